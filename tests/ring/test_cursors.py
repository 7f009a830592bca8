"""The flags, and what each end is told: for each kind of core."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from rings import NewEnds, content, look, put, receive

from aioshm.ring import layout as at
from aioshm.ring.header import read_header


class TestFlags:
    @pytest.mark.parametrize("row", list(itertools.product((0, 1), repeat=4)), ids=lambda row: "".join(map(str, row)))
    def test_every_row_of_the_table(self, new_ends: NewEnds, row: tuple[int, ...]) -> None:
        ring, writer, readers = new_ends(3)
        flags = ring.flags(0)
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


class TestRing:
    def test_counts(self, new_ends: NewEnds) -> None:
        ring, writer, (first, second) = new_ends(2)
        for number in range(3):
            put(writer, content(number, 100))
        first.release()
        first.release()
        second.release()
        assert (writer.seq, first.seq, second.seq) == (3, 2, 1)
        for end in (writer, first, second):
            assert end.messages_written() == 3
            assert [end.messages_read(reader) for reader in range(2)] == [2, 1]
        assert ring.view[at.WRITER_LINE : at.WRITER_LINE + 8].cast("Q")[0] == 3


class TestParking:
    def test_commit_tells_of_parked_readers(self, new_ends: NewEnds) -> None:
        _, writer, readers = new_ends(3, 9)
        assert put(writer, b"") is False
        for reader in readers:
            reader.parked[0] = 1
            assert put(writer, b"") is True
            assert writer.readers_parked[reader.reader] == 1, "commit leaves the flag to the reader"
            reader.parked[0] = 0
            assert put(writer, b"") is False

    def test_release_tells_of_a_parked_writer(self, new_ends: NewEnds) -> None:
        _, writer, (first, second) = new_ends(2, 4)
        for _ in range(4):
            put(writer, b"")
        assert first.release() is False
        writer.parked[0] = 1
        assert first.release() is True
        assert second.release() is True
        writer.parked[0] = 0
        assert second.release() is False

    def test_each_flag_is_its_own(self, new_ends: NewEnds) -> None:
        ring, writer, readers = new_ends(3)
        for end in (writer, *readers):
            end.parked[0] = 1
            raised = [ring.view[at.WRITER_PARKED], *ring.view[at.READERS_PARKED : at.READERS_PARKED + 3]]
            assert sum(raised) == 1
            assert raised[0 if end is writer else 1 + end.reader] == 1  # type: ignore[attr-defined]
            end.parked[0] = 0


class TestHeader:
    def test_reader_states(self, new_ends: NewEnds) -> None:
        ring, writer, _ = new_ends(2)
        writer.set_reader_state(1, at.DIED, 0x01020304)
        line = ring.layout.reader_line(1)
        assert ring.view[line + at.STATE] == at.DIED
        assert ring.view[line + at.PID : line + at.PID + 4] == bytes([4, 3, 2, 1])
        other = ring.layout.reader_line(0)
        assert bytes(ring.view[other : other + at.LINE]) == bytes(at.LINE)

    def test_writer_state(self, new_ends: NewEnds) -> None:
        ring, writer, readers = new_ends(2)
        assert not any(reader.writer_closed() for reader in readers)
        writer.set_writer_state(closed=False, pid=4_000_000_000)
        assert read_header(ring.view).writer.pid == 4_000_000_000
        assert not any(reader.writer_closed() for reader in readers)
        writer.set_writer_state(closed=True, pid=7)
        assert all(reader.writer_closed() for reader in readers)
        assert read_header(ring.view).writer.pid == 7

    def test_nothing_of_this_touches_the_messages(self, new_ends: NewEnds) -> None:
        _, writer, (reader,) = new_ends(1)
        put(writer, b"message")
        writer.set_reader_state(0, at.ATTACHED, 1)
        writer.set_writer_state(closed=True, pid=1)
        writer.parked[0] = reader.parked[0] = 1
        assert receive(reader) == b"message"
        assert (writer.seq, reader.messages_read(0)) == (1, 1)


class TestClosing:
    def test_gives_the_memory_back(self, new_ends: NewEnds) -> None:
        def mapped() -> int:
            return Path("/proc/self/maps").read_text().count("/memfd:aioshm")

        before = mapped()
        ring, writer, readers = new_ends(2)
        put(writer, b"x")
        look(readers[0])
        assert mapped() == before + 1
        for cursor in (writer, *readers):
            cursor.close()
            cursor.close()
        ring.close()
        assert mapped() == before

    def test_a_closed_cursor_cannot_be_used(self, new_ends: NewEnds) -> None:
        _, writer, (reader,) = new_ends(1)
        writer.close()
        reader.close()
        for call in (writer.claim, writer.free, writer.commit, reader.ready, reader.peek, reader.release):
            with pytest.raises(ValueError, match=r"the ring was closed|released memoryview"):
                call()

    def test_a_message_is_finished_with_when_every_reader_has_released_it(self, new_ends: NewEnds) -> None:
        """Whatever the writer has sent since: also where the next slot that it is going to claim is that message's."""
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
