"""Heartbeats of an engine that no process of its host watches: when they are sent, and what is in them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from aioshm.engine.protocol.messages import HEARTBEAT_S, Heartbeat, encode_heartbeat
from aioshm.process.progress import own


class Heartbeats:
    """Calls ``beat`` on the running loop, inside the block: every second, and when `progress.expect` begins or ends.

    ZeroMQ sends in a thread of its own, so a heartbeat leaves although a step blocks the loop next.
    """

    def __init__(self, beat: Callable[[], None]) -> None:
        self._beat = beat

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        own().on_expect.add(self._expectation_changed)
        self._tick()
        return self

    def __exit__(self, *_: object) -> None:
        own().on_expect.discard(self._expectation_changed)
        self._timer.cancel()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(HEARTBEAT_S, self._tick)
        self._beat()

    def _expectation_changed(self) -> None:
        if threading.get_ident() == self._thread:
            self._beat()
            return
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._beat)


def present_heartbeat() -> bytes:
    """Return a heartbeat with the progress of this process."""
    sample = own().read()
    return encode_heartbeat(Heartbeat(sample.phase, sample.steps, sample.turns, sample.expected_s, sample.requests))
