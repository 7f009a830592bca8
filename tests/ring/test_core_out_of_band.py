"""Messages with out-of-band buffers, and slots that are kept, in both cores."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from pairs_of_cores import PLAIN, NewPair, Pair, open_gate


def send_out_of_band(pair: Pair) -> None:
    """Make the next message of the reader none that the core decodes itself."""
    struct.pack_into("<Q", pair.slots[pair.reader.seq % len(pair.slots)].header, 0, PLAIN + 1)


class TestBeside:
    def test_the_writer_has_its_slot_filled_and_publishes(self, new_pair: NewPair) -> None:
        pair = new_pair()

        def fill(begin: int, message: Any, seq: int) -> bool:
            if message == ["no"]:
                return False
            struct.pack_into("<4Q", pair.slots.bodies, begin, PLAIN, seq, 5, 1)
            pair.slots.body(begin)[:1] = message[0]
            return True

        assert pair.writer.send([b"x"]) == [b"x"], "nothing does that"
        pair.writer.bind_out_of_band(fill, len)
        assert pair.writer.send([b"x"]) is None
        assert pair.writer.send(["no"]) == ["no"]
        assert (pair.writer.seq, pair.writer.published_ns) == (1, 5)
        assert pair.reader.take() == b"x"
        pair.writer.bind_out_of_band(None)
        assert pair.writer.send([b"x"]) == [b"x"]

    def test_a_chunk_is_taken_where_it_does_not_fit_the_slot(self, new_pair: NewPair) -> None:
        pair = new_pair(1, 2, 100, slots=4, inline_bytes=16)
        sizes = []

        def fill(begin: int, message: Any, seq: int) -> bool:
            sizes.append((pair.slots.chunk(begin) is not None, len(pair.slots.body(begin))))
            struct.pack_into("<4Q", pair.slots.bodies, begin, PLAIN, seq, 5, message[0])
            pair.slots.body(begin)[: message[0]] = b"z" * message[0]
            return True

        pair.writer.bind_out_of_band(fill, lambda message: message[0])
        for nbytes in (16, 17, 100):
            assert pair.writer.send([nbytes]) is None
        assert sizes == [(False, 16), (True, 100), (True, 100)]
        assert pair.writer.send([17]) == [17], "no chunk is free"
        assert [len(pair.reader.take()) for _ in range(2)] == [16, 17]
        assert pair.writer.send([101]) == [101], "it does not fit a chunk"
        assert pair.writer.send([100]) is None
        with pytest.raises((OverflowError, TypeError)):
            pair.writer.send([-1])

    def test_measuring_fails(self, new_pair: NewPair) -> None:
        pair = new_pair()
        pair.writer.bind_out_of_band(lambda *_: True, lambda _: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            pair.writer.send([1])
        assert (pair.writer.seq, pair.writer.send(b"next")) == (0, None)

    def test_filling_fails(self, new_pair: NewPair) -> None:
        pair = new_pair()

        def fail(*_: Any) -> bool:
            with pytest.raises((RuntimeError, BufferError)):
                pair.writer.commit()
            with pytest.raises(BufferError):
                pair.writer.close()
            raise ZeroDivisionError

        pair.writer.bind_out_of_band(fail, len)
        with pytest.raises(ZeroDivisionError):
            pair.writer.send([1])
        assert (pair.writer.seq, pair.reader.ready()) == (0, False)
        assert pair.writer.send(b"next") is None
        assert pair.reader.take() == b"next"

    def test_the_reader_has_its_message_decoded_and_releases(self, new_pair: NewPair) -> None:
        pair = new_pair(1, 2)
        pair.reader.bind_out_of_band(lambda begin: ("decoded", bytes(pair.slots.body(begin)[:1])))
        for number in range(5):
            pair.writer.put(b"%d" % number)
            send_out_of_band(pair)
            assert pair.reader.receive() == ("decoded", b"%d" % number)
        assert pair.reader.seq == 5

    @pytest.mark.parametrize(("error", "left"), [(ValueError, False), (KeyboardInterrupt, True)])
    def test_decoding_fails(self, new_pair: NewPair, error: type[BaseException], left: bool) -> None:
        pair = new_pair()

        def fail(_: Any) -> None:
            raise error

        pair.reader.bind_out_of_band(fail)
        pair.writer.put(b"bad")
        send_out_of_band(pair)
        pair.writer.put(b"good")
        with pytest.raises(error):
            pair.reader.take()
        assert pair.reader.seq == (0 if left else 1)
        pair.reader.bind_out_of_band(None)
        assert pair.reader.take() == (pair.cores.module.SLOW_PATH if left else b"good")


class TestKept:
    def test_nothing_is_received_until_a_kept_slot_went_back(self, new_pair: NewPair) -> None:
        pair = new_pair()
        pair.writer.put(b"kept")
        pair.writer.put(b"next")
        pair.reader.skip()
        assert pair.reader.kept
        assert pair.reader.receive() is pair.cores.module.EMPTY
        assert pair.reader.passes(), "who gives it back first may go on"
        pair.reader.give_back(0)
        assert not pair.reader.kept
        assert pair.reader.receive() == b"next"


class TestCopied:
    """How many bytes were copied of what is sent."""

    def test_of_a_writer(self, new_pair: NewPair) -> None:
        pair = new_pair(1, 8)
        pair.writer.put(b"12345")
        assert pair.writer.copied == 5
        pair.writer.put_many([b"1", b"23"], 0)
        assert pair.writer.copied == 8
        pair.writer.bind(lambda obj: obj, PLAIN, False, None)
        pair.writer.bind_out_of_band(lambda *_: True, lambda message: 10)
        open_gate(pair.writer)
        pair.writer.send(["beside"])
        assert pair.writer.copied == 18
        pair.writer.copied += 2
        assert pair.writer.copied == 20
