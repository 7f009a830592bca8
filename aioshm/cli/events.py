"""``aioshm events``: print, record, replay and measure KV-cache events."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, cast

import msgspec
import typer

from aioshm.cli.app import fold, run_interruptibly
from aioshm.events import (
    Delivery,
    EventSubscriber,
    KVEvent,
    Lost,
    PublisherGone,
    Received,
    Restarted,
    UnknownEvent,
    ZmqEventPublisher,
)
from aioshm.events.config import DEFAULT_MAX_QUEUE_SIZE
from aioshm.events.protocol.encoding import BatchDecoder
from aioshm.events.protocol.wire import WIRES, Encoding, Wire, formats_of
from aioshm.events.recording import MAGIC, Record, read_records, write_record

Endpoints = Annotated[list[str], typer.Argument(help="Where publishers send, such as tcp://host:5557.")]
ReplayEndpoints = Annotated[
    list[str] | None, typer.Option("--replay", help="Replay endpoint; once for every endpoint, in order.")
]
Topic = Annotated[str, typer.Option(help="Only topics that begin with this.")]
FromStart = Annotated[
    bool, typer.Option("--from-start", help="Begin with batch 0, by replay, instead of with the next one.")
]
Count = Annotated[int | None, typer.Option(min=1, help="Stop after so many batches.")]
Duration = Annotated[float, typer.Option(min=0.0, show_default=False, help="Stop after so many seconds.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]

_MAX_DEPTH = 100
"""How deep shown values may be nested."""

_PATIENCE_S = 1.0
"""Seconds after which the command reports endpoints without a publisher."""

_RECEIVE_S = 3600.0

_WIRES: dict[Encoding, Wire] = {"map": "vllm-0.24+", "array": "vllm-0.9"}
_NO_PUBLISHER = "no publisher is connected yet; waiting for one"

events: typer.Typer = typer.Typer()


@events.callback(invoke_without_command=True)
def _root(ctx: typer.Context) -> None:
    """KV-cache events: tail, record, replay, stats."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@events.command()
def tail(
    endpoints: Endpoints,
    replay: ReplayEndpoints = None,
    topic: Topic = "",
    rank: Annotated[list[int] | None, typer.Option(help="Only these ranks.")] = None,
    kind: Annotated[list[str] | None, typer.Option("--type", help="Only events of these types.")] = None,
    from_start: FromStart = False,
    count: Count = None,
    duration: Duration = math.inf,
    as_json: AsJson = False,
) -> None:
    """Print events as they happen; gaps and restarts too."""

    async def run() -> None:
        shown = 0
        async with _subscriber(endpoints, replay, topic, from_start) as subscriber:
            async for item in _tailed(subscriber, duration, as_json):
                if rank and item.source.rank not in rank:
                    continue
                for line in lines_of(item, set(kind or ()), as_json):
                    _print(line)
                shown += isinstance(item, Received)
                if shown == count:
                    return

    run_interruptibly(run())


@events.command()
def record(
    endpoints: Endpoints,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")],
    replay: ReplayEndpoints = None,
    topic: Topic = "",
    from_start: FromStart = False,
    count: Count = None,
    duration: Duration = math.inf,
    as_json: AsJson = False,
) -> None:
    """Write batches to a file, as on the wire, until Ctrl-C."""

    async def run() -> None:
        written = gaps = 0
        # The subscriber first: wrong arguments leave an older file alone.
        async with _subscriber(endpoints, replay, topic, from_start) as subscriber:
            with output.open("wb") as file:
                file.write(MAGIC)
                try:
                    async for item in _deliveries(subscriber, duration):
                        if isinstance(item, Received):
                            source = item.source
                            saved = Record(time.time(), source.endpoint, source.topic or b"", item.seq, item.payload)
                            write_record(file, saved)
                            written += 1
                        else:
                            gaps += isinstance(item, Lost)
                            _print_notices(item)
                        if written == count:
                            break
                finally:
                    found = {"recorded": written, "file": str(output), "gaps": gaps}
                    _print_result(found, f"{written} batches recorded in {output}, {gaps} gaps", as_json)

    run_interruptibly(run())


