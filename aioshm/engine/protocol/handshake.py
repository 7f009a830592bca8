"""The handshake between a front end and its engines, at both ends. No I/O.

    engine (DEALER, its identity is its rank)                front end (ROUTER)
    NEW        HELLO {status, local, headless?}          ->
               INIT  EngineHandshakeMetadata             <-             NEW -> CONNECTED
    CONNECTED  (initialises, connects its data sockets)
    READY      READY {status, local, headless?, ...}     ->       CONNECTED -> READY

Every message is one frame, a MessagePack map. Fields that are not known here are kept. A message that is lost in a
connection that breaks is not sent again: the startup ends after its timeout. A second HELLO comes from another process
with the same rank. With restarts allowed, the HELLO of an engine of another host starts the handshake anew, unless a
process with that rank serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from aioshm.engine.protocol.addresses import (
    IDENTITY_BYTES,
    CoreEngine,
    CoreEngineState,
    EngineReport,
    EngineZmqAddresses,
    StartupReport,
    balanced_outside,
    identity,
    parallel_settings,
)
from aioshm.engine.protocol.messages import NO_ORDER, PauseOrder, decode_single, encode
from aioshm.errors import HandshakeError

MAX_PAYLOAD_BYTES = 1 << 20
"""The limit of an engine's message, which has a few hundred bytes."""
MAX_INIT_BYTES = 16 << 20
"""The limit of the answer, which has two addresses for each client."""

_OWN_FIELDS = frozenset({"status", "local", "headless"})
_NEXT = {CoreEngineState.NEW: "HELLO", CoreEngineState.CONNECTED: "READY", CoreEngineState.READY: "nothing more"}
_PLACES = {True: "local", False: "remote"}
_SHOWN_RANKS = 16
_SHOWN_CHARACTERS = 200


@dataclass(slots=True)
class EngineHandshakeMetadata:
    """The front end's answer to HELLO.

    Attributes:
        addresses: The addresses to connect to.
        parallel_config: Changes to the engine's parallel configuration, by name.
        pause: The order to pause that is in force.
    """

    addresses: EngineZmqAddresses
    parallel_config: dict[str, Any]
    pause: PauseOrder = NO_ORDER


class _FromEngine(msgspec.Struct):
    """The checked fields of a message from an engine; other fields are kept unchecked."""

    status: Literal["HELLO", "READY"]
    local: bool
    headless: bool | None = None  # releases of vLLM before 0.9.2 do not say
    num_gpu_blocks: Annotated[int, msgspec.Meta(ge=0)] | None = None
    dp_stats_address: str | None = None
    parallel_config_hash: Any = None


_map_decoder: msgspec.msgpack.Decoder[dict[str, Any]] = msgspec.msgpack.Decoder(dict[str, Any])


