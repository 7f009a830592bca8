"""Engines that come back after a startup: they shake hands at the same place."""

from __future__ import annotations

import logging
from collections.abc import Callable

import zmq

from aioshm.engine.protocol.addresses import CoreEngineState
from aioshm.engine.protocol.handshake import FrontEndHandshake
from aioshm.engine.startup.router import HandshakeRouter
from aioshm.errors import HandshakeError
from aioshm.logs import LogLimiter
from aioshm.process.background import notify

logger: logging.Logger = logging.getLogger("aioshm.engine")

_LOG_INTERVAL_S = 10.0


class Rejoining:
    """Shakes hands with engines that are started again, or for the first time, once the startup is over.

    An engine that says HELLO before its predecessor is known to be dead is answered when that is known. Nothing that is
    refused ends anything: it is logged, and an engine that gets no answer gives up.
    """

    def __init__(
        self, router: HandshakeRouter, handshake: FrontEndHandshake, on_ready: Callable[[int], object]
    ) -> None:
        self._router, self._handshake, self._on_ready = router, handshake, on_ready
        self._early: dict[bytes, tuple[list[bytes], str]] = {}
        self._limiter = LogLimiter(_LOG_INTERVAL_S)

    @property
    def handshake(self) -> FrontEndHandshake:
        """What engines have said, and who is expected."""
        return self._handshake

    def expect(self, index: int) -> None:
        """Let an engine shake hands: the one that had its rank is dead."""
        self._handshake.forget(index)
        early = self._early.pop(self._handshake.engines[index].identity, None)
        if early is not None:
            self.take(self._handshake.engines[index].identity, *early)

    def void_keys(self, index: int, incarnation: int) -> None:
        """Refuse the keys of the incarnations of an engine that were before this one."""
        self._router.void_keys(index, incarnation)

    def take(self, identity: bytes, frames: list[bytes], sender: str) -> bool:
        """Take a message; return whether to take more, which is always so."""
        index = int.from_bytes(identity, "little")
        engine = self._handshake.engines.get(index)
        if engine is not None and engine.state is CoreEngineState.READY and engine.identity == identity:
            try:
                self._handshake.receive(identity, frames)  # its READY, sent again
            except HandshakeError:
                self._early[identity] = frames, sender
            return True
        before = None if engine is None else engine.state
        try:
            reply = self._handshake.receive(identity, frames)
        except (HandshakeError, TypeError, ValueError) as error:
            self._limiter.warn(logger, "ignored a message from %s: %s", sender, error)
            return True
        if reply is None:
            if engine is not None and engine.state is not before:
                notify(self._on_ready, index)
            return True
        try:
            self._router.answer(reply)
        except zmq.ZMQError as error:
            self._handshake.forget(index)
            self._limiter.warn(logger, "engine %d left before it could be told the addresses: %s", index, error)
        return True
