"""Counters of publishers and subscribers, as they stand at one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """What a publisher has done so far.

    Attributes:
        published: Numbers given out, those of dropped batches and of the empty ones that reveal a hole
            included.
        sent: Batches handed to ZeroMQ.
        queued: Batches that wait to be sent.
        dropped: Batches that found the queue full, or were left when it was closed.
        unencodable: Batches that could not be encoded.
        replay_requests: Well-formed replay requests.
        replayed: Batches sent in answer to them.
        malformed_requests: Replay requests that were none.
        abandoned_replays: Clients that left or stalled before they had everything.
        handshake_failures: Connections that ended before their handshake: no ZeroMQ, other keys, or hung up.
        cut_off: Connections that had too many subscriptions and were hung up on.
    """

    published: int
    sent: int
    queued: int
    dropped: int
    unencodable: int
    replay_requests: int
    replayed: int
    malformed_requests: int
    abandoned_replays: int
    handshake_failures: int
    cut_off: int


@dataclass(frozen=True, slots=True)
class SubscriberStats:
    """What a subscriber has seen so far, over all its sources.

    Attributes:
        delivered: Batches handed to the consumer, or ready to be.
        replayed: How many of them came from a replay port.
        duplicates: Batches that arrived again and were dropped.
        gaps: Times that numbers were missing and a replay, where there is one, was asked for them.
        lost: Numbers that were reported as lost.
        restarts: Times that a publisher began again, or may have.
        reconnects: Connections that broke and came back.
        garbage: Messages that could not be understood, or that the publisher's own replay does not confirm.
        unknown_events: Events of unknown types and malformed ones; each is delivered as an `UnknownEvent`.
        replay_failures: Replay requests that were not answered to the end in time.
        handshake_failures: Connections that ended before their handshake: no ZeroMQ, other keys, or hung up.
        gone: Publishers that were reported as gone.
        dropped: Messages that this subscriber dropped undecoded, because it decodes more slowly than they come. Their
            numbers are missing then: they are replayed, or count as lost.
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
