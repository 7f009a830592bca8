"""A merge loses nothing, wherever the writers are and however soon they end."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from merged_child import MESSAGES, new_writer, write
from support import HELPERS

from aioshm import AioshmError, MessageQueue, MessagesLost, PeerDied, blocking, merge

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
    """Give a function that forks a process with writers and returns their handles.

    Names and sockets are in a directory of their own, where nothing is in the way of files that killed writers leave.
    """
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