@events.command()
def replay(
    recording: Annotated[Path, typer.Argument(help="A file that `record` wrote.")],
    endpoint: Annotated[str, typer.Option(help="Where to publish.")] = "tcp://127.0.0.1:5557",
    replay_endpoint: Annotated[str | None, typer.Option("--replay", help="Where to serve replay.")] = None,
    topic: Annotated[str, typer.Option(help="The topic to publish under.")] = "",
    bind: Annotated[bool, typer.Option(help="Bind the endpoint rather than connect to it.")] = True,
    speed: Annotated[float, typer.Option(min=0.0, help="1 is as recorded, 2 twice as fast, 0 without pauses.")] = 1.0,
    wait: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for subscribers first.")] = 0.5,
    hold: Annotated[float, typer.Option(min=0.0, help="Seconds to continue to serve replay afterwards.")] = 0.0,
    wire: Annotated[
        str | None,
        typer.Option(help=f"Write like {', '.join(WIRES)}; unless given, the newest that encodes as it was recorded."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Publish a recording again, with new numbers, in the rhythm of the recording."""

    async def run() -> None:
        decoder = BatchDecoder()
        published = 0
        with recording.open("rb") as file:
            like = cast(Wire, wire or _WIRES[_encoding_of(file)])
            form, _ = formats_of(like)
            records = read_records(file)
            async with ZmqEventPublisher(
                0,
                endpoint,
                replay_endpoint,
                max_queue_size=DEFAULT_MAX_QUEUE_SIZE,
                topic=topic,
                bind=bind,
                wire=like,
            ) as publisher:
                where = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
                text = f"publishing {form}s at {publisher.endpoint}, replay at {publisher.replay_endpoint}"
                _print_result(where | {"wire": like, "encoding": form}, text, as_json)
                await asyncio.sleep(wait)
                begin = time.monotonic()
                first = None
                for each in records:
                    first = first or each.received_at
                    if speed:
                        due = begin + (each.received_at - first) / speed
                        await asyncio.sleep(max(0.0, due - time.monotonic()))
                    publisher.publish(decoder.decode(each.payload))
                    published += 1
                    if not published % 100:
                        await publisher.flush()
                await publisher.flush()
                await asyncio.sleep(hold)
        _print_result({"published": published}, f"{published} batches published", as_json)

    run_interruptibly(run())


@events.command()
def stats(
    endpoints: Endpoints,
    replay: ReplayEndpoints = None,
    topic: Topic = "",
    from_start: FromStart = False,
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between reports.")] = 1.0,
    duration: Duration = math.inf,
    as_json: AsJson = False,
) -> None:
    """Report rates, gaps and lag of every publisher, again and again."""

    async def run() -> None:
        meters: dict[str, EventMeter] = {}
        end = time.monotonic() + duration
        async with _subscriber(endpoints, replay, topic, from_start) as subscriber:
            while (seconds := min(interval, end - time.monotonic())) > 0:
                async for item in _deliveries(subscriber, seconds):
                    if isinstance(item, PublisherGone):
                        meters.pop(str(item.source), None)
                        _print_notices(item)
                    else:
                        meters.setdefault(str(item.source), EventMeter()).count(item)
                reports = {name: meter.report(seconds) for name, meter in meters.items()}
                if as_json:
                    totals = msgspec.to_builtins(subscriber.stats())
                    _print(json.dumps({"at": time.time(), "publishers": _plain(reports), "subscriber": totals}))
                    continue
                for name, report in reports.items():
                    text = f"{name}: " + ", ".join(f"{key} {value}" for key, value in report.items())
                    _print(fold(_printable(text)))
                if not reports:
                    _print("no publisher yet")

    run_interruptibly(run())


def _encoding_of(file: BinaryIO) -> Encoding:
    """Return the encoding of the first batch that has events; restore the file position."""
    decoder = BatchDecoder()
    begin = file.tell()
    try:
        for each in read_records(file):
            if decoder.decode(each.payload).events:
                break
    finally:
        file.seek(begin)
    return decoder.encoding


def _subscriber(endpoints: list[str], replays: list[str] | None, topic: str, from_start: bool) -> EventSubscriber:
    return EventSubscriber(endpoints, replays or None, topic, start=None if from_start else "live")


async def _deliveries(subscriber: EventSubscriber, duration: float) -> AsyncIterator[Delivery]:
    """Yield deliveries for ``duration`` seconds."""
    end = time.monotonic() + duration
    while (left := end - time.monotonic()) > 0:
        try:
            yield await subscriber.receive(min(left, _RECEIVE_S))
        except TimeoutError:
            continue


async def _tailed(subscriber: EventSubscriber, duration: float, as_json: bool) -> AsyncIterator[Delivery]:
    """Yield deliveries; after `_PATIENCE_S` report endpoints without a publisher."""
    async for item in _deliveries(subscriber, min(duration, _PATIENCE_S)):
        yield item
    if duration <= _PATIENCE_S:
        return
    for endpoint in subscriber.unconnected:
        if as_json:
            _print(json.dumps({"endpoint": endpoint, "type": "nobody", "reason": _NO_PUBLISHER}))
        else:
            print(f"{endpoint}: {_NO_PUBLISHER}", file=sys.stderr, flush=True)
    async for item in _deliveries(subscriber, duration - _PATIENCE_S):
        yield item


def _print(line: str) -> None:
    print(line, flush=True)


def _print_result(found: dict[str, Any], text: str, as_json: bool) -> None:
    _print(json.dumps(found) if as_json else text)


def _printable(text: str) -> str:
    """Return a text in one line that cannot control a terminal: topics and events may come from strangers."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def _print_notices(item: Delivery) -> None:
    for line in lines_of(item, set(), as_json=False):
        print(line, file=sys.stderr, flush=True)


def lines_of(item: Delivery, kinds: set[str], as_json: bool) -> list[str]:
    """Return a line for each event of a delivery, or one line; ``kinds``, unless empty, selects event types."""
    if isinstance(item, Received):
        head = {"seq": item.seq, "ts": _plain(item.batch.ts), "replayed": item.replayed}
        found = [(kind_of(event), _fields(event)) for event in item.batch.events]
        found = [(kind, fields) for kind, fields in found if not kinds or kind in kinds]
        where = f"{item.source} #{item.seq}"
    else:
        head = {}
        found = [_notice(item)]
        where = f"{item.source}:"
    lines = []
    for kind, fields in found:
        if as_json:
            source = {"endpoint": item.source.endpoint, "rank": item.source.rank}
            lines.append(json.dumps(source | head | {"type": kind} | fields))
        else:
            shown = " ".join(f"{name}={value}" for name, value in fields.items())
            lines.append(_printable(f"{where} {kind} {shown}".rstrip()))
    return lines


def _notice(item: Lost | Restarted | PublisherGone) -> tuple[str, dict[str, Any]]:
    """Return the type and the fields of a delivery without events."""
    if isinstance(item, Lost):
        return "lost", {"first": item.first, "last": item.last, "reason": item.reason}
    if isinstance(item, Restarted):
        return "restarted", {"expected": item.expected, "reason": item.reason}
    return "gone", {"expected": item.expected, "after_s": round(item.after_s, 3)}


def kind_of(event: KVEvent) -> str:
    """Return the type of an event."""
    if isinstance(event, UnknownEvent):
        return event.type or "unknown"
    return type(event).__name__


def _fields(event: KVEvent) -> dict[str, Any]:
    """Return the fields that are set, with bytes as hex."""
    if isinstance(event, UnknownEvent):
        return {"data": _plain(event.data), "reason": event.reason}
    fields = msgspec.structs.asdict(event)
    return {name: _plain(value) for name, value in fields.items() if value is not None}


def _plain(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON has it; numbers that are not finite, which JSON lacks, are None."""
    if depth > _MAX_DEPTH:
        return "..."
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (list, tuple)):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {str(_plain(key, depth + 1)): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    return repr(value)


class EventMeter:
    """Counts the deliveries of one publisher since the last report, and in total."""

    def __init__(self) -> None:
        self._recent: Counter[str] = Counter()  # since the last report
        self._total: Counter[str] = Counter()
        self._kinds: Counter[str] = Counter()
        self._lags_s: list[float] = []

    def count(self, item: Received | Lost | Restarted) -> None:
        """Count a delivery."""
        if isinstance(item, Lost):
            self._total["gaps"] += 1
            self._total["lost"] += item.last - item.first + 1
        elif isinstance(item, Restarted):
            self._total["restarts"] += 1
        else:
            self._total["batches"] += 1
            self._recent["batches"] += 1
            self._recent["events"] += len(item.batch.events)
            self._kinds.update(kind_of(event) for event in item.batch.events)
            if not item.replayed:
                self._lags_s.append(time.time() - item.batch.ts)

    def report(self, seconds: float) -> dict[str, Any]:
        """Return the rates since the last report, ``seconds`` ago, and the totals."""
        lag_ms = [round(lag_s * 1000, 3) for lag_s in self._lags_s]
        report: dict[str, Any] = {}
        for name in ("batches", "events"):
            report[f"{name}_per_s"] = round(self._recent[name] / seconds, 1)
        report["max_lag_ms"] = max(lag_ms, default=None)
        report.update((name, self._total[name]) for name in ("batches", "gaps", "lost", "restarts"))
        report["types"] = dict(self._kinds)
        self._recent.clear()
        self._lags_s.clear()
        return report
