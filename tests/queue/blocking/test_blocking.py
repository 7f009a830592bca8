"""The face for threads without an event loop: alone, and together with the other one."""

from __future__ import annotations

import numpy as np
import pytest
from faces import child, make_writer, pair

from aioshm import RoleError


def test_every_way_to_send_meets_every_way_to_receive() -> None:
    with pair(codec="raw", chunks=8) as (writer, reader):
        writer.enqueue(b"one")
        writer.enqueue_many([b"two", b"333"])
        with writer.acquire_write(10) as chunk:
            chunk[:3] = b"444"
        assert writer.broadcast_object(b"five") == b"five"
        writer.enqueue_nowait(b"six")
        received = [reader.dequeue(10), *reader.dequeue_many(1, 10)]
        with reader.lease(10) as obj:
            received.append(bytes(obj))
        with reader.acquire_read(10) as view:
            received.append(bytes(view[:3]))
        received += [reader.broadcast_object(), reader.dequeue_nowait()]
        assert received == [b"one", b"two", b"333", b"444", b"five", b"six"]
        assert writer.stats().messages == 6


def test_other_processes() -> None:
    with make_writer() as writer, child("collect", writer.export_handle().to_json()) as reader:
        for number in range(1000):
            writer.enqueue((number, bytes([number % 256]) * (9000 if number % 99 == 5 else 50)), 20)
        writer.close()
        reader.says("ready")
        reader.says("1000 then closed")
        assert reader.end() == (0, "")


# Blocks


@pytest.mark.parametrize(
    ("block", "error"),
    [("lease", KeyboardInterrupt), ("lease", StopIteration), ("acquire_read", GeneratorExit)],
)
def test_what_a_block_raises_is_not_changed(block: str, error: type[BaseException]) -> None:
    with pair(chunks=1) as (writer, reader):
        writer.enqueue(np.zeros(100), 10)
        mine = error("mine")
        with pytest.raises(error) as caught:
            with getattr(reader, block)(10):
                raise mine
        assert caught.value is mine
        with pytest.raises(error):
            with writer.acquire_write(10):
                raise error
        writer.enqueue("next", 10)
        assert reader.dequeue(10) == "next"
        assert writer.stats().messages == 2


def test_a_block_that_would_wait_for_itself() -> None:
    with pair() as (writer, reader):
        with writer.acquire_write() as chunk:
            with pytest.raises(RoleError, match="inside of a block that has its slot"):
                writer.enqueue(5)
            chunk[:1] = b"x"
        writer.enqueue(1)
        with reader.lease(10) as obj:
            for call in (reader.dequeue, lambda: reader.dequeue_many(1), lambda: reader.lease().__enter__()):
                with pytest.raises(RoleError, match="inside of a block that has its slot"):
                    call()
        assert (obj[:1], reader.dequeue(10)) == (b"x", 1)
