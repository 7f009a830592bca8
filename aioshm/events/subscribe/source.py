"""One endpoint of a subscriber: a port where live batches come in, and one where missed ones are asked for.

Everything happens in callbacks of the loop, a slice at a time; no task runs. The decisions are the tracker's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import zmq

from aioshm.errors import CodecError
from aioshm.events.protocol import wire
from aioshm.events.protocol.decoding import BatchDecoder, Decoding
from aioshm.events.protocol.deliveries import Lost, Received
from aioshm.events.protocol.messages import KVEventBatch
from aioshm.events.protocol.tracker import Message, SourceTracker, Start
from aioshm.events.stats import SubscriberStats
from aioshm.events.subscribe.backlog import CAME_BACK, Backlog, Inbox
from aioshm.events.subscribe.ports import LivePort, ReplayPort
from aioshm.logs import LogLimiter
from aioshm.process.limits import detach_when_forked
from aioshm.zeromq.endpoint import CurveKeys

logger: logging.Logger = logging.getLogger("aioshm.events")

# A publisher that says nothing is asked whether something was missed after this long, then ever less often.
CHECK_MAX_S = 30.0
_SLICE_S = 0.002
# Refused batches that the reason of a loss can name.
_MAX_REFUSED = 64
_TOO_SLOW = (
    "subscriber %s: %d batches so far were dropped undecoded, because batches come faster than this process decodes "
    "and consumes them: give its loop more processor time, spread the endpoints or topics over several processes, or, "
    "for bursts, pass a larger max_backlog_bytes (dropped batches are replayed, or reported as Lost)"
)

_Where: TypeAlias = Literal["live", "replay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """What all sources of a subscriber have in common; see `EventSubscriber`."""

    topic: str
    start: Start
    hwm: int
    curve: CurveKeys | None
    replay_timeout: float
    check_interval: float | None
    gone_after_s: float | None
    max_backlog_bytes: int


class EventSource:
    """Reads one endpoint on one loop, and puts deliveries into the subscriber's inbox."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        replay_endpoint: str | None,
        options: SourceOptions,
        *,
        bind: bool,
        max_payload_bytes: int,
        inbox: Inbox,
    ) -> None:
        self._loop = loop
        self._context = context
        self._topic = options.topic.encode()
        self._replay_timeout = options.replay_timeout
        self._check_interval = options.check_interval if replay_endpoint is not None else None
        self._gone_after_s = options.gone_after_s
        self._inbox = inbox
        self._decoder = BatchDecoder(max_bytes=max_payload_bytes)
        self._unfinished: tuple[_Where, wire.LiveFrames | wire.ReplayFrames, Decoding] | None = None
        self._limiter = LogLimiter(10.0)
        self._backlog = Backlog(options.max_backlog_bytes)
        self._sender: object = None  # the connection that the last live message came over
        self._dropped = 0  # messages that the backlog had dropped when it was looked at last
        self._drop_limiter = LogLimiter(10.0)
        self._paused = False
        self._again = False
        self._delivered = self._replayed = self._garbage = self._unknown_events = 0
        self._refused: dict[tuple[bytes | None, int], str] = {}  # why, by topic and number
        self._replay = ReplayPort(loop, context, replay_endpoint, options.curve, options.replay_timeout, self._run)
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0  # uvloop's handle does not tell, where it is due at once
        self._overdue: float | None = None
        self._quiet_checks = 0

        self._inherited = False
        self._port = LivePort(
            context,
            endpoint,
            self._topic,
            bind=bind,
            hwm=options.hwm,
            curve=options.curve,
            max_bytes=max_payload_bytes,
            backlog=self._backlog,
        )
        self.endpoint: str = self._port.endpoint
        self._closed = False
        self._tracker = SourceTracker(
            self.endpoint,
            options.start,
            can_replay=replay_endpoint is not None,
            gone_after_s=options.gone_after_s,
        )
        self._port.watch(loop, self._work)
        detach_when_forked(self)

    @property
    def is_connected(self) -> bool:
        """Whether a publisher speaks there."""
        return self._port.connections > 0

    def stats(self) -> SubscriberStats:
        """Return this source's counters."""
        tracker = self._tracker
        return SubscriberStats(
            delivered=self._delivered,
            replayed=self._replayed,
            duplicates=tracker.duplicates,
            gaps=tracker.gaps,
            lost=tracker.lost,
            restarts=tracker.restarts,
            reconnects=self._port.reconnects,
            garbage=self._garbage + tracker.unconfirmed,
            unknown_events=self._unknown_events,
            replay_failures=self._replay.failures,
            handshake_failures=self._port.handshake_failures,
            gone=tracker.gone,
            dropped=self._backlog.dropped,
        )

    def resume(self) -> None:
        """Go on after the inbox was full."""
        if self._paused:
            self._paused = False
            self._replay.resume()
            self._come_back()

    def close(self) -> None:
        """Close the sockets and forget what was not delivered."""
        if self._inherited or self._closed:
            return
        self._closed = True
        self._pause()
        self._replay.close()
        self._unfinished = None
        self._port.close()
        self._backlog.clear()

    def detach_after_fork(self) -> None:
        """Do nothing any more: the sockets, and what the loop waits by, are the parent's."""
        self._inherited = self._paused = True

    def _pause(self) -> None:
        """Decode nothing; a socket that is watched but not read would wake the loop for ever."""
        self._paused = True
        self._set_timer(None)
        self._replay.pause()

    # The loop calls

    def _work(self) -> bool:
        """Read ahead, then work for one slice of time; True if there may be more to read."""
        try:
            more = self._port.read_ahead()
        except Exception as error:
            self._break(error)
            return False
        for reason in self._port.take_refused():
            self._limiter.warn(logger, "subscriber %s: %s", self.endpoint, reason)
        if self._backlog.dropped > self._dropped:
            self._dropped = self._backlog.dropped
            if self._drop_limiter.admit() is not None:
                logger.warning(_TOO_SLOW, self.endpoint, self._dropped)
        if not self._again:
            self._run()
        return more

    def _run(self) -> None:
        """Work for one slice of time, or until there is nothing to do."""
        if self._paused or self._closed:
            return
        try:
            deadline = time.perf_counter() + _SLICE_S
            while self._step():
                if self._paused:
                    return
                if time.perf_counter() > deadline:
                    self._come_back()
                    return
            self._arm()
        except Exception as error:
            self._break(error)

    def _break(self, error: Exception) -> None:
        """Close, and raise an error of a callback at the consumer, who would wait for ever."""
        self.close()
        self._inbox.fail(error)

    def _run_again(self) -> None:
        self._again = False
        self._run()

    def _come_back(self) -> None:
        if not self._again:
            self._again = True
            self._loop.call_soon(self._run_again)

    def _step(self) -> bool:
        """Take one message, live or replayed; False if there is none."""
        if self._hand_out():
            return True
        if self._unfinished is not None:
            self._go_on(*self._unfinished)
            return True
        if self._tracker.asking is None:
            return self._read_live()
        return self._read_reply(self._tracker.asking)

    def _hand_out(self) -> bool:
        """Hand out what the tracker has; True if the consumer wants no more for now."""
        out = self._tracker.out
        while out:
            delivery = out.popleft()
            if isinstance(delivery, Received):
                self._delivered += 1
                self._replayed += delivery.replayed
            elif isinstance(delivery, Lost):
                delivery = self._explained(delivery)
            if not self._inbox.put(delivery):
                self._pause()
                return True
        return False

    # Live

    def _read_live(self) -> bool:
        entry = self._backlog.take()
        if entry is None:
            return False
        connection, frames, _ = entry
        if frames is not None:
            self._quiet_checks = 0
            self._sender = connection
            try:
                live = wire.parse_live(frames)
            except CodecError as error:
                self._complain("live", error)
            else:
                self._take("live", live)
        elif connection is CAME_BACK:
            logger.debug("subscriber %s: connected again", self.endpoint)
            self._quiet_checks = 0
            self._tracker.reconnected()
        else:
            self._tracker.disconnected(connection)
        return True

    # Payloads

    def _take(self, where: _Where, frames: wire.LiveFrames | wire.ReplayFrames) -> None:
        """Decode a batch; one that takes long is gone on with in the next steps."""
        try:
            found = self._decoder.begin(frames.payload)
        except CodecError as error:
            self._refuse(where, frames, error)
            return
        if isinstance(found, Decoding):
            self._unfinished = where, frames, found
        else:
            self._accept(where, frames, found)

    def _go_on(self, where: _Where, frames: wire.LiveFrames | wire.ReplayFrames, decoding: Decoding) -> None:
        batch = decoding.work(time.perf_counter() + _SLICE_S)
        if batch is None:
            return
        self._unfinished = None
        if decoding.unknown is not None:
            if not self._unknown_events:
                logger.warning(
                    "subscriber %s: an event of type %s in batch %d of rank %s is delivered as an UnknownEvent: %s "
                    "(logged once; stats().unknown_events counts them)",
                    self.endpoint,
                    decoding.unknown.type,
                    frames.seq,
                    batch.data_parallel_rank,
                    decoding.unknown.reason,
                )
            self._unknown_events += decoding.unknown_events
        self._replay.heard()
        self._accept(where, frames, batch)

    def _refuse(self, where: _Where, frames: wire.LiveFrames | wire.ReplayFrames, error: CodecError) -> None:
        """Drop a batch that cannot be decoded; a later loss of its number gives the reason."""
        self._complain(where, error)
        self._refused[frames.topic, frames.seq] = str(error)
        if len(self._refused) > _MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    def _explained(self, lost: Lost) -> Lost:
        """Return a loss with the reason for which one of its batches was refused, if one was."""
        for (topic, seq), why in self._refused.items():
            if lost.first <= seq <= lost.last and topic in (lost.source.topic, None):
                others = "" if lost.first == lost.last else f"; for the others: {lost.reason}"
                return replace(lost, reason=f"batch {seq} came and was refused: {why}{others}")
        dropped = self._backlog.dropped_between(lost.source.topic, lost.first, lost.last)
        if dropped is None:
            return lost
        first, last = dropped
        reason = f"this subscriber decodes too slowly: its backlog was full, and it dropped batches {first} to {last}"
        return replace(lost, reason=f"{reason}; they were not replayed: {lost.reason}")

    def _accept(self, where: _Where, frames: wire.LiveFrames | wire.ReplayFrames, batch: KVEventBatch) -> None:
        message = Message(frames.topic, frames.seq, batch, frames.payload)
        try:
            if where == "live":
                self._tracker.live(message, self._sender, self._backlog.taken)
            elif not self._tracker.replayed(message):
                self._replay.ended()
        except CodecError as error:
            self._refuse(where, frames, error)

    # Replay

    def _read_reply(self, start: int) -> bool:
        if not self._replay.is_asked:
            self._tracker.asked(self._backlog.received)
        frames = self._replay.receive(start)
        if frames is None:
            return False
        try:
            reply = wire.parse_reply(frames)
            if reply is None:
                self._replay.ended()
                self._tracker.replay_ended()
                return True
            if reply.topic is not None and not reply.topic.startswith(self._topic):
                return True
        except CodecError as error:
            self._complain("replay", error)
            return True
        self._take("replay", reply)
        return True

    # Time

    def _arm(self) -> None:
        """Set when something is overdue: an answer, a word from a publisher, or one that is missing."""
        now = self._loop.time()
        gone_at = self._tracker.gone_at(now)
        if self._tracker.asking is not None:
            self._overdue = self._replay.overdue_at
        elif self._check_interval is not None:
            due = now + min(CHECK_MAX_S, self._check_interval * 2 ** min(self._quiet_checks, 16))
            if gone_at is not None and self._gone_after_s is not None:
                # Batches of other publishers do not put off the question whether the missing one is there.
                due = min(due, now + self._gone_after_s / 3, self._overdue or due)
            self._overdue = due
        else:
            self._overdue = None
        self._schedule(gone_at)

    def _schedule(self, gone_at: float | None) -> None:
        due = self._overdue
        if gone_at is not None and (due is None or gone_at < due):
            due = gone_at
        # The timer is left alone if it is early, and asks again: setting it anew for every message is dear.
        if due is not None and (self._timer is None or self._timer_at > due):
            self._set_timer(due)

    def _set_timer(self, when: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if when is not None:
            self._timer, self._timer_at = self._loop.call_at(when, self._tick), when

    def _tick(self) -> None:
        self._timer = None
        if self._paused:
            return
        now = self._loop.time()
        self._tracker.forget_gone(now)
        if self._unfinished is not None:  # the answer is here; it is being read
            self._overdue = now + self._replay_timeout
        elif self._tracker.asking is not None:  # much may have been read of it since the timer was set
            self._overdue = self._replay.overdue_at
        if self._overdue is None or now < self._overdue:
            if self._tracker.out:
                self._run()
            else:
                self._schedule(self._tracker.gone_at(now))
            return
        if self._tracker.asking is None:
            self._quiet_checks += 1
            self._overdue = None
            self._tracker.check()
        elif self._replay.has_answer:  # only the loop was late
            self._replay.heard()
        else:
            reason = self._replay.give_up(self.endpoint)
            if reason is not None:
                self._tracker.replay_failed(reason)
            self._come_back()
        self._run()

    def _complain(self, where: str, error: Exception) -> None:
        self._garbage += 1
        endpoint = self._replay.endpoint if where == "replay" else self.endpoint
        self._limiter.warn(logger, "subscriber %s: a %s message cannot be used: %s", endpoint, where, error)
