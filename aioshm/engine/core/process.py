"""The process of an engine: shakes hands with front ends, and serves requests."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import zmq

from aioshm.arguments import check_limit
from aioshm.config import Options
from aioshm.engine.core.core import MAX_PENDING_BYTES, EngineCore
from aioshm.engine.protocol.handshake import MAX_INIT_BYTES, EngineHandshake, EngineHandshakeMetadata
from aioshm.engine.protocol.messages import HEARTBEAT_S
from aioshm.engine.security.binding import over_tcp
from aioshm.engine.security.keys import AnyKeys, EngineCredentials, keys_for_engine
from aioshm.process import progress
from aioshm.process.background import give_back
from aioshm.process.stalls import SelfWatch
from aioshm.process.stopping import Termination
from aioshm.zeromq.endpoint import attach, limit_frames, open_socket
from aioshm.zeromq.monitor import ENDED, MISMATCH, Monitor
from aioshm.zeromq.pump import Pump, whole
from aioshm.zeromq.sockets import Sockets

INIT_TIMEOUT_S = 300.0
LINGER_MS = 5000
"""How long READY may take to leave; no time at all unless the front end is gone."""

_HWM = 16

logger: logging.Logger = logging.getLogger("aioshm.engine")

ReadyFields = Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeOptions:
    """The options of an engine's handshake.

    Attributes:
        local: Whether the engine runs on the front end's host.
        headless: Whether the engine's host has no front end.
        client_handshake_address: Where the engine's own front end listens, if ``handshake_address`` is the address of a
            head node elsewhere (hybrid and external load balancing, at ranks above 0). The engine shakes hands with
            both: requests come from its own front end, and the head node decides everything else.
        keys: The keys of this engine for TCP, see `EngineKeys`; None: the keys that its process was started with.
        secure: Whether TCP connections are encrypted; the front end needs the same setting. False for front ends
            without keys, such as vLLM's.
    """

    local: bool = True
    headless: bool = False
    client_handshake_address: str | None = None
    # Security
    keys: AnyKeys | None = None
    secure: bool = True


async def run_engine_core(
    engine: Any,
    handshake_address: str,
    index: int,
    *,
    request_type: Any = None,
    options: Options | None = None,
    max_pending_bytes: int = MAX_PENDING_BYTES,
    handshake: HandshakeOptions | None = None,
) -> None:
    """Shake hands with the front end, and serve requests until the process ends.

    ``engine`` is the user's own object. Each of its methods may be async, and those marked * may be missing:

    * ``initialize(metadata) -> dict | None``: prepare; returns the fields of READY, such as ``num_gpu_blocks``.
    * ``add_request(request)``: accept a request; an exception refuses it.
    * ``abort_requests(ids)``: drop unfinished requests.
    * ``step() -> outputs``: compute, while there are requests; returns an iterable of outputs, or None. An output has a
      ``request_id``; its request's last one has a ``finish_reason``, or is ``finished``.
    * ``has_work() -> bool``*: whether to step although no request is open; never async.
    * ``request_counts() -> (waiting, running)``*: for the coordinator; never async.
    * ``kv_cache_usage() -> float``*: how much of the KV cache is in use, 0 to 1, for the coordinator; never async.
    * ``error_output(request_id, message) -> output``*: the form of a refused request's output, for clients of other
      makers; never async. Without, it is a map ``{request_id, finish_reason: "error", error: message}``. aioshm's
      clients raise `RequestFailed` for that, and for an object with these two attributes.
    * ``has_unfinished_dp(unfinished) -> bool``*: whether any engine has work, agreed with all others. An engine that
      has this works in lockstep with them: it steps while one of them has work, if it has none itself by calling
      ``execute_dummy_batch()``*.
    * ``shutdown()``*: give back what it holds, at the end.
    * whatever a client may ``call``: any other method whose name does not begin with an underscore.

    The methods run one by one, except for async methods that a client calls, which run beside everything
    else. So the engine needs no locks. A step that is not async blocks the loop; ZeroMQ's own thread receives messages
    meanwhile.

    An engine that no process of its host watches watches itself: a thread logs the line of Python after
    ``options.stall_warning_s`` seconds without progress, see `progress.expect`; and front ends get its heartbeats.

    After a failed step, SIGTERM, or a cancellation, every client is notified that the engine is dead. SIGTERM also ends
    an async ``initialize``, and calls ``shutdown``: a `WorkerGroup` that the engine has entered closes its workers. An
    ``initialize`` that is not async ends with the process. After SIGTERM this returns; otherwise it raises.

    Args:
        engine: The engine.
        handshake_address: Where the front end listens.
        index: The engine's rank.
        request_type: The type that requests are decoded to: any type that msgspec knows; None for plain data.
        options: ``max_message_bytes``, ``remote_timeout``, ``secure`` and ``stall_warning_s`` apply; None:
            `Options.from_env`.
        max_pending_bytes: Bytes of outputs that may wait for one front end of this host, besides the last 8 messages,
            which ZeroMQ holds. With more than that the front end has stopped reading, and the engine drops it: it logs
            a warning that names the front end, and aborts its requests. A front end that runs again raises `EngineDead`
            for them, and the engine registers with it anew. Answers to calls do not count. Over TCP a front end is
            dropped after ``options.remote_timeout`` seconds of silence instead.
        handshake: See `HandshakeOptions`; None: the defaults.

    Raises:
        HandshakeError: The front end's answer is invalid.
        RoleError: There are no keys for this engine.
        TimeoutError: The front end did not answer.
        TypeError: The engine has not all methods that it needs; nothing is started then.
        Exception: An exception of the engine in ``initialize`` or ``step``.
    """
    options = options or Options.from_env()
    stall_warning_s = options.stall_warning_s
    chosen = handshake or HandshakeOptions()
    chosen = replace(chosen, secure=chosen.secure and options.secure)
    core = EngineCore(
        engine,
        index,
        request_type=request_type,
        options=options,
        keys=chosen.keys,
        secure=chosen.secure,
        max_pending_bytes=max_pending_bytes,
    )
    termination = Termination()
    own = progress.own()

    async def initialize(metadata: EngineHandshakeMetadata) -> dict[str, Any]:
        # A method that is not async, and may take minutes, is ended by the signal itself.
        fields = await core.initialize(metadata, termination.arm)
        termination.arm()
        sockets = await core.connect(metadata.addresses, fields)
        if not own.is_watched:
            watches.enter_context(SelfWatch(f"engine {index}", stall_warning_s))
        if not own.is_watched or not chosen.local:
            watches.enter_context(_heartbeats(sockets.beat))
        return fields

    try:
        with ExitStack() as watches:
            watches.enter_context(own.turning())
            try:
                await shake_hands(handshake_address, index, initialize=initialize, handshake=chosen)
                await core.run()
            finally:
                await core.aclose()
    except (asyncio.CancelledError, SystemExit):
        if not termination.take_back():
            raise
    finally:
        termination.disarm()


async def shake_hands(
    handshake_address: str,
    index: int,
    *,
    initialize: Callable[[EngineHandshakeMetadata], ReadyFields | Awaitable[ReadyFields]],
    timeout: float | None = INIT_TIMEOUT_S,
    handshake: HandshakeOptions | None = None,
) -> EngineHandshakeMetadata:
    """Say HELLO to the front end, initialise with its answer, and say READY.

    Cancelling this, or an error in ``initialize``, leaves the front end without a READY.

    Args:
        handshake_address: Where the front end listens, or will listen.
        index: The engine's rank.
        initialize: Gets the front end's answer, connects the engine's data sockets, and returns the fields of READY,
            such as ``num_gpu_blocks``; may be async.
        timeout: Seconds that each front end may take to answer; None waits for ever.
        handshake: See `HandshakeOptions`; None: the defaults.

    Returns:
        The front end's answer; with two front ends, both answers combined.

    Raises:
        HandshakeError: The front end's answer is invalid.
        TimeoutError: The front end did not answer; the text names its address.
        OSError: An address is malformed.
        RoleError: There are no keys for this engine.
        TypeError, ValueError: The fields of READY cannot be sent, or an engine with a front end of its own is headless
            or not local.
    """
    chosen = handshake or HandshakeOptions()
    check_limit("timeout", timeout)
    own_address = chosen.client_handshake_address
    if own_address is not None and (chosen.headless or not chosen.local):
        raise ValueError(
            "an engine with a client_handshake_address has a front end of its own beside it: "
            f"it must be local and not headless, not local={chosen.local}, headless={chosen.headless}"
        )
    async with AsyncExitStack() as stack:

        async def greet(address: str, local: bool) -> tuple[_FrontEnd, EngineHandshakeMetadata]:
            credentials = None
            if chosen.secure and over_tcp([address]):
                credentials = keys_for_engine(index, chosen.keys)
            state = EngineHandshake(index, local=local, headless=chosen.headless)
            front_end = _FrontEnd(address, state, credentials)
            stack.callback(front_end.close)
            return front_end, await front_end.greet(timeout)

        if own_address is None:
            front_end, metadata = await greet(handshake_address, chosen.local)
            front_ends = [front_end]
        else:
            head, metadata = await greet(handshake_address, False)
            own, beside = await greet(own_address, True)
            metadata.addresses.inputs = beside.addresses.inputs
            metadata.addresses.outputs = beside.addresses.outputs
            front_ends = [own, head]
        fields = initialize(metadata)
        if inspect.isawaitable(fields):
            fields = await fields
        for front_end in front_ends:
            front_end.ready(fields)
        for front_end in front_ends:
            await front_end.flush()
    return metadata


class _FrontEnd:
    """The engine's connection to one front end for the handshake: a DEALER with its monitor."""

    def __init__(self, address: str, state: EngineHandshake, credentials: EngineCredentials | None) -> None:
        self._address = address
        self._state = state
        self._encrypts = credentials is not None
        self._failure = ""  # why the last attempt to connect has failed
        self._sockets = Sockets()
        self._dealer = self._sockets.add(
            open_socket(
                self._sockets.context,
                zmq.DEALER,
                address,
                bind=False,
                hwm=_HWM,
                curve=None if credentials is None else credentials.to_front_end(),
                heartbeats=True,  # also for proxies, which forget idle connections while the engine initialises
            )
        )
        try:
            self._monitor = Monitor(self._dealer)
            self._sockets.add(self._monitor.pair)
            self._dealer.setsockopt(zmq.ROUTING_ID, state.identity if credentials is None else credentials.name)
            limit_frames(self._dealer, MAX_INIT_BYTES)
            if over_tcp([address]):
                # The front end drops a silent connection, too: without keys it ignores the next connection while this
                # one seems to live.
                self._dealer.setsockopt(zmq.HEARTBEAT_TTL, int(self._dealer.getsockopt(zmq.HEARTBEAT_TIMEOUT)))
            attach(self._dealer, address, bind=False)
        except BaseException:
            self._sockets.close()
            raise
        loop = asyncio.get_running_loop()
        self._init: asyncio.Future[list[bytes]] = loop.create_future()
        self._messages = Pump.of_messages(loop, self._dealer, self._take, whole(self._dealer))
        self._events = Pump(loop, self._monitor.pair, self._read_monitor)

    async def greet(self, timeout: float | None) -> EngineHandshakeMetadata:
        """Say HELLO, and return the answer."""
        self._dealer.send(self._state.hello(), zmq.NOBLOCK)
        self._messages.run_soon()  # a send may clear the event of a waiting message
        try:
            async with asyncio.timeout(timeout):
                frames = await self._init
        except TimeoutError:
            index = int.from_bytes(self._state.identity, "little")
            text = f"engine {index}: no answer from {self._address} within {timeout} s"
            if self._failure:
                text += f": {self._failure}"
            raise TimeoutError(text) from None
        return self._state.receive(frames)

    def ready(self, fields: ReadyFields) -> None:
        self._dealer.send(self._state.ready(fields), zmq.NOBLOCK)

    async def flush(self) -> None:
        """Close the socket once READY has left; continues in a thread when cancelled."""
        self._stop()
        await give_back(lambda: self._sockets.close(LINGER_MS))

    def close(self) -> None:
        self._stop()
        self._sockets.close()

    def _stop(self) -> None:
        self._messages.pause()
        self._events.pause()
        self._monitor.close()

    def _take(self, frames: list[bytes]) -> None:
        if not self._init.done():
            self._init.set_result(frames)
            self._messages.pause()

    def _read_monitor(self) -> None:
        failed = self._monitor.read()[1]
        if failed and not self._init.done():
            self._note_failure(failed[-1].reason)

    def _note_failure(self, reason: str) -> None:
        # The end that finds a mismatch hangs up, so the other end may name the mismatch at a later attempt only.
        if self._failure and reason == ENDED:
            return
        hint = ""
        if reason == MISMATCH and not self._encrypts:
            hint = "; leave out secure=False"
        elif reason == MISMATCH:
            hint = "; with a front end that has no keys, such as vLLM's, secure=False is needed"
        elif reason == ENDED and self._encrypts:
            hint = ", or the front end refuses these keys, which have to be of its EngineKeys"
        text = f"{self._address}: {reason}{hint}"
        if text != self._failure:
            logger.warning("%s", text)
        self._failure = text


@contextmanager
def _heartbeats(beat: Callable[[], None]) -> Iterator[None]:
    """Call ``beat`` on the running loop every second, and when `progress.expect` begins or ends in any thread.

    ZeroMQ sends in a thread of its own, so a heartbeat leaves although a step blocks the loop next.
    """
    loop = asyncio.get_running_loop()
    thread = threading.get_ident()
    timer = loop.call_later(HEARTBEAT_S, lambda: tick())

    def tick() -> None:
        nonlocal timer
        timer = loop.call_later(HEARTBEAT_S, tick)
        beat()

    def expectation_changed() -> None:
        if threading.get_ident() == thread:
            beat()
            return
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(beat)

    beat()
    progress.own().on_expect.add(expectation_changed)
    try:
        yield
    finally:
        progress.own().on_expect.discard(expectation_changed)
        timer.cancel()
