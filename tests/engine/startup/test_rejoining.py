"""Engines that come back, and what connections that break make of their messages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from aioshm.engine import CoreEngine, EngineHandshake, EngineZmqAddresses, FrontEndHandshake
from aioshm.engine.startup.rejoining import Rejoining

RANK = b"\0\0"
Made = tuple[Rejoining, list[list[bytes]], list[int]]


@pytest.fixture
def made() -> Made:
    """Return one with one engine, the replies, and the ranks that became ready."""
    replies: list[list[bytes]] = []
    ready: list[int] = []
    router: Any = SimpleNamespace(answer=replies.append)
    handshake = FrontEndHandshake([CoreEngine(0)], EngineZmqAddresses([], []))
    return Rejoining(router, handshake, ready.append), replies, ready


def start(rejoining: Rejoining, replies: list[list[bytes]]) -> EngineHandshake:
    """Let an engine shake hands."""
    engine = EngineHandshake(0)
    rejoining.take(RANK, [engine.hello()], "")
    engine.receive(replies[-1][1:])
    rejoining.take(RANK, [engine.ready()], "")
    return engine


async def test_repeated_ready_is_reported_once_and_keeps_the_hello_of_a_successor(
    made: Made,
) -> None:
    rejoining, replies, ready = made
    engine = start(rejoining, replies)
    rejoining.take(RANK, [EngineHandshake(0).hello()], "")  # its predecessor is not known to be dead
    rejoining.take(RANK, [engine.again], "")
    assert (len(replies), ready) == (1, [0])
    rejoining.expect(0)
    assert (len(replies), ready) == (2, [0])


async def test_repeated_hello_is_answered_again(made: Made) -> None:
    rejoining, replies, ready = made
    engine = EngineHandshake(0)
    for message in (engine.hello(), engine.again, engine.again):
        rejoining.take(RANK, [message], "")
    assert replies == replies[:1] * 3
    assert ready == []


async def test_repeated_ready_of_a_dead_engine_makes_nobody_ready(
    made: Made,
) -> None:
    rejoining, replies, ready = made
    engine = start(rejoining, replies)
    rejoining.expect(0)
    rejoining.take(RANK, [engine.again], "")
    assert ready == [0]
    start(rejoining, replies)
    assert ready == [0, 0]