class FrontEndHandshake:
    """The front end's side, for all of its engines.

    A refused message changes nothing: the caller decides whether to continue.

    Args:
        engines: The expected engines; their states are kept up to date.
        addresses: The addresses for engines, as of their HELLO.
        parallel_config: The parallel configuration for engines: a mapping, or an object with vLLM's attributes.
        config_hash: The hash that engines must report, if they report one; None: all report the same.
        remote_headless: Whether engines on other hosts must be headless (or must not); None: they must, unless
            ``parallel_config`` enables hybrid or external load balancing.

    Attributes:
        engines: The engines, by rank.
        hello: The HELLO of each engine, by rank.
        ready: The READY of each engine, by rank.
        pause_order: Returns the order to pause that is in force, for engines that start.
        serves: Returns whether front ends have an engine with this rank; called for engines of other hosts only.

    Raises:
        TypeError: MessagePack cannot encode ``parallel_config`` or ``addresses``.
        ValueError: Two engines have one rank.
    """

    def __init__(
        self,
        engines: Iterable[CoreEngine],
        addresses: EngineZmqAddresses,
        parallel_config: object = None,
        *,
        config_hash: object = None,
        remote_headless: bool | None = None,
    ) -> None:
        self.engines: dict[int, CoreEngine] = {}
        for engine in engines:
            self.add(engine)
        self.hello: dict[int, dict[str, Any]] = {}
        self.ready: dict[int, dict[str, Any]] = {}
        self.pause_order: Callable[[], PauseOrder] = lambda: NO_ORDER
        self.serves: Callable[[int], bool] = lambda _: False
        self._restarts = False
        self._early: dict[int, Sequence[bytes]] = {}  # of engines whose predecessors are not known to be dead
        self.addresses: EngineZmqAddresses = addresses
        self._parallel = parallel_settings(parallel_config)
        self._expected_hash = config_hash
        if remote_headless is None:
            remote_headless = not balanced_outside(parallel_config)
        self._remote_headless = remote_headless
        try:
            self._init()
        except (TypeError, ValueError, OverflowError) as error:
            raise TypeError(f"addresses and parallel_config cannot be sent to engines: {error}") from error

    @property
    def complete(self) -> bool:
        """Whether every engine is ready."""
        return len(self.ready) == len(self.engines)

    @property
    def num_gpu_blocks(self) -> int | None:
        """The total of the ready engines; None if no engine reports a number."""
        numbers = [ready.get("num_gpu_blocks") for ready in self.ready.values()]
        known = [number for number in numbers if number is not None]
        return sum(known) if known else None

    @property
    def parallel_config_hash(self) -> Any:
        """The common hash of the engines; None if no engine reports one."""
        return self._first("parallel_config_hash")

    @property
    def stats_address(self) -> str | None:
        """Where the coordinator publishes its counts, if an engine passes that on."""
        address: str | None = self._first("dp_stats_address")
        return address

    def report(self) -> StartupReport:
        """Return the answers of all engines, once complete."""
        engines = {
            index: EngineReport(index, engine.local, self.hello[index], self.ready[index])
            for index, engine in self.engines.items()
        }
        return StartupReport(engines, self.num_gpu_blocks or 0, self.parallel_config_hash, self.stats_address)

    def receive(self, identity: bytes, frames: Sequence[bytes]) -> list[bytes] | None:
        """Handle a message; return the frames to send in reply, the identity first.

        Args:
            identity: The identity of the sender's socket.
            frames: The frames behind the identity.

        Raises:
            HandshakeError: The message is refused.
        """
        rank: int | None = None
        if len(identity) == IDENTITY_BYTES:
            rank = int.from_bytes(identity, "little")
        if rank not in self.engines:
            raise self._unknown(identity, rank)
        engine = self.engines[rank]
        if self._restarts and engine.state is CoreEngineState.READY and not engine.local and self.serves(engine.index):
            self._early[engine.index] = frames
            return None
        return self._receive(engine, frames)

    def _receive(self, engine: CoreEngine, frames: Sequence[bytes]) -> list[bytes] | None:
        state = engine.state
        if len(frames) != 1:
            raise _refused(engine.index, state, f"a message of {len(frames)} payload frames", "one")
        fields, message = self._parse(engine, frames[0])
        self._check_place(engine, message)
        if message.status == "HELLO" and self._restarts:
            replaces = state is CoreEngineState.CONNECTED if engine.local else not self.serves(engine.index)
            if replaces:  # the process of an earlier HELLO is dead, or has no business here
                self.forget(engine.index)
                state = engine.state
        if message.status != _NEXT[state]:
            found = f"{message.status} came"
            hint = ""
            if message.status == "HELLO" or state is CoreEngineState.READY:
                found += " again"
            if message.status == "HELLO":
                hint = "; have two engines the same rank?"
            raise _refused(engine.index, state, found, _NEXT[state], hint)
        if message.status == "HELLO":
            self.hello[engine.index] = fields
            engine.state = CoreEngineState.CONNECTED
            return [engine.identity, self._init()]
        self._check_hash(engine, message)
        self.ready[engine.index] = fields
        engine.state = CoreEngineState.READY
        return None

    def allow_restarts(self) -> None:
        """Let HELLO start an unfinished handshake anew, and keep the HELLO of a replacement, see `released`."""
        self._restarts = True

    def released(self) -> dict[int, Sequence[bytes]]:
        """Return the kept messages from other hosts for ranks without a serving engine, by rank."""
        return {rank: self._early.pop(rank) for rank in [*self._early] if not self.serves(rank)}

    def forget(self, index: int) -> None:
        """Reset an engine to NEW: its sender has left, and another may come."""
        self._early.pop(index, None)
        self.hello.pop(index, None)
        self.ready.pop(index, None)
        self.engines[index].state = CoreEngineState.NEW

    def add(self, engine: CoreEngine) -> None:
        """Expect one more engine.

        Raises:
            ValueError: The rank is taken.
        """
        if engine.index in self.engines:
            raise ValueError(f"engines must have a rank each, and two have {engine.index}")
        self.engines[engine.index] = engine

    def remove(self, index: int) -> None:
        """Expect an engine no more."""
        self.forget(index)
        del self.engines[index]

    def _parse(self, engine: CoreEngine, payload: bytes) -> tuple[dict[str, Any], _FromEngine]:
        expected = _NEXT[engine.state]
        if engine.state is not CoreEngineState.READY:
            expected += ", a MessagePack map with status and local"
        try:
            fields = decode_single(_map_decoder, [payload], MAX_PAYLOAD_BYTES)
            message = msgspec.convert(fields, _FromEngine)
        except ValueError as error:
            raise _refused(engine.index, engine.state, _cut(str(error)), expected) from None
        return fields, message

    def _check_place(self, engine: CoreEngine, message: _FromEngine) -> None:
        if message.local != engine.local:
            found = _PLACES[message.local]
            expected = f"a {_PLACES[engine.local]} one"
        elif engine.local or message.headless in (None, self._remote_headless):
            return
        elif self._remote_headless:
            found = "not headless"
            expected = "remote engines to be headless"
        else:
            found = "headless"
            expected = "remote engines not to be headless with hybrid or external load balancing"
        raise _refused(engine.index, engine.state, f"its {message.status} says that it is {found}", expected)

    def _check_hash(self, engine: CoreEngine, message: _FromEngine) -> None:
        found = message.parallel_config_hash
        expected = self._expected_hash
        source = "the front end's"
        if found is None:
            return
        if expected is None:
            expected = self.parallel_config_hash
            others = (index for index, ready in self.ready.items() if ready.get("parallel_config_hash") is not None)
            source = f"that of engine {next(others, None)}"
        if expected is not None and found != expected:
            raise _refused(
                engine.index,
                engine.state,
                f"its parallel_config_hash is {_cut(repr(found))}",
                f"{_cut(repr(expected))}, {source}",
                "; are all engines started with the same arguments?",
            )

    def _first(self, name: str) -> Any:
        values = (ready.get(name) for ready in self.ready.values())
        return next((value for value in values if value is not None), None)

    def _init(self) -> bytes:
        init: dict[str, Any] = {"addresses": self.addresses, "parallel_config": self._parallel}
        if self._expected_hash is not None:  # releases of vLLM around 0.12 look for the hash here
            init["parallel_config_hash"] = self._expected_hash
        order = self.pause_order()
        if order.mode:
            init["pause"] = order
        return encode(init)

    def _unknown(self, sender: bytes, rank: int | None) -> HandshakeError:
        ranks = sorted(self.engines)
        expected = f"one of engines {', '.join(map(str, ranks[:_SHOWN_RANKS])) or 'none'}"
        if len(ranks) > _SHOWN_RANKS:
            expected += ", ..."
        name = "no engine's identity" if rank is None else f"engine {rank}"
        text = f"{name} (identity {sender[:16].hex()}): a message from an unknown sender, expected {expected}"
        return HandshakeError(text, engine=rank, expected=expected)


