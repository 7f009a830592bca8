"""What one message costs the writer as readers grow in number: the same few stores and comparisons for all of them.

One process plays all the readers. They keep up: whenever the ring is full it marks every slot as read by everyone, off
the clock. So what is measured is the writer alone; 64 real readers would only be in each other's way on a machine of
fewer cores.
"""

from __future__ import annotations

import asyncio
import sys
import time
from abc import ABC, abstractmethod
from contextlib import AsyncExitStack
from statistics import median

from aioshm import Handle, MessageQueue, Options, ShmRingBuffer
from benchmarks.framework.crew import Boss, Crew, Hand
from benchmarks.framework.harness import Settings, main, progress
from benchmarks.framework.report import Report
from benchmarks.framework.workload import SHORT_BYTES

READERS = [1, 2, 4, 8, 16, 32, 64]
QUICK_READERS = [1, 4]
MAX_GROWTH = 1.3

RING = "claim, fill, commit"
QUEUE = "enqueue"
OURS = "aioshm"

READY_TIMEOUT_S = 60.0

_SLOTS = SHORT_BYTES.slots
_CHUNK_BYTES = SHORT_BYTES.chunk_bytes


class Writer(ABC):
    """A way to publish messages."""

    case: str

    @abstractmethod
    def order(self) -> Handle | ShmRingBuffer:
        """Return what its readers attach to."""

    @abstractmethod
    async def attached(self) -> None:
        """Wait until they have."""

    @abstractmethod
    async def fill(self, message: bytes) -> float:
        """Publish the message once in every slot; return the seconds that it took."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close it."""


class RingWriter(Writer):
    """The ring by itself."""

    case = RING

    def __init__(self, n_reader: int) -> None:
        self._ring = ShmRingBuffer(n_reader, _CHUNK_BYTES, 1, backing="named", slots=_SLOTS)
        self._writer = self._ring.writer()

    def order(self) -> ShmRingBuffer:
        return self._ring

    async def attached(self) -> None:
        pass

    async def fill(self, message: bytes) -> float:
        claim, commit, size = self._writer.claim, self._writer.commit, len(message)
        header = bytes(32)
        began = time.perf_counter()
        for _ in range(_SLOTS):
            slot = claim()
            assert slot is not None
            slot.header[:32] = header
            slot.body[:size] = message
            commit()
        return time.perf_counter() - began

    async def aclose(self) -> None:
        self._writer.close()
        self._ring.close()


class QueueWriter(Writer):
    """A queue of bytes."""

    case = QUEUE

    def __init__(self, n_reader: int) -> None:
        # Of a named segment, because that can be opened by its name, beside the queue.
        self._queue = MessageQueue(
            n_reader,
            n_reader,
            max_chunk_bytes=_CHUNK_BYTES,
            max_chunks=1,
            slots=_SLOTS,
            codec="raw",
            options=Options(backing="named"),
        )

    def order(self) -> Handle:
        return self._queue.export_handle()

    async def attached(self) -> None:
        await self._queue.wait_until_ready(READY_TIMEOUT_S)

    async def fill(self, message: bytes) -> float:
        enqueue = self._queue.enqueue
        began = time.perf_counter()
        for _ in range(_SLOTS):
            await enqueue(message)
        return time.perf_counter() - began

    async def aclose(self) -> None:
        await self._queue.aclose()


async def run(settings: Settings, report: Report) -> None:
    """Measure, and hold the results against the promises."""
    readers = QUICK_READERS if settings.quick else READERS
    with Crew(settings.loop_factory) as crew:
        for make in (RingWriter, QueueWriter):
            case = make.case
            async with AsyncExitStack() as stack:
                hand = crew.start(f"readers of {case}", keep_up)
                writers: dict[int, Writer] = {}
                for n_reader in readers:
                    progress(f"{case}: {n_reader} reader(s) attach")
                    writers[n_reader] = make(n_reader)
                    stack.push_async_callback(writers[n_reader].aclose)
                    hand.order(writers[n_reader].order())
                    await asyncio.gather(writers[n_reader].attached(), hand.reply())
                for repetition in range(settings.repeat):
                    progress(f"{case}: repetition {repetition + 1} of {settings.repeat}")
                    for number, (n_reader, writer) in enumerate(writers.items()):
                        cost = await _measure(writer, hand, number, settings.seconds)
                        report.result(case, OURS, n_reader).add(us_per_message=cost)
                await crew.dismiss([hand])
            fewest, most = (report.result(case, OURS, n).median("us_per_message") for n in (readers[0], readers[-1]))
            text = f"the writer's cost per message with {readers[-1]} readers, {case}, against {readers[0]}"
            report.hold(text, most / fewest, "x", MAX_GROWTH)


async def _measure(writer: Writer, hand: Hand, number: int, seconds: float) -> float:
    """Return the microseconds that one message takes, in the median over the fillings of the ring."""
    [message] = SHORT_BYTES.numbered([number])
    costs: list[float] = []
    ends = time.perf_counter() + seconds
    await writer.fill(message)  # untimed: the memory has gone cold while others were measured
    while not costs or time.perf_counter() < ends:
        hand.order(number)
        await hand.reply()
        costs.append(1e6 * await writer.fill(message) / _SLOTS)
    hand.order(number)
    await hand.reply()
    return median(costs)


async def keep_up(boss: Boss) -> None:
    """Role: attach as all readers of each ring or queue that comes; whenever its number comes, have read everything."""
    rings: list[ShmRingBuffer] = []
    queues: list[MessageQueue] = []
    while (order := await boss.order()) is not None:
        if isinstance(order, int):
            sizes = rings[order].layout
            flags = sizes.slots * sizes.flag_bytes  # the written flags among them, which are set already
            rings[order].view[sizes.metadata_offset : sizes.metadata_offset + flags] = b"\x01" * flags
        elif isinstance(order, ShmRingBuffer):
            rings.append(order)
        else:
            ranks = order.local_reader_ranks
            # Before they attach: then the segment loses its name.
            rings.append(
                ShmRingBuffer(len(ranks), order.max_chunk_bytes, order.max_chunks, order.segment, slots=order.slots)
            )
            ends = [MessageQueue.create_from_handle(order, rank) for rank in ranks]
            queues += ends
            await asyncio.gather(*(end.wait_until_ready(READY_TIMEOUT_S) for end in ends))
        boss.reply(None)
    for ring in rings:
        ring.close()
    for queue in queues:
        await queue.aclose()


if __name__ == "__main__":
    sys.exit(main("writer_cost", __doc__, run, repeat=5, seconds=0.3))
