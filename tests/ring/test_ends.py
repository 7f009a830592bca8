"""The table of the flags, for each core."""

from __future__ import annotations

import itertools

import pytest
from rings import NewEnds, content, put, receive


class TestFlags:
    @pytest.mark.parametrize("row", list(itertools.product((0, 1), repeat=4)), ids=lambda row: "".join(map(str, row)))
    def test_every_row_of_the_table(self, new_ends: NewEnds, row: tuple[int, ...]) -> None:
        _, writer, readers = new_ends(3)
        flags = writer.slots.flags(0)
        flags[:] = bytes(row)
        written, *read = row
        for reader in readers:
            readable = bool(written and not read[reader.reader])
            assert reader.ready() is readable
            assert (reader.peek() is not None) is readable
        writable = not written or all(read)
        assert writer.free() is writable
        assert writer.laggards() == ([i for i in range(3) if not read[i]] if written else [])
        assert bytes(flags) == bytes(row), "looking changes nothing"
        assert (writer.claim() is not None) is writable
        assert flags[0] == (0 if writable else 1)
        assert bytes(flags[1:]) == bytes(read)

    def test_a_message_is_finished_with_when_every_reader_has_released_it(self, new_ends: NewEnds) -> None:
        _, writer, readers = new_ends(2, 3)
        for number in range(3):
            put(writer, content(number, 100))
        assert not any(map(writer.finished, range(3)))
        receive(readers[0])
        assert not writer.finished(0)
        receive(readers[1])
        assert list(map(writer.finished, range(3))) == [True, False, False]
        assert writer.claim() is not None
        assert writer.finished(0), "when its slot is claimed again"
        writer.commit()
        assert list(map(writer.finished, range(4))) == [True, False, False, False]
