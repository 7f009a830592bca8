"""The client of engines: sends requests, and receives outputs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias, get_args

from aioshm.arguments import check_int, check_limit, check_type
from aioshm.closing import AsyncClosing
from aioshm.config import Options
from aioshm.engine.client.link import EngineLink
from aioshm.engine.client.liveness import OnLate
from aioshm.engine.client.requests import Inbox, OutputStream, PendingCall
from aioshm.engine.protocol.addresses import CoreEngine, EngineZmqAddresses, identity
from aioshm.engine.protocol.messages import EngineCoreRequestType, PauseMode, PauseOrder, check_mode, request_id_of
from aioshm.engine.protocol.payloads import PayloadEncoder
from aioshm.engine.security.keys import EngineKeys
from aioshm.engine.stats import EngineClientStats
from aioshm.errors import CodecError, EngineDead
from aioshm.process.restart import Health
from aioshm.process.watch import WatchedManager, WatchedProcess

OnEngineChange: TypeAlias = Callable[[int, EngineDead | None], object]
OnEngineDeath: TypeAlias = Literal["fail", "continue"]
Resubmit: TypeAlias = Literal["unstarted"]

_UTILITY = EngineCoreRequestType.UTILITY.value


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """The options of an `EngineClient`.

    Attributes:
        client_index: Index of this client's input and output in the addresses.
        request_type: The type of requests; None: anything that MessagePack can encode, and arrays and tensors.
        output_type: The type that outputs are decoded to: any type that msgspec knows, or None for plain data. A plain
            array is read as vLLM's outputs are: the first item is the request id, the sixth the finish reason.
        options: ``max_message_bytes``, ``remote_timeout`` and ``secure`` apply; None: `Options.from_env`.
        keys: The keys of the deployment, for TCP; None: the keys of this process.
        secure: Whether TCP connections are encrypted and admit holders of keys only. Engines and the coordinator need
            the same setting. False for engines without keys, such as vLLM's: SECURITY.md lists the consequences.
        on_engine_death: ``"fail"``: the death of one engine fails everything. ``"continue"``: all other engines serve
            on, for engines that do not need each other. A later engine of the same rank is the replacement.
        resubmit: With ``"continue"``, ``"unstarted"`` sends requests of a dead engine that brought no output yet to
            other engines, to each engine once; None: they fail.
        on_engine_change: With ``"continue"``, called on the loop with the rank and the error when an engine dies, and
            with the rank and None when it is back.
        membership_address: With ``"continue"``, the address where the launching process publishes the present engines,
            see `CoreEngineLaunch.membership_address`. None: the engines passed to the client, plus `add_engine`, minus
            `remove_engine`.

    Raises:
        TypeError, ValueError: A value or a combination is invalid; the text names it.
    """

    client_index: int = 0
    # Payloads
    request_type: type[Any] | None = None
    output_type: Any = None
    options: Options | None = None
    # Security
    keys: EngineKeys | None = None
    secure: bool = True
    # Deaths of engines
    on_engine_death: OnEngineDeath = "fail"
    resubmit: Resubmit | None = None
    on_engine_change: OnEngineChange | None = None
    membership_address: str | None = None

    def __post_init__(self) -> None:
        check_int("client_index", self.client_index, minimum=0)
        check_type("options", self.options, Options)
        if self.on_engine_death not in get_args(OnEngineDeath):
            raise ValueError(f"on_engine_death must be 'fail' or 'continue', not {self.on_engine_death!r}")
        given = self.resubmit
        if given is not None and (given not in get_args(Resubmit) or self.on_engine_death == "fail"):
            raise ValueError(f"resubmit must be None, or 'unstarted' with on_engine_death='continue', not {given!r}")
        if self.membership_address is not None and self.on_engine_death == "fail":
            raise ValueError("membership_address needs on_engine_death='continue', not 'fail'")


class EngineClient(AsyncClosing):
    """Sends requests to engines and receives their outputs; belongs to one event loop.

        async with EngineClient(addresses, 2) as client:
            ...  # start the engines with client.addresses, and shake hands with them
            await client.wait_until_ready()
            async for output in client.submit(request):
                ...

    A request goes to the least busy engine: by the coordinator's published counts and KV cache usage, if the addresses
    name a coordinator, else by the requests of this client. An engine that makes no progress is passed over. When an
    engine dies, all pending and later calls raise `EngineDead`. With ``on_engine_death="continue"`` only the requests
    of that engine do; all other engines serve on, and the engine may come back.

    Args:
        addresses: The addresses to bind, one input and output for each client; all others are read when the engines
            are ready. The bound addresses are written back here, in a form that engines can connect to: the kernel's
            choice for port 0, and this host's address for a wildcard (``tcp://*:0``).
        engines: The engines, or their number, with ranks from 0 on.
        options: See `ClientOptions`; None: the defaults.

    Attributes:
        addresses: The addresses for engines.

    Raises:
        TypeError, ValueError: An argument is invalid; the text names it.
    """

    def __init__(
        self, addresses: EngineZmqAddresses, engines: Sequence[CoreEngine] | int, options: ClientOptions | None = None
    ) -> None:
        chosen = check_type("options", options, ClientOptions) or ClientOptions()
        self._link = EngineLink(addresses, engines, chosen)
        self._encode = PayloadEncoder(self._link.options.max_message_bytes).encode

    def __repr__(self) -> str:
        return repr(self._link)

    @property
    def addresses(self) -> EngineZmqAddresses:
        """The addresses for engines."""
        return self._link.addresses

    @property
    def ranks(self) -> list[int]:
        """The ranks of the engines."""
        return self._link.engines.ranks

    @property
    def ready(self) -> Mapping[int, dict[str, Any]]:
        """The registration of each engine, by rank."""
        return {each.rank: each.registration for each in self._link.engines if each.registration is not None}

    @property
    def deaths(self) -> Mapping[int, EngineDead]:
        """The deaths of engines that are not back, by rank; empty unless ``on_engine_death="continue"``."""
        return {each.rank: each.death for each in self._link.engines if each.death is not None}

    @property
    def late_outputs(self) -> int:
        """The number of outputs and answers for requests and calls that were not in flight any more."""
        return self._link.pending.late_outputs

    @property
    def in_flight(self) -> int:
        """The number of requests in flight."""
        return len(self._link.pending.inboxes)

    @property
    def paused(self) -> PauseMode | None:
        """The mode of the pause, from `pause` until `resume` by any client; None: the engines are not paused.

        A client learns of the pauses of others from its ``membership_address``, and from engines to which it has sent
        a request.
        """
        return self._link.pause.order.mode or None

    def serves(self, rank: int) -> bool:
        """Return whether an engine has registered, and is not dead; for the handshake."""
        engine = self._link.engines.get(rank)
        return engine is not None and engine.registration is not None

    def pause_order(self) -> PauseOrder:
        """Return the newest order to pause or to resume, for engines that start."""
        return self._link.pause.order

    def stats(self) -> EngineClientStats:
        """Return the counters of the client; from any thread."""
        link = self._link
        pending = link.pending
        return EngineClientStats(
            index=link.index,
            engines=len(link.engines),
            missing=len(link.engines.missing),
            requests=pending.requests,
            failed=pending.failed,
            in_flight=len(pending.inboxes),
            paused=self.paused,
            late_outputs=pending.late_outputs,
            deaths=link.engines.died,
            stalled=sum(bool(engine.stall) for engine in link.engines),
        )

    def leave_deaths_to_supervisor(self) -> None:
        """Log only the requests of a dead engine: the supervisor logs the death."""
        self._link.logs_deaths = False

    # Opened, ready, closed

    async def __aenter__(self) -> Self:
        self.open()
        return self

    def open(self) -> None:
        """Bind the addresses and begin to read; ``async with`` does it.

        Raises:
            OSError: An address cannot be bound.
            RoleError: The client was open before, or this process has the keys of one engine only.
        """
        self._link.open()

    def watch(self, manager: WatchedManager | None = None, processes: Iterable[WatchedProcess] = ()) -> None:
        """Treat every exit of these processes as the death of an engine, even with code 0.

        Without this, the end of its connection reveals an engine's death. With it the error has the exit code.

        Raises:
            RoleError: The client is not open.
            ValueError: A process was not started.
        """
        self._link.check_open()
        self._link.liveness.watch(manager, processes)

    async def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until every engine has registered, also again after a death. Cancelling this changes nothing.

        Args:
            timeout: Seconds to wait; None waits for ever.

        Raises:
            EngineDead: An engine is dead.
            TimeoutError: Not all engines have registered in time; the text names the missing ones.
            QueueClosed, RoleError: The client is closed, or not open.
        """
        check_limit("timeout", timeout)
        link = self._link
        link.check_open()
        try:
            async with asyncio.timeout(timeout):
                await link.settled.wait()
        except TimeoutError:
            missing = ", ".join(map(str, link.engines.missing))
            texts = [
                f"engines {missing} have not registered after {timeout} s",
                *map(str, self.deaths.values()),
                *[engine.stall for engine in link.engines if engine.stall],
            ]
            if not missing:
                texts[0] = f"no membership came from {link.chosen.membership_address} within {timeout} s"
            if not link.settled.is_set():  # else the last engine has registered in the iteration of the timeout
                raise TimeoutError("; ".join(texts)) from None
        link.check_open()

    def give_up(self, error: EngineDead) -> None:
        """Raise this error from all pending and later calls: no engine will come back."""
        self._link.check_open()
        self._link.give_up(error)

    def void_keys(self, rank: int, incarnation: int) -> None:
        """Refuse the keys of an engine's incarnations before this one, the first that is not dead; supervisors do it.

        Otherwise keys become void when newer ones are used. Without TCP nothing happens.
        """
        self._link.check_open()
        self._link.void_keys(rank, incarnation)

    def note_health(self, rank: int, health: Health, where: str = "") -> None:
        """Note that an engine has stalled, was stopped, or makes progress again; supervisors and launches do it.

        An engine without progress gets no new requests while another engine is there, except those with its rank
        (``engine=``). Errors and timeouts name it, and ``where``. Unknown and dead engines are ignored.
        """
        self._link.check_open()
        self._link.engines.note_health(rank, health, where)

    def supervise_heartbeats(self, hang_s: float | None, on_late: OnLate) -> None:
        """Report late engines that send heartbeats; a supervisor calls this, and ends them after ``hang_s`` seconds."""
        self._link.liveness.supervise(hang_s, on_late)

    def add_engine(self, rank: int) -> None:
        """Expect one more engine, which gets requests once it has registered.

        Raises:
            EngineDead, QueueClosed, RoleError: See `submit`.
            TypeError, ValueError: The rank is invalid or taken, or an engine is being removed.
        """
        identity(rank)
        self._link.check_own()
        leaving = [each.rank for each in self._link.engines if each.leaving]
        if leaving:
            raise ValueError(f"engine {leaving[0]} is being removed, and must be the last one until then")
        self._link.add(rank)
        self._link.report_scale()

    async def remove_engine(self, rank: int, *, timeout: float | None = None) -> None:
        """Send no more requests to the last engine, wait for its unfinished ones, and remove it.

        Then its process can be stopped. Cancelling the wait returns the engine to service.

        Args:
            rank: Its rank, the last of `ranks`; not the only one.
            timeout: Seconds to wait; unfinished requests then fail with `EngineDead`. None waits for ever.

        Raises:
            EngineDead, QueueClosed, RoleError: See `submit`.
            ValueError: It is not the last engine, or the only one.
        """
        link = self._link
        self._link.check_own()
        check_limit("timeout", timeout)
        ranks = link.engines.ranks
        if len(ranks) == 1 or rank != ranks[-1]:
            raise ValueError(f"rank must be the last one of several engines, {ranks}, not {rank!r}")
        engine = link.engines[rank]
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await link.drain(engine)
        link.check_open()
        if link.engines.get(rank) is engine:
            link.remove_last()
            link.report_scale()

    async def aclose(self) -> None:
        """Abort all requests, and close the sockets.

        Waiting calls raise `QueueClosed`. Idempotent; finishes also when cancelled.
        """
        await self._link.aclose()

    # Requests and calls

    def submit(self, request: Any, *, engine: int | None = None, timeout: float | None = None) -> OutputStream[Any]:
        """Send a request immediately, and return its outputs.

        Attributes ``client_index`` and ``current_wave`` of a request, as vLLM's requests have, are set.

        Args:
            request: Has a ``request_id``, a string that no other request in flight has, as an attribute, a key, or the
                first item of an array. The id of an aborted request is free immediately, at engines of vLLM after 60 s.
                The id of a stream whose last wait was cancelled is free, too: this aborts the former request. Arrays
                may be changed once this returns.
            engine: The rank of the engine; None: the least busy engine.
            timeout: Seconds that each output may take: after that long ``async for`` raises `TimeoutError`, and may
                continue with the same stream. None: no limit.

        Raises:
            CodecError: The request cannot be encoded.
            EngineDead: An engine is dead.
            QueueClosed, RoleError: The client is closed, or not ready.
            TypeError, ValueError: The request has another type than ``request_type``, no id or one that is not free, or
                there is no such engine, or ``timeout`` is invalid.
        """
        check_limit("timeout", timeout)
        return OutputStream(self.send_request(request, engine), self._link.leave, timeout)

    def leave(self, inbox: Inbox) -> None:
        """Abort a request, unless it is finished. May be called in any thread."""
        self._link.leave(inbox)

    def send_request(self, request: Any, engine: int | None) -> Inbox:
        """Do what `submit` does; the caller must call `leave` if it drops the result."""
        link = self._link
        link.check_ready()
        request_type = link.chosen.request_type
        if request_type is not None and not isinstance(request, request_type):
            raise TypeError(f"request must be a {request_type.__name__}, not {request!r}")
        try:
            request_id = request_id_of(request, "request")
        except CodecError as error:
            raise ValueError(*error.args) from None
        former = link.pending.inboxes.get(request_id)
        if former is not None and not former.interrupted:
            raise ValueError(f"request_id {request_id!r} is that of another request in flight")
        chosen = link.engines.choose(engine)
        self._stamp(request)
        frames = self._encode(request)
        if former is not None:
            link.leave(former)
        inbox = Inbox(request_id, wanted=engine)
        if link.pause.order.mode:  # the caller may change the arrays before the request is sent
            return link.pending.wait(inbox, [bytes(frame) for frame in frames])
        return link.send_request(inbox, chosen, frames)

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """Abort requests: their streams raise `RequestAborted` after the received outputs.

        Ids of requests that are not in flight are ignored.

        Raises:
            EngineDead: An engine is dead.
            QueueClosed, RoleError: The client is closed, or not ready.
        """
        link = self._link
        link.check_ready()
        if isinstance(request_ids, str):
            request_ids = [request_ids]
        link.end_and_abort(request_ids)

    async def call(self, method: str, *args: Any, engine: int | None = None) -> Any:
        """Call a method of the engine.

        Cancelling this drops the answer; the method still runs.

        Args:
            method: Its name.
            args: Values that MessagePack can encode, and arrays and tensors.
            engine: The rank of the engine; None: all engines, with ``on_engine_death="continue"`` the living ones.

        Returns:
            The result of the method, as plain data; of all engines a list, in the order of the engines.

        Raises:
            CallFailed: The method has failed in one of the engines; this call does not wait for all others.
            CodecError: The arguments cannot be encoded.
            EngineDead: An engine is dead.
            QueueClosed, RoleError: The client is closed, or not ready.
            ValueError: There is no such engine.
        """
        link = self._link
        link.check_ready()
        if not isinstance(method, str):
            raise TypeError(f"method must be a str, not {method!r}")
        if engine is not None:
            engines = [link.engines.choose(engine)]
        elif link.goes_on:
            engines = link.engines.in_service()
        else:  # with an engine that was just lost: the call fails, and does not return fewer results
            engines = [each for each in link.engines if each.registration is not None and not each.leaving]
        calls: list[PendingCall] = []
        try:
            for each in engines:
                calls.append(link.pending.call(method, each))
                link.send(each, _UTILITY, self._encode((link.index, calls[-1].call_id, method, args)))
            results = await asyncio.gather(*(call.answer for call in calls))
        finally:
            link.pending.forget(calls)
        return results if engine is None else results[0]

    # The pause

    async def pause(self, mode: PauseMode = "finish", timeout: float | None = None) -> None:
        """Pause all engines, for all clients: for example to change the weights of a model.

            await client.pause()
            await client.call("load_weights", path)
            await client.resume()

        When this returns, no engine is in a step, and none begins one until `resume`. New requests wait: `submit`
        returns, and the request is sent after `resume`, in the order of submission. `call` works. The pause outlives
        the client that has asked for it, and the engines: an engine that is restarted or added is paused, too.
        Engines that are missing are not waited for: one that starts already pauses when it registers.

        The last call of `pause` or `resume` counts, by any client: a later `pause` may change the mode. After a
        failure, a timeout, or a cancellation, the engines are pausing nonetheless: `resume` undoes that.

        Args:
            mode: What happens to requests in flight. ``"finish"``: they run to their end. ``"abort"``: their streams
                raise `RequestAborted`. ``"keep"``: they stay where they are, and continue after `resume`.
            timeout: Seconds to wait; None waits for ever.

        Raises:
            CallFailed: An engine of vLLM has refused to pause, such as a release without ``pause_scheduler``.
            EngineDead: An engine is dead.
            QueueClosed, RoleError: The client is closed, or not ready; or `resume` was called meanwhile.
            TimeoutError: Engines have requests in flight or are in a step; the text names them.
            ValueError: The mode is invalid.
        """
        check_mode(mode)
        check_limit("timeout", timeout)
        self._link.check_ready()
        await self._link.pause.pause(mode, timeout)

    async def resume(self) -> None:
        """End the pause, of any client; return when all engines have resumed. Without a pause nothing happens.

        Cancelling this resumes the engines nonetheless.

        Raises:
            CallFailed: An engine of vLLM has refused to resume.
            EngineDead, QueueClosed, RoleError: See `submit`.
        """
        self._link.check_ready()
        await self._link.pause.resume()

    def _stamp(self, request: Any) -> None:
        try:
            if hasattr(request, "client_index"):
                request.client_index = self._link.index
            if hasattr(request, "current_wave"):
                request.current_wave = self._link.wave
        except AttributeError:
            pass  # the request is immutable: the caller has set the attributes
