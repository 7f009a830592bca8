"""What one subscriber knows about one endpoint, and what it does next. No I/O.

Live messages go in with ``live``. As long as ``asking`` is not None, the caller reads no live messages but
sends a replay request from that number, puts the replies in with ``replayed`` and finishes with
``replay_ended`` or ``replay_failed``. Deliveries come out of ``out``, every publisher's in order and without
copies.

A request starts at the number that was delivered *last*, not at the first missing one. The publisher's answer
then begins with a batch that is already known; if it is another one, or if there is none, the publisher has
begun again, even where its numbers happen to go on just where the old one's ended.

An answer may begin behind a live message that waits for it, where the publisher's replay buffer is short and live
messages wait for long. The live messages then go first, and the rest of the answer is not wanted.

Without an answer, a batch over a new connection proves nothing: the publisher counts as begun again.

Streams end. A stream is missing while its connection has ended, or its replay port answers without it; the port is then
asked for the streams that it has, not for this one. ``forget_gone`` reports and forgets what is missing for too long.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal, NamedTuple, TypeAlias

from aioshm.errors import CodecError
from aioshm.events.protocol.deliveries import Delivery, Lost, PublisherGone, Received, Restarted, Source
from aioshm.events.protocol.messages import KVEventBatch
from aioshm.events.protocol.numbering import Numbering, Verdict, fingerprint

# Publishers of one endpoint, by topic and rank. From half as many on, silent ones are taken for gone, as behind a proxy
# whose connection never ends; beyond it new ones are refused, as from strangers.
MAX_STREAMS = 1 << 14

Start: TypeAlias = int | Literal["live"] | None

_NOT_KEPT = "the publisher's replay buffer does not have them"
_UNPROVED = "it has a new connection, and no replay shows that it is the same process"


class Message(NamedTuple):
    """A batch with its number and what it was decoded from."""

    topic: bytes | None
    seq: int
    batch: KVEventBatch
    payload: bytes


class _Why(Enum):
    BEGIN = auto()  # whatever there is, from the start
    CHECK = auto()  # is the publisher still the same, and what did it send since
    SCAN = auto()  # it does not have what we had last: what does it have


@dataclass(eq=False, slots=True)
class _Stream:
    source: Source
    numbers: Numbering
    doubted: bool = False  # what comes live may be another publisher's, until one batch of it is known to be its own
    connection: object = None  # the one that its last live batch came over
    moved: bool = False  # that one is new, and no replay has shown that the process is the same
    ended: bool = False  # that one has ended
    absent: bool = False  # the replay port has nothing of it, and is not asked for it
    covered: int = 0  # live messages with lower numbers of arrival came before a question that was answered since


@dataclass(slots=True)
class _Job:
    why: _Why
    stream: _Stream | None
    pending: Message | None = None  # the live message that brought this up
    answered: bool = False  # the stream was in the answer
    same: bool = False  # and what it had last is of the publisher that answered
    asked_at: int = 0  # so many live messages had come when it was asked
    outdated: bool = False  # a connection came back since: by now there may be another publisher
    disowned: set[_Stream] = field(default_factory=set)  # each is asked for again, from where it stands


class SourceTracker:
    """The numbers of all publishers behind one endpoint."""

    def __init__(self, endpoint: str, start: Start, *, can_replay: bool, gone_after_s: float | None = None) -> None:
        self.out: deque[Delivery] = deque()  # deliveries for the consumer; the caller takes them from the left
        self.duplicates: int = 0  # batches that came again
        self.gaps: int = 0  # times that numbers were missing
        self.lost: int = 0  # numbers that were given up
        self.restarts: int = 0  # times that a publisher began again, or may have
        self.unconfirmed: int = 0  # live batches that the publisher's own replay does not know
        self.gone: int = 0  # publishers that were reported as gone
        self._endpoint = endpoint
        self._start = start
        self._can_replay = can_replay
        self._gone_after_s = gone_after_s
        self._missing: dict[_Stream, float | None] = {}  # and since when, once `gone_at` was asked
        self._streams: dict[tuple[bytes | None, int | None], _Stream] = {}
        self._jobs: deque[_Job] = deque()
        if can_replay and start != "live":
            self._jobs.append(_Job(_Why.BEGIN, None))

    @property
    def asking(self) -> int | None:
        """The number from which a replay is wanted now, or None."""
        if not self._jobs:
            return None
        job = self._jobs[0]
        if job.stream is None:
            return self._start if isinstance(self._start, int) else 0
        numbers = job.stream.numbers
        if job.why is _Why.SCAN or numbers.last is None:
            return 0 if job.why is _Why.SCAN else numbers.expected
        return numbers.last[0]

    def live(self, message: Message, connection: object = 0, arrival: int = 0) -> None:
        """Take a live message, before which ``arrival`` others came; read no more while ``asking`` is not None."""
        stream = self._stream(message)
        stream.absent = False
        if self._missing:
            self._missing.pop(stream, None)
        if stream.connection != connection:
            if stream.connection is not None and stream.numbers.last is not None:
                stream.moved = True
                stream.doubted = True
            stream.connection = connection
            stream.ended = False
        if arrival < stream.covered:  # the answer would have had it, unless its publisher was gone before
            verdict = stream.numbers.judge(message.seq, fingerprint(message.payload))
            if verdict in (Verdict.COPY, Verdict.UNSURE):
                self.duplicates += 1
            else:
                self.unconfirmed += 1
        elif not self._jobs:
            self._judge_live(stream, message)
        else:  # a connection came back just before it: it waits for the answer that is asked for anyway
            self._jobs.append(_Job(_Why.CHECK, stream, message))

    def reconnected(self) -> None:
        """Note that a connection broke and is back: other messages may follow than would have."""
        for stream in self._streams.values():
            stream.doubted = self._can_replay
        for job in self._jobs:
            job.outdated = True
        self.check()

    def disconnected(self, connection: object) -> None:
        """Note that a connection ended, and that all its messages were taken."""
        for stream in self._streams.values():
            if stream.connection in (None, connection):
                stream.connection = connection
                stream.ended = True
                self._missing.setdefault(stream, None)

    def gone_at(self, now: float) -> float | None:
        """Return when the next publisher will have been missing for too long; None if there is none."""
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
                self._missing[stream] = now  # a batch of it waits for an answer
                continue
            self._forget(stream)
            self.gone += 1
            self.out.append(PublisherGone(stream.source, stream.numbers.expected, now - since))

    def check(self) -> None:
        """Ask the publisher what there is, although nothing seems to be missing."""
        if not self._can_replay or self._jobs:
            return
        streams = [stream for stream in self._streams.values() if stream.numbers.last is not None and not stream.absent]
        self._jobs.extend(_Job(_Why.CHECK, stream) for stream in streams)
        if not streams and self._start != "live":
            self._jobs.append(_Job(_Why.BEGIN, None))

    def asked(self, arrivals: int) -> None:
        """Note that the request at hand is sent now, when so many live messages have come."""
        self._jobs[0].asked_at = arrivals

    def replayed(self, message: Message) -> bool:
        """Take one reply to the request at hand; False if the rest of the answer is not wanted."""
        job = self._jobs[0]
        stream = self._stream(message, job.stream)
        if stream.absent and stream is not job.stream:  # it is back: its own answer shows as which process
            self._ask_again(job, stream)
        self._confirm(stream)
        if stream in job.disowned:
            return True
        numbers = stream.numbers
        mark = fingerprint(message.payload)
        if stream is job.stream and not job.answered:
            pending = job.pending
            if pending is not None and not stream.doubted and numbers.expected <= pending.seq < message.seq:
                self._jobs.popleft()
                self._settle(stream, pending, fingerprint(pending.payload), _NOT_KEPT)
                return False
            job.answered = True
            if job.why is _Why.SCAN:
                self._begin_again(stream)
            job.same = numbers.last in (None, (message.seq, mark))
            if job.same and numbers.last is not None:
                return True  # this is what we had last
        verdict = numbers.judge(message.seq, mark)
        if verdict is Verdict.BACK:
            self._begin_again(stream)
            self._ask_again(job, stream)
        elif verdict is Verdict.GAP and stream is not job.stream and (self.asking or 0) > numbers.expected:
            self._ask_again(job, stream)  # the question was about another stream, and began behind this one's next
        elif verdict in (Verdict.COPY, Verdict.UNSURE):
            self.duplicates += 1
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
        if not job.answered and job.why is _Why.CHECK and stream.numbers.last is not None:
            self._jobs.appendleft(_Job(_Why.SCAN, stream, job.pending))
            return
        if job.answered:
            stream.covered = job.asked_at
        if job.pending is not None:
            self._judge_pending(job, stream, job.pending, _NOT_KEPT, ended=True)
        elif not job.answered and stream.numbers.last is not None:
            stream.doubted = True
            stream.absent = True
            self._missing.setdefault(stream, None)

    def replay_failed(self, reason: str) -> None:
        """Note that there will be no answer; go on without it."""
        job = self._jobs.popleft()
        if job.stream is None or job.stream in job.disowned:
            return
        if job.pending is not None:
            self._judge_pending(job, job.stream, job.pending, reason, ended=False)
        else:
            job.stream.doubted = True

    def _judge_pending(self, job: _Job, stream: _Stream, pending: Message, reason: str, *, ended: bool) -> None:
        """Say what a live message means after the answer; it had come before the request was sent."""
        mark = fingerprint(pending.payload)
        verdict = stream.numbers.judge(pending.seq, mark)
        if job.answered:
            stream.moved = False
        if verdict is Verdict.COPY or (job.answered and verdict is Verdict.UNSURE):
            self.duplicates += 1
            if verdict is Verdict.COPY and (job.answered or not ended):  # where nobody answers, asking on is no use
                stream.doubted = job.outdated
        elif job.answered and ended and verdict in (Verdict.GAP, Verdict.NEXT):
            self.unconfirmed += 1  # a whole answer of its publisher would have had it
        elif job.same and verdict is Verdict.BACK:
            self.unconfirmed += 1  # of a publisher that was gone before the answer
        else:
            self._settle(stream, pending, mark, reason)
            stream.doubted = job.outdated

    def _stream(self, message: Message, asked: _Stream | None = None) -> _Stream:
        """Find the stream that a message belongs to, or begin one.

        Old replay ports send no topic: such a reply belongs to the stream that was asked for, if the rank
        fits, or to the one stream of that rank; the first live message then tells the topic.
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
            stream = self._streams.pop((None, rank))  # its source stays as it is: consumers know it by that
        if stream is None:
            self._make_room()
            first = message.seq if self._start == "live" else self._start or 0
            stream = _Stream(Source(self._endpoint, *key), Numbering(first))
        self._streams[key] = stream
        return stream

    def _make_room(self) -> None:
        count = len(self._streams)
        if count >= MAX_STREAMS // 2 and not self._missing:
            self._missing = dict.fromkeys(self._streams.values())  # until the next message of each
        if count >= MAX_STREAMS:
            raise CodecError(f"{count} publishers are known at this endpoint, by topic and rank, and no more are taken")

    def _ask_again(self, job: _Job, stream: _Stream) -> None:
        """Ignore the rest of an answer as to a stream, and ask for that stream next."""
        job.disowned.add(stream)
        self._jobs.insert(1, _Job(_Why.CHECK, stream, job.pending if stream is job.stream else None))

    def _confirm(self, stream: _Stream) -> None:
        """Note that the replay port has something of a stream."""
        stream.absent = False
        if stream not in self._missing:
            return
        if stream.ended:
            self._missing[stream] = None  # counted anew: answers alone do not tell when a publisher ends
        else:
            del self._missing[stream]

    def _forget(self, stream: _Stream) -> None:
        del self._missing[stream]
        self._streams = {key: known for key, known in self._streams.items() if known is not stream}
        asked, others = list(self._jobs)[:1], list(self._jobs)[1:]
        for job in asked:
            if job.stream is stream:
                job.stream = None
        self._jobs = deque(asked + [job for job in others if job.stream is not stream])

    def _judge_live(self, stream: _Stream, message: Message) -> None:
        mark = fingerprint(message.payload)
        verdict = stream.numbers.judge(message.seq, mark)
        if verdict is Verdict.GAP:
            self.gaps += 1
        if self._can_replay and (stream.doubted or verdict in (Verdict.GAP, Verdict.UNSURE)):
            self._jobs.append(_Job(_Why.CHECK, stream, message))
        elif self._can_replay and verdict is Verdict.COPY:
            self.duplicates += 1
        elif self._can_replay and verdict is Verdict.BACK:
            self._begin_again(stream)
            self._judge_live(stream, message)
        else:
            self._settle(stream, message, mark, "no replay endpoint was given")

    def _settle(self, stream: _Stream, message: Message, mark: int, reason: str) -> None:
        """Deliver a live message where there is no replay: what is missing is lost, what goes back is new."""
        if message.seq < stream.numbers.expected:
            self._begin_again(stream)
        elif stream.moved:
            self._begin_again(stream, _UNPROVED)
        if message.seq > stream.numbers.expected:
            self._give_up(stream, message.seq, reason)
        self._deliver(stream, message, mark, replayed=False)

    def _deliver(self, stream: _Stream, message: Message, mark: int, *, replayed: bool) -> None:
        if replayed and stream.numbers.last is None:  # others' may lie there, and come before its own
            stream.doubted = True
        stream.numbers.accept(message.seq, mark)
        self.out.append(Received(stream.source, message.seq, message.batch, message.payload, replayed))

    def _give_up(self, stream: _Stream, before: int, reason: str) -> None:
        first, last = stream.numbers.skip_to(before)
        self.lost += last - first + 1
        self.out.append(Lost(stream.source, first, last, reason))

    def _begin_again(self, stream: _Stream, reason: str = "its numbers went back") -> None:
        stream.doubted = False
        stream.moved = False
        self.restarts += 1
        self.out.append(Restarted(stream.source, stream.numbers.begin_again(), reason))
