"""The flags, and what each end is told: for each kind of core."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from rings import NewEnds, content, look, put, receive

from aioshm.ring import layout as at


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

    def test_the_life_of_a_slot(self, new_ends: NewEnds) -> None:
        ring, writer, readers = new_ends(3, chunks=1)
        flags = ring.flags(0)
        for _ in range(3):
            assert writer.claim() is not None
            assert flags[0] == 0
            writer.commit()
            assert bytes(flags) == bytes([1, 0, 0, 0])
            for index, expected in ((1, [1, 0, 1, 0]), (0, [1, 1, 1, 0]), (2, [1, 1, 1, 1])):
                assert not writer.free()
                assert readers[index].peek() is not None
                readers[index].release()
                assert readers[index].peek() is None
                assert bytes(flags) == bytes(expected)

    def test_a_fresh_ring_is_writable_and_empty(self, new_ends: NewEnds) -> None:
        ring, writer, readers = new_ends(2)
        assert writer.free()
        assert writer.laggards() == []
        assert not any(reader.ready() for reader in readers)
        assert all(bytes(ring.flags(index)) == bytes(3) for index in range(3))

    def test_looking_twice_shows_the_same_message(self, new_ends: NewEnds) -> None:
        _, writer, (reader,) = new_ends(1)
        put(writer, b"first")
        put(writer, b"second")
        assert [look(reader), look(reader)] == [b"first", b"first"]
        reader.release()
        assert look(reader) == b"second"


class TestRing:
    @pytest.mark.parametrize("chunks", [1, 2, 3, 7])
    def test_laps(self, new_ends: NewEnds, chunks: int) -> None:
        _, writer, readers = new_ends(2, chunks)
        for number in range(chunks * 4 + 1):
            assert put(writer, content(number, 100)) is False
            assert [receive(reader) for reader in readers] == [content(number, 100)] * 2
        assert [receive(reader) for reader in readers] == [None, None]

    def test_full_laps_with_readers_at_different_places(self, new_ends: NewEnds) -> None:
        _, writer, (fast, slow) = new_ends(2, 4)
        for lap in range(5):
            numbers = range(lap * 4, lap * 4 + 4)
            for number in numbers:
                assert put(writer, content(number, 100)) is not None
                assert receive(fast) == content(number, 100)
            assert put(writer, b"") is None
            assert [receive(slow) for _ in numbers] == [content(number, 100) for number in numbers]

    def test_slots_do_not_touch_each_other(self, new_ends: NewEnds) -> None:
        _, writer, (reader,) = new_ends(1, 4, chunk_bytes=65)
        for number in range(4):
            slot = writer.claim(65)
            assert slot is not None
            assert (slot.header.nbytes, slot.body.nbytes) == (at.SLOT_HEADER_BYTES, 65)
            slot.body[:] = bytes([100 + number]) * 65
            slot.header[:8] = slot.header[48:56] = bytes([number]) * 8
            writer.commit()
        for number in range(4):
            slot = reader.peek()
            assert slot is not None
            assert slot.header[:8] == slot.header[48:56] == bytes([number]) * 8
            assert slot.body == bytes([100 + number]) * 65
            reader.release()

    def test_one_reader_holds_the_writer_back(self, new_ends: NewEnds) -> None:
        _, writer, (first, second) = new_ends(2, 2)
        assert writer.laggards() == []
        for number in range(2):
            assert put(writer, content(number, 100)) is not None
        assert (writer.claim(), writer.free(), writer.laggards()) == (None, False, [0, 1])
        first.release()
        first.release()
        assert (writer.claim(), writer.free(), writer.laggards()) == (None, False, [1])
        second.release()
        assert writer.free()
        assert writer.claim() is not None
        assert look(second) == content(1, 100), "what a refused claim left alone"

    def test_an_abandoned_claim_stays_invisible_and_can_be_claimed_again(self, new_ends: NewEnds) -> None:
        _, writer, (reader,) = new_ends(1, 2)
        for number in range(6):
            for _ in range(3):
                slot = writer.claim(100)
                assert slot is not None
                slot.body[:] = b"\xa5" * 100
                assert (reader.peek(), reader.ready(), writer.free()) == (None, False, True)
            assert writer.seq == number
            put(writer, content(number, 100))
            assert receive(reader) == content(number, 100)

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


class TestEviction:
    def test_an_evicted_reader_counts_as_having_read_everything(self, new_ends: NewEnds) -> None:
        _, writer, (alive, gone) = new_ends(2, 2)
        for number in range(2):
            put(writer, content(number, 100))
        receive(alive)
        writer.evict(1)
        assert writer.laggards() == []
        assert writer.free()
        for number in range(2, 9):
            assert put(writer, content(number, 100)) is not None
            assert receive(alive) == content(number - 1, 100)
            assert (gone.peek(), gone.ready()) == (None, False)

    def test_the_others_lose_nothing(self, new_ends: NewEnds) -> None:
        _, writer, (first, gone, last) = new_ends(3, 3)
        for number in range(3):
            put(writer, content(number, 100))
        assert receive(first) == content(0, 100)
        gone.release()
        writer.evict(1)
        assert [receive(first) for _ in range(3)] == [content(1, 100), content(2, 100), None]
        assert not writer.free()
        assert [receive(last) for _ in range(4)] == [*(content(number, 100) for number in range(3)), None]
        assert writer.free()

    def test_during_a_claim(self, new_ends: NewEnds) -> None:
        _, writer, (first, _) = new_ends(2, 2)
        slot = writer.claim()
        assert slot is not None
        writer.evict(1)
        slot.body[:4] = b"late"
        slot.header[:8] = (4).to_bytes(8, "little")
        writer.commit()
        assert receive(first) == b"late"
        assert writer.free()

    def test_of_the_last_reader_lets_the_writer_run_free(self, new_ends: NewEnds) -> None:
        _, writer, _ = new_ends(1, 2)
        for _ in range(2):
            put(writer, b"")
        writer.evict(0)
        assert [put(writer, b"") for _ in range(5)] == [False] * 5

    def test_an_evicted_reader_is_not_woken(self, new_ends: NewEnds) -> None:
        _, writer, (_, gone) = new_ends(2)
        gone.parked[0] = 1
        assert put(writer, b"") is True
        writer.evict(1)
        assert put(writer, b"") is False


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
        _, writer, readers = new_ends(2)
        assert not any(reader.writer_closed() for reader in readers)
        writer.set_writer_state(closed=False, pid=4_000_000_000)
        assert [reader.writer_pid() for reader in readers] == [4_000_000_000] * 2
        assert not any(reader.writer_closed() for reader in readers)
        writer.set_writer_state(closed=True, pid=7)
        assert all(reader.writer_closed() for reader in readers)
        assert [reader.writer_pid() for reader in readers] == [7, 7]

    def test_costs(self, new_ends: NewEnds) -> None:
        ring, writer, readers = new_ends(2)
        line = slice(at.WRITER_LINE, at.WRITER_LINE + at.COSTS)
        put(writer, b"")
        writer.set_writer_state(closed=True, pid=4_000_000_000)
        before = bytes(ring.view[line])
        assert [reader.costs() for reader in readers] == [(0, 0, 0)] * 2
        writer.set_costs((5_000, 3_000, 300))
        assert [reader.costs() for reader in readers] == [(5_000, 3_000, 300)] * 2
        assert bytes(ring.view[line]) == before
        assert at.COSTS + 8 * at.N_COSTS <= at.LINE

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
