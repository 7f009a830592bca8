"""One endpoint of a subscriber: receives live batches and requests missed ones.

Everything happens in callbacks of the loop, in slices of time; no task runs. `SourceTracker` decides.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import zmq

from aioshm.errors import CodecError
from aioshm.events.config import SubscriberSettings
from aioshm.events.protocol import wire
from aioshm.events.protocol.encoding import BatchDecoder
from aioshm.events.protocol.messages import Lost, UnknownEvent
from aioshm.events.protocol.tracker import Message, SourceTracker, SubscriberStats
from aioshm.events.subscribe.backlog import RECONNECTED, Inbox
from aioshm.events.subscribe.ports import LivePort, ReplayPort
from aioshm.logs import LogLimiter
from aioshm.process.limits import detach_when_forked

logger: logging.Logger = logging.getLogger("aioshm.events")

# A silent publisher is checked after the check interval, then ever less often, down to this interval.
CHECK_MAX_S = 30.0
_MAX_DOUBLINGS = 16
_SLICE_S = 0.002


class _Timer:
    """Calls a function at the earliest of the times that were asked for."""

    def __init__(self, loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> None:
        self._loop = loop
        self._act = act
        self._handle: asyncio.Handle | None = None
        self._due = 0.0  # uvloop's handles do not have the time of an immediate call

    def call_at(self, due: float | None) -> None:
        """Call at ``due`` at the latest; moving the timer for every message would be expensive."""
        if due is None or (self._handle is not None and self._due <= due):
            return
        self.cancel()
        self._handle = self._loop.call_at(due, self._call)
        self._due = due

    def cancel(self) -> None:
        """Forget all times."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _call(self) -> None:
        self._handle = None
        self._act()


