"""State of one subscriber's endpoint: the publishers there, their numbers, and the next action. No I/O.

Live messages go in with ``live``. As long as ``asking`` is not None, the caller sends a replay request from that number
instead (``asked``), puts the replies in with ``replayed`` and finishes with ``replay_ended`` or ``replay_failed``.

A request starts at the number that was delivered *last*, not at the first missing one. The answer of the same process
then begins with a known batch. If it begins with a different batch, or is empty, the publisher has restarted, even if
the new numbers continue exactly where the old ones ended. A stream whose last batch is older than the request is
requested again, from its own last batch.

If the publisher's replay buffer is short and live messages wait for long, an answer may begin after a waiting live
message. The live messages are then delivered first, and the remaining answer is ignored.

If nobody answers, a batch over a new connection proves nothing: the publisher counts as restarted.

Streams end. A stream is missing while its connection has ended, or while the replay port answers without its batches;
such a stream is no longer requested. ``forget_gone`` reports and forgets streams that are missing for too long.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
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


@dataclass(eq=False, slots=True)
class Connection:
    """A connection over which live messages come."""

    ended: bool = False


# A number is the expected one; numbers before it are missing; it was delivered before; it is an old number with new
# content, so the publisher restarted; or it is an old number whose content is no longer known.
Verdict: TypeAlias = Literal["next", "gap", "copy", "back", "unsure"]


@dataclass(eq=False, slots=True)
class _Stream:
    """One publisher's batches, and the consumer's position in their numbers."""

    source: Source
    expected: int  # the next number
    last: tuple[int, int] | None = None  # number and hash of the last delivery
    doubted: bool = False  # live batches may come from another process, until a replay confirms one of them
    connection: Connection | None = None  # of the last live batch
    moved: bool = False  # `connection` is new, and no replay has confirmed that the process is the same
    absent: bool = False  # the replay port has no batches of this stream: no requests
    covered: int = 0  # live messages that arrived before this number are older than an answered request
    fingerprints: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))  # of numbers before `expected`

    @property
    def position(self) -> int:
        """The number from which a replay shows whether the publisher is the same process."""
        return self.expected if self.last is None else self.last[0]

    def judge(self, message: Message) -> Verdict:
        """Return the meaning of a message's number."""
        if message.seq == self.expected:
            return "next"
        if message.seq > self.expected:
            return "gap"
        if self.last is None:
            return "back"
        age = self.expected - message.seq
        if age > len(self.fingerprints):
            return "unsure"
        return "copy" if self.fingerprints[-age] == hash(message.payload) else "back"


@dataclass(eq=False, slots=True)
class _Question:
    """A replay request: is the publisher the same process, and which batches did it send since?"""

    stream: _Stream | None  # None: everything from the start number on
    is_scan: bool = False  # everything: the publisher does not have the last delivered batch
    start: int = 0  # the first requested number
    asked_at: int = 0  # number of live messages that had come when the request was sent
    outdated: bool = False  # a connection came back since: the publisher may be another one by now
    known: set[_Stream] = field(default_factory=set)  # streams in the answer
    skipped: set[_Stream] = field(default_factory=set)  # streams that are requested again, from their own position


