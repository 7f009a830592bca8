"""The names under which queues, workers, engines and events tell of themselves, and what each says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]


class Family(NamedTuple):
    """Figures of one name.

    Attributes:
        name: After Prometheus' conventions, without ``aioshm_`` in front and ``_total`` behind.
        kind: What it is.
        unit: After OpenTelemetry's conventions, for what the name says in Prometheus' way.
        help: What it says, in a sentence.
        labels: The names of its labels.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...]


_END, _READER = ("queue", "side", "rank"), ("queue", "rank")
_GROUP, _WORKER = ("group",), ("group", "rank")
_CLIENT, _SUPERVISOR, _ENGINE = ("client",), ("supervisor",), ("supervisor", "rank")
_PUBLISHER, _SUBSCRIBER = ("publisher",), ("subscriber",)


def _counters(prefix: str, labels: tuple[str, ...], told: Mapping[str, tuple[str, str, str]]) -> dict[str, Family]:
    return {field: Family(prefix + name, "counter", unit, text, labels) for field, (name, unit, text) in told.items()}


def _gauges(prefix: str, labels: tuple[str, ...], told: Mapping[str, tuple[str, str, str]]) -> dict[str, Family]:
    return {field: Family(prefix + name, "gauge", unit, text, labels) for field, (name, unit, text) in told.items()}


