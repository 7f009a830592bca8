"""Engines that come back, and what connections that break make of their messages."""

from __future__ import annotations

import pytest

from aioshm.engine import CoreEngine, CoreEngineState, EngineHandshake, EngineZmqAddresses, FrontEndHandshake

RANK = b"\0\0"


@pytest.fixture
def front_end() -> FrontEndHandshake:
    """Return the front end of one engine, which may be restarted."""
    handshake = FrontEndHandshake([CoreEngine(0)], EngineZmqAddresses([], []))
    handshake.allow_restarts()
    return handshake


def start(front_end: FrontEndHandshake) -> EngineHandshake:
    """Let an engine shake hands."""
    engine = EngineHandshake(0)
    reply = front_end.receive(RANK, [engine.hello()])
    assert reply is not None
    engine.receive(reply[1:])
    assert front_end.receive(RANK, [engine.ready()]) is None
    assert front_end.complete
    return engine


def test_hello_of_a_successor_waits_for_the_death_of_its_predecessor(front_end: FrontEndHandshake) -> None:
    engine = start(front_end)
    early = [EngineHandshake(0).hello()]
    assert front_end.receive(RANK, early) is None
    assert front_end.receive(RANK, [engine.again]) is None  # its READY once more, which changes nothing
    assert front_end.engines[0].state is CoreEngineState.READY
    assert front_end.expect(0) == early
    assert front_end.engines[0].state is CoreEngineState.NEW
    assert front_end.receive(RANK, early) is not None
    assert front_end.expect(0) is None


def test_repeated_hello_is_answered_again(front_end: FrontEndHandshake) -> None:
    engine = EngineHandshake(0)
    replies = [front_end.receive(RANK, [message]) for message in (engine.hello(), engine.again, engine.again)]
    assert replies[0] is not None
    assert replies == replies[:1] * 3
    assert not front_end.complete


def test_repeated_ready_of_a_dead_engine_makes_nobody_ready(front_end: FrontEndHandshake) -> None:
    engine = start(front_end)
    front_end.expect(0)
    assert front_end.receive(RANK, [engine.again]) is None
    assert not front_end.complete
    start(front_end)
