"""The front end's side of the data path: requests to engines, outputs back."""

from __future__ import annotations

import asyncio
import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

from aioshm.config import Options, check_int, check_seconds
from aioshm.engine.addresses import CoreEngine, EngineZmqAddresses
from aioshm.engine.balance import LoadBalancer
from aioshm.engine.client_sockets import ClientSockets
from aioshm.engine.deaths import WatchedManager, WatchedProcess
from aioshm.engine.envelopes import EnvelopeDecoder
from aioshm.engine.keys import EngineKeys, keys_for_front_end
from aioshm.engine.liveness import Liveness
from aioshm.engine.messages import ENGINE_CORE_DEAD, EngineCoreRequestType, request_id_of
from aioshm.engine.payloads import Frame, PayloadEncoder
from aioshm.engine.pending import Pending, PendingCall
from aioshm.engine.registrations import Registrations
from aioshm.engine.security import Protection, over_tcp
from aioshm.engine.streams import Inbox, OutputStream
from aioshm.errors import CodecError, EngineDead, QueueClosed, RoleError
from aioshm.zeromq import LogLimiter

logger = logging.getLogger("aioshm.engine")

_LOG_INTERVAL_S = 10.0
_ADD = EngineCoreRequestType.ADD.value
_ABORT = EngineCoreRequestType.ABORT.value
_UTILITY = EngineCoreRequestType.UTILITY.value

_encode_plain = msgspec.msgpack.Encoder().encode
_decode_counts = msgspec.msgpack.Decoder(tuple[list[list[float]] | None, int, bool]).decode


