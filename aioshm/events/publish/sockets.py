"""The sockets of a publisher: opened, named, watched for strangers, and closed with time to deliver."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

import zmq

from aioshm.errors import OutOfThreads
from aioshm.events.endpoints import check_endpoint, for_rank, is_wildcard, publisher_binds
from aioshm.events.protocol.wire import MAX_TOPIC_BYTES
from aioshm.events.publish.admission import Admission
from aioshm.events.publish.reading_apart import ReadingApart
from aioshm.events.publish.replay_server import CLIENT_BUFFER_BYTES, CLIENT_HWM, MAX_REQUEST_BYTES
from aioshm.events.publish.subscriptions import Subscriptions
from aioshm.lifeline.address import is_own_address
from aioshm.logs import LogLimiter
from aioshm.process.threads import start_thread
from aioshm.zeromq.context import context_for
from aioshm.zeromq.curve import ADDED_BYTES, CurveKeys
from aioshm.zeromq.endpoint import BoundFile, attach, open_socket
from aioshm.zeromq.guard import GuardedMonitor, PeerLimits
from aioshm.zeromq.monitor import Monitor
from aioshm.zeromq.pump import Pump

logger: logging.Logger = logging.getLogger("aioshm.events")

# ZeroMQ hangs up on a peer that sends a longer subscription, or command of a handshake.
_MAX_FRAME_BYTES = MAX_TOPIC_BYTES + ADDED_BYTES
# All that subscribers send and that was not read yet, in a turn of the loop: ZeroMQ takes some 10 ms for so much.
_PUB_TOTAL_BYTES = 1 << 15
# The same of those who ask for replay: 32 MB, if all of it are empty parts.
_REPLAY_TOTAL_BYTES = 1 << 20
# The handshake, which is longer with CURVE.
_FREE_BYTES, _FREE_CURVE_BYTES = 256, 1024

# What must stand before binding: connections take it from there.
_PUB_OPTIONS: dict[int, int] = {zmq.MAXMSGSIZE: _MAX_FRAME_BYTES}
# Where strangers come, little may lie between them and the loop: what is not read yet cannot be refused.
_XPUB_OPTIONS: dict[int, int] = _PUB_OPTIONS | {zmq.XPUB_VERBOSER: 1, zmq.RCVBUF: 1 << 12, zmq.RCVHWM: 8}
_REPLAY_OPTIONS: dict[int, int] = {
    zmq.MAXMSGSIZE: MAX_REQUEST_BYTES,
    zmq.SNDBUF: CLIENT_BUFFER_BYTES,
    zmq.ROUTER_MANDATORY: 1,
}

# Bits of ZeroMQ's threads: live batches do not queue behind those that are replayed.
_LIVE_THREAD, _REPLAY_THREAD = 1, 2


class PublisherEnds:
    """A PUB socket and, if asked for, a ROUTER.

    What strangers may reach, a TCP port, is guarded: there batches go out through an XPUB socket, which tells what is
    subscribed to.

    Attributes:
        pub: Where batches go out.
        replay: Where replay requests come in, or None.
        endpoint: What ``pub`` is really bound or connected to.
        replay_endpoint: What ``replay`` is really bound to, or None.
        replay_monitor: What limits those who ask for replay, or None.
        on_ready: Called when batches may go out again, see `ready`.
    """

    def __init__(
        self,
        rank: int,
        endpoint: str,
        replay_endpoint: str | None,
        *,
        bind: bool | None,
        hwm: int,
        curve: CurveKeys | None,
    ) -> None:
        endpoint = for_rank(check_endpoint(endpoint), rank)
        if replay_endpoint is not None:
            replay_endpoint = for_rank(check_endpoint(replay_endpoint, "replay_endpoint"), rank)
        binds = publisher_binds(endpoint) if bind is None else bind
        self.replay: zmq.Socket[bytes] | None = None
        self.replay_endpoint: str | None = None
        count = 1 + bool(replay_endpoint)
        self._context, self._owns_context = context_for(
            endpoint,
            replay_endpoint,
            what=f"a publisher of events at {endpoint}",
            io_threads=count,
            sockets=3 * count + 1,  # a monitor for each takes two more; and what lets subscribers in
            connections=2 * count + 2,  # with what guards them
            threads=2,  # what guards the sockets, and what reads subscriptions
        )
        self._sockets: list[zmq.Socket[bytes]] = []
        self._monitors: list[Monitor] = []
        self._pumps: list[Pump] = []
        self._files: list[BoundFile] = []
        self._limiter = LogLimiter(10.0)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.on_ready: Callable[[], None] = _nothing
        self._subscriptions: Subscriptions | None = None
        self._reading: ReadingApart | None = None
        self._admission: Admission | None = None
        self.replay_monitor: GuardedMonitor | None = None
        try:
            guarded = binds and endpoint.startswith("tcp://")
            kind, options = (zmq.XPUB, _XPUB_OPTIONS) if guarded else (zmq.PUB, _PUB_OPTIONS)
            self.pub: zmq.Socket[bytes]
            self.endpoint: str
            self.pub, self.endpoint = self._open(kind, options, endpoint, binds, hwm, curve)
            if replay_endpoint is not None:
                self.replay, self.replay_endpoint = self._open(
                    zmq.ROUTER, _REPLAY_OPTIONS, replay_endpoint, True, CLIENT_HWM, curve
                )
        except BaseException:
            self.close(0.0)
            raise
        if curve is None:
            self._warn_about_wildcards([endpoint if binds else None, replay_endpoint])
        if bind is None and not binds:
            self._warn_about_connecting(endpoint)

    @property
    def handshake_failures(self) -> int:
        """Connections that did not speak ZeroMQ, or not with the right keys."""
        return sum(monitor.handshake_failures for monitor in self._monitors)

    @property
    def cut_off(self) -> int:
        """Connections that sent more than they may."""
        return sum(monitor.cut_off for monitor in self._monitors if isinstance(monitor, GuardedMonitor))

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch the connections on ``loop``."""
        self._loop = loop
        self._pumps = [Pump(loop, monitor.pair, self._read_monitors) for monitor in self._monitors]
        if self._reading is not None:
            self._reading.start(loop)
        if self._admission is not None:
            self._admission.start(loop)

    def ready(self) -> bool:
        """Return whether batches may go out now; if not, ``on_ready`` is called when they may."""
        return self._reading is None or self._reading.ready()

    def read_subscriptions(self) -> None:
        """Read subscriptions; to be called now and then, too: sending hides from the loop that something came."""
        if self._reading is not None:
            self._reading.look(listen=True)

    def stop_reading(self) -> None:
        """Read nothing more from subscribers, so that batches may go out whether `ready` or not."""
        if self._reading is not None:
            self._reading.close()

    def abandon_in_child(self) -> None:
        """Read no more: the sockets are the parent's."""
        self._reading = self._admission = None

    def close(self, linger: float) -> asyncio.Future[None] | None:
        """Close the sockets; what ZeroMQ still holds may go out for ``linger`` seconds.

        Returns:
            Where a loop is running and there is something to wait for: a future that is done once it went
            out, or the time is over.
        """
        for pump in self._pumps:
            pump.pause()
        self.stop_reading()
        if self._admission is not None:
            self._admission.close()
        self._read_monitors()
        for monitor in self._monitors:
            monitor.close()
        for socket in self._sockets:
            _give_back_name(socket)
            socket.close(linger=int(linger * 1000))
        self._sockets.clear()
        for file in self._files:
            file.remove()
        if not self._owns_context or self._context.closed:
            return None
        return _terminate(self._context)

    def _open(
        self, kind: int, options: dict[int, int], endpoint: str, bind: bool, hwm: int, curve: CurveKeys | None
    ) -> tuple[zmq.Socket[bytes], str]:
        socket = open_socket(self._context, kind, endpoint, bind=bind, hwm=hwm, curve=curve)
        self._sockets.append(socket)
        for option, value in options.items():
            socket.setsockopt(option, value)
        if self._owns_context:
            socket.setsockopt(zmq.AFFINITY, _REPLAY_THREAD if kind == zmq.ROUTER else _LIVE_THREAD)
        self._monitors.append(self._monitor(socket, kind, endpoint, bind, curve))
        actual = attach(socket, endpoint, bind=bind)
        if bind:
            self._files.append(BoundFile(actual))
        return socket, actual

    def _monitor(
        self, socket: zmq.Socket[bytes], kind: int, endpoint: str, bind: bool, curve: CurveKeys | None
    ) -> Monitor:
        if not bind or not endpoint.startswith("tcp://"):
            return Monitor(socket)
        limits = PeerLimits(
            total_bytes=_PUB_TOTAL_BYTES if kind == zmq.XPUB else _REPLAY_TOTAL_BYTES,
            free_bytes=_FREE_BYTES if curve is None else _FREE_CURVE_BYTES,
        )
        monitor = GuardedMonitor(socket, limits, name=f"publisher {endpoint}", nudge=self._nudge)
        if kind == zmq.XPUB:
            self._subscriptions = Subscriptions(socket, monitor)
            self._reading = ReadingApart(socket, self._subscriptions, lambda: self.on_ready())
            if self._owns_context:  # another one may have its own answerer
                self._admission = Admission(self._context, socket, self._subscriptions, self.ready)
        else:
            self.replay_monitor = monitor
        return monitor

    def _nudge(self) -> None:
        """Have the monitors read; in the guard's thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(self._read_monitors)

    def _read_monitors(self) -> None:
        for monitor in self._monitors:
            failed = monitor.read()[1]
            if not failed:
                continue
            held_back = self._limiter.admit()
            if held_back is not None:
                logger.warning(
                    "publisher %s: %d connections failed their handshake, the last at %s: %s (%d in all)",
                    self.endpoint, len(failed) + held_back, *failed[-1], self.handshake_failures,
                )  # fmt: skip

    @staticmethod
    def _warn_about_connecting(endpoint: str) -> None:
        """Say that nothing is bound, as in vLLM, where whoever gives this host's own address may expect that."""
        host = endpoint.removeprefix("tcp://").rpartition(":")[0]
        if is_own_address(host):
            logger.warning(
                "a publisher of events connects to %s, which is this host, and binds nothing: that is vLLM's rule for "
                "addresses without a *; subscribers that connect there, too, get nothing. Pass bind=True to bind it, "
                "or bind=False where a subscriber has bound it",
                endpoint,
            )

    @staticmethod
    def _warn_about_wildcards(endpoints: list[str | None]) -> None:
        open_to_all = [endpoint for endpoint in endpoints if endpoint is not None and is_wildcard(endpoint)]
        if open_to_all:
            logger.warning(
                "events are published on every interface, unencrypted (%s): pass curve=, or bind one address",
                ", ".join(open_to_all),
            )


def _give_back_name(socket: zmq.Socket[bytes]) -> None:
    """Let an inproc name be bound again at once; ZeroMQ closes sockets some time later, in another thread."""
    name = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    if name.startswith("inproc://"):
        with suppress(zmq.ZMQError):  # it only connected
            socket.unbind(name)


def _terminate(context: zmq.Context[zmq.Socket[bytes]]) -> asyncio.Future[None] | None:
    """End the context, which blocks while its sockets linger, in a thread that lives no longer than that."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        context.term()
        return None
    done: asyncio.Future[None] = loop.create_future()

    def finish() -> None:
        thread.join()  # this callback was the last thing it did
        if not done.done():
            done.set_result(None)

    def work() -> None:
        context.term()
        try:
            loop.call_soon_threadsafe(finish)
        except RuntimeError:  # the loop was closed meanwhile: nobody waits any more
            logger.debug("an event loop was closed before its publisher's context ended")

    try:
        thread = start_thread(work, name="aioshm-events-close", what="closing a publisher of events")
    except OutOfThreads:  # what is left may take its time all the same
        context.term()
        return None
    return done


def _nothing() -> None: ...
