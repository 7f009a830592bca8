"""What one subscriber knows about one endpoint, and what it does next. No I/O.

Live messages go in with ``live``. As long as ``asking`` is not None, the caller reads no live messages but
sends a replay request from that number, puts the replies in with ``replayed`` and finishes with
``replay_ended`` or ``replay_failed``. Deliveries come out of ``out``, every publisher's in order and without
copies.

A request starts at the number that was delivered *last*, not at the first missing one. The publisher's answer
then begins with a batch that is already known; if it is another one, or if there is none, the publisher has
begun again, even where its numbers happen to go on just where the old one's ended.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal, NamedTuple, TypeAlias

from aioshm.events.protocol.deliveries import Delivery, Lost, Received, Restarted, Source
from aioshm.events.protocol.messages import KVEventBatch
from aioshm.events.protocol.numbering import Numbering, Verdict, fingerprint

Start: TypeAlias = int | Literal["live"] | None


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


@dataclass(slots=True)
class _Job:
    why: _Why
    stream: _Stream | None
    pending: Message | None = None  # the live message that brought this up
    answered: bool = False  # the stream was in the answer
    same: bool = False  # and what it had last is of the publisher that answered
    outdated: bool = False  # a connection came back since: by now there may be another publisher
    disowned: _Stream | None = None  # turned out to be a new publisher: it is asked again, from 0


class SourceTracker:
    """The numbers of all publishers behind one endpoint.

    Attributes:
        out: Deliveries for the consumer; the caller takes them from the left.
        duplicates: Batches that came again.
        gaps: Times that numbers were missing.
        lost: Numbers that were given up.
        restarts: Times that numbers went back.
        unconfirmed: Live batches that the publisher's own replay does not know.
    """

    def __init__(self, endpoint: str, start: Start, *, can_replay: bool) -> None:
        self.out: deque[Delivery] = deque()
        self.duplicates: int = 0
        self.gaps: int = 0
        self.lost: int = 0
        self.restarts: int = 0
        self.unconfirmed: int = 0
        self._endpoint = endpoint
        self._start = start
        self._can_replay = can_replay
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

    def live(self, message: Message) -> None:
        """Take a live message; read no more of them while ``asking`` is not None."""
        stream = self._stream(message)
        if not self._jobs:
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

    def check(self) -> None:
        """Ask the publisher what there is, although nothing seems to be missing."""
        if not self._can_replay or self._jobs:
            return
        streams = [stream for stream in self._streams.values() if stream.numbers.last is not None]
        self._jobs.extend(_Job(_Why.CHECK, stream) for stream in streams)
        if not streams and self._start != "live":
            self._jobs.append(_Job(_Why.BEGIN, None))

    def replayed(self, message: Message) -> None:
        """Take one reply to the request at hand."""
        job = self._jobs[0]
        stream = self._stream(message, job.stream)
        if stream is job.disowned:
            return
        numbers = stream.numbers
        mark = fingerprint(message.payload)
        if stream is job.stream and not job.answered:
            job.answered = True
            if job.why is _Why.SCAN:
                self._begin_again(stream)
            job.same = numbers.last in (None, (message.seq, mark))
            if job.same and numbers.last is not None:
                return  # this is what we had last
        verdict = numbers.judge(message.seq, mark)
        if verdict is Verdict.BACK:
            self._begin_again(stream)
            job.disowned = stream
            self._jobs.insert(1, _Job(_Why.CHECK, stream, job.pending if stream is job.stream else None))
        elif verdict in (Verdict.COPY, Verdict.UNSURE):
            self.duplicates += 1
        else:
            if verdict is Verdict.GAP:
                self._give_up(stream, message.seq, "the publisher's replay buffer does not have them")
            self._deliver(stream, message, mark, replayed=True)

    def replay_ended(self) -> None:
        """Take the end of the answer."""
        job = self._jobs.popleft()
        stream = job.stream
        if stream is None or stream is job.disowned:
            return
        if not job.answered and job.why is _Why.CHECK and stream.numbers.last is not None:
            self._jobs.appendleft(_Job(_Why.SCAN, stream, job.pending))
            return
        if job.pending is not None:
            reason = "the publisher's replay buffer does not have them"
            self._judge_pending(job, stream, job.pending, reason, ended=True)
        elif not job.answered and stream.numbers.last is not None:
            stream.doubted = True

    def replay_failed(self, reason: str) -> None:
        """Note that there will be no answer; go on without it."""
        job = self._jobs.popleft()
        if job.stream is None or job.stream is job.disowned:
            return
        if job.pending is not None:
            self._judge_pending(job, job.stream, job.pending, reason, ended=False)
        else:
            job.stream.doubted = True

    def _judge_pending(self, job: _Job, stream: _Stream, pending: Message, reason: str, *, ended: bool) -> None:
        """Say what a live message means after the answer; it had come before the request was sent."""
        mark = fingerprint(pending.payload)
        verdict = stream.numbers.judge(pending.seq, mark)
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
            first = message.seq if self._start == "live" else self._start or 0
            stream = _Stream(Source(self._endpoint, *key), Numbering(first))
        self._streams[key] = stream
        return stream

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

    def _begin_again(self, stream: _Stream) -> None:
        stream.doubted = False
        self.restarts += 1
        self.out.append(Restarted(stream.source, stream.numbers.begin_again()))
