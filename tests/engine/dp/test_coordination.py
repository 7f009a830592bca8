"""The coordinator's sockets: READY, waves, counts, and invalid messages."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from peers import Peers, complete, counts, frames, pack, published, start, starts, until

from aioshm.engine import get_engine_client_zmq_addr
from aioshm.engine.dp.coordination import Coordination, CoordinatorAddresses
from aioshm.engine.protocol.waves import Waves

IDLE = [0, 0, 0.0]

pytestmark = pytest.mark.usefixtures("runtime_dir")


def wanted(local: bool = True) -> CoordinatorAddresses:
    return CoordinatorAddresses(*(get_engine_client_zmq_addr(local, "127.0.0.1") for _ in range(3)))


@contextmanager
def coordination(n_engines: int = 2, local: bool = True, **options: bool) -> Iterator[Peers]:
    with Coordination(Waves(n_engines, **options), wanted(local)) as made, Peers(made.addresses) as peers:
        yield peers
        if made.over.done():
            made.over.result()


class TestSubscriptions:
    @pytest.mark.parametrize("local", [True, False])
    async def test_ready_when_all_have(self, local: bool) -> None:
        with coordination(2, local) as peers:
            first = await peers.subscriber(peers.addresses.engine_input)
            early = first.recv()
            front_end = await peers.front_end()
            await asyncio.sleep(0.05)
            assert not early.done()
            await peers.subscriber(peers.addresses.engine_input)
            assert await early == b"READY"
            assert await published(front_end) == [[IDLE, IDLE], 0, False]

    async def test_reports_before_ready_are_kept(self) -> None:
        with coordination(1) as peers:
            front_end = await peers.front_end()
            await peers.reporter().send(start(0, 0))
            engine = await peers.subscriber(peers.addresses.engine_input)
            assert await frames(engine) == [b"READY"]
            assert await starts(engine) == (0, 0)
            await until(front_end, [[IDLE], 0, True])


class TestWaves:
    async def test_one_engine_wakes_the_others(self) -> None:
        with coordination(2) as peers:
            engines = await peers.engines(2)
            front_end = await peers.front_end()
            reporter = peers.reporter()
            assert await published(front_end) == [[IDLE, IDLE], 0, False]
            await reporter.send(start(1, 0))
            assert [await starts(engine) for engine in engines] == [(0, 1), (0, 1)]
            assert await published(front_end) == [None, 0, True]
            await reporter.send(complete(0, 0))
            assert await published(front_end) == [None, 1, False]
            await reporter.send(start(1, 0))  # stale
            await reporter.send(start(0, 1))
            assert [await starts(engine) for engine in engines] == [(1, 0), (1, 0)]


class TestCounts:
    async def test_a_new_number_of_engines(self) -> None:
        with coordination(1) as peers:
            await peers.engines(1)
            front_end = await peers.front_end()
            reporter = peers.reporter()
            await front_end.send(pack(("SCALE_ELASTIC_EP", 2)))
            await until(front_end, [[IDLE, IDLE], 0, False])
            await reporter.send(counts(1, 8, 9))
            await until(front_end, [[IDLE, [8, 9, 0.0]], 0, False])
            (added,) = await peers.engines(1)
            await reporter.send(start(0, 0))
            assert await starts(added) == (0, 0)


class TestGarbage:
    @pytest.mark.slow_on_uvloop
    @pytest.mark.parametrize(
        "garbage",
        [
            [b""],
            [b"\xc1"],
            [b"\x91" * 5000],
            [pack({"a": 1})],
            [b"x" * (2 << 20)],
            [pack(("SCALE_ELASTIC_EP", 0))],
            [counts(1, 1, 1), b"more"],
            [b"frame"] * 1000,
        ],
        ids=lambda each: str(each)[:30],
    )
    async def test_does_no_harm(self, garbage: list[bytes], caplog: pytest.LogCaptureFixture) -> None:
        with coordination(1) as peers:
            (engine,) = await peers.engines(1)
            front_end = await peers.front_end()
            reporter = peers.reporter()
            for peer in (engine, front_end, reporter):
                for _ in range(3):
                    await peer.send_multipart(garbage)
            await reporter.send(counts(0, 1, 2))
            await until(front_end, [[[1, 2, 0.0]], 0, False])
            await reporter.send(start(0, 0))
            assert await starts(engine) == (0, 0)
        said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(said) == 1
        assert said[0].startswith("dropped a message: ")


class TestEnd:
    async def test_leaves_nothing(self, runtime_dir: Path) -> None:
        made = Coordination(Waves(2), wanted())
        assert len(os.listdir(runtime_dir)) == 3
        made.close()
        made.close()
        assert os.listdir(runtime_dir) == []

    async def test_an_address_that_is_taken(self, runtime_dir: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(OSError, match=f"cannot bind {address}"):
                Coordination(Waves(2), wanted()._replace(engine_output=address))
        assert os.listdir(runtime_dir) == []

    async def test_internal_error_ends_the_coordination(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> None:
            raise ZeroDivisionError("a mistake")

        monkeypatch.setattr(Waves, "load", fail)
        with Coordination(Waves(1), wanted()) as made, Peers(made.addresses) as peers:
            await peers.engines(1)
            await peers.reporter().send(counts(0, 1, 1))
            async with asyncio.timeout(30):
                with pytest.raises(ZeroDivisionError, match="a mistake"):
                    await made.over
