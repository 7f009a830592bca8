"""Many queues as one stream, for threads without an event loop."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from faces import Thread, handling, interrupt_after
from merging import all_asleep, blocking_queues
from support import eventually, raising

from aioshm import CodecError, EndClosed, RoleError
from aioshm.blocking import Merged, merge
from aioshm.queue.merge import blocking as merge_of_threads


@pytest.mark.usefixtures("short_goodbye")
def test_closing_ends_a_wait_in_another_thread_and_leaves_the_readers() -> None:
    with blocking_queues(2, 1) as (writers, readers):
        merged = merge(readers)
        waiting = [Thread(list, merged) for _ in range(2)]
        all_asleep(readers)
        merged.close()
        merged.close()
        assert [thread.result() for thread in waiting] == [[], []]
        writers[0].enqueue("still", 20)
        assert readers[0].dequeue(20) == "still"


def test_what_a_handler_raises_ends_the_wait_and_loses_nothing() -> None:
    with handling(raising(KeyboardInterrupt("by a signal"))):
        with blocking_queues(2) as (writers, readers):
            merged = merge(readers)
            for number in range(5):
                interrupting = interrupt_after(all_asleep, readers)
                with pytest.raises(KeyboardInterrupt, match="by a signal"):
                    next(merged)
                interrupting.result()
                writers[number % 2].enqueue(number, 20)
                assert next(merged) == (number % 2, number)


def test_handler_that_iterates_over_the_merge_it_has_interrupted_is_refused() -> None:
    refused: list[RoleError] = []
    with blocking_queues(1) as (writers, readers):
        merged = merge(readers)

        def handle(*_: object) -> None:
            with pytest.raises(RoleError, match="called by a signal handler") as caught:
                next(merged)
            refused.append(caught.value)
            writers[0].enqueue("after", 20)

        with handling(handle):
            interrupting = interrupt_after(all_asleep, readers)
            assert next(merged) == (0, "after")
            interrupting.result()
            assert len(refused) == 1


def test_reader_that_another_thread_has_in_a_block_is_merged_afterwards() -> None:
    with blocking_queues(2) as (writers, readers):
        writers[0].enqueue_many(["leased", "next"], 20)
        merged = merge(readers)
        with readers[0].lease(20) as leased:
            waiting = Thread(next, merged)
            eventually(lambda: readers[1].held.lock.owner, "a sleep")
            assert waiting.running
        assert leased == "leased"
        assert waiting.result() == (0, "next")


def test_reader_that_a_thread_acquires_at_the_same_moment_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with blocking_queues(1) as (writers, readers):
        lock = readers[0].held.lock
        met = threading.Event()

        def switch_threads() -> int:
            if threading.current_thread().name == "aioshm-loop" and not met.is_set():
                lock.acquire(1)
                met.set()
            return threading.get_ident()

        monkeypatch.setattr(merge_of_threads, "get_ident", switch_threads)
        waiting = Thread(next, merge(readers))
        assert met.wait(20)
        owner = readers[0].held.loop().do(lambda: lock.owner)
        lock.owner = 0
        writers[0].enqueue("on", 20)
        assert (owner, waiting.result()) == (1, (0, "on"))


@pytest.mark.parametrize("kept", ["message", "error"])
def test_what_an_interrupted_call_has_left_is_given_out_though_the_reader_is_not_ready(kept: str) -> None:
    with blocking_queues(1, ready=False) as (_, readers):
        merged = merge(readers, errors="yield")
        if kept == "message":
            readers[0].held.undelivered.append("left")
            merged._budget = 0  # the time to look after queues that had nothing
        else:
            readers[0].held.failure = CodecError("left")
        rank, left = Thread(next, merged).result(10)
        assert (rank, str(left)) == (0, "left")


def test_arguments() -> None:
    with blocking_queues(1) as (writers, readers):
        with pytest.raises(TypeError, match=r"must be an aioshm\.blocking\.MessageQueue"):
            merge({0: readers[0].held.end})  # type: ignore[dict-item]
        assert list(merge({})) == []
        writers[0].enqueue("leased", 20)
        with readers[0].lease(20), pytest.raises(RoleError, match="inside of a block"):
            next(merge(readers))
        merged: Merged[Any] = merge({})
        with pytest.raises(TypeError, match=r"must be an aioshm\.blocking\.MessageQueue"):
            merged.add(1, readers[0].held.end)  # type: ignore[arg-type]
        with pytest.raises(RoleError, match="this is a writer"):
            merged.add(1, writers[0])
        merged.add(1, readers[0])
        assert repr(merged) == "<blocking Merged of 1 queues>"
        merged.close()
        with pytest.raises(EndClosed):
            merged.add(2, readers[0])
