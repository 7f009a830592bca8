"""Giving up waiting on merged queues loses nothing, wherever the writers are and however soon they end."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from merged_child import MESSAGES, new_writer, write
from merging import BIG, asleep, poller_of, queues
from support import HELPERS, forked

from aioshm import AioshmError, MessageQueue, MessagesLost, PeerDied, RoleError, blocking
from aioshm.queue.merge import merge


class TestGivingUp:
    @pytest.mark.slow_on_uvloop
    async def test_random_cancellations_lose_nothing(self) -> None:
        rng = random.Random(1)
        async with queues(2, 1) as (writers, readers):
            merged = merge(readers)
            sent, received = [0, 0, 0], [0, 0, 0]

            def message(which: int, number: int) -> tuple[int, bytes]:
                return number, bytes([which]) * (BIG if number % 19 == 3 else number % 50)

            async def send() -> None:
                for _ in range(rng.randrange(4)):
                    which = rng.randrange(3)
                    await writers[which].enqueue(message(which, sent[which]))
                    sent[which] += 1

            async def receive(turns: int | None) -> bool:
                waiting = asyncio.ensure_future(anext(merged))
                for _ in range(1_000_000 if turns is None else turns):
                    if waiting.done():
                        break
                    await asyncio.sleep(0)
                waiting.cancel()
                with suppress(asyncio.CancelledError):
                    rank, obj = await waiting
                    assert obj == message(rank, received[rank])
                    received[rank] += 1
                    return True
                return False

            cancellations = 0
            while cancellations < 1000:
                sending = asyncio.ensure_future(send()) if rng.random() < 0.5 else None
                cancellations += not await receive(rng.randrange(8))
                while sending is not None and not sending.done():
                    await receive(50)
            while received != sent:
                await receive(None)
            await merged.aclose()
            for which in range(3):
                await writers[which].enqueue("direct")
                assert await readers[which].dequeue(5) == "direct"

    async def test_breaking_out_and_beginning_again(self) -> None:
        async with queues(3) as (writers, readers):
            fds = len(os.listdir("/proc/self/fd"))
            for number in range(6):
                merged = merge(readers)
                waiting = await asleep(merged)
                await writers[number % 3].enqueue(number)
                await waiting
                del waiting
                await writers[number % 3].enqueue(number)
                async for item in merged:
                    assert item == (number % 3, number)
                    poller_of(merged)._timer.arm(1 << 62)  # as a wait before a window does
                    break
                gone = weakref.ref(merged)
                del merged
                assert gone() is None, "nothing but the caller has kept it"
            assert len(os.listdir("/proc/self/fd")) == fds
            await writers[0].enqueue("direct")
            assert await readers[0].dequeue(5) == "direct"

    async def test_closing_it_ends_a_wait_and_leaves_the_readers(self) -> None:
        async with queues(2, 1) as (writers, readers):
            merged = merge(readers)
            waiting = [await asleep(merged), asyncio.ensure_future(anext(merged))]
            await asyncio.sleep(0)
            await writers[1].enqueue("kept")
            await merged.aclose()
            await merged.aclose()
            merged.remove(2)
            for each in waiting:
                with pytest.raises(StopAsyncIteration):
                    await asyncio.wait_for(each, 5)
            assert await readers[1].dequeue(5) == "kept"
            await writers[0].enqueue("direct")
            assert await readers[0].dequeue(5) == "direct"


def _is_refused(merged: Any) -> bool:
    """Return whether a forked child, which also forgets the merge, is refused."""
    try:
        merged._loop = None
        merged._take(merged._running[0])
    except RoleError as error:
        return "forked" in str(error)
    finally:
        merged.__del__()
    return False


class TestRefusals:
    async def test_arguments(self) -> None:
        async with queues(2) as (writers, readers):
            for wrong, error, named in [
                ([readers[0]], TypeError, "mapping"),
                ({"0": readers[0]}, TypeError, "keys"),
                ({True: readers[0]}, TypeError, "keys"),
                ({0: "queue"}, TypeError, r"readers\[0\]"),
                ({7: writers[0]}, RoleError, r"readers\[7\] must be a reader"),
                ({0: readers[0], 5: readers[0]}, ValueError, r"readers\[0\] and readers\[5\]"),
            ]:
                with pytest.raises(error, match=named):
                    merge(wrong)  # type: ignore[arg-type]
            assert repr(merge(readers)) == "<Merged of 2 queues>"

    async def test_a_reader_that_another_merge_waits_for(self) -> None:
        async with queues(3) as (writers, readers):
            one, other = merge({0: readers[0], 1: readers[1]}), merge({2: readers[2], 1: readers[1]})
            waiting = await asleep(one)
            for _ in range(2):
                with pytest.raises(RoleError, match="another merge is waiting"):
                    await anext(other)
            await writers[1].enqueue("first")
            assert await waiting == (1, "first")
            await writers[1].enqueue("second")
            assert await anext(other) == (1, "second"), "the first one does not wait any more"
            await writers[0].enqueue("third")
            assert await anext(one) == (0, "third")

    async def test_another_thread(self) -> None:
        async with queues(2) as (writers, readers):
            begun, fresh = merge(readers), merge(readers)
            await writers[0].enqueue(0)
            assert await anext(begun) == (0, 0)
            await writers[0].enqueue(1)

            async def receive() -> None:
                for merged in (begun, fresh):
                    with pytest.raises(RoleError, match="belongs to another"):
                        await anext(merged)

            await asyncio.to_thread(asyncio.run, receive())
            assert await anext(begun) == (0, 1)

    async def test_a_forked_child(self) -> None:
        async with queues(2) as (writers, readers):
            merged = merge(readers)
            waiting = await asleep(merged)
            poller_of(merged)._timer.arm(1 << 62)
            assert forked(_is_refused, merged)()
            await writers[1].enqueue("kept")
            assert await waiting == (1, "kept")
            await merged.aclose()


SCRIPT = HELPERS / "merged_child.py"
QUEUES = 5
MERGES = 4

CASES = [
    (place, found, ending)
    for place, endings in (("task", ("closes", "later")), ("process", ("closes", "later", "dies")))
    for found in ("handle", "name", "remote")
    for ending in endings
]


@pytest.fixture(scope="module")
def fork(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[str]]]:
    """Give a function that forks a process with writers and returns their handles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AIOSHM_RUNTIME_DIR", str(tmp_path_factory.mktemp("m")))
        with subprocess.Popen(
            [sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            stdin, stdout = process.stdin, process.stdout
            assert stdin is not None
            assert stdout is not None

            def fork_one(*order: Any) -> list[str]:
                print(json.dumps(order), file=stdin, flush=True)
                handles: list[str] = json.loads(stdout.readline())
                return handles

            yield fork_one


@pytest.mark.one_loop
@pytest.mark.parametrize(("place", "found", "ending"), CASES)
@pytest.mark.parametrize("blocks", [False, True], ids=["async", "blocking"])
async def test_merge_of_writers_that_end_soon_receives_all_messages(
    fork: Callable[..., list[str]], blocks: bool, place: str, found: str, ending: str
) -> None:
    remote = found == "remote"
    for number in range(MERGES):
        slots = MESSAGES - 1 if number % 3 == 2 else MESSAGES + 3  # the writer waits for the reader, or does not
        names = [f"n{number}-{rank}" if found == "name" else None for rank in range(QUEUES if number % 2 else 1)]
        senders: list[Any] = []
        if place == "process":
            handles = await asyncio.to_thread(fork, names, remote, ending, slots)
        else:
            writers = [new_writer(name, remote, ending, slots) for name in names]
            handles = [writer.export_handle().to_json() for writer in writers]
            senders = [asyncio.create_task(write(writer, ending)) for writer in writers]
        kind: Any = blocking.MessageQueue if blocks else MessageQueue
        readers = {
            rank: kind.create_from_handle(handles[rank], 0) if name is None else kind.attach(name, 0)
            for rank, name in enumerate(names)
        }
        async with asyncio.timeout(60):
            if blocks:
                received, errors = await asyncio.to_thread(receive_blocking, readers)
            else:
                if number == 3 and ending != "dies":  # which may be before the reader is ready
                    await readers[0].wait_until_ready()
                received, errors = await receive(readers, adds=number == 1)
            await asyncio.gather(*senders)
        for rank, reader in readers.items():
            check(received[rank], errors.get(rank), found, ending)
            if blocks:
                await asyncio.to_thread(reader.close)
            else:
                await reader.aclose()


async def receive(readers: dict[int, MessageQueue[Any]], *, adds: bool) -> tuple[dict[int, list[Any]], dict[int, Any]]:
    """Merge the readers, or add all but the first to the merge; return the messages and the error of each."""
    received: dict[int, list[Any]] = {rank: [] for rank in readers}
    errors: dict[int, Any] = {}
    to_add = list(readers.items())[1:] if adds else []
    merged = merge({0: readers[0]} if to_add else readers)
    if to_add:
        asyncio.get_running_loop().call_soon(merged.add, *to_add.pop(0))  # while the merge waits
    while True:
        try:
            rank, obj = await anext(merged)
        except StopAsyncIteration:
            if not to_add:
                break
        except AioshmError as error:
            errors[error.rank] = error
        else:
            received[rank].append(obj)
        if to_add:
            merged.add(*to_add.pop(0))
    assert merged.failed == errors
    return received, errors


def receive_blocking(
    readers: dict[int, blocking.MessageQueue[Any]],
) -> tuple[dict[int, list[Any]], dict[int, AioshmError]]:
    """Merge the readers, where calls block; return the messages and the error of each."""
    received: dict[int, list[Any]] = {rank: [] for rank in readers}
    with blocking.merge(readers, errors="yield") as merged:
        for rank, obj in merged:
            if not isinstance(obj, AioshmError):
                received[rank].append(obj)
    return received, merged.failed


def check(received: list[Any], error: AioshmError | None, found: str, ending: str) -> None:
    """Check that everything came, but for what the sockets of a remote writer still had when its process died."""
    everything = list(range(MESSAGES))
    if ending == "dies" and found == "remote":
        everything = everything[: len(received)]
    assert received == everything
    assert isinstance(error, (PeerDied, MessagesLost)) if ending == "dies" else error is None
