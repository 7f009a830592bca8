"""The front end's side of the data path: requests to engines, outputs back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

import msgspec

from aioshm.arguments import check_int, check_seconds
from aioshm.closing import AsyncClosing
from aioshm.engine.client.link import EngineLink
from aioshm.engine.client.options import ClientOptions
from aioshm.engine.client.pending import PendingCall
from aioshm.engine.client.streams import OutputStream
from aioshm.engine.protocol.addresses import CoreEngine, EngineZmqAddresses, identity
from aioshm.engine.protocol.messages import EngineCoreRequestType, request_id_of
from aioshm.engine.protocol.payloads import Frame, PayloadEncoder
from aioshm.engine.stats import EngineClientStats
from aioshm.errors import CodecError, EngineDead
from aioshm.process.watch import WatchedManager, WatchedProcess

_ADD = EngineCoreRequestType.ADD.value
_ABORT = EngineCoreRequestType.ABORT.value
_UTILITY = EngineCoreRequestType.UTILITY.value

_encode_plain = msgspec.msgpack.Encoder().encode


class EngineClient(AsyncClosing):
    """Sends requests to engines and brings back their outputs; one event loop's.

        async with EngineClient(addresses, 2) as client:
            ...  # start the engines, who are told client.addresses, and shake hands with them
            await client.wait_until_ready()
            async for output in client.submit(request):
                ...

    A request goes to the engine with the least to do: as the coordinator publishes it, with how full KV caches are, if
    the addresses name one, else by what this client has in flight. When one engine is gone, all that is pending raises
    `EngineDead`, and so does everything that is begun later; with ``on_engine_death="continue"`` only what that engine
    had does, the others go on, and it may come back.

    Args:
        addresses: Where to bind, one input and output for each client; the rest is used as it is when the engines are
            ready. What is bound is written back here, in a form that engines can connect to: with port 0 that is a port
            that the kernel has chosen, and in the place of a wildcard (``tcp://*:0``) this host's own address.
        engines: The engines, or how many there are, with the ranks from 0 on.
        options: See `ClientOptions`; None: the defaults.

    Attributes:
        addresses: What engines are to be told.

    Raises:
        TypeError, ValueError: An argument makes no sense; the text names it.
    """

    def __init__(
        self,
        addresses: EngineZmqAddresses,
        engines: Sequence[CoreEngine] | int,
        options: ClientOptions | None = None,
    ) -> None:
        chosen = options or ClientOptions()
        self._link = EngineLink(addresses, engines, chosen)
        self._resubmits = chosen.resubmit is not None
        self._request_type = chosen.request_type
        self._encode = PayloadEncoder(self._link.options.max_message_bytes).encode

    def __repr__(self) -> str:
        return repr(self._link)

    @property
    def addresses(self) -> EngineZmqAddresses:
        """What engines are to be told."""
        return self._link.addresses

    @property
    def ranks(self) -> list[int]:
        """The ranks of the engines."""
        return self._link.engines.ranks.copy()

    @property
    def ready(self) -> Mapping[int, dict[str, Any]]:
        """What each engine has said when it registered, by rank."""
        return self._link.engines.ready

    @property
    def deaths(self) -> Mapping[int, EngineDead]:
        """How engines have died that are not back, by rank; empty unless ``on_engine_death="continue"``."""
        return self._link.engines.deaths

    @property
    def late_outputs(self) -> int:
        """How many outputs and answers came too late, and were dropped.

        Their requests were aborted, their engine was taken for dead, or they were meant for the process that was this
        client before it died.
        """
        return self._link.pending.late_outputs

    @property
    def in_flight(self) -> int:
        """How many requests are in flight."""
        return len(self._link.pending.inboxes)

    def stats(self) -> EngineClientStats:
        """Return what the client has done so far; from any thread."""
        link, pending = self._link, self._link.pending
        return EngineClientStats(
            index=link.index,
            engines=len(link.engines.ranks),
            missing=len(link.engines.missing),
            requests=pending.requests,
            failed=pending.failed,
            in_flight=len(pending.inboxes),
            late_outputs=pending.late_outputs,
            deaths=link.engines.died,
        )

    def leave_deaths_to_supervisor(self) -> None:
        """When an engine dies, log only the fate of its requests: the supervisor logs the death."""
        self._link.logs_deaths = False

    # Opened, ready, closed

    async def __aenter__(self) -> Self:
        self.open()
        return self

    def open(self) -> None:
        """Bind the addresses and begin to listen; ``async with`` does it.

        Raises:
            OSError: An address cannot be bound.
            RoleError: It was open before, or this process has the keys of one engine only.
        """
        self._link.open()

    def watch(self, manager: WatchedManager | None = None, processes: Iterable[WatchedProcess] = ()) -> None:
        """Take the exit of any of these processes for the death of an engine, however well it went.

        Without it an engine's death is noticed, too: its connection ends. With it the error has its exit code.

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
            EngineDead: One is gone.
            TimeoutError: Not all have registered in time; the text names those that have not.
            QueueClosed, RoleError: The client is closed, or not open.
        """
        if timeout is not None:
            check_seconds("timeout", timeout)
        link = self._link
        link.check_open()
        try:
            async with asyncio.timeout(timeout):
                await link.settled.wait()
        except TimeoutError:
            missing = ", ".join(map(str, link.engines.missing))
            died = "".join(f"; {error}" for error in link.engines.deaths.values())
            raise TimeoutError(f"engines {missing} have not registered after {timeout} s{died}") from None
        link.check_open()

    def give_up(self, error: EngineDead) -> None:
        """Raise this error from all that is pending, and from all that is begun later: no engine will come back."""
        self._link.check_open()
        self._link.give_up(error)

    def void_keys(self, rank: int, incarnation: int) -> None:
        """Refuse the keys of the incarnations of an engine that were before this one: they are dead.

        Whoever starts engines again calls this when one has died; otherwise keys are void when newer ones are used.
        Nothing happens where engines do not connect over TCP.

        Raises:
            EngineDead, QueueClosed, RoleError: See `submit`.
            TypeError, ValueError: There can be no such rank, or incarnation.
        """
        identity(rank)
        check_int("incarnation", incarnation, minimum=0)
        self._link.check_open()
        self._link.void_keys(rank, incarnation)

    def add_engine(self, rank: int) -> None:
        """Expect one more engine, which gets requests once it has registered.

        Raises:
            EngineDead, QueueClosed, RoleError: See `submit`.
            TypeError, ValueError: There can be no such rank, or there is an engine of that rank.
        """
        identity(rank)
        self._link.check_own()
        self._link.add(rank)
        self._link.tell_scale()

    async def remove_engine(self, rank: int, *, timeout: float | None = None) -> None:
        """Give the last engine no more requests, wait until it has finished those that it has, and forget it.

        Then its process can be stopped. Cancelling this while it waits lets the engine go on as before.

        Args:
            rank: Its rank, the last one of `ranks`; not the only one.
            timeout: Seconds to wait; what is unfinished then fails with `EngineDead`. None waits for ever.

        Raises:
            EngineDead, QueueClosed, RoleError: See `submit`.
            ValueError: It is not the last one, or the only one.
        """
        link = self._link
        self._link.check_own()
        if timeout is not None:
            check_seconds("timeout", timeout)
        if len(link.engines.ranks) == 1 or rank != link.engines.ranks[-1]:
            raise ValueError(f"rank must be the last one of several engines, {link.engines.ranks}, not {rank!r}")
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await link.engines.drain(rank)
        link.check_open()
        link.remove_last()
        link.tell_scale()

    async def aclose(self) -> None:
        """Abort what is in flight, and close the sockets.

        Whatever waits raises `QueueClosed`. Idempotent; finishes also when it is cancelled.
        """
        await self._link.aclose()

    # Requests and calls

    def submit(self, request: Any, *, engine: int | None = None) -> OutputStream[Any]:
        """Send a request, and return its outputs. It is sent at once, not when the first output is asked for.

        Where a request has ``client_index`` and ``current_wave``, as those of vLLM have, they are set.

        Args:
            request: Has a ``request_id``, a string that no other request in flight has, as an attribute, a key, or the
                first of an array. The id of an aborted request may be used again at once, also that of a stream whose
                last wait was cancelled, which is aborted then. With ``resubmit``, arrays are copied; without, they may
                be changed as soon as this returns, too.
            engine: The rank of the engine that gets it; None: the one with the least to do.

        Raises:
            CodecError: It cannot be encoded.
            EngineDead: An engine is gone.
            QueueClosed, RoleError: The client is closed, or not ready.
            TypeError, ValueError: It is no ``request_type``, it has no id or one in use, or there is no such engine; or
                its id is that of an aborted request, and the engine, no aioshm one, cannot tell the two apart.
        """
        link = self._link
        link.check_ready()
        if self._request_type is not None and not isinstance(request, self._request_type):
            raise TypeError(f"request must be a {self._request_type.__name__}, not {request!r}")
        try:
            request_id = request_id_of(request, "request")
        except CodecError as error:
            raise ValueError(*error.args) from None
        former = link.pending.inboxes.get(request_id)
        if former is not None and not former.interrupted:
            raise ValueError(f"request_id {request_id!r} is that of another request in flight")
        position = link.engines.choose(engine)
        self._stamp(request)
        frames = self._encode(request)
        if former is not None:
            link.leave(request_id, former)
        while True:
            link.pending.check_reuse(request_id, position)
            generation, marked = link.pending.new_generation(position, frames)
            try:
                link.send(position, _ADD, marked)
                break
            except EngineDead:
                if engine is not None or not link.goes_on:
                    raise
                position = link.engines.choose(None)  # another one: this one is none of the choices any more
        # Frames of arrays are views of the caller's memory, who may change it by the time that an engine dies.
        kept: list[Frame] | None = [bytes(frame) for frame in frames] if self._resubmits else None
        inbox = link.pending.add(request_id, position, generation, kept)
        return OutputStream(request_id, inbox, link.leave)

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """Abort requests: their streams raise `RequestAborted` after the outputs that have arrived.

        Ids of requests that are not in flight do no harm.

        Raises:
            EngineDead: An engine is gone.
            QueueClosed, RoleError: The client is closed, or not ready.
        """
        link = self._link
        link.check_ready()
        for position, ids in link.pending.by_engine(request_ids).items():
            for request_id in ids:
                link.pending.abort(request_id)
            link.send(position, _ABORT, [_encode_plain(ids)])

    async def call(self, method: str, *args: Any, engine: int | None = None) -> Any:
        """Call a method of the engine.

        Cancelling this forgets the answer; the method runs all the same.

        Args:
            method: Its name.
            args: What MessagePack can say, and arrays and tensors.
            engine: The rank of the engine; None: all of them, with ``on_engine_death="continue"`` those that live.

        Returns:
            What the method returned, as plain data; of all engines a list, in the order of the engines.

        Raises:
            CallFailed: It has failed in one of the engines; the others are not waited for.
            CodecError: The arguments cannot be encoded.
            EngineDead: An engine is gone.
            QueueClosed, RoleError: The client is closed, or not ready.
            ValueError: There is no such engine.
        """
        link = self._link
        link.check_ready()
        positions = link.engines.all_positions() if engine is None else [link.engines.choose(engine)]
        calls: list[PendingCall] = []
        try:
            for position in positions:
                calls.append(link.pending.call(method, position))
                link.send(position, _UTILITY, self._encode((link.index, calls[-1].call_id, method, args)))
            results = await asyncio.gather(*(call.answer for call in calls))
        finally:
            link.pending.forget(calls)
        return results if engine is None else results[0]

    def _stamp(self, request: Any) -> None:
        try:
            if hasattr(request, "client_index"):
                request.client_index = self._link.index
            if hasattr(request, "current_wave"):
                request.current_wave = self._link.wave
        except AttributeError:
            pass  # it cannot be changed, so its owner has set what is to be set