class EngineHandshake:
    """An engine's side.

    Args:
        index: Its rank.
        local: Whether it runs on the front end's host.
        headless: Whether its host has no front end.

    Attributes:
        identity: The ZeroMQ identity for its socket.
        state: Its progress: NEW until INIT has come, READY once READY is sent.
    """

    def __init__(self, index: int, *, local: bool = True, headless: bool = False) -> None:
        self.identity: bytes = identity(index)
        self.state: CoreEngineState = CoreEngineState.NEW
        self._index = index
        self._local = bool(local)
        self._headless = bool(headless)

    def hello(self) -> bytes:
        """Return the first message."""
        return self._message("HELLO", {})

    def receive(self, frames: Sequence[bytes]) -> EngineHandshakeMetadata:
        """Handle a message of the front end.

        Raises:
            HandshakeError: It is no INIT, or comes at the wrong moment.
        """
        if self.state is not CoreEngineState.NEW:
            raise _refused(self._index, self.state, "a message from the front end after INIT", "none")
        if len(frames) != 1:
            raise _refused(self._index, self.state, f"a message of {len(frames)} payload frames", "one: INIT")
        try:
            fields = decode_single(_map_decoder, frames, MAX_INIT_BYTES)
            metadata = msgspec.convert(fields, EngineHandshakeMetadata)
        except ValueError as error:
            expected = "INIT, a MessagePack map with addresses and parallel_config"
            raise _refused(self._index, self.state, _cut(str(error)), expected) from None
        self.state = CoreEngineState.CONNECTED
        return metadata

    def ready(self, fields: Mapping[str, Any] | None = None) -> bytes:
        """Return the message for the end of the initialisation.

        Args:
            fields: More fields for the front end, such as ``num_gpu_blocks``.

        Raises:
            HandshakeError: INIT has not come, or READY was sent before.
            TypeError: MessagePack cannot encode these fields.
            ValueError: They have the names of the message's own fields, or are too large.
        """
        if self.state is not CoreEngineState.CONNECTED:
            expected = "INIT from the front end first" if self.state is CoreEngineState.NEW else "nothing more"
            raise _refused(self._index, self.state, "READY was to be sent", expected)
        own = _OWN_FIELDS.intersection(fields or ())
        if own:
            raise ValueError(f"READY fields must not have the names of the message's own: {', '.join(sorted(own))}")
        try:
            payload = self._message("READY", fields or {})
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise TypeError(f"READY fields cannot be sent: {error}") from error
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ValueError(f"READY fields must fit {MAX_PAYLOAD_BYTES} bytes, and take {len(payload)}")
        self.state = CoreEngineState.READY
        return payload

    def _message(self, status: str, fields: Mapping[str, Any]) -> bytes:
        return encode({"status": status, "local": self._local, "headless": self._headless, **fields})


def _refused(index: int, state: CoreEngineState, found: str, expected: str, hint: str = "") -> HandshakeError:
    text = f"engine {index} in state {state.name}: {found}, expected {expected}{hint}"
    return HandshakeError(text, engine=index, state=state.name, expected=expected)


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
