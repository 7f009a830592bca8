"""State of one subscriber's endpoint: the publishers there, their numbers, and the next action. No I/O.

Live messages go in with ``live``. As long as ``asking`` is not None, the caller sends a replay request from that number
instead, puts the replies in with ``replayed`` and finishes with ``replay_ended`` or ``replay_failed``. Deliveries come
out of ``out``.

A request starts at the number that was delivered *last*, not at the first missing one. The answer of the same process
then begins with a known batch. If it begins with a different batch, or is empty, the publisher has restarted, even if
the new numbers continue exactly where the old ones ended.

If the publisher's replay buffer is short and live messages wait for long, an answer may begin after a waiting live
message. The live messages are then delivered first, and the remaining answer is ignored.

If nobody answers, a batch over a new connection proves nothing: the publisher counts as restarted.

Streams end. A stream is missing while its connection has ended, or while the replay port answers without its batches;
such a stream is no longer requested. ``forget_gone`` reports and forgets streams that are missing for too long.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal, NamedTuple, TypeAlias

from aioshm.errors import CodecError
from aioshm.events.protocol.messages import Delivery, KVEventBatch, Lost, PublisherGone, Received, Restarted, Source

# Publishers of one endpoint, by topic and rank. Above half of this number, silent publishers count as missing, because
# the connection of a proxy never ends. At this number, new publishers are refused: they may be forged.
MAX_STREAMS = 1 << 14
# Delivered numbers whose payload's hash is kept.
REMEMBERED = 2**11

Start: TypeAlias = int | Literal["live"] | None

_NOT_KEPT = "the publisher's replay buffer does not have them"
_UNPROVED = "it has a new connection, and no replay shows that it is the same process"


@dataclass(slots=True)
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


class Message(NamedTuple):
    """A batch with its number, and the payload that the batch was decoded from."""

    topic: bytes | None
    seq: int
    batch: KVEventBatch
    payload: bytes


class Verdict(Enum):
    """The meaning of a number."""

    NEXT = auto()  # the expected number
    GAP = auto()  # numbers before this number are missing
    COPY = auto()  # delivered before
    BACK = auto()  # an old number with new content: the publisher restarted
    UNSURE = auto()  # an old number whose content is no longer known


class _Stream:
    """One publisher's batches, and the consumer's position in their numbers."""

    def __init__(self, source: Source, expected: int) -> None:
        self.source: Source = source
        self.expected: int = expected  # the next number
        # Number and hash of the last delivery; None before the first delivery.
        self.last: tuple[int, int] | None = None
        # Live batches may come from another process, until a replay confirms one of them.
        self.doubted: bool = False
        self.connection: object = None  # connection of the last live batch
        # `connection` is new, and no replay has confirmed that the process is the same.
        self.moved: bool = False
        self.ended: bool = False  # `connection` has ended
        self.absent: bool = False  # the replay port has no batches of this stream: no requests
        # Live messages with a lower arrival number came before a request that was answered since.
        self.covered: int = 0
        self._fingerprints: deque[int] = deque(maxlen=REMEMBERED)  # of the numbers directly before ``expected``

    def judge(self, seq: int, mark: int) -> Verdict:
        """Return the meaning of number ``seq`` whose payload has the hash ``mark``; changes nothing."""
        if seq == self.expected:
            return Verdict.NEXT
        if seq > self.expected:
            return Verdict.GAP
        if self.last is None:
            return Verdict.BACK
        age = self.expected - seq
        if age > len(self._fingerprints):
            return Verdict.UNSURE
        if self._fingerprints[-age] == mark:
            return Verdict.COPY
        return Verdict.BACK

    def accept(self, seq: int, mark: int) -> None:
        """Record that ``seq``, the expected number, has been delivered."""
        assert seq == self.expected
        self._fingerprints.append(mark)
        self.last = (seq, mark)
        self.expected = seq + 1

    def skip_to(self, seq: int) -> None:
        """Give up the numbers before ``seq``."""
        assert seq > self.expected
        self._fingerprints.clear()  # older numbers are UNSURE from now on, never wrongly a copy
        self.expected = seq

    def begin_again(self) -> None:
        """Expect 0, from a new publisher."""
        self.expected = 0
        self.last = None
        self.doubted = False
        self.moved = False
        self._fingerprints.clear()


@dataclass(slots=True)
class _Job:
    """A replay request: is the publisher the same process, and which batches did it send since?"""

    stream: _Stream | None  # None: everything from the start number on
    pending: Message | None = None  # the live message that caused this request
    is_scan: bool = False  # everything: the publisher does not have the last delivered batch
    answered: bool = False  # the answer has batches of the stream
    same: bool = False  # the answering publisher has the last delivered batch
    asked_at: int = 0  # number of live messages that had come when the request was sent
    outdated: bool = False  # a connection came back since: the publisher may be another one by now
    disowned: set[_Stream] = field(default_factory=set)  # streams that are requested again, from their own position


class SourceTracker:
    """The numbers of all publishers behind one endpoint."""

    def __init__(
        self,
        endpoint: str,
        start: Start,
        *,
        can_replay: bool,
        gone_after_s: float | None = None,
        stats: SubscriberStats | None = None,
    ) -> None:
        self.out: deque[Delivery] = deque()  # deliveries for the consumer; the caller takes them from the left
        self.stats: SubscriberStats = stats or SubscriberStats()
        self._endpoint = endpoint
        self._start = start
        self._can_replay = can_replay
        self._gone_after_s = gone_after_s
        self._missing: dict[_Stream, float | None] = {}  # with the time since when, set by the first `gone_at`
        self._streams: dict[tuple[bytes | None, int | None], _Stream] = {}
        self._jobs: deque[_Job] = deque()
        if can_replay and start != "live":
            self._jobs.append(_Job(None))

    @property
    def asking(self) -> int | None:
        """The number from which a replay is wanted now, or None."""
        if not self._jobs:
            return None
        job = self._jobs[0]
        if job.stream is None and isinstance(self._start, int):
            return self._start
        if job.stream is None or job.is_scan:
            return 0
        if job.stream.last is None:
            return job.stream.expected
        return job.stream.last[0]

    def live(self, message: Message, connection: object = 0, arrival: int = 0) -> None:
        """Take a live message that ``arrival`` live messages preceded; read no more while ``asking`` is not None."""
        stream = self._stream(message)
        stream.absent = False
        if self._missing:
            self._missing.pop(stream, None)
        if stream.connection != connection:
            if stream.connection is not None and stream.last is not None:
                stream.moved = True
                stream.doubted = True
            stream.connection = connection
            stream.ended = False
        if arrival < stream.covered:  # the answer would have it, unless its publisher was gone before
            verdict = stream.judge(message.seq, hash(message.payload))
            if verdict in (Verdict.COPY, Verdict.UNSURE):
                self.stats.duplicates += 1
            else:
                self.stats.garbage += 1
        elif not self._jobs:
            self._judge_live(stream, message)
        else:  # a connection came back just before: the message waits for the answer that is requested anyway
            self._jobs.append(_Job(stream, message))

    def reconnected(self) -> None:
        """Record that a broken connection is back: live messages may come from another process."""
        for stream in self._streams.values():
            stream.doubted = self._can_replay
        for job in self._jobs:
            job.outdated = True
        self.check()

    def disconnected(self, connection: object) -> None:
        """Record that a connection ended, after its last message was taken."""
        for stream in self._streams.values():
            if stream.connection in (None, connection):
                stream.connection = connection
                stream.ended = True
                self._missing.setdefault(stream, None)

    def gone_at(self, now: float) -> float | None:
        """Return when the next publisher will have been missing for too long; None if none is missing."""
        if not self._missing or self._gone_after_s is None:
            return None
        for stream, since in self._missing.items():
            if since is None:
                self._missing[stream] = now
        return min(since for since in self._missing.values() if since is not None) + self._gone_after_s

    def forget_gone(self, now: float) -> None:
        """Report and forget the publishers that have been missing for too long."""
        due = self.gone_at(now)
        if due is None or due > now:
            return
        for stream, since in list(self._missing.items()):
            assert since is not None
            assert self._gone_after_s is not None
            if since + self._gone_after_s > now:
                continue
            if any(job.stream is stream and job.pending is not None for job in self._jobs):
                self._missing[stream] = now  # one of its batches waits for an answer
                continue
            self._forget(stream)
            self.stats.gone += 1
            self.out.append(PublisherGone(stream.source, stream.expected, now - since))

    def check(self) -> None:
        """Request a replay of every stream, although nothing seems to be missing."""
        if not self._can_replay or self._jobs:
            return
        streams = [stream for stream in self._streams.values() if stream.last is not None and not stream.absent]
        self._jobs.extend(_Job(stream) for stream in streams)
        if not streams and self._start != "live":
            self._jobs.append(_Job(None))

    def asked(self, arrivals: int) -> None:
        """Note that the current replay request is sent now; ``arrivals``: live messages received so far."""
        self._jobs[0].asked_at = arrivals

    def replayed(self, message: Message) -> bool:
        """Take one reply to the current request; False if the remaining answer is not wanted."""
        job = self._jobs[0]
        stream = self._stream(message, job.stream)
        if stream.absent and stream is not job.stream:  # back: the answer to its own request identifies the process
            self._ask_again(job, stream)
        self._confirm(stream)
        if stream in job.disowned:
            return True
        mark = hash(message.payload)
        if stream is job.stream and not job.answered:
            pending = job.pending
            if pending is not None and not stream.doubted and stream.expected <= pending.seq < message.seq:
                self._jobs.popleft()
                self._settle(stream, pending, hash(pending.payload), _NOT_KEPT)
                return False
            job.answered = True
            if job.is_scan:
                self._begin_again(stream)
            job.same = stream.last in (None, (message.seq, mark))
            if job.same and stream.last is not None:
                return True  # the last delivered batch
        verdict = stream.judge(message.seq, mark)
        if verdict is Verdict.BACK:
            self._begin_again(stream)
            self._ask_again(job, stream)
        elif verdict is Verdict.GAP and stream is not job.stream and (self.asking or 0) > stream.expected:
            self._ask_again(job, stream)  # the request was for another stream, and began after this stream's next batch
        elif verdict in (Verdict.COPY, Verdict.UNSURE):
            self.stats.duplicates += 1
        else:
            if verdict is Verdict.GAP:
                self._give_up(stream, message.seq, _NOT_KEPT)
            self._deliver(stream, message, mark, replayed=True)
        return True

    def replay_ended(self) -> None:
        """Take the end of the answer."""
        job = self._jobs.popleft()
        stream = job.stream
        if stream is None or stream in job.disowned:
            return
        if not job.answered and not job.is_scan and stream.last is not None:
            self._jobs.appendleft(_Job(stream, job.pending, is_scan=True))
            return
        if job.answered:
            stream.covered = job.asked_at
        if job.pending is not None:
            self._judge_pending(job, stream, job.pending, _NOT_KEPT, ended=True)
        elif not job.answered and stream.last is not None:
            stream.doubted = True
            stream.absent = True
            self._missing.setdefault(stream, None)

    def replay_failed(self, reason: str) -> None:
        """Record that there will be no answer, and continue without it."""
        job = self._jobs.popleft()
        if job.stream is None or job.stream in job.disowned:
            return
        if job.pending is not None:
            self._judge_pending(job, job.stream, job.pending, reason, ended=False)
        else:
            job.stream.doubted = True

    def _judge_pending(self, job: _Job, stream: _Stream, pending: Message, reason: str, *, ended: bool) -> None:
        """Judge a live message after the answer to the request that the message caused."""
        mark = hash(pending.payload)
        verdict = stream.judge(pending.seq, mark)
        if job.answered:
            stream.moved = False
        if verdict is Verdict.COPY or (job.answered and verdict is Verdict.UNSURE):
            self.stats.duplicates += 1
            if verdict is Verdict.COPY and (job.answered or not ended):  # without an answer, more requests are useless
                stream.doubted = job.outdated
        elif job.answered and ended and verdict in (Verdict.GAP, Verdict.NEXT):
            self.stats.garbage += 1  # a complete answer of its publisher would have it
        elif job.same and verdict is Verdict.BACK:
            self.stats.garbage += 1  # of a publisher that was gone before the answer
        else:
            self._settle(stream, pending, mark, reason)
            stream.doubted = job.outdated

    def _stream(self, message: Message, asked: _Stream | None = None) -> _Stream:
        """Find or create the stream of a message.

        Old replay ports send no topic: such a reply belongs to the requested stream if the rank
        fits, or else to the only stream of that rank; the first live message then reveals the topic.
        """
        rank = message.batch.data_parallel_rank
        key = (message.topic, rank)
        stream = self._streams.get(key)
        if stream is not None:
            return stream
        if message.topic is None:
            if asked is not None and asked.source.rank == rank:
                return asked
            of_rank = [known for known in self._streams.values() if known.source.rank == rank]
            if len(of_rank) == 1:
                return of_rank[0]
        elif (None, rank) in self._streams:
            stream = self._streams.pop((None, rank))  # keeps its source, by which consumers know the stream
        if stream is None:
            self._make_room()
            first = 0
            if isinstance(self._start, int):
                first = self._start
            elif self._start == "live":
                first = message.seq
            stream = _Stream(Source(self._endpoint, *key), first)
        self._streams[key] = stream
        return stream

    def _make_room(self) -> None:
        count = len(self._streams)
        if count >= MAX_STREAMS // 2 and not self._missing:
            self._missing = dict.fromkeys(self._streams.values())  # until the next message of each
        if count >= MAX_STREAMS:
            raise CodecError(f"this endpoint has {count} publishers, by topic and rank: no more are accepted")

    def _ask_again(self, job: _Job, stream: _Stream) -> None:
        """Ignore the stream in the remaining answer, and request the stream next."""
        job.disowned.add(stream)
        pending = job.pending if stream is job.stream else None
        self._jobs.insert(1, _Job(stream, pending))

    def _confirm(self, stream: _Stream) -> None:
        """Record that the replay port has batches of a stream."""
        stream.absent = False
        if stream not in self._missing:
            return
        if stream.ended:
            self._missing[stream] = None  # the time restarts: answers alone do not show when a publisher ends
        else:
            del self._missing[stream]

    def _forget(self, stream: _Stream) -> None:
        del self._missing[stream]
        self._streams = {key: known for key, known in self._streams.items() if known is not stream}
        kept: deque[_Job] = deque()
        for position, job in enumerate(self._jobs):
            if position == 0 and job.stream is stream:
                job.stream = None  # the request is already sent
            if position == 0 or job.stream is not stream:
                kept.append(job)
        self._jobs = kept

    def _judge_live(self, stream: _Stream, message: Message) -> None:
        mark = hash(message.payload)
        verdict = stream.judge(message.seq, mark)
        if verdict is Verdict.GAP:
            self.stats.gaps += 1
        if self._can_replay and (stream.doubted or verdict in (Verdict.GAP, Verdict.UNSURE)):
            self._jobs.append(_Job(stream, message))
        elif self._can_replay and verdict is Verdict.COPY:
            self.stats.duplicates += 1
        elif self._can_replay and verdict is Verdict.BACK:
            self._begin_again(stream)
            self._judge_live(stream, message)
        else:
            self._settle(stream, message, mark, "no replay endpoint was given")

    def _settle(self, stream: _Stream, message: Message, mark: int, reason: str) -> None:
        """Deliver a live message without replay: missing numbers are lost, and older numbers mean a restart."""
        if message.seq < stream.expected:
            self._begin_again(stream)
        elif stream.moved:
            self._begin_again(stream, _UNPROVED)
        if message.seq > stream.expected:
            self._give_up(stream, message.seq, reason)
        self._deliver(stream, message, mark, replayed=False)

    def _deliver(self, stream: _Stream, message: Message, mark: int, *, replayed: bool) -> None:
        if replayed and stream.last is None:  # live messages of an older process may still come
            stream.doubted = True
        stream.accept(message.seq, mark)
        self.stats.delivered += 1
        self.stats.replayed += replayed
        self.out.append(Received(stream.source, message.seq, message.batch, message.payload, replayed))

    def _give_up(self, stream: _Stream, before: int, reason: str) -> None:
        self.stats.lost += before - stream.expected
        self.out.append(Lost(stream.source, stream.expected, before - 1, reason))
        stream.skip_to(before)

    def _begin_again(self, stream: _Stream, reason: str = "its numbers went back") -> None:
        self.stats.restarts += 1
        self.out.append(Restarted(stream.source, stream.expected, reason))
        stream.begin_again()
