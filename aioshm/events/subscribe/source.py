"""One endpoint of a subscriber: receives live batches and requests missed ones.

Everything happens in callbacks of the loop, in slices of time; no task runs. `SourceTracker` decides.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Literal

from aioshm.errors import CodecError
from aioshm.events.config import SubscriberSettings
from aioshm.events.protocol import wire
from aioshm.events.protocol.encoding import BatchDecoder
from aioshm.events.protocol.messages import Delivery, Received, UnknownEvent
from aioshm.events.protocol.tracker import Message, SourceTracker, SubscriberStats
from aioshm.events.subscribe.ports import LivePort, ReplayPort
from aioshm.logs import LogLimiter
from aioshm.process.limits import detach_when_forked
from aioshm.zeromq.sockets import Context

logger: logging.Logger = logging.getLogger("aioshm.events")

# A silent publisher is checked after the check interval, then after longer and longer pauses, up to this one.
CHECK_MAX_S = 30.0
_MAX_DOUBLINGS = 16
_SLICE_S = 0.002
# Payloads that may wait for the consumer together; decoded, they take up to 112 times as much.
MAX_WAITING_BYTES = 1 << 20


class Inbox:
    """Deliveries that wait for the consumer.

    The sources refer to the inbox, not to the subscriber, so an abandoned subscriber can be garbage-collected.
    """

    def __init__(self, capacity: int) -> None:
        self.waiting: deque[Delivery] = deque()
        self.failure: BaseException | None = None  # of a callback, for the consumer
        self.changed: asyncio.Event = asyncio.Event()
        self._capacity = capacity
        self._bytes = 0

    def put(self, delivery: Delivery) -> None:
        """Append a delivery."""
        self.waiting.append(delivery)
        if isinstance(delivery, Received):
            self._bytes += len(delivery.payload)
        self.changed.set()

    def take(self) -> Delivery:
        """Remove and return the next delivery."""
        delivery = self.waiting.popleft()
        if isinstance(delivery, Received):
            self._bytes -= len(delivery.payload)
        return delivery

    @property
    def is_full(self) -> bool:
        """Whether decoding has to pause."""
        return len(self.waiting) >= self._capacity or self._bytes >= MAX_WAITING_BYTES

    @property
    def is_half_empty(self) -> bool:
        """Whether decoding may continue after the inbox was full."""
        return len(self.waiting) <= self._capacity // 2 and self._bytes <= MAX_WAITING_BYTES // 2


class EventSource:
    """Reads one endpoint on one loop, and puts deliveries into the subscriber's inbox."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: Context,
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
        self._timer: asyncio.Handle | None = None
        self._due = 0.0  # of the timer: uvloop's handles do not have the time of an immediate call
        self._check_at: float | None = None  # loop time of the next check; None while there is a request
        self._quiet_checks = 0  # checks since the last message
        self._replay = ReplayPort(loop, context, replay_endpoint, settings, self._run)
        self.port: LivePort = LivePort(context, endpoint, settings, self.stats)
        self._decoder = BatchDecoder(settings.payload_limit(endpoint))
        self._limiter = LogLimiter(10.0)
        self._tracker = SourceTracker(
            self.port.endpoint,
            settings.start,
            inbox.put,
            can_replay=replay_endpoint is not None,
            gone_after_s=settings.gone_after_s,
            stats=self.stats,
            clock=loop.time,
        )
        self.port.watch(loop, self._work)
        detach_when_forked(self)

    def resume(self) -> None:
        """Continue after the inbox was full."""
        if self._state == "paused":
            self._state = "running"
            self._replay.resume()
            self.port.run_soon()

    def close(self) -> None:
        """Close the sockets; drop batches that are not in the inbox yet. Idempotent."""
        if self._state == "closed":
            return
        self._pause()
        self._state = "closed"
        self._replay.close()
        self.port.close()

    def detach_after_fork(self) -> None:
        """Become useless in a forked child: the sockets, and the loop's epoll descriptor, belong to the parent."""
        self._state = "closed"

    def _pause(self) -> None:
        """Stop decoding, and stop watching the replay socket: a watched socket that is not read busies the loop."""
        self._state = "paused"
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._replay.pause()

    # Callbacks of the loop

    def _work(self) -> bool:
        """Read ahead, then work for one slice of time; True if there may be more to read."""
        try:
            more = self.port.read_ahead(self._tracker)
        except Exception as error:
            self._fail(error)
            return False
        self._run()
        return more

    def _run(self) -> None:
        """Work for one slice of time, until there is nothing to do, or until the inbox is full."""
        if self._state != "running":
            return
        deadline = time.perf_counter() + _SLICE_S
        try:
            while not self._inbox.is_full and time.perf_counter() < deadline:
                if not self._step():
                    self._plan()
                    return
        except Exception as error:
            self._fail(error)
            return
        if self._inbox.is_full:
            self._pause()
        else:
            self.port.run_soon()

    def _fail(self, error: Exception) -> None:
        """Close, and pass the error of a callback to the consumer, which would wait for ever."""
        self.close()
        self._inbox.failure = error
        self._inbox.changed.set()

    # The passage of time

    def _plan(self) -> None:
        """Set the timer after all messages were handled."""
        now = self._loop.time()
        gone_at = self._tracker.gone_at
        previous = self._check_at
        self._check_at = None
        if self._tracker.asking is not None:
            self._call_at(self._replay.overdue_at)
        elif self._settings.check_interval is not None and self._replay.endpoint is not None:
            pause = self._settings.check_interval * 2 ** min(self._quiet_checks, _MAX_DOUBLINGS)
            self._check_at = now + min(CHECK_MAX_S, pause)
            if gone_at is not None and self._settings.gone_after_s is not None:
                # Batches of other publishers must not postpone the check of the missing publisher.
                soon = now + self._settings.gone_after_s / 3
                self._check_at = min(self._check_at, soon, previous or soon)
            self._call_at(self._check_at)
        if gone_at is not None:
            self._call_at(gone_at)

    def _call_at(self, due: float) -> None:
        """Set the timer to ``due`` at the latest; moving the timer for every message would be expensive."""
        if self._timer is not None:
            if self._due <= due:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._tick)
        self._due = due

    def _tick(self) -> None:
        """Act on the passage of time."""
        self._timer = None
        self._tracker.forget_gone()
        if self._tracker.asking is not None:
            self._run()  # an answer may be there already: only the loop was late
            if self._is_overdue():
                self._end_wait_for_answer()
                self._run()
            return
        if self._check_at is not None and self._loop.time() >= self._check_at:
            self._quiet_checks += 1
            self._check_at = None
            self._tracker.check()
        elif self._check_at is not None:  # the timer was set for an earlier time
            self._call_at(self._check_at)
            if self._tracker.gone_at is not None:
                self._call_at(self._tracker.gone_at)
            return
        self._run()

    def _is_overdue(self) -> bool:
        is_waiting = self._state == "running" and self._tracker.asking is not None
        return is_waiting and self._loop.time() >= self._replay.overdue_at

    def _end_wait_for_answer(self) -> None:
        self.stats.replay_failures += 1
        reason = self._replay.give_up(self.port.endpoint)
        if reason is not None:
            self._tracker.replay_failed(reason)

    # Messages

    def _step(self) -> bool:
        """Handle one message, live or replayed; False if there is none."""
        tracker = self._tracker
        if self.port.take_reconnection():
            tracker.reconnected()
        start = tracker.asking
        if start is not None:
            if not self._replay.is_asked:
                tracker.asked(self.port.backlog.received)
                self._replay.ask(start)
            return self._read_reply()
        if not self.port.backlog.entries:
            return False
        entry = self.port.backlog.take()
        self._quiet_checks = 0
        try:
            tracker.live(self._decode(wire.parse_live(entry.frames)), entry.connection, entry.number)
        except CodecError as error:
            self._refuse("live", error)
        return True

    def _read_reply(self) -> bool:
        frames = self._replay.receive()
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
            text = "subscriber %s: an event of type %r arrives as an UnknownEvent: %s (logged once)"
            logger.warning(text, self.port.endpoint, unknown.type, unknown.reason)
        self.stats.unknown_events = self._decoder.unknown_events
        return Message(frames.topic, frames.seq, batch, frames.payload)

    def _refuse(self, port: str, error: CodecError) -> None:
        """Count and log a message that cannot be used."""
        self.stats.garbage += 1
        self._tracker.refusal = str(error)
        self._limiter.warn(logger, "subscriber %s: a %s message cannot be used: %s", self.port.endpoint, port, error)