QUEUE: dict[str, Family] = {
    **_counters(
        "queue_",
        _END,
        {
            "messages": ("messages", "{message}", "Messages sent by a writer, or received by a reader."),
            "bytes": ("bytes", "By", "Bytes in the bodies of these messages."),
            "overflows": ("overflows", "{message}", "Messages that did not fit a chunk of the ring."),
            "copied_bytes": ("copied_bytes", "By", "Bytes copied into messages, or out of leased ones."),
            "spins": ("spins", "{spin}", "Times that an end span for a message, or for room."),
            "spin_hits": ("spin_hits", "{spin}", "Spins that ended with what was waited for."),
            "spin_s": ("spin_seconds", "s", "Time spent spinning."),
            "naps": ("naps", "{nap}", "Short sleeps on a timer."),
            "parks": ("parks", "{park}", "Times that an end went to sleep until it is woken."),
            "resent": ("resent_messages", "{message}", "Messages sent again to remote readers, or received twice."),
            "reconnects": ("reconnects", "{connection}", "Connections to the writer that were lost and came back."),
            "restarts": ("restarts", "{writer}", "Times that a reader went on with another writer."),
            "garbled_traces": ("garbled_traces", "{message}", "Messages whose trace context was none."),
        },
    ),
    **_gauges(
        "queue_",
        _END,
        {
            "backlog": (
                "backlog_messages",
                "{message}",
                "Messages that the end, or the slowest reader, has to read.",
            ),
            "slots": ("slots", "{message}", "Messages that the ring holds."),
            "kept": ("kept_messages", "{message}", "Messages that are kept for remote readers."),
            "kept_bytes": ("kept_bytes", "By", "Bytes that are kept for remote readers."),
        },
    ),
}
ATTACHED = Family("queue_attached_readers", "gauge", "{reader}", "Readers that are attached and alive.", ("queue",))
READER: dict[str, Family] = {
    **_counters(
        "queue_reader_",
        _READER,
        {
            "read": ("messages", "{message}", "Messages that a writer's reader has finished with, from number 0 on."),
            "bytes": ("bytes", "By", "Bytes in the bodies of the messages that a local reader has finished with."),
        },
    ),
    **_gauges(
        "queue_reader_",
        _READER,
        {"lag": ("lag_messages", "{message}", "Messages that a writer's reader has still to read.")},
    ),
}
READER_UP = Family("queue_reader_up", "gauge", "1", "Whether a writer's reader is attached.", _READER)
LATENCY = Family(
    "queue_latency_seconds",
    "histogram",
    "s",
    "Time from publishing until a local reader had taken the message, of a sample of the messages.",
    _READER,
)
CALLS = _counters(
    "worker_",
    _GROUP,
    {
        "calls": ("calls", "{call}", "Calls of the workers of a group."),
        "failed": ("failed_calls", "{call}", "Calls that ended with an error."),
        "cancelled": ("cancelled_calls", "{call}", "Calls that were cancelled, or out of time."),
    },
) | _gauges("worker_", _GROUP, {"in_flight": ("calls_in_flight", "{call}", "Calls that have not ended.")})
CALL_DURATION = Family(
    "worker_call_duration_seconds",
    "histogram",
    "s",
    "How long calls took that ended well, the wait included.",
    _GROUP,
)
STREAMS = _counters(
    "worker_",
    _GROUP,
    {
        "streams": ("streams", "{stream}", "Streams from workers of a group."),
        "failed": ("failed_streams", "{stream}", "Streams that ended with an error."),
        "cancelled": ("cancelled_streams", "{stream}", "Streams that were left early, cancelled, or out of time."),
        "items": ("stream_items", "{item}", "Items of streams that were handed on."),
    },
) | _gauges("worker_", _GROUP, {"in_flight": ("streams_in_flight", "{stream}", "Streams that have not ended.")})
FIRST_ITEM = Family(
    "worker_stream_first_item_seconds",
    "histogram",
    "s",
    "How long the first items of streams took to come, the wait included.",
    _GROUP,
)
WORKERS = _gauges(
    "worker_",
    _GROUP,
    {
        "n_workers": ("processes", "{process}", "Workers that a group is to have."),
        "standbys": ("standbys", "{process}", "Processes that can take a rank at once."),
    },
)
_RESTARTS = "Times that the process was started again."
WORKER_RESTARTS = Family("worker_restarts", "counter", "{restart}", _RESTARTS, _WORKER)
WORKER_UP = Family("worker_up", "gauge", "1", "Whether a supervised worker serves.", _WORKER)
CLIENT = _counters(
    "engine_",
    _CLIENT,
    {
        "requests": ("requests", "{request}", "Requests sent to engines."),
        "failed": ("failed_requests", "{request}", "Requests that ended with an error."),
        "late_outputs": ("late_outputs", "{output}", "Outputs that came for requests that had ended."),
        "deaths": ("deaths", "{engine}", "Engines that have died."),
    },
) | _gauges(
    "engine_",
    _CLIENT,
    {
        "in_flight": ("requests_in_flight", "{request}", "Requests that have not ended."),
        "engines": ("engines", "{engine}", "Engines that a client is to have."),
        "missing": ("missing_engines", "{engine}", "Engines that do not serve: not registered yet, or dead."),
    },
)
ENGINE_RESTARTS = Family("engine_restarts", "counter", "{restart}", _RESTARTS, _ENGINE)
ENGINE_UP = Family("engine_up", "gauge", "1", "Whether a supervised engine serves.", _ENGINE)
PUBLISHER = _counters(
    "events_publisher_",
    _PUBLISHER,
    {
        "published": ("published_batches", "{batch}", "Batches of events that were given a number."),
        "sent": ("sent_batches", "{batch}", "Batches that were handed to ZeroMQ."),
        "dropped": (
            "dropped_batches",
            "{batch}",
            "Batches that found the queue full, or were left at the end.",
        ),
        "unencodable": ("unencodable_batches", "{batch}", "Batches that could not be encoded."),
        "replay_requests": ("replay_requests", "{request}", "Requests for a replay."),
        "replayed": ("replayed_batches", "{batch}", "Batches that were sent in answer to them."),
        "malformed_requests": ("malformed_requests", "{request}", "Requests for a replay that were none."),
        "abandoned_replays": ("abandoned_replays", "{replay}", "Replays whose client has left, or stalled."),
        "handshake_failures": ("handshake_failures", "{connection}", "Connections without ZeroMQ, or the right keys."),
        "cut_off": ("cut_off_connections", "{connection}", "Connections that sent more than they may."),
    },
) | _gauges("events_publisher_", _PUBLISHER, {"queued": ("queued_batches", "{batch}", "Batches that wait to be sent.")})
SUBSCRIBER = _counters(
    "events_subscriber_",
    _SUBSCRIBER,
    {
        "delivered": ("delivered_batches", "{batch}", "Batches of events that were delivered."),
        "replayed": ("replayed_batches", "{batch}", "Batches of these that came from a replay."),
        "duplicates": ("duplicate_batches", "{batch}", "Batches that came again and were dropped."),
        "gaps": ("gaps", "{gap}", "Times that numbers were missing."),
        "lost": ("lost_batches", "{batch}", "Batches that were reported as lost."),
        "restarts": ("publisher_restarts", "{publisher}", "Times that a publisher's numbers went back."),
        "reconnects": ("reconnects", "{connection}", "Connections that broke and came back."),
        "garbage": ("garbage_messages", "{message}", "Messages that could not be understood."),
        "unknown_events": ("unknown_events", "{event}", "Events of unknown types and malformed ones."),
        "replay_failures": ("replay_failures", "{replay}", "Replays that were not answered to the end in time."),
        "handshake_failures": ("handshake_failures", "{connection}", "Connections without ZeroMQ, or the right keys."),
        "cut_off": ("cut_off_connections", "{connection}", "Connections that sent more than they may."),
        "dropped": ("dropped_messages", "{message}", "Messages that were dropped because decoding is too slow."),
    },
)

FAMILIES: tuple[Family, ...] = (
    *QUEUE.values(), ATTACHED, *READER.values(), READER_UP, LATENCY,
    *CALLS.values(), CALL_DURATION, *STREAMS.values(), FIRST_ITEM, *WORKERS.values(), WORKER_RESTARTS, WORKER_UP,
    *CLIENT.values(), ENGINE_RESTARTS, ENGINE_UP, *PUBLISHER.values(), *SUBSCRIBER.values(),
)  # fmt: skip
"""All that there are."""
