from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from planting import Planted
from support import eventually

from aioshm import MessageQueue, Options, ShmRingBuffer
from aioshm.errors import AioshmError
from aioshm.observe import Watch, find_queue, find_queues
from aioshm.observe.queues import QueueNotFound, Segment, chosen, find_segments, snapshot_of
from aioshm.ring import layout as at
from aioshm.ring.header import read_header
from aioshm.ring.layout import Layout


def ids() -> list[str]:
    return [queue.header.queue_id for queue in find_queues()]


@pytest.mark.parametrize("backing", ["memfd", "named"])
async def test_a_queue_of_this_process(backing: Any) -> None:
    async with MessageQueue(
        2, 2, max_chunk_bytes=1000, options=Options(backing=backing, overflow="segments")
    ) as writer:
        handle = writer.export_handle()
        async with MessageQueue.create_from_handle(handle, 0) as one, MessageQueue.create_from_handle(handle, 1):
            await writer.wait_until_ready()
            for _ in range(3):
                await writer.enqueue("message")
            await writer.enqueue(b"x" * 5000)
            assert await one.dequeue() == "message"
            queue = find_queue(handle.queue_id.hex()[:12])
            header = queue.header
            assert (queue.label, queue.codec) == (handle.queue_id.hex()[:8], "pickle")
            assert (header.max_chunk_bytes, header.n_reader) == (1000, 2)
            assert (header.writer.messages, header.writer.overflows) == (4, 1)
            assert header.writer.bytes > 5000
            assert [end.pid for end in queue.ends] == [os.getpid()] * 3
            assert {end.state for end in queue.ends} == {"running"}
            assert [(end.rank, end.membership, end.messages, end.lag) for end in queue.readers] == [
                (0, "attached", 1, 3),
                (1, "attached", 0, 4),
            ]
            assert queue.readers[0].latency_p50_s is not None
            assert queue.readers[1].latency_p50_s is None
            assert queue.holders == (os.getpid(),)
            assert 0 < queue.memory_bytes <= header.layout.total_bytes
            assert (queue.overflow_segments, queue.overflow_bytes > 4096) == (1, True)
    assert handle.queue_id.hex() not in ids()


def test_a_bare_ring_is_no_queue() -> None:
    ring = ShmRingBuffer(1, 100, 2)
    try:
        assert ring.queue_id.hex() not in ids()
    finally:
        ring.close()


def test_other_processes(planted: Planted) -> None:
    writer, other, reader = planted.queue("read", "read")
    queue = find_queue(planted.name)
    assert queue.label == planted.name
    assert [end.pid for end in queue.ends] == [process.pid for process in planted.processes]
    assert all("planted.py" in end.command for end in queue.ends)
    assert set(queue.holders) == {process.pid for process in planted.processes}
    assert find_queue(str(reader.pid)).label == planted.name
    writer.send_signal(signal.SIGSTOP)  # a stopped process is visible, too
    eventually(lambda: find_queue(planted.name).writer.state == "stopped")
    reader.kill()
    reader.wait()
    assert find_queue(planted.name).readers[1].state == "gone"
    other.send_signal(signal.SIGSTOP)  # else the reader and the queue end with the writer
    writer.kill()
    eventually(lambda: find_queue(planted.name).writer.state in ("zombie", "gone"))


def test_ended_queue_is_not_kept_alive_by_a_watch(planted: Planted) -> None:
    looker = Watch(rescan_s=60)
    processes = planted.queue("read")
    assert planted.name in [queue.label for queue in looker.look()]
    for process in processes:
        process.kill()
        process.wait()
    with pytest.raises(QueueNotFound):
        find_queue(planted.name)


