"""The sockets of a publisher: opened, named, watched for strangers, and closed with time to deliver."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress

import zmq

from aioshm.events.endpoints import check_endpoint, for_rank, is_wildcard, publisher_binds
from aioshm.events.replay_server import CLIENT_BUFFER_BYTES, CLIENT_HWM, MAX_REQUEST_BYTES
from aioshm.zeromq import BoundFile, CurveKeys, LogLimiter, Monitor, Watch, attach, context_for, open_socket

logger = logging.getLogger("aioshm.events")

# A subscription is a topic; ZeroMQ hangs up on whoever sends more.
MAX_SUBSCRIPTION_BYTES = 1 << 16

# What must stand before binding: connections take it from there.
_PUB_OPTIONS: dict[int, int] = {zmq.MAXMSGSIZE: MAX_SUBSCRIPTION_BYTES}
_REPLAY_OPTIONS: dict[int, int] = {
    zmq.MAXMSGSIZE: MAX_REQUEST_BYTES,
    zmq.SNDBUF: CLIENT_BUFFER_BYTES,
    zmq.ROUTER_MANDATORY: 1,
}

# Bits of ZeroMQ's threads: live batches do not queue behind those that are replayed.
_LIVE_THREAD, _REPLAY_THREAD = 1, 2


class PublisherEnds:
    """A PUB socket and, if asked for, a ROUTER.

    Attributes:
        pub: Where batches go out.
        replay: Where replay requests come in, or None.
        endpoint: What ``pub`` is really bound or connected to.
        replay_endpoint: What ``replay`` is really bound to, or None.
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
        self._context, self._owns_context = context_for(endpoint, replay_endpoint, io_threads=1 + bool(replay_endpoint))
        self._sockets: list[zmq.Socket[bytes]] = []
        self._monitors: list[Monitor] = []
        self._watches: list[Watch] = []
        self._files: list[BoundFile] = []
        self._limiter = LogLimiter(10.0)
        try:
            self.pub, self.endpoint = self._open(zmq.PUB, _PUB_OPTIONS, endpoint, binds, hwm, curve)
            if replay_endpoint is not None:
                self.replay, self.replay_endpoint = self._open(
                    zmq.ROUTER, _REPLAY_OPTIONS, replay_endpoint, True, CLIENT_HWM, curve
                )
        except BaseException:
            self.close(0.0)
            raise
        if curve is None:
            self._warn_about_wildcards([endpoint if binds else None, replay_endpoint])

    @property
    def handshake_failures(self) -> int:
        """Connections that did not speak ZeroMQ, or not with the right keys."""
        return sum(monitor.handshake_failures for monitor in self._monitors)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch the connections on ``loop``."""
        self._watches = [Watch(loop, monitor.pair, self._read_monitors) for monitor in self._monitors]

    def close(self, linger: float) -> asyncio.Future[None] | None:
        """Close the sockets; what ZeroMQ still holds may go out for ``linger`` seconds.

        Returns:
            Where a loop is running and there is something to wait for: a future that is done once it went
            out, or the time is over.
        """
        for watch in self._watches:
            watch.pause()
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
        for option, value in options.items():
            socket.setsockopt(option, value)
        if self._owns_context:
            socket.setsockopt(zmq.AFFINITY, _REPLAY_THREAD if kind == zmq.ROUTER else _LIVE_THREAD)
        self._monitors.append(Monitor(socket))
        self._sockets.append(socket)
        actual = attach(socket, endpoint, bind=bind)
        if bind:
            self._files.append(BoundFile(actual))
        return socket, actual

    def _read_monitors(self) -> None:
        for monitor in self._monitors:
            failed = monitor.read()[1]
            if not failed:
                continue
            held_back = self._limiter.admit()
            if held_back is not None:
                logger.warning(
                    "publisher %s: %d connections failed their handshake, the last at %s: "
                    "not ZeroMQ, or not with the right keys (%d in all)",
                    self.endpoint, len(failed) + held_back, failed[-1], self.handshake_failures,
                )  # fmt: skip

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

    thread = threading.Thread(target=work, name="aioshm-events-close", daemon=True)
    thread.start()
    return done
