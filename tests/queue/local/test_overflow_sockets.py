"""Messages that do not fit a chunk, over ZeroMQ: late subscribers, deaths, damage."""

from __future__ import annotations

import asyncio
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
import zmq
from children import child
from overflowing import overflow_of, sockets_of_zeromq, withhold
from pairs import attached
from support import eventually

from aioshm import CorruptSlot, MessageQueue, Options, PeerDied, SharedMemoryError
from aioshm.queue.local import overflow_sockets
from aioshm.queue.remote import wire

pytestmark = pytest.mark.slow_on_uvloop

BIG = 50_000


def subscription_of(reader: Any) -> Any:
    return reader.end.source.overflow


class TestSubscribing:
    async def test_who_does_not_know_the_secret_gets_nothing(self) -> None:
        async with attached(overflow="zmq") as (writer, (reader,)):
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            stranger = context.socket(zmq.SUB)
            try:
                path = writer.end.ring.overflow._file._path  # type: ignore[attr-defined]
                stranger.connect(f"ipc://{path}")
                for topic in (b"", bytes(20), wire.address(bytes(16), 0)):
                    stranger.setsockopt(zmq.SUBSCRIBE, topic)
                for _ in range(20):
                    await writer.enqueue(b"x" * BIG)
                    assert len(await reader.dequeue(5)) == BIG
                assert not stranger.poll(50)
            finally:
                stranger.close(linger=0)
                context.term()

    async def test_only_this_user_reaches_the_socket_file_and_closing_removes_it(self, base: Path) -> None:
        run = base / "run"
        async with attached(overflow="zmq", runtime_dir=str(run)):
            (path,) = run.iterdir()
            assert stat.S_ISSOCK(path.stat().st_mode)
            assert stat.S_IMODE(run.stat().st_mode) == 0o700
        assert not list(run.iterdir())

    def test_a_directory_that_cannot_be_had_is_named(self, base: Path) -> None:
        (base / "file").touch()
        with pytest.raises(SharedMemoryError, match="AIOSHM_RUNTIME_DIR"):
            MessageQueue(1, 1, options=Options(overflow="zmq", runtime_dir=str(base / "file")))

    async def test_reader_that_cannot_subscribe_releases_the_ring(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> None:
            raise SharedMemoryError(12, "no sockets")

        async with MessageQueue(1, 1, options=Options(overflow="zmq")) as writer:
            reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
            with monkeypatch.context() as patch:
                patch.setattr(overflow_sockets, "OverflowSubscriber", refuse)
                waiting = asyncio.ensure_future(writer.wait_until_ready(5))
                with pytest.raises(SharedMemoryError, match="no sockets"):
                    await reader.wait_until_ready(5)
            waiting.cancel()
            await reader.aclose()


class TestTrouble:
    async def test_a_body_whose_slot_was_not_published_is_never_anothers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with attached(overflow="zmq") as (writer, (reader,)):
            with monkeypatch.context() as patch:

                def interrupt(*_: object) -> None:
                    raise KeyboardInterrupt

                patch.setattr(overflow_sockets, "pack_marker", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    await writer.enqueue(b"0" * BIG)
            for number in b"12":
                await writer.enqueue(bytes([number]) * BIG)
                assert await reader.dequeue(5) == bytes([number]) * BIG
            assert subscription_of(reader)._arrived == {}
            assert len(overflow_of(writer)._kept) == 1

    @pytest.mark.parametrize("damage", [b"", b"x" * 36, b"x" * 100])
    async def test_what_is_no_body(self, damage: bytes) -> None:
        async with attached(overflow="zmq") as (writer, (reader,)):
            release = withhold(writer)
            await writer.enqueue(b"x" * BIG)
            await writer.enqueue("next")
            waiting = asyncio.ensure_future(reader.dequeue(20))
            await asyncio.sleep(0)
            publisher: Any = overflow_of(writer)
            while not publisher._subscribed:
                await asyncio.sleep(0.001)
            publisher._publisher.socket.send(wire.address(publisher._secret, 0) + damage)
            with pytest.raises(CorruptSlot, match="slot of message 0: damaged: rank 0 was sent a damaged body 0"):
                await waiting
            release()
            assert await reader.dequeue(5) == "next"

    async def test_no_memory_for_a_copy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with attached(overflow="zmq") as (writer, (reader,)):
            with monkeypatch.context() as patch:

                def full(*_: object) -> None:
                    raise MemoryError

                patch.setattr(overflow_sockets, "pack", full)
                for _ in range(2):
                    with pytest.raises(SharedMemoryError, match=r"message 0 of 50\d+ bytes"):
                        await writer.enqueue(b"x" * BIG)
            await writer.enqueue(b"y" * BIG)
            assert await reader.dequeue(5) == b"y" * BIG

    @pytest.mark.parametrize("size", [10_000, 3_000_000])
    async def test_a_writer_that_is_killed(self, size: int, monkeypatch: pytest.MonkeyPatch, base: Path) -> None:
        """What has arrived is received; then, at the latest, the death is told."""
        monkeypatch.setenv("AIOSHM_OVERFLOW", "zmq")
        monkeypatch.setenv("AIOSHM_RUNTIME_DIR", str(base / "run"))
        async with child("write", "8", str(size), "10") as writer:
            async with MessageQueue.create_from_handle(await writer.says("{"), 0) as reader:
                await reader.wait_until_ready(20)
                await writer.says("written")
                assert await reader.dequeue(20) == (0, bytes(size))
                writer.signal(signal.SIGKILL)
                received = 1
                with pytest.raises(PeerDied, match="writer"):
                    while True:
                        number, payload = await reader.dequeue(20)
                        assert (number, payload) == (received, bytes([received]) * size)
                        received += 1
                assert await writer.end() == -signal.SIGKILL

    async def test_a_writer_that_was_forgotten_leaves_no_socket(self, recwarn: pytest.WarningsRecorder) -> None:
        before = sockets_of_zeromq()
        writer = MessageQueue(1, 1, options=Options(overflow="zmq"))
        assert sockets_of_zeromq() == before + 1
        del writer
        eventually(lambda: sockets_of_zeromq() == before, "the end of its sockets")
        assert [str(each.message) for each in recwarn if issubclass(each.category, ResourceWarning)]
