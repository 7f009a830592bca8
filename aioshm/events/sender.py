"""The sending half of a publisher: from the queue through the encoder and the replay buffer into PUB."""

from __future__ import annotations

import logging
import time

import zmq

from aioshm.errors import CodecError
from aioshm.events import wire
from aioshm.events.encoding import BatchEncoder
from aioshm.events.ends import PublisherEnds
from aioshm.events.messages import EventBatch
from aioshm.events.outbox import Outbox
from aioshm.events.replay_buffer import ReplayBuffer
from aioshm.zeromq import LogLimiter

logger = logging.getLogger("aioshm.events")

_MORE = zmq.NOBLOCK | zmq.SNDMORE


class Sender:
    """Sends what lies in the outbox; ``put`` may be called from any thread, the rest from one.

    Attributes:
        outbox: What waits.
        sent: Batches handed to ZeroMQ.
        unencodable: Batches that could not be encoded.
    """

    def __init__(
        self,
        outbox: Outbox,
        encoder: BatchEncoder,
        buffer: ReplayBuffer,
        ends: PublisherEnds,
        topic: bytes,
        rank: int,
    ) -> None:
        self.outbox = outbox
        self.sent = 0
        self.unencodable = 0
        self._encoder = encoder
        self._buffer = buffer
        self._ends = ends
        self._topic = topic
        self._rank = rank
        self._overflowed = False
        self._limiter = LogLimiter(10.0)

    def put(self, batch: EventBatch) -> bool:
        """Number a batch and queue it; True if somebody must be woken to send it.

        Raises:
            QueueFull: No room, and the outbox was told to raise.
        """
        ticket = self.outbox.put(batch)
        if not ticket.kept and not self._overflowed:
            self._overflowed = True
            logger.warning(
                "publisher %s: %d batches wait to be sent; batch %d and maybe later ones are dropped: "
                "their numbers stay unused, so subscribers see the gap",
                self._ends.endpoint,
                len(self.outbox),
                ticket.seq,
            )
        return ticket.wake

    def send_until(self, deadline: float) -> bool:
        """Send until the deadline (``time.perf_counter``); True if nothing is left."""
        while True:
            item = self.outbox.take()
            if item is None:
                return True
            self._send(*item)
            if time.perf_counter() > deadline:
                return False

    def _send(self, seq: int, batch: EventBatch | None) -> None:
        if batch is None:
            batch = EventBatch(time.time(), [])
        try:
            payload = self._encoder.encode(batch, self._rank)
        except CodecError as error:
            self.unencodable += 1
            self._complain("publisher %s: batch %d is lost: %s (%d others)", seq, error)
            return
        # Buffer first: whoever sees the live message and asks for its predecessors must find it there.
        self._buffer.append(seq, payload)
        self.outbox.sent(seq)
        pub = self._ends.pub
        try:
            pub.send(self._topic, _MORE)
            pub.send(wire.pack_seq(seq), _MORE)
            pub.send(payload, zmq.NOBLOCK)
        except zmq.ZMQError as error:  # the context was ended by somebody else
            self.outbox.dropped += 1
            self._complain("publisher %s: batch %d cannot be sent: %s (%d others)", seq, error)
        else:
            self.sent += 1

    def _complain(self, text: str, seq: int, error: Exception) -> None:
        held_back = self._limiter.admit()
        if held_back is not None:
            logger.error(text, self._ends.endpoint, seq, error, held_back)