class TestChoosing:
    @staticmethod
    def queue(name: str, queue_id: str, pid: int) -> Any:
        layout = Layout.of(1, 100, 1)
        memory = bytearray(layout.header_bytes)
        memory[: at.PREAMBLE.size] = layout.preamble(bytes.fromhex(queue_id))
        memory[at.WRITER_LINE + at.PID] = pid
        memory[layout.name_at] = len(name)
        memory[layout.name_at + at.NAME : layout.name_at + at.NAME + len(name)] = name.encode()
        return snapshot_of(read_header(memory), {}, 0, (0, 0), 0)

    @pytest.fixture
    def queues(self) -> list[Any]:
        return [
            self.queue("steps", "ab" * 16, 7),
            self.queue("", "cd" * 16, 8),
            self.queue("", "cdce" * 8, 8),
            self.queue("cdcd", "ef" * 16, 9),
        ]

    @pytest.mark.parametrize(
        ("key", "number"),
        [("steps", 0), ("abab", 0), ("ab" * 16, 0), ("7", 0), ("cdcdc", 1), ("cdce", 2), ("cdcd", 3), ("9", 3)],
    )
    def test_one(self, queues: list[Any], key: str, number: int) -> None:
        assert chosen(key, queues) is queues[number]

    @pytest.mark.parametrize(
        ("key", "problem"),
        [
            ("nope", r"there is no queue 'nope'; queues .*: steps \(its writer is gone\), cdcdcdcd"),
            ("aba", "there is no queue 'aba'"),
            ("8", "'8' matches 2 queues, say which: cdcdcdcd, cdcecdce$"),
            ("", "there is no queue ''"),
        ],
    )
    def test_none_or_several(self, queues: list[Any], key: str, problem: str) -> None:
        with pytest.raises(QueueNotFound, match=problem) as caught:
            chosen(key, queues)
        assert caught.value.key == key
        assert isinstance(caught.value, AioshmError)

    @pytest.mark.parametrize(
        ("name", "there_are"),
        [("", ("steps", "cdcdcdcd")), ("other", ("steps", "other")), ("steps", ("abababababab", "cdcdcdcdcdcd"))],
    )
    def test_several_of_one_process_are_named(self, name: str, there_are: tuple[str, ...]) -> None:
        with pytest.raises(QueueNotFound, match=f": {', '.join(there_are)}$") as caught:
            chosen("7", [self.queue("steps", "ab" * 16, 7), self.queue(name, "cd" * 16, 7)])
        assert caught.value.there_are == there_are


class TestWatch:
    async def test_rates(self) -> None:
        async with MessageQueue(1, 1) as writer:
            async with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
                await writer.wait_until_ready()
                key = writer.export_handle().queue_id.hex()
                watch = Watch(rescan_s=1000)
                [first] = [queue for queue in watch.look() if queue.header.queue_id == key]
                assert (first.bytes_per_s, first.writer.messages_per_s) == (None, None)
                for _ in range(100):
                    await writer.enqueue(b"x" * 50)
                assert await reader.dequeue() is not None
                await asyncio.sleep(0.02)
                [second] = [queue for queue in watch.look() if queue.header.queue_id == key]
                seconds = (second.taken_ns - first.taken_ns) / 1e9
                assert [round((end.messages_per_s or 0) * seconds) for end in second.ends] == [100, 1]
                assert round((second.bytes_per_s or 0) * seconds) == second.header.writer.bytes
                assert all((end.cpu_share or 0) >= 0 for end in second.ends)
                assert watch.ring(second).queue_id == key
                with pytest.raises(KeyError):
                    watch.ring(TestChoosing.queue("other", "ab" * 16, 1))

    async def test_new_queues_are_found_and_old_ones_forgotten(self) -> None:
        watch = Watch(rescan_s=0)
        async with MessageQueue(0, 0) as writer:
            key = writer.export_handle().queue_id.hex()
            assert key in [queue.header.queue_id for queue in watch.look()]
        assert key not in [queue.header.queue_id for queue in watch.look()]


def of_this_process() -> list[Segment]:
    return [segment for segment in find_segments()[0] if os.getpid() in segment.paths]


async def test_segment_is_opened_through_its_last_holder() -> None:
    async with MessageQueue(0, 0):
        [segment] = of_this_process()
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        with open(os.devnull) as other:
            former = {-1: f"/proc/{ended.pid}/fd/3", -2: f"/proc/self/fd/{other.fileno()}"}
            segment.paths = former | segment.paths
            fd = segment.open()
        try:
            status = os.fstat(fd)
        finally:
            os.close(fd)
        assert (status.st_dev, status.st_ino) == segment.identity
    with pytest.raises(FileNotFoundError, match="no process has /memfd:aioshm"):
        segment.open()
    assert of_this_process() == []
