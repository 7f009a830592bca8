"""The table of calls ends each call exactly once, after any events.

The test calls the table directly, with queues that only record messages: the order of events is then the test's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioshm import QueueFull, WorkerDied, WorkerError
from aioshm.engine.workers.calls import Call, CallTable
from aioshm.engine.workers.processes import Rank
from aioshm.engine.workers.worker import CALL, CANCEL, FAILURE, ITEM, RESULT, STREAM, Request, Undecodable, failure_of
from aioshm.errors import CodecError, PeerDied, QueueEmpty
from aioshm.process.restart import Restart

pytestmark = pytest.mark.one_loop

RANKS = (0, 1, 2)


class Recorded:
    """A queue to workers."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.full = False
        self.dead = False
        self.room = asyncio.Event()

    def enqueue_nowait(self, message: Any) -> None:
        if self.dead:
            raise PeerDied("the worker is dead", pid=1, side="reader")
        if type(message[3]) is tuple and "bad" in message[3][1]:
            raise CodecError("the arguments cannot be sent")
        if self.full:
            raise QueueFull
        self.messages.append(message)

    async def enqueue(self, message: Any) -> None:
        while self.full and not self.dead:
            self.room.clear()
            await self.room.wait()
        self.full = False
        self.enqueue_nowait(message)

    def dequeue_nowait(self) -> Any:
        raise QueueEmpty

    async def aclose(self) -> None:
        self.dead = True
        self.room.set()


class Answers:
    """Stands for the merged queues of answers: the test delivers answers itself."""

    def __init__(self) -> None:
        self.failed: dict[int, Exception] = {}

    def add(self, rank: int, queue: Any) -> None:
        pass

    def remove(self, rank: int) -> None:
        pass

    def take_soon(self) -> None:
        return None

    async def __anext__(self) -> Any:
        await asyncio.Event().wait()


class Group:
    """The table, its workers as they see their calls, and the calls' outcomes."""

    failure = None

    def __init__(self) -> None:
        self.ranks = {rank: Rank(rank, f"Worker_{rank}", Restart()) for rank in RANKS}
        self.broadcasts = Recorded()
        self.table = CallTable(self, self.broadcasts)  # type: ignore[arg-type]
        self.table._answers = Answers()  # type: ignore[assignment]
        self.tasks: dict[asyncio.Task[Any], tuple[str, int]] = {}
        self.cancelled: set[asyncio.Task[Any]] = set()
        self.reading: list[asyncio.Task[Any]] = []
        self.begun: set[tuple[int, int]] = set()  # by worker process and number: in the worker
        self.died = 0
        for rank in RANKS:
            self.arrive(rank)

    # The part of `Session` that the table uses

    def check(self) -> None:
        pass

    def describe(self, ranks: Any) -> str:
        return str(sorted(ranks))

    def describe_absent(self) -> str:
        return ""

    def spawn(self, work: Any, name: str) -> asyncio.Task[None]:
        self.reading.append(asyncio.create_task(work, name=name))
        return self.reading[-1]

    # Events

    def arrive(self, number: int) -> None:
        rank = self.ranks[number]
        queue = Recorded()
        process = SimpleNamespace(
            requests=queue, replies=queue, outbox=deque(), ended=asyncio.Event(), close=queue.aclose, answered=set()
        )
        process.first = len(self.broadcasts.messages)
        rank.process = process  # type: ignore[assignment]
        self.table.add(rank)

    def ask(self, kind: str, number: int, argument: int, *, bad: bool = False) -> None:
        arguments: Any = ("bad",) if bad else (argument,)
        request = Request("method", arguments, {}, prefetch=2)
        if kind == "all":
            work = self.table.call_all(Call("method", request, of_all=True), None)
        elif kind == "stream":
            work = self.consume(Call("method", request, number, stream=True))
        else:
            work = self.table.call(Call("method", request, None if kind == "any" else number), None)
        self.tasks[asyncio.create_task(work)] = kind, -1 if bad else argument

    async def consume(self, call: Call) -> Any:
        items = []
        try:
            while True:
                items.append(await self.table.next_item(call, None))
        except StopAsyncIteration:
            return items
        finally:
            self.table.abandon(call)

    def begins(self, number: int) -> list[Any]:
        """Return the calls that a worker has received, in their order, as the worker decides."""
        process: Any = self.ranks[number].process
        queues = deque(self.broadcasts.messages[process.first :]), deque(process.requests.messages)
        last = [0, 0]
        calls = []
        while True:
            for source, queue in enumerate(queues):
                while queue and queue[0][0] not in (CALL, STREAM):
                    queue.popleft()
                if queue:
                    after = queue[0][2]
                    if isinstance(after, dict):
                        after = after.get(number, 0)
                    if after <= last[1 - source]:
                        last[source] = queue[0][1]
                        calls.append(queue.popleft())
                        break
            else:
                assert not any(queues), "a call waits for another one that was not sent"
                return calls

    def unanswered(self, number: int) -> list[Any]:
        process: Any = self.ranks[number].process
        calls = [call for call in self.begins(number) if not isinstance(call[3], Undecodable)]
        return [call for call in calls if call[1] not in process.answered]

    def answer(self, number: int, how: str) -> None:
        rank = self.ranks[number]
        assert rank.process is not None
        if not rank.present or rank.process.requests.dead:  # type: ignore[attr-defined]
            return
        calls = self.unanswered(number)
        if not calls:
            return
        kind, call, _, value = calls[0]
        if how == "item":
            streams = [each for each in calls if each[0] == STREAM]
            if streams:
                self.table._receive(number, (ITEM, streams[0][1], 0, streams[0][3][1][0]))
            return
        process: Any = rank.process
        process.answered.add(call)
        if how == "failure":
            self.table._receive(number, (FAILURE, call, 0, failure_of(ValueError("no"))))
        else:
            self.table._receive(number, (RESULT, call, 0, None if kind == STREAM else value[1][0]))

    def die(self, number: int, *, unseen: bool = False) -> None:
        rank = self.ranks[number]
        process: Any = rank.process
        process.requests.dead = True
        process.requests.room.set()
        if unseen and rank.present:  # the next message finds out
            return
        if rank.present:
            self.table.remove(rank, WorkerDied(number, rank.name, 1, -9, "was killed"))
            rank.enter("waiting")

    def check_ended(self) -> None:
        for task, (kind, argument) in self.tasks.items():
            assert task.done(), f"a call of kind {kind} has not ended"
            if task.cancelled():
                assert task in self.cancelled
                continue
            error = task.exception()
            if argument < 0:
                assert isinstance(error, CodecError | WorkerDied)
            elif error is not None:
                assert isinstance(error, WorkerError | WorkerDied)
            elif kind == "all":
                assert task.result() == [argument] * len(RANKS)
            elif kind == "stream":
                assert set(task.result()) <= {argument}
            else:
                assert task.result() == argument
        table = self.table
        assert not [*table._sent, *table._any]
        for rank in self.ranks.values():
            assert not [*rank.sent, *rank.streams, *rank.queue]


