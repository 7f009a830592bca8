"""What a newcomer tries first: both ends in one task, a queue that was closed, a queue where its handle belongs."""

from __future__ import annotations

import asyncio
import copy
import pickle
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
from children import child
from remotes import ready_ends, wide_writer
from support import until

from aioshm import EndClosed, Handle, HandleError, MessageQueue, PeerClosed
from aioshm.process.proc import process_state

pytestmark = pytest.mark.slow_on_uvloop


class TestAWriterThatWasClosed:
    """It did not die, whenever that was."""

    @pytest.mark.parametrize("lifeline", ["abstract", "directory"])
    @pytest.mark.parametrize("listening", [False, True])
    async def test_before_a_reader_attached(self, lifeline: Any, listening: bool, base: Path) -> None:
        writer = wide_writer(2, 0, lifeline=lifeline, runtime_dir=str(base))
        if listening:
            with pytest.raises(TimeoutError):
                await writer.wait_until_ready(0)
        dialled = [MessageQueue.create_from_handle(writer.export_handle(), rank) for rank in range(2)]
        await writer.aclose()
        for reader in dialled:
            async with reader:
                with pytest.raises(PeerClosed, match="the writer has closed the queue"):
                    await reader.dequeue(20)
                with pytest.raises(PeerClosed):
                    await reader.wait_until_ready(20)

    @pytest.mark.parametrize("backing", ["memfd", "named"])
    async def test_at_any_turn_of_the_loop(self, backing: Any) -> None:
        for turns in range(25):
            async with wide_writer(1, 0, backing=backing) as writer:
                waiting = asyncio.ensure_future(writer.wait_until_ready())
                async with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
                    receiving = asyncio.ensure_future(reader.dequeue(20))
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    await writer.aclose()
                    with pytest.raises(PeerClosed):
                        await receiving
                    with suppress(EndClosed):
                        await waiting

    async def test_to_a_remote_reader_that_has_not_attached(self) -> None:
        async with wide_writer(0, 1, remote_timeout=0.3) as writer:
            handle = writer.export_handle()
        async with MessageQueue.create_from_handle(handle, 0) as reader:
            with pytest.raises(HandleError, match="is the writer gone"):
                await reader.dequeue(20)


async def test_queue_instead_of_its_handle_is_refused_with_what_to_pass_on() -> None:
    copying: list[Callable[[Any], Any]] = [pickle.dumps, copy.copy, copy.deepcopy, ForkingPickler.dumps]
    async with ready_ends(1, 0) as (writer, (reader,)):
        for pass_on in copying:
            with pytest.raises(TypeError, match=r"<writer of .*> belongs to this process .* export_handle\(\)"):
                pass_on(writer)
            with pytest.raises(TypeError, match="pass on the handle that it was made from"):
                pass_on(reader)
        await writer.enqueue("still there", 20)
        assert await reader.dequeue(20) == "still there"


async def refusal(handle: Handle) -> str:
    async with MessageQueue.create_from_handle(handle, 0) as second:
        with pytest.raises(HandleError, match="rank 0 is") as caught:
            await second.wait_until_ready(20)
    return str(caught.value)


async def test_rank_that_is_taken_is_refused_naming_who_has_it() -> None:
    async with wide_writer(2, 0, on_reader_death="evict") as writer:
        handle = writer.export_handle()
        async with child("idle", handle.to_json(), "0") as first, MessageQueue.create_from_handle(handle, 1):
            await writer.wait_until_ready(20)
            assert re.search(rf"is taken by pid {first.pid}, which lives \(\w", await refusal(handle))
            first.signal(signal.SIGSTOP)
            await until(lambda: process_state(first.pid) == "stopped")
            assert f"is taken by pid {first.pid}, which lives (stopped)" in await refusal(handle)
            first.signal(signal.SIGKILL)
            await until(lambda: writer.stats().readers == 1, "its death")
            async with MessageQueue.create_from_handle(handle, 0) as second:
                await second.wait_until_ready(20)
