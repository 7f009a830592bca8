"""The sending half of a publisher: from the queue through the encoder and the replay buffer into PUB."""

from __future__ import annotations

import logging
import time

import zmq

from aioshm.errors import CodecError
from aioshm.events.protocol.encoding import BatchEncoder
from aioshm.events.protocol.messages import EventBatch
from aioshm.events.protocol.outbox import Outbox
from aioshm.events.protocol.replay_buffer import ReplayBuffer
from aioshm.events.protocol.wire import pack_seq
from aioshm.events.publish.sockets import PublisherEnds
from aioshm.logs import LogLimiter

logger: logging.Logger = logging.getLogger("aioshm.events")

_MORE, _LAST = zmq.NOBLOCK | zmq.SNDMORE, zmq.NOBLOCK


class Sender:
    """Sends what lies in the outbox; for one thread at a time.

    Attributes:
        sent: Batches handed to ZeroMQ.
        unencodable: Batches that could not be encoded.
    """

    def __init__(
        self,
        outbox: Outbox,
        encoder: BatchEncoder,
        buffer: ReplayBuffer | None,
        ends: PublisherEnds,
        topic: bytes,
        rank: int,
    ) -> None:
        self.sent: int = 0
        self.unencodable: int = 0
        self._outbox = outbox
        self._encode = encoder.encode
        self._buffer = buffer
        self._endpoint = ends.endpoint
        self._send_frame = ends.pub.send
        self._topic = topic
        self._rank = rank
        self._overflowed = False
        self._limiter = LogLimiter(10.0)

    def send_until(self, deadline: float) -> bool:
        """Send until the deadline (``time.perf_counter``); True if nothing is left."""
        waiting, take, clock = self._outbox.waiting, self._outbox.take, time.perf_counter
        while (item := waiting.popleft() if waiting else take()) is not None:  # ``take`` asks for the lock
            seq, batch = item
            self._send(seq, batch)
            if clock() > deadline:
                break
        if self._outbox.first_dropped is not None and not self._overflowed:
            self._overflowed = True
            self._warn_of_overflow(self._outbox.first_dropped)
        return item is None

    def _send(self, seq: int, batch: EventBatch | None) -> None:
        if batch is None:
            batch = EventBatch(time.time(), [])
        try:
            payload = self._encode(batch, self._rank)
        except CodecError as error:
            self.unencodable += 1
            self._complain("publisher %s: batch %d is lost: %s", seq, error)
            return
        # Buffer first: a subscriber that sees the live message and asks for its predecessors must find it there.
        if self._buffer is not None:
            self._buffer.append(seq, payload)
        self._outbox.last_sent = seq
        send = self._send_frame
        try:
            send(self._topic, _MORE)
            send(pack_seq(seq), _MORE)
            send(payload, _LAST)
        except zmq.ZMQError as error:  # the context was ended by another part of the program
            self._outbox.dropped += 1
            self._complain("publisher %s: batch %d cannot be sent: %s", seq, error)
        else:
            self.sent += 1

    def _warn_of_overflow(self, seq: int) -> None:
        logger.warning(
            "publisher %s: too many batches waited to be sent; batch %d and maybe later ones are dropped: "
            "their numbers stay unused, so subscribers see the gap",
            self._endpoint,
            seq,
        )

    def _complain(self, text: str, seq: int, error: Exception) -> None:
        self._limiter.warn(logger, text, self._endpoint, seq, error, level=logging.ERROR)