CALLS = ["one", "any", "all", "stream", "bad", "cancel"]
ANSWERS = ["result", "result", "result", "failure", "item"]
WORKERS = ["full", "room", "die", "unseen", "back", "stalls", "runs"]
EVENTS = st.tuples(st.sampled_from([*CALLS, *ANSWERS, *WORKERS, "pause", "pause"]), st.integers(0, 30))


@settings(deadline=None)
@given(st.lists(EVENTS, max_size=80))
def test_every_call_ends_once_with_its_own_answer_after_any_events(events: list[tuple[str, int]]) -> None:
    async def run() -> None:
        group = Group()
        for event, number in events:
            await happen(group, event, number)
        for rank in RANKS:  # from here on nothing fails
            process: Any = group.ranks[rank].process
            if process.requests.dead:
                group.die(rank)
                await happen(group, "back", rank)
            if group.ranks[rank].state == "stalled":
                await happen(group, "runs", rank)
            await happen(group, "room", rank)
        while not all(task.done() for task in group.tasks):
            await asyncio.sleep(0.001 * any(rank.process.outbox for rank in group.ranks.values() if rank.process))
            for rank in RANKS:
                group.answer(rank, "result")
        await asyncio.sleep(0)
        group.check_ended()
        for task in group.reading:
            task.cancel()

    asyncio.run(asyncio.wait_for(run(), 20))


async def happen(group: Group, event: str, number: int) -> None:
    rank = group.ranks[number % len(RANKS)]
    process: Any = rank.process
    if event in ("one", "any", "all", "stream"):
        group.ask(event, rank.rank, number)
    elif event == "bad":
        group.ask("all" if number % 2 else "one", rank.rank, number, bad=True)
    elif event in ("result", "failure", "item"):
        group.answer(rank.rank, event)
    elif event == "cancel":
        waiting = [task for task in group.tasks if not task.done()]
        if waiting:
            task = waiting[number % len(waiting)]
            task.cancel()
            group.cancelled.add(task)
    elif event == "full":
        (group.broadcasts if number % 2 else process.requests).full = True
    elif event == "room":
        group.broadcasts.full = process.requests.full = False
        process.requests.room.set()
    elif event in ("die", "unseen"):
        group.die(rank.rank, unseen=event == "unseen")
    elif event == "back" and not rank.present:
        group.arrive(rank.rank)
    elif event in ("stalls", "runs"):
        rank.note_health("stalled" if event == "stalls" else "running", "")
        group.table.freed(rank)
    else:
        await asyncio.sleep(0)


async def test_call_of_one_queues_behind_waiting_calls_of_any_unless_the_worker_has_a_stream() -> None:
    group = Group()
    for kind, number, argument in (("one", 0, 1), ("stream", 1, 2), ("one", 2, 3), ("any", 0, 4), ("one", 0, 5)):
        group.ask(kind, number, argument)
    group.ask("one", 1, 6)
    await asyncio.sleep(0)
    received = {rank: [call[3][1][0] for call in group.begins(rank)] for rank in RANKS}
    assert received == {0: [1], 1: [2, 6], 2: [3]}
    group.answer(0, "result")
    assert [call[3][1][0] for call in group.begins(0)] == [1, 4, 5]
    group.ask("any", 0, 7)
    group.ask("one", 0, 8)
    await asyncio.sleep(0)
    assert len(group.begins(0)) == 3
    list(group.tasks)[-2].cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [call[3][1][0] for call in group.begins(0)] == [1, 4, 5, 8]
    for task in [*group.tasks, *group.reading]:
        task.cancel()
    await asyncio.wait([*group.tasks])
    kinds = [message[0] for message in group.ranks[0].process.requests.messages]  # type: ignore[union-attr]
    assert kinds == [CALL] * 4 + [CANCEL] * 3