class EngineClient:
    """Sends requests to engines and brings back their outputs; one event loop's.

        async with EngineClient(addresses, 2) as client:
            ...  # start the engines, who are told client.addresses, and shake hands with them
            await client.wait_until_ready()
            async for output in client.submit(request):
                ...

    A request goes to the engine with the least to do: as the coordinator publishes it, with how full KV caches are, if
    the addresses name one, else by what this client has in flight. When one engine is gone, all that is pending raises
    `EngineDead`, and so does everything that is begun later.

    Args:
        addresses: Where to bind, one input and output for each client; the rest is used as it is when the engines are
            ready. What is bound is written back here: with port 0 that is a port that the kernel has chosen.
        engines: The engines, or how many there are, with the ranks from 0 on.
        client_index: Which of the addresses' inputs and outputs are this client's.
        request_type: What requests have to be; None: anything that MessagePack can say, and arrays and tensors.
        output_type: What outputs are decoded as; any type that msgspec knows, or None for plain data. A plain array is
            read as the field's outputs are: the first is the request's id, the sixth why it is finished.
        options: ``max_message_bytes``, ``remote_timeout`` and ``secure`` hold here; None: as the environment says.
        keys: Who may connect over TCP, and as whom; None: those of this process.
        secure: Whether connections over TCP are encrypted, and only holders of keys get in; engines and the coordinator
            must say the same. False for engines that know no keys, as vLLM's: see SECURITY.md for what strangers can
            do then.

    Attributes:
        addresses: What engines are to be told.

    Raises:
        TypeError, ValueError: An argument makes no sense; the text names it.
    """

    def __init__(
        self,
        addresses: EngineZmqAddresses,
        engines: Sequence[CoreEngine] | int,
        *,
        client_index: int = 0,
        request_type: type[Any] | None = None,
        output_type: Any = None,
        options: Options | None = None,
        keys: EngineKeys | None = None,
        secure: bool = True,
    ) -> None:
        self._sockets: ClientSockets | None = None
        self._closed = False
        if isinstance(engines, int):
            self._engines = Registrations(range(check_int("engines", engines, minimum=1)))
        else:
            self._engines = Registrations(engine.index for engine in engines)
        n_clients = min(len(addresses.inputs), len(addresses.outputs))
        if check_int("client_index", client_index, minimum=0) >= n_clients:
            raise ValueError(f"client_index must be below {n_clients}, the number of addresses, not {client_index}")
        self.addresses = addresses
        self._options = options or Options.from_env()
        self._secure = secure and self._options.secure
        self._given_keys = keys
        self._index = client_index
        self._request_type = request_type
        n_engines = len(self._engines.ranks)
        self._balance = LoadBalancer(n_engines, n_engines * client_index // n_clients, n_clients)
        self._pending = Pending(EnvelopeDecoder(output_type), self._balance, self._engines.ranks)
        self._encode = PayloadEncoder(self._options.max_message_bytes).encode
        self._wave = 0
        self._dead: EngineDead | None = None
        self._limiter = LogLimiter(_LOG_INTERVAL_S)

    def __repr__(self) -> str:
        return f"<EngineClient {self._index} of engines {self._engines.ranks}, {self.in_flight} requests in flight>"

    @property
    def ranks(self) -> list[int]:
        """The ranks of the engines."""
        return self._engines.ranks.copy()

    @property
    def ready(self) -> Mapping[int, dict[str, Any]]:
        """What each engine has said when it registered, by rank."""
        return self._engines.ready

    @property
    def in_flight(self) -> int:
        """How many requests are in flight."""
        return len(self._pending.inboxes)

    # Its life

    async def __aenter__(self) -> Self:
        self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def open(self) -> None:
        """Bind the addresses and begin to listen; ``async with`` does it.

        Raises:
            OSError: An address cannot be bound.
            RoleError: It was open before, or this process has the keys of one engine only.
        """
        if self._sockets is not None or self._closed:
            raise RoleError("a client of engines can be entered once")
        self._settled = asyncio.Event()
        self._thread = threading.get_ident()
        self._loop = asyncio.get_running_loop()
        addresses = self.addresses.inputs[self._index], self.addresses.outputs[self._index]
        protection = Protection.of_front_end(addresses, self._engines.ranks, keys=self._given_keys, secure=self._secure)
        self._engines.identities = [protection.name(rank, addresses[0]) for rank in self._engines.ranks]
        # Where engines are recognised by their keys, they speak for nobody else.
        self._recognised = protection.encrypts(addresses[0]), protection.encrypts(addresses[1])
        this: EngineClient = weakref.proxy(self)  # the loop holds on to what it calls; a forgotten client shall end
        self._sockets = ClientSockets(
            *addresses,
            this,
            protection,
            max_bytes=self._options.max_message_bytes,
            silence_s=self._options.remote_timeout,
        )
        self.addresses.inputs[self._index] = self._sockets.input_address
        self.addresses.outputs[self._index] = self._sockets.output_address
        self._liveness = Liveness(lambda error: this._die(error))

    def watch(self, manager: WatchedManager | None = None, processes: Iterable[WatchedProcess] = ()) -> None:
        """Take the end of these processes for the death of an engine, however well they end.

        Without it an engine's death is noticed, too: its connection ends. With it the error says how the process ended.

        Raises:
            RoleError: The client is not open.
            ValueError: A process was not started.
        """
        self._check_open()
        self._liveness.watch(manager, processes)

    async def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until every engine has registered. Cancelling this changes nothing.

        Args:
            timeout: Seconds to wait; None waits for ever.

        Raises:
            EngineDead: One is gone.
            TimeoutError: Not all have registered in time; the text names those that have not.
            QueueClosed, RoleError: The client is closed, or not open.
        """
        if timeout is not None:
            check_seconds("timeout", timeout)
        self._check_open()
        try:
            async with asyncio.timeout(timeout):
                await self._settled.wait()
        except TimeoutError:
            missing = ", ".join(map(str, self._engines.missing))
            raise TimeoutError(f"engines {missing} have not registered after {timeout} s") from None
        self._check_open()

    async def aclose(self) -> None:
        """Abort what is in flight, and close the sockets.

        Whatever waits raises `QueueClosed`. Idempotent; finishes also when it is cancelled.
        """
        if self._closed or self._sockets is None:
            self._closed = True
            return
        for position, ids in self._pending.by_engine().items():
            self._abort(position, ids)
        self._closed = True
        self._liveness.stop()
        self._fail(lambda: QueueClosed("the client of the engines was closed"))
        await self._sockets.aclose()

    def __del__(self) -> None:
        if self._sockets is not None and not self._closed:
            warnings.warn(f"{self!r} was not closed: use `async with`", ResourceWarning, 2, self)
            self._liveness.stop()
            self._sockets.close()

    # What it is for

    def submit(self, request: Any, *, engine: int | None = None) -> OutputStream[Any]:
        """Send a request, and return its outputs. It is sent at once, not when the first output is asked for.

        Where a request has ``client_index`` and ``current_wave``, as those of the field have, they are set.

        Args:
            request: Has a ``request_id``, a string that no other request in flight has, as an attribute, a key, or the
                first of an array. Do not use that of an aborted one again: what was on its way may still come.
            engine: The rank of the engine that gets it; None: the one with the least to do.

        Raises:
            CodecError: It cannot be encoded, or has no id.
            EngineDead: An engine is gone.
            QueueClosed, RoleError: The client is closed, or not ready.
            TypeError, ValueError: It is no ``request_type``, its id is in use, or there is no such engine.
        """
        self._check_ready()
        if self._request_type is not None and not isinstance(request, self._request_type):
            raise TypeError(f"request must be a {self._request_type.__name__}, not {request!r}")
        request_id = request_id_of(request)
        if request_id in self._pending.inboxes:
            raise ValueError(f"request_id {request_id!r} is that of another request in flight")
        position = self._balance.choose() if engine is None else self._engines.position(engine)
        self._stamp(request)
        self._send(position, _ADD, self._encode(request))
        return OutputStream(
            request_id, self._engines.ranks[position], self._pending.add(request_id, position), self._leave
        )

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """Abort requests: their streams end after what has come. Ids of requests that are not in flight do no harm.

        Raises:
            EngineDead: An engine is gone.
            QueueClosed, RoleError: The client is closed, or not ready.
        """
        self._check_ready()
        for position, ids in self._pending.by_engine(request_ids).items():
            for request_id in ids:
                self._pending.finish(request_id)
            self._send(position, _ABORT, [_encode_plain(ids)])

    async def call(self, method: str, *args: Any, engine: int | None = None) -> Any:
        """Call a method of the engine.

        Cancelling this forgets the answer; the method runs all the same.

        Args:
            method: Its name.
            args: What MessagePack can say, and arrays and tensors.
            engine: The rank of the engine; None: all of them.

        Returns:
            What the method returned, as plain data; of all engines a list, in the order of the engines.

        Raises:
            CallFailed: It has failed in one of the engines; the others are not waited for.
            CodecError: The arguments cannot be encoded.
            EngineDead: An engine is gone.
            QueueClosed, RoleError: The client is closed, or not ready.
            ValueError: There is no such engine.
        """
        self._check_ready()
        positions = range(len(self._engines.ranks)) if engine is None else [self._engines.position(engine)]
        calls: list[PendingCall] = []
        try:
            for position in positions:
                calls.append(self._pending.call(method))
                self._send(position, _UTILITY, self._encode((self._index, calls[-1].call_id, method, args)))
            results = await asyncio.gather(*(call.answer for call in calls))
        finally:
            self._pending.forget(calls)
        return results if engine is None else results[0]

    # What comes

    def registered(self, sender_identity: bytes, frames: list[bytes], connection: int, sender: str, user: str) -> None:
        """Take an engine's registration."""
        try:
            if self._recognised[0]:
                self._engines.check(sender_identity, user)
            rank = self._engines.take(sender_identity, frames)
        except ValueError as error:
            self._complain("a registration of %s by %s is ignored: %s", sender_identity[:16].hex(), sender, error)
            return
        self._liveness.connected(rank, connection, sender)
        if not self._engines.missing and not self._settled.is_set():
            self._settled.set()
            self._subscribe(self.addresses.frontend_stats_publish_address or self._engines.stats_address)

    def disconnected(self, connection: int) -> None:
        """Take the end of a connection."""
        self._liveness.disconnected(connection)

    def output(self, frames: list[Frame], origin: str) -> None:
        """Take what an engine has sent."""
        if len(frames) == 1 and frames[0] == ENGINE_CORE_DEAD:
            self._said_dead(origin)
            return
        try:
            unwanted = self._pending.take(frames, int(origin) if self._recognised[1] else None)
        except CodecError as error:
            self._complain("a message from an engine is dropped: %s", error)
            return
        for position, request_id in unwanted:
            self._abort(position, [request_id])

    def counts(self, payload: bytes) -> None:
        """Take what the coordinator has published."""
        try:
            counts, self._wave, _running = _decode_counts(payload)
            if counts is not None:
                self._balance.update([counts[rank] for rank in self._engines.ranks])
        except (ValueError, IndexError) as error:
            self._complain("counts from the coordinator are ignored: %s", error)

    # The end of things

    def _said_dead(self, origin: str) -> None:
        """Take an engine's word that it ends; of strangers' hosts there is none whose word counts."""
        if self._recognised[1]:
            self._liveness.said_dead(int(origin))
        elif not origin or origin in self._liveness.hosts:
            self._liveness.said_dead()
        else:
            self._complain("%s says that an engine ends, and no engine is there: ignored", origin)

    def _leave(self, request_id: str, inbox: Inbox) -> None:
        """Abort a request whose stream was left."""
        if inbox.ended or self._closed:
            return
        if threading.get_ident() != self._thread:  # the garbage collector's choice
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._leave, request_id, inbox)
            return
        if self._loop.is_closed():
            return
        self._pending.finish(request_id)
        self._abort(inbox.position, [request_id])

    def _abort(self, position: int, request_ids: list[str]) -> None:
        if self._dead is None:
            try:
                self._send(position, _ABORT, [_encode_plain(request_ids)])
            except EngineDead:
                pass  # whoever waits is told

    def _die(self, error: EngineDead) -> None:
        if self._closed or self._dead is not None:
            return
        assert self._sockets is not None
        self._sockets.read_outputs()  # its last words
        self._dead = error
        # Who waits is told; where nobody does, it is but an engine that was stopped.
        logger.debug("%s; %d requests and %d calls were pending", error, self.in_flight, self._pending.calls)
        self._fail(lambda: _again(error))

    def _fail(self, error: Callable[[], Exception]) -> None:
        self._pending.fail(error)
        self._settled.set()

    # Small things

    def _send(self, position: int, kind: bytes, frames: list[Frame]) -> None:
        assert self._sockets is not None
        try:
            self._sockets.send(self._engines.identities[position], kind, frames)
        except zmq.ZMQError as error:
            rank = self._engines.ranks[position]
            self._liveness.lost(rank)
            raise EngineDead(f"engine {rank} cannot be reached: {error}", engine=rank) from None

    def _stamp(self, request: Any) -> None:
        try:
            if hasattr(request, "client_index"):
                request.client_index = self._index
            if hasattr(request, "current_wave"):
                request.current_wave = self._wave
        except AttributeError:
            pass  # it cannot be changed, so its owner has set what is to be set

    def _subscribe(self, address: str | None) -> None:
        assert self._sockets is not None
        try:
            if address is not None:
                encrypted = self._secure and over_tcp([address])
                self._sockets.subscribe(
                    address, keys_for_front_end(self._given_keys).to_coordinator() if encrypted else None
                )
        except (OSError, RuntimeError) as error:  # requests are distributed by what this client knows, then
            self._complain("there are no counts from the coordinator: %s", error)

    def _check_ready(self) -> None:
        self._check_open()
        if not self._settled.is_set():
            raise RoleError("the engines are not ready: await wait_until_ready() first")

    def _check_open(self) -> None:
        if self._closed:
            raise QueueClosed("the client of the engines was closed")
        if self._sockets is None:
            raise RoleError("a client of engines is used inside `async with`")
        if threading.get_ident() != self._thread:
            raise RoleError("a client of engines is used in the thread of its event loop")
        if self._dead is not None:
            raise _again(self._dead)

    def _complain(self, text: str, *args: object) -> None:
        held_back = self._limiter.admit()
        if held_back is not None:
            logger.warning(f"{text} (and %d more like this)", *args, held_back)


def _again(error: EngineDead) -> EngineDead:
    """Return the same error for somebody else: each one gets its own traceback."""
    return EngineDead(*error.args, engine=error.engine, pid=error.pid)