class SourceTracker:
    """The numbers of all publishers behind one endpoint; passes deliveries to ``emit``."""

    def __init__(
        self,
        endpoint: str,
        start: Start,
        emit: Callable[[Delivery], object],
        *,
        can_replay: bool,
        gone_after_s: float | None = None,
        stats: SubscriberStats | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats: SubscriberStats = stats or SubscriberStats()
        self.refusal: str = ""  # why the caller refused the last message that it could not use
        self._emit = emit
        self._endpoint = endpoint
        self._start = start
        self._can_replay = can_replay
        self._gone_after_s = gone_after_s
        self._clock = clock
        self._missing: dict[_Stream, float] = {}  # with the time since when
        self._streams: dict[tuple[bytes | None, int | None], _Stream] = {}
        self._questions: deque[_Question] = deque()  # the first one is asked
        self._pending: tuple[_Stream, Message] | None = None  # the live message that waits for an answer
        if can_replay and start != "live":
            self._questions.append(_Question(None))

    # Live messages

    def live(self, message: Message, connection: Connection, arrival: int = 0) -> None:
        """Take a live message that ``arrival`` live messages preceded. Call it only while ``asking`` is None."""
        stream = self._find(message)
        stream.absent = False
        if stream.connection is not connection:
            if stream.connection is not None and stream.last is not None:
                stream.moved = True
                stream.doubted = True
            stream.connection = connection
        self._missing.pop(stream, None)
        if connection.ended:
            self._missing[stream] = self._clock()
        if arrival < stream.covered:  # the answer would have it, unless its publisher was gone before
            self._drop(stream.judge(message))
        else:
            self._judge_live(stream, message)

    def _judge_live(self, stream: _Stream, message: Message) -> None:
        verdict = stream.judge(message)
        if verdict == "gap":
            self.stats.gaps += 1
        if not self._can_replay:
            self._settle(stream, message, "no replay endpoint was given")
        elif stream.doubted or verdict in ("gap", "unsure"):
            self._pending = (stream, message)
            self._questions.append(_Question(stream))
        elif verdict == "copy":
            self._drop(verdict)
        elif verdict == "back":
            self._begin_again(stream)
            self._judge_live(stream, message)
        else:
            self._deliver(stream, message, replayed=False)

    def doubt_answer(self) -> None:
        """Record that the answer to the current request may be another process's: a broken connection is back."""
        if self._questions:
            self._questions[0].outdated = True

    def reconnected(self) -> None:
        """Record that a broken connection is back: live messages may come from another process."""
        for stream in self._streams.values():
            stream.doubted = self._can_replay
        self.doubt_answer()
        self.check()

    # Replay

    @property
    def asking(self) -> int | None:
        """The number from which a replay is wanted now, or None."""
        if not self._questions:
            return None
        question = self._questions[0]
        if question.stream is None and isinstance(self._start, int):
            return self._start
        if question.stream is None or question.is_scan:
            return 0
        return question.stream.position

    def check(self) -> None:
        """Request a replay of every stream, although nothing seems to be missing."""
        if not self._can_replay or self._questions:
            return
        streams = [stream for stream in self._streams.values() if stream.last is not None and not stream.absent]
        self._questions.extend(_Question(stream) for stream in streams)
        if not streams and self._start != "live":
            self._questions.append(_Question(None))

    def asked(self, arrivals: int) -> None:
        """Note that the replay from ``asking`` on is requested now; ``arrivals``: live messages received so far."""
        question = self._questions[0]
        self._questions[0] = _Question(question.stream, question.is_scan, self.asking or 0, arrivals)

    def replayed(self, message: Message) -> bool:
        """Take one reply to the current request; False if the remaining answer is not wanted."""
        question = self._questions[0]
        stream = self._find(message, question.stream)
        self._confirm(stream)
        if stream in question.skipped:
            return True
        if stream not in question.known:
            if self._is_older(stream, message):
                self._questions.popleft()
                self._judge_pending(question, _NOT_KEPT, ended=False)
                return False
            question.known.add(stream)
            moved = stream.moved or (stream.connection is not None and stream.connection.ended)
            stream.moved = False
            if question.is_scan and stream is question.stream:
                question.is_scan = False  # another attempt continues behind this reply
                self._begin_again(stream)
            elif moved and stream.last is not None and question.start <= stream.position < message.seq:
                self._begin_again(stream, _UNPROVED)  # the answer does not have the last delivered batch
        verdict = stream.judge(message)
        if verdict == "back":
            self._begin_again(stream)
            verdict = stream.judge(message)
        if verdict in ("copy", "unsure"):
            if (message.seq, hash(message.payload)) != stream.last:
                self._drop(verdict)
        elif question.start > stream.position:
            question.skipped.add(stream)
            self._questions.insert(1, _Question(stream))
        else:
            self._give_up(stream, message.seq, _NOT_KEPT)
            self._deliver(stream, message, replayed=True)
        return True

    def _is_older(self, stream: _Stream, message: Message) -> bool:
        """Return whether the waiting live message comes before a reply, of the same process."""
        if self._pending is None or self._pending[0] is not stream or stream.doubted:
            return False
        return stream.expected <= self._pending[1].seq < message.seq

    def replay_ended(self) -> None:
        """Take the end of the answer."""
        question = self._questions.popleft()
        stream = question.stream
        if stream is None or stream in question.skipped:
            return
        if stream in question.known:
            stream.covered = question.asked_at
        elif not question.is_scan and stream.last is not None:
            self._questions.appendleft(_Question(stream, is_scan=True))
            return
        if self._pending is not None and self._pending[0] is stream:
            self._judge_pending(question, _NOT_KEPT, ended=True)
        elif stream not in question.known and stream.last is not None:
            stream.doubted = True
            stream.absent = True
            self._missing.setdefault(stream, self._clock())

    def replay_failed(self, reason: str) -> None:
        """Record that there will be no answer, and continue without it."""
        question = self._questions.popleft()
        stream = question.stream
        if stream is None or stream in question.skipped:
            return
        if self._pending is not None and self._pending[0] is stream:
            self._judge_pending(question, reason, ended=False)
        else:
            stream.doubted = True

    def _judge_pending(self, question: _Question, reason: str, *, ended: bool) -> None:
        """Judge the live message that waited for the answer to a request."""
        assert self._pending is not None
        stream, message = self._pending
        self._pending = None
        verdict = stream.judge(message)
        answered = stream in question.known
        if answered and (ended or verdict not in ("next", "gap")):
            self._drop(verdict)  # a complete answer of its publisher would have it
            settled = verdict == "copy"
        elif verdict == "copy":
            self._drop(verdict)
            settled = not ended  # without an answer, more requests are useless
        else:
            self._settle(stream, message, reason)
            settled = True
        if settled:
            stream.doubted = question.outdated

    # Streams

    def _find(self, message: Message, asked: _Stream | None = None) -> _Stream:
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
            first = self._start or 0
            if first == "live":
                first = message.seq
            stream = _Stream(Source(self._endpoint, *key), first)
        self._streams[key] = stream
        return stream

    def _make_room(self) -> None:
        count = len(self._streams)
        if count >= MAX_STREAMS // 2 and not self._missing:
            self._missing = dict.fromkeys(self._streams.values(), self._clock())  # until the next message of each
        if count >= MAX_STREAMS:
            raise CodecError(f"this endpoint has {count} publishers, by topic and rank: no more are accepted")

    def disconnected(self, connection: Connection) -> None:
        """Record that a connection ended; its last messages may still come."""
        connection.ended = True
        for stream in self._streams.values():
            if stream.connection in (None, connection):
                stream.connection = connection
                self._missing.setdefault(stream, self._clock())

    def _confirm(self, stream: _Stream) -> None:
        """Record that the replay port has batches of a stream."""
        stream.absent = False
        if self._missing.pop(stream, None) is None:
            return
        if stream.connection is not None and stream.connection.ended:
            # The time restarts: answers alone do not show when a publisher ends.
            self._missing[stream] = self._clock()

    @property
    def gone_at(self) -> float | None:
        """When the next publisher will have been missing for too long; None if none is missing."""
        if not self._missing or self._gone_after_s is None:
            return None
        return min(self._missing.values()) + self._gone_after_s

    def forget_gone(self) -> None:
        """Report and forget the publishers that have been missing for too long."""
        now = self._clock()
        due = self.gone_at
        if due is None or due > now:
            return
        if self._pending is not None and self._pending[0] in self._missing:
            self._missing[self._pending[0]] = now
        after_s = self._gone_after_s or 0
        gone = {stream: since for stream, since in self._missing.items() if since + after_s <= now}
        self._missing = {stream: since for stream, since in self._missing.items() if stream not in gone}
        self._streams = {key: stream for key, stream in self._streams.items() if stream not in gone}
        for question in self._questions:
            if question.stream in gone:
                question.stream = None
        for stream, since in gone.items():
            self.stats.gone += 1
            self._emit(PublisherGone(stream.source, stream.expected, now - since))

    # Deliveries

    def _settle(self, stream: _Stream, message: Message, reason: str) -> None:
        """Deliver a live message without replay: missing numbers are lost, and older numbers mean a restart."""
        if message.seq < stream.expected:
            self._begin_again(stream)
        elif stream.moved:
            self._begin_again(stream, _UNPROVED)
        self._give_up(stream, message.seq, reason)
        self._deliver(stream, message, replayed=False)

    def _deliver(self, stream: _Stream, message: Message, *, replayed: bool) -> None:
        assert message.seq == stream.expected
        if replayed and stream.last is None:  # live messages of an older process may still come
            stream.doubted = True
        mark = hash(message.payload)
        stream.fingerprints.append(mark)
        stream.last = (message.seq, mark)
        stream.expected += 1
        self.stats.delivered += 1
        self.stats.replayed += replayed
        self._emit(Received(stream.source, message.seq, message.batch, message.payload, replayed))

    def _give_up(self, stream: _Stream, before: int, reason: str) -> None:
        """Report the numbers up to ``before``, if any, as lost."""
        if before == stream.expected:
            return
        if self.refusal:
            reason += f"; this subscriber refused {self.stats.garbage} messages so far, the last one: {self.refusal}"
        if self.stats.dropped:
            reason += f"; its backlog was full, and it dropped {self.stats.dropped} batches: it decodes too slowly"
        self.stats.lost += before - stream.expected
        self._emit(Lost(stream.source, stream.expected, before - 1, reason))
        stream.fingerprints.clear()  # older numbers are unsure from now on, never wrongly a copy
        stream.expected = before

    def _begin_again(self, stream: _Stream, reason: str = "its numbers went back") -> None:
        """Report a restart, and expect 0."""
        self.stats.restarts += 1
        self._emit(Restarted(stream.source, stream.expected, reason))
        stream.expected = 0
        stream.last = None
        stream.doubted = False
        stream.moved = False
        stream.fingerprints.clear()

    def _drop(self, verdict: Verdict) -> None:
        if verdict in ("copy", "unsure"):
            self.stats.duplicates += 1
        else:
            self.stats.garbage += 1
