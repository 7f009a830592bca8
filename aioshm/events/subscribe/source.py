"""One endpoint of a subscriber: receives live batches and requests missed ones.

Everything happens in callbacks of the loop, in slices of time; no task runs. `SourceTracker` decides.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import zmq

from aioshm.errors import CodecError
from aioshm.events.config import SubscriberSettings
from aioshm.events.protocol import wire
from aioshm.events.protocol.encoding import BatchDecoder
from aioshm.events.protocol.messages import KVEventBatch, Lost, Received, UnknownEvent
from aioshm.events.protocol.tracker import Message, SourceTracker
from aioshm.events.subscribe.backlog import RECONNECTED, Inbox
from aioshm.events.subscribe.ports import LivePort, ReplayPort
from aioshm.logs import LogLimiter
from aioshm.process.limits import detach_when_forked

logger: logging.Logger = logging.getLogger("aioshm.events")

# A silent publisher is checked after the check interval, then ever less often, down to this interval.
CHECK_MAX_S = 30.0
_MAX_DOUBLINGS = 16
_SLICE_S = 0.002


@dataclass(frozen=True, slots=True)
class SubscriberStats:
    """Counters of a subscriber, over all its sources.

    Attributes:
        delivered: Batches returned to the consumer, or ready for it.
        replayed: Delivered batches that came from a replay port.
        duplicates: Batches that arrived again and were dropped.
        gaps: Times that numbers were missing and a replay, if there is one, was requested.
        lost: Numbers that were reported as lost.
        restarts: Times that a publisher restarted, or may have.
        reconnects: Connections that broke and came back.
        garbage: Malformed messages, and messages that the publisher's own replay does not confirm.
        unknown_events: Events of unknown types and malformed events; each is delivered as an `UnknownEvent`.
        replay_failures: Replay requests without a complete answer in time.
        handshake_failures: Connections that ended before their handshake: no ZeroMQ, wrong keys, or closed.
        gone: Publishers that were reported as gone.
        dropped: Messages that this subscriber dropped undecoded, because messages came faster than it decodes. Their
            numbers are replayed, or reported as lost.
    """

    delivered: int = 0
    replayed: int = 0
    duplicates: int = 0
    gaps: int = 0
    lost: int = 0
    restarts: int = 0
    reconnects: int = 0
    garbage: int = 0
    unknown_events: int = 0
    replay_failures: int = 0
    handshake_failures: int = 0
    gone: int = 0
    dropped: int = 0


class _Intake:
    """Decodes payloads, and remembers why batches were refused."""

    def __init__(self, endpoint: str, max_payload_bytes: int) -> None:
        self.garbage: int = 0
        self.decoder: BatchDecoder = BatchDecoder(max_bytes=max_payload_bytes)
        self._endpoint = endpoint
        self._limiter = LogLimiter(10.0)
        self._last_refusal = ""

    def decode(self, frames: wire.Frames) -> KVEventBatch:
        """Decode a batch, or raise CodecError; log the first unknown event."""
        before = self.decoder.unknown_events
        batch = self.decoder.decode(frames.payload)
        if self.decoder.unknown_events and not before:
            unknown = next(event for event in batch.events if isinstance(event, UnknownEvent))
            logger.warning(
                "subscriber %s: an event of type %s in batch %d of rank %s is delivered as an UnknownEvent: %s "
                "(logged once; stats().unknown_events counts them)",
                self._endpoint,
                unknown.type,
                frames.seq,
                batch.data_parallel_rank,
                unknown.reason,
            )
        return batch

    def refuse(self, port: str, error: CodecError) -> None:
        """Count and log a message that cannot be used."""
        self.garbage += 1
        self._last_refusal = str(error)
        self._limiter.warn(logger, "subscriber %s: a %s message cannot be used: %s", self._endpoint, port, error)

    def explain(self, lost: Lost, dropped: int) -> Lost:
        """Return a loss with more reasons, if this subscriber refused messages, or ``dropped`` some undecoded."""
        reason = lost.reason
        if self.garbage:
            reason += f"; this subscriber refused {self.garbage} messages so far, the last one: {self._last_refusal}"
        if dropped:
            reason += f"; its backlog was full, and it dropped {dropped} batches so far: it decodes too slowly"
        return replace(lost, reason=reason)


class _Schedule:
    """When a source acts without a message: an answer is overdue, or a publisher is silent or missing."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        check_interval: float | None,
        gone_after_s: float | None,
        act: Callable[[], None],
    ) -> None:
        self.overdue: float | None = None  # loop time of the next check, or of the end of an answer's timeout
        self.quiet_checks: int = 0  # checks since the last message
        self._loop = loop
        self._check_interval = check_interval
        self._gone_after_s = gone_after_s
        self._act = act
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0  # uvloop's handles do not have the time of an immediate call

    def plan(self, answer_due: float | None, gone_at: float | None) -> None:
        """Plan the next action after all messages were handled."""
        self.overdue, previous = answer_due, self.overdue
        if answer_due is None and self._check_interval is not None:
            now = self._loop.time()
            due = now + min(CHECK_MAX_S, self._check_interval * 2 ** min(self.quiet_checks, _MAX_DOUBLINGS))
            if gone_at is not None and self._gone_after_s is not None:
                # Batches of other publishers must not postpone the check of the missing publisher.
                due = min(due, now + self._gone_after_s / 3, previous or due)
            self.overdue = due
        self.set_timer(gone_at)

    def set_timer(self, gone_at: float | None) -> None:
        """Set the timer, unless it is set for an earlier time; moving it for every message would be expensive."""
        due = self.overdue
        if gone_at is not None and (due is None or gone_at < due):
            due = gone_at
        if due is not None and (self._timer is None or self._timer_at > due):
            self.cancel()
            self._timer = self._loop.call_at(due, self._call)
            self._timer_at = due

    def cancel(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _call(self) -> None:
        self._timer = None
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
        can_replay = replay_endpoint is not None
        check_interval = settings.check_interval if can_replay else None
        self.delivered: int = 0
        self.replayed: int = 0
        self._loop = loop
        self._topic = settings.topic.encode()
        self._inbox = inbox
        self._state: Literal["running", "paused", "closed"] = "running"
        self._again = False  # whether `_run_again` is scheduled
        self._replay = ReplayPort(loop, context, replay_endpoint, settings, self._run)
        self._schedule = _Schedule(loop, check_interval, settings.gone_after_s, self._tick)
        self._port = LivePort(context, endpoint, self._topic, settings)
        self.endpoint: str = self._port.endpoint
        self._intake = _Intake(self.endpoint, settings.payload_limit(endpoint))
        self._tracker = SourceTracker(
            self.endpoint, settings.start, can_replay=can_replay, gone_after_s=settings.gone_after_s
        )
        self._port.watch(loop, self._work)
        detach_when_forked(self)

    @property
    def is_connected(self) -> bool:
        """Whether a publisher is connected."""
        return self._port.connections > 0

    def stats(self) -> SubscriberStats:
        """Return this source's counters."""
        tracker = self._tracker
        return SubscriberStats(
            delivered=self.delivered,
            replayed=self.replayed,
            duplicates=tracker.duplicates,
            gaps=tracker.gaps,
            lost=tracker.lost,
            restarts=tracker.restarts,
            reconnects=self._port.monitor.reconnects,
            garbage=self._intake.garbage + tracker.unconfirmed,
            unknown_events=self._intake.decoder.unknown_events,
            replay_failures=self._replay.failures,
            handshake_failures=self._port.monitor.handshake_failures,
            gone=tracker.gone,
            dropped=self._port.backlog.dropped,
        )

    def resume(self) -> None:
        """Continue after the inbox was full."""
        if self._state == "paused":
            self._state = "running"
            self._replay.resume()
            self._run_soon()

    def close(self) -> None:
        """Close the sockets and drop undelivered batches."""
        if self._state == "closed":
            return
        self._pause()
        self._state = "closed"
        self._replay.close()
        self._port.close()
        self._port.backlog.clear()

    def detach_after_fork(self) -> None:
        """Become useless in a forked child: the sockets, and the loop's epoll descriptor, belong to the parent."""
        self._state = "closed"

    def _pause(self) -> None:
        """Stop decoding, and stop watching the replay socket: a watched socket that is not read busies the loop."""
        self._state = "paused"
        self._schedule.cancel()
        self._replay.pause()

    # Callbacks of the loop

    def _work(self) -> bool:
        """Read ahead, then work for one slice of time; True if there may be more to read."""
        try:
            more = self._port.read_ahead()
        except Exception as error:
            self._fail(error)
            return False
        if not self._again:
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
                    self._run_soon()
                    return
            answer_due = None
            if self._tracker.asking is not None:
                answer_due = self._replay.overdue_at
            self._schedule.plan(answer_due, self._tracker.gone_at(self._loop.time()))
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Close, and pass the error of a callback to the consumer, which would wait for ever."""
        self.close()
        self._inbox.fail(error)

    def _run_again(self) -> None:
        self._again = False
        self._run()

    def _run_soon(self) -> None:
        if not self._again:
            self._again = True
            self._loop.call_soon(self._run_again)

    def _tick(self) -> None:
        """Act on the passage of time."""
        if self._state != "running":
            return
        schedule = self._schedule
        tracker = self._tracker
        now = self._loop.time()
        tracker.forget_gone(now)
        if tracker.asking is not None:  # replies may have arrived since the timer was set
            schedule.overdue = self._replay.overdue_at
        if schedule.overdue is None or now < schedule.overdue:
            if tracker.out:
                self._run()
            else:
                schedule.set_timer(tracker.gone_at(now))
            return
        if tracker.asking is None:
            schedule.quiet_checks += 1
            schedule.overdue = None
            tracker.check()
        elif self._replay.has_answer:  # only the loop was late
            self._replay.restart_timeout()
        else:
            reason = self._replay.give_up(self.endpoint)
            if reason is not None:
                tracker.replay_failed(reason)
            self._run_soon()
        self._run()

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
            if isinstance(delivery, Received):
                self.delivered += 1
                self.replayed += delivery.replayed
            elif isinstance(delivery, Lost):
                delivery = self._intake.explain(delivery, self._port.backlog.dropped)
            if not self._inbox.put(delivery):
                self._pause()
                return True
        return False

    def _read_live(self) -> bool:
        entry = self._port.backlog.take()
        if entry is None:
            return False
        connection, frames, _ = entry
        if frames is not None:
            self._schedule.quiet_checks = 0
            backlog = self._port.backlog
            try:
                self._tracker.live(self._decode(wire.parse_live(frames)), backlog.sender, backlog.arrival)
            except CodecError as error:
                self._intake.refuse("live", error)
        elif connection is RECONNECTED:
            logger.debug("subscriber %s: connected again", self.endpoint)
            self._schedule.quiet_checks = 0
            self._tracker.reconnected()
        else:
            self._tracker.disconnected(connection)
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
            elif reply.topic is None or reply.topic.startswith(self._topic):
                is_wanted = self._tracker.replayed(self._decode(reply))
                if not is_wanted:
                    self._replay.ended()
        except CodecError as error:
            self._intake.refuse("replay", error)
        return True

    def _decode(self, frames: wire.Frames) -> Message:
        batch = self._intake.decode(frames)
        return Message(frames.topic, frames.seq, batch, frames.payload)