class EventSource:
    """Reads one endpoint on one loop, and puts deliveries into the subscriber's inbox."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        replay_endpoint: str | None,
        settings: SubscriberSettings,
        inbox: Inbox,
    ) -> None:
        self.stats: SubscriberStats = SubscriberStats()
        self._loop = loop
        self._settings = settings
        self._inbox = inbox
        self._state: Literal["running", "paused", "closed"] = "running"
        self._timer = _Timer(loop, self._tick)
        self._check_at: float | None = None  # loop time of the next check; None while there is a request
        self._quiet_checks = 0  # checks since the last message
        self._replay = ReplayPort(loop, context, replay_endpoint, settings, self._run)
        self._port = LivePort(context, endpoint, settings, self.stats)
        self.endpoint: str = self._port.endpoint
        self._decoder = BatchDecoder(settings.payload_limit(endpoint))
        self._limiter = LogLimiter(10.0)
        self._last_refusal = ""
        self._tracker = SourceTracker(
            self.endpoint,
            settings.start,
            can_replay=replay_endpoint is not None,
            gone_after_s=settings.gone_after_s,
            stats=self.stats,
        )
        self._port.watch(loop, self._work)
        detach_when_forked(self)

    @property
    def is_connected(self) -> bool:
        """Whether a publisher is connected."""
        return self._port.connections > 0

    def resume(self) -> None:
        """Continue after the inbox was full."""
        if self._state == "paused":
            self._state = "running"
            self._replay.resume()
            self._port.run_soon()

    def close(self) -> None:
        """Close the sockets and drop undelivered batches. Idempotent."""
        if self._state == "closed":
            return
        self._pause()
        self._state = "closed"
        self._replay.close()
        self._port.close()

    def detach_after_fork(self) -> None:
        """Become useless in a forked child: the sockets, and the loop's epoll descriptor, belong to the parent."""
        self._state = "closed"

    def _pause(self) -> None:
        """Stop decoding, and stop watching the replay socket: a watched socket that is not read busies the loop."""
        self._state = "paused"
        self._timer.cancel()
        self._replay.pause()

    # Callbacks of the loop

    def _work(self) -> bool:
        """Read ahead, then work for one slice of time; True if there may be more to read."""
        try:
            more = self._port.read_ahead()
        except Exception as error:
            self._fail(error)
            return False
        self._run()
        return more

    def _run(self) -> None:
        """Work for one slice of time, or until there is nothing to do."""
        if self._state != "running":
            return
        try:
            deadline = time.perf_counter() + _SLICE_S
            while self._step():
                if self._state != "running":
                    return
                if time.perf_counter() > deadline:
                    self._port.run_soon()
                    return
            self._plan()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Close, and pass the error of a callback to the consumer, which would wait for ever."""
        self.close()
        self._inbox.fail(error)

    # The passage of time

    def _plan(self) -> None:
        """Set the timer after all messages were handled."""
        now = self._loop.time()
        gone_at = self._tracker.gone_at(now)
        self._timer.call_at(gone_at)
        previous = self._check_at
        self._check_at = None
        if self._tracker.asking is not None:
            self._timer.call_at(self._replay.overdue_at)
        elif self._settings.check_interval is not None and self._replay.endpoint is not None:
            pause = self._settings.check_interval * 2 ** min(self._quiet_checks, _MAX_DOUBLINGS)
            self._check_at = now + min(CHECK_MAX_S, pause)
            if gone_at is not None and self._settings.gone_after_s is not None:
                # Batches of other publishers must not postpone the check of the missing publisher.
                soon = now + self._settings.gone_after_s / 3
                self._check_at = min(self._check_at, soon, previous or soon)
            self._timer.call_at(self._check_at)

    def _tick(self) -> None:
        """Act on the passage of time."""
        if self._state != "running":
            return
        now = self._loop.time()
        self._tracker.forget_gone(now)
        if self._tracker.asking is not None:
            if now >= self._replay.overdue_at:
                self._end_wait_for_answer()
        elif self._check_at is not None and now >= self._check_at:
            self._quiet_checks += 1
            self._check_at = None
            self._tracker.check()
        elif not self._tracker.out:  # the timer was set for an earlier time
            self._timer.call_at(self._tracker.gone_at(now))
            self._timer.call_at(self._check_at)
            return
        self._run()

    def _end_wait_for_answer(self) -> None:
        if self._replay.has_answer:  # only the loop was late
            self._replay.restart_timeout()
            return
        self.stats.replay_failures += 1
        reason = self._replay.give_up(self.endpoint)
        if reason is not None:
            self._tracker.replay_failed(reason)

    # Messages

    def _step(self) -> bool:
        """Handle one message, live or replayed; False if there is none."""
        if self._hand_out():
            return True
        if self._tracker.asking is None:
            return self._read_live()
        return self._read_reply(self._tracker.asking)

    def _hand_out(self) -> bool:
        """Move deliveries from the tracker to the inbox; True if the inbox is full."""
        out = self._tracker.out
        while out:
            delivery = out.popleft()
            if isinstance(delivery, Lost):
                delivery = self._explain(delivery)
            if not self._inbox.put(delivery):
                self._pause()
                return True
        return False

    def _read_live(self) -> bool:
        entry = self._port.backlog.take()
        if entry is None:
            return False
        if entry.frames is not None:
            self._quiet_checks = 0
            try:
                self._tracker.live(self._decode(wire.parse_live(entry.frames)), entry.connection, entry.number)
            except CodecError as error:
                self._refuse("live", error)
        elif entry.connection is RECONNECTED:
            logger.debug("subscriber %s: connected again", self.endpoint)
            self._quiet_checks = 0
            self._tracker.reconnected()
        else:
            self._tracker.disconnected(entry.connection)
        return True

    def _read_reply(self, start: int) -> bool:
        if not self._replay.is_asked:
            self._tracker.asked(self._port.backlog.received)
        frames = self._replay.receive(start)
        if frames is None:
            return False
        try:
            reply = wire.parse_reply(frames)
            if reply is None:
                self._replay.ended()
                self._tracker.replay_ended()
            elif reply.topic is None or reply.topic.startswith(self._settings.topic.encode()):
                is_wanted = self._tracker.replayed(self._decode(reply))
                if not is_wanted:
                    self._replay.ended()
        except CodecError as error:
            self._refuse("replay", error)
        return True

    def _decode(self, frames: wire.Frames) -> Message:
        """Decode a batch, or raise CodecError; log the first unknown event."""
        batch = self._decoder.decode(frames.payload)
        if self._decoder.unknown_events and not self.stats.unknown_events:
            unknown = next(event for event in batch.events if isinstance(event, UnknownEvent))
            logger.warning(
                "subscriber %s: an event of type %s in batch %d of rank %s is delivered as an UnknownEvent: %s "
                "(logged once; stats().unknown_events counts them)",
                self.endpoint,
                unknown.type,
                frames.seq,
                batch.data_parallel_rank,
                unknown.reason,
            )
        self.stats.unknown_events = self._decoder.unknown_events
        return Message(frames.topic, frames.seq, batch, frames.payload)

    def _refuse(self, port: str, error: CodecError) -> None:
        """Count and log a message that cannot be used."""
        self.stats.garbage += 1
        self._last_refusal = str(error)
        self._limiter.warn(logger, "subscriber %s: a %s message cannot be used: %s", self.endpoint, port, error)

    def _explain(self, lost: Lost) -> Lost:
        """Return a loss with more reasons, if this subscriber refused messages, or dropped some undecoded."""
        reason = lost.reason
        if self._last_refusal:
            reason += f"; this subscriber refused {self.stats.garbage} messages so far, the last one: "
            reason += self._last_refusal
        if self.stats.dropped:
            reason += (
                f"; its backlog was full, and it dropped {self.stats.dropped} batches so far: it decodes too slowly"
            )
        return replace(lost, reason=reason)
