"""Processes that are killed, stopped or leave at every possible moment."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
from children import child
from remotes import ready_ends, wide_writer
from support import eventually, until

from aioshm import Handle, MessageQueue, Options, PeerDied, QueueClosed, QueueFull
from aioshm.ring.layout import PREAMBLE
from aioshm.ring.segment import remove_orphan

pytestmark = pytest.mark.slow_on_uvloop


@pytest.mark.parametrize(("role", "n_remote"), [("hold", 0), ("idle", 0), ("idle", 1)])
async def test_a_killed_reader_is_named_to_a_waiting_writer(role: str, n_remote: int) -> None:
    writer = wide_writer(1 - n_remote, n_remote, remote_timeout=0.8, remote_window=4)
    async with writer, child(role, writer.export_handle().to_json(), "0") as reader:
        await writer.wait_until_ready(20)
        await reader.says("ready")
        if role == "hold":
            await writer.enqueue("held")
            await reader.says("holding")
        with pytest.raises(QueueFull):
            for _ in range(10):
                writer.enqueue_nowait("fill")
        waiting = asyncio.ensure_future(writer.enqueue("one more"))
        await asyncio.sleep(0.05)
        reader.signal(signal.SIGKILL)
        with pytest.raises(PeerDied) as caught:
            await asyncio.wait_for(waiting, 5)
        assert (caught.value.rank, caught.value.pid, caught.value.side) == (0, reader.pid, "reader")
        with pytest.raises(PeerDied):
            await writer.enqueue("and again")
        with pytest.raises(PeerDied):
            writer.enqueue_nowait("and again")
        assert writer.stats().kept == 0


async def test_no_call_goes_on_in_the_room_that_a_death_makes() -> None:
    async with wide_writer(1, 0) as writer, child("idle", writer.export_handle().to_json(), "0") as reader:
        await writer.wait_until_ready(20)
        await reader.says("ready")
        with pytest.raises(QueueFull):
            for _ in range(10):
                writer.enqueue_nowait("fill")
        reader.signal(signal.SIGKILL)
        with pytest.raises(PeerDied):  # QueueFull until then
            while True:
                with suppress(QueueFull):
                    writer.enqueue_nowait("and again")
                    pytest.fail("it was sent to nobody")
                await asyncio.sleep(0)


@pytest.mark.parametrize(("n_local", "n_remote", "role"), [(2, 0, "hold"), (1, 2, "idle")], ids=["hold", "remote"])
async def test_an_evicted_reader_holds_nobody_up(
    n_local: int, n_remote: int, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"remote_timeout": 0.8, "remote_window": 4, "on_reader_death": "evict"}
    async with wide_writer(n_local, n_remote, **options) as writer, AsyncExitStack() as stack:
        handle = writer.export_handle().to_json()
        victim = await stack.enter_async_context(child(role, handle, "1"))
        ranks = [rank for rank in range(n_local + n_remote) if rank != 1]
        survivors = [await stack.enter_async_context(child("collect", handle, str(rank))) for rank in ranks]
        await writer.wait_until_ready(20)
        for number in range(4):
            await writer.enqueue((number, b""))
        if role == "hold":
            await victim.says("ready")
            await victim.says("holding")
        waiting = asyncio.ensure_future(writer.enqueue((4, b"\x04")))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        victim.signal(signal.SIGKILL)
        await asyncio.wait_for(waiting, 5)
        for number in range(5, 100):
            await writer.enqueue((number, bytes([number]) * (number * 100)), 5)
        assert writer.stats().readers == len(survivors)
        await writer.aclose()
        for survivor in survivors:
            await survivor.says("ready")
            await survivor.says("100 then closed")
    assert f"reader 1 (pid {victim.pid}" in caplog.text
    assert "died and was evicted" in caplog.text


@pytest.mark.parametrize(("n_local", "n_remote"), [(2, 0), (1, 2)])
async def test_readers_that_leave_hold_nobody_up(n_local: int, n_remote: int) -> None:
    async with ready_ends(n_local, n_remote, remote_window=4) as (writer, (*readers, leaver)):
        for _ in range(4):
            await writer.enqueue("x")
        waiting = asyncio.ensure_future(writer.enqueue("y"))
        for reader in readers:
            assert [await reader.dequeue(5) for _ in range(4)] == ["x"] * 4
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await leaver.aclose()
        await asyncio.wait_for(waiting, 5)
        assert writer.stats().readers == len(readers)
        while readers:
            assert [await reader.dequeue(5) for reader in readers] == ["y"] * len(readers)
            await readers.pop().aclose()
            if readers:
                for _ in range(100):
                    await writer.enqueue("z", 5)
                    assert [await reader.dequeue(5) for reader in readers] == ["z"] * len(readers)
                await writer.enqueue("y", 5)
        with pytest.raises(QueueClosed, match="every reader has left"):
            for _ in range(1000):
                await writer.enqueue("z", 5)


@pytest.mark.parametrize("size", [10, 300_000])
async def test_a_killed_writer_lets_readers_drain(size: int) -> None:
    writing = child("write", "5", str(size))
    async with writing as writer, MessageQueue.create_from_handle(await writer.says("{"), 0) as reader:
        await reader.wait_until_ready(20)
        await writer.says("written")
        await until(lambda: reader.stats().backlog == 5, "the arrival of all messages")
        await writer.kill()
        began = time.monotonic()
        for number in range(5):
            assert await reader.dequeue(5) == (number, bytes([number]) * size)
        with pytest.raises(PeerDied) as caught:
            await reader.dequeue()
        assert time.monotonic() - began < 1.3
        assert (caught.value.rank, caught.value.pid, caught.value.side) == (-1, writer.pid, "writer")
        with pytest.raises(PeerDied):
            reader.dequeue_nowait()
        with pytest.raises(PeerDied):
            async with reader.lease():
                pytest.fail("nothing was there")


@pytest.mark.parametrize("wait", ["park", "spin"])
async def test_a_killed_writer_ends_a_waiting_dequeue(wait: str) -> None:
    async with child("write", "0", "0") as writer:
        handle = await writer.says("{")
        async with MessageQueue.create_from_handle(handle, 0, options=Options(wait=wait)) as reader:  # type: ignore[arg-type]
            await reader.wait_until_ready(20)
            waiting = asyncio.ensure_future(reader.dequeue())
            await asyncio.sleep(0.05)
            began = time.monotonic()
            writer.signal(signal.SIGKILL)
            with pytest.raises(PeerDied):
                await waiting
            assert time.monotonic() - began < 5


async def test_a_stopped_reader_is_reported_by_name(caplog: pytest.LogCaptureFixture) -> None:
    async with wide_writer(2, 0, stall_warning_s=0.1) as writer:
        handle = writer.export_handle().to_json()
        async with child("collect", handle, "0"), child("collect", handle, "1") as stopped:
            await writer.wait_until_ready(20)
            await stopped.says("ready")
            stopped.signal(signal.SIGSTOP)
            with caplog.at_level(logging.WARNING, "aioshm"), pytest.raises(TimeoutError) as caught:
                for number in range(20):
                    await writer.enqueue((number, b""), 0.5)
            reports = [text for record in caplog.records if "to write message" in (text := record.getMessage())]
            assert 2 <= len(reports) <= 5, "one after every interval"
            assert f"rank 1 (pid {stopped.pid}, stopped)" in reports[0]
            assert "rank 0" not in reports[0]
            assert f"rank 1 (pid {stopped.pid}, stopped)" in str(caught.value)
            stopped.signal(signal.SIGCONT)


async def test_a_stopped_writer_is_reported_and_an_idle_one_is_not(caplog: pytest.LogCaptureFixture) -> None:
    async with child("write", "0", "0") as writer:
        handle = await writer.says("{")
        async with MessageQueue.create_from_handle(handle, 0, options=Options(stall_warning_s=0.1)) as reader:
            await reader.wait_until_ready(20)
            with pytest.raises(TimeoutError):
                await reader.dequeue(0.25)
            assert caplog.records == []
            writer.signal(signal.SIGSTOP)
            with pytest.raises(TimeoutError):
                await reader.dequeue(0.25, indefinite=True)
            assert caplog.records == []
            with pytest.raises(TimeoutError):
                await reader.dequeue(0.25)
            reports = [record.getMessage() for record in caplog.records]
            assert reports
            assert all(f"the writer (pid {writer.pid}) is stopped" in report for report in reports)
            writer.signal(signal.SIGCONT)


@pytest.mark.one_loop
async def test_killing_the_whole_tree_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOSHM_BACKING", "named")
    queues: list[bytes] = []
    for attaches, ready in ((False, False), (True, False), (True, True)):
        async with child("write", "1000000", "100") as writer:
            handle = await writer.says("{")
            queues.append(Handle.from_json(handle).queue_id)
            if not attaches:
                await writer.kill()
                continue
            async with child("collect", handle, "0") as reader:
                if ready:
                    await reader.says("ready")
                for victim in (writer, reader):
                    victim.signal(signal.SIGKILL)
                for victim in (writer, reader):
                    await victim.end()
    # Killed between creating the segment and the last reader's attaching, it has a name that nobody can remove.
    # It is recognised as an orphan, which is what `aioshm doctor --clean` removes.
    # A test beside this one that looks for orphans holds each for an instant.
    eventually(lambda: all(remove_orphan(name) for name in named_segments(queues)), "the end of the orphans")
    assert not named_segments(queues)


def named_segments(queues: list[bytes]) -> list[str]:
    """Return the segments that begin with what these queues' do: a test beside this one may have some, too."""
    return [path.name for path in Path("/dev/shm").glob("aioshm-*") if any(queue in _start(path) for queue in queues)]


def _start(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(PREAMBLE.size)
    except FileNotFoundError:  # gone in the meantime
        return b""
