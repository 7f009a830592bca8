"""Queues between the ranks of a process group, made and used by threads without an event loop."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
from faces import Thread, handling
from members import each, meet
from support import raising

from aioshm import HandleError, PeerClosed, blocking


def test_one_rank_writes_to_all_others() -> None:
    def call(member: Any) -> Any:
        make = blocking.MessageQueue.create_from_process_group
        with make(member, 4096, 4, writer_rank=2, codec="msgpack") as queue:
            assert isinstance(queue, blocking.MessageQueue)
            return [queue.broadcast_object(number if member.rank == 2 else None) for number in range(50)]

    assert each(meet(3), call) == [list(range(50))] * 3


@pytest.mark.parametrize("blocks", [False, True])
def test_every_rank_writes_to_one(blocks: bool) -> None:
    def call(member: Any) -> Any:
        make = blocking.MessageQueue.create_from_process_group_single_reader
        writer, handles = make(member, 4096, 4, reader_rank=1, blocking=blocks)
        with writer:
            if member.rank != 1:
                assert handles == []
                assert writer.stats().ready is blocks
                writer.enqueue(member.rank, 20)
                return None
            readers = {
                rank: blocking.MessageQueue.create_from_handle(handle, 0)
                for rank, handle in enumerate(handles)
                if rank != 1
            }
            received = sorted(blocking.merge(readers))
            for reader in readers.values():
                reader.close()
            return received

    assert each(meet(3), call)[1] == [(0, 0), (2, 2)]


def test_what_a_handler_raises_takes_effect_at_once() -> None:
    here, late = meet(2)
    here.before = lambda number: os.kill(os.getpid(), signal.SIGUSR1) if number == 0 else None
    with handling(raising(KeyboardInterrupt("by a signal"))):
        with pytest.raises(KeyboardInterrupt, match="by a signal"):
            blocking.MessageQueue.create_from_process_group(here, 4096, 4)
        other = Thread(blocking.MessageQueue.create_from_process_group, late, 4096, 4)
        with pytest.raises(HandleError, match="the call was cancelled there"):
            other.result(30)


def test_the_writer_waits_no_longer_than_until_a_rank_has_left() -> None:
    def call(member: Any) -> Any:
        with blocking.MessageQueue.create_from_process_group(member, 4096, 4, blocking=member.rank == 0) as queue:
            if member.rank == 1:
                with pytest.raises(TimeoutError):
                    queue.wait_until_ready(0.2)  # rank 2 does not attach
            else:
                left.wait(20)
        left.set()

    left = threading.Event()
    writing, *readers = [Thread(call, member) for member in meet(3)]
    with pytest.raises(PeerClosed, match="not all readers will attach"):
        writing.result()
    for reader in readers:
        reader.result()
