"""What an end tells of itself: bytes, overflows, rates, and each reader of a writer."""

from __future__ import annotations

import os
import platform
from typing import Any

import msgspec
import pytest
from pairs import EITHER_PLACE
from remotes import ready_ends
from support import until

from aioshm.queue.stats import Rates


class TestRates:
    def test_over_at_least_a_second(self) -> None:
        rates = Rates(100.0)
        assert rates.since(100.0, 0, 0) == (0, 0), "no time has passed"
        assert rates.since(100.5, 50, 500) == (100, 1000)
        assert rates.since(102.0, 200, 4000) == (100, 2000), "since it was made"
        assert rates.since(102.1, 310, 4000) == pytest.approx((310 / 2.1, 4000 / 2.1)), "the last call was just now"
        assert rates.since(104.0, 400, 5000) == (100, 500), "since the call at 102 s"
        assert rates.since(104.5, 400, 5000) == pytest.approx((80, 400))
        assert rates.since(105.0, 400, 5000) == (0, 0), "since that at 104 s"

    def test_a_newcomer_begins_where_it_came(self) -> None:
        rates = Rates(0.0)
        rates.begin(10.0, 1_000_000)
        assert rates.since(12.0, 1_000_010, 20) == (5, 10)
        rates.begin(12.0, 5)
        assert rates.since(12.5, 1_000_020, 20) == (8, 8), "what follows is no newcomer"


@EITHER_PLACE
async def test_bytes(n_local: int, n_remote: int) -> None:
    """As they were encoded, whichever way they take, and the same at both ends."""
    async with ready_ends(n_local, n_remote, codec="raw", chunks=16) as (writer, (reader,)):
        sizes = [0, 10, 3000, 4096, 5000, 60_000]
        for size in sizes:
            await writer.enqueue(bytes(size))
        await writer.enqueue_many([bytes(7), bytearray(9000), bytes(11)])
        async with writer.acquire_write(nbytes=100) as room:
            room[:50] = b"x" * 50
        total = sum(sizes) + 7 + 9000 + 11 + 100
        assert writer.stats().bytes == total
        for count in range(len(sizes)):
            assert reader.stats().bytes == sum(sizes[:count])
            if count % 2:
                async with reader.lease(20):
                    pass
            else:
                await reader.dequeue(20)
        got: list[Any] = []
        while len(got) < 3:
            got += await reader.dequeue_many(3 - len(got), 20)
        async with reader.acquire_read(20) as view:
            assert len(view) == 100
        assert reader.stats().bytes == total
        assert reader.stats().overflows == (3 if n_local else 0)
        assert writer.stats().overflows == (3 if n_local else 0)
    assert (writer.stats().bytes, reader.stats().bytes) == (total, total), "also after closing"


async def test_a_row_for_each_reader() -> None:
    async with ready_ends(2, 1) as (writer, readers):
        await writer.enqueue_many([b"x" * 10, b"y" * 10])
        first, second, far = readers
        for reader in (first, first, far, far):
            await reader.dequeue(20)
        await until(lambda: writer.readers[2].lag == 0)
        stats = writer.stats()
        rows = stats.per_reader
        assert [(row.rank, row.read, row.lag, row.state) for row in rows] == [
            (0, 2, 0, "attached"),
            (1, 0, 2, "attached"),
            (2, 2, 0, "attached"),
        ]
        assert all((row.pid, row.host) == (os.getpid(), platform.node()) for row in rows)
        assert [info.rank for info in writer.readers] == [0, 1, 2]
        assert rows[0].bytes == stats.bytes == first.stats().bytes
        assert (rows[1].bytes, rows[2].bytes) == (0, None)
        latency = rows[0].latency
        assert latency is not None
        assert first.stats().latency == latency
        assert latency.samples >= 1
        assert 0 < rows[0].latency_p50_s <= rows[0].latency_p99_s < 60  # type: ignore[operator]
        assert (rows[1].latency_p50_s, rows[2].latency_p99_s, rows[2].latency) == (None, None, None)
        assert (far.stats().latency, stats.latency) == (None, None)
        assert first.stats().per_reader == ()
        encoded = msgspec.json.encode(stats)
        assert msgspec.json.decode(encoded, type=type(stats)) == stats
        await second.aclose()
        await until(lambda: writer.stats().per_reader[1].state == "left")
        assert writer.stats().per_reader[1].lag == writer.stats().backlog == 0, "nobody waits for it any more"
