"""``aioshm events``: print, record, replay and measure KV-cache events."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, cast

import msgspec
import typer

from aioshm.cli.outcome import UNUSABLE, CommandFailed, run_interruptibly
from aioshm.errors import AioshmError
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
from aioshm.events.protocol.decoding import BatchDecoder
from aioshm.events.protocol.wire import WIRES, Encoding, Wire, resolve_wire
from aioshm.events.recording import Record, Recorder, read_records

Endpoints = Annotated[list[str], typer.Argument(help="Where publishers send, such as tcp://host:5557.")]
ReplayEndpoints = Annotated[
    list[str] | None, typer.Option("--replay", help="Replay endpoint; once for every endpoint, in order.")
]
Topic = Annotated[str, typer.Option(help="Only topics that begin with this.")]
FromStart = Annotated[
    bool, typer.Option("--from-start", help="Begin with batch 0, by replay, instead of with the next one.")
]
Count = Annotated[int | None, typer.Option(min=1, help="Stop after so many batches.")]
Duration = Annotated[float | None, typer.Option(min=0.0, help="Stop after so many seconds.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]

_PROGRESS_S = 0.2
_PATIENCE_S = 1.0
"""Seconds after which the command reports endpoints without a publisher."""

_NOBODY = "no publisher speaks here yet; waiting for one"

events_app: typer.Typer = typer.Typer(no_args_is_help=True, help="KV-cache events: tail, record, replay, stats.")


def register(app: typer.Typer) -> None:
    """Add the ``events`` commands to ``app``."""
    app.add_typer(events_app, name="events")


@events_app.command()
def tail(
    endpoints: Endpoints,
    replay: ReplayEndpoints = None,
    topic: Topic = "",
    rank: Annotated[list[int] | None, typer.Option(help="Only these ranks.")] = None,
    kind: Annotated[list[str] | None, typer.Option("--type", help="Only events of these types.")] = None,
    from_start: FromStart = False,
    count: Count = None,
    duration: Duration = None,
    as_json: AsJson = False,
) -> None:
    """Print events as they happen; gaps and restarts too."""

    async def run() -> None:
        shown = 0
        async with (
            _subscriber(endpoints, replay, topic, from_start) as subscriber,
            _reporting_silence(subscriber, as_json),
        ):
            async for item in _deliveries(subscriber, duration):
                if rank and item.source.rank not in rank:
                    continue
                for line in lines_of(item, set(kind or ()), as_json):
                    _print(line)
                shown += isinstance(item, Received)
                if shown == count:
                    return

    _run(run())


@events_app.command()
def record(
    endpoints: Endpoints,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")],
    replay: ReplayEndpoints = None,
    topic: Topic = "",
    from_start: FromStart = False,
    count: Count = None,
    duration: Duration = None,
    as_json: AsJson = False,
) -> None:
    """Write batches to a file, as they were on the wire; Ctrl-C ends it."""

    async def run() -> None:
        written = gaps = 0
        show = _progress("recorded")
        with output.open("wb") as file:
            recorder = Recorder(file)
            try:
                async with _subscriber(endpoints, replay, topic, from_start) as subscriber:
                    async for item in _deliveries(subscriber, duration):
                        if isinstance(item, Received):
                            source = item.source
                            recorder.write(
                                Record(time.time(), source.endpoint, source.topic or b"", item.seq, item.payload)
                            )
                            written += 1
                            show(written)
                        else:
                            gaps += isinstance(item, Lost)
                            _complain(item)
                        if written == count:
                            break
            finally:
                found = {"recorded": written, "file": str(output), "gaps": gaps}
                _print(json.dumps(found) if as_json else f"{written} batches recorded in {output}, {gaps} gaps")

    _run(run())


@events_app.command()
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
    encoding: Annotated[str | None, typer.Option(help="array or map, where it is not that of the wire.")] = None,
    as_json: AsJson = False,
) -> None:
    """Publish a recording again, with new numbers, in the rhythm in which it was received."""

    async def run() -> None:
        decoder = BatchDecoder()
        published = 0
        show = _progress("published")
        with recording.open("rb") as file:
            like = cast(Wire, wire or ("vllm-0.24+" if _encoding_of(file) == "map" else "vllm-0.9"))
            form, _ = resolve_wire(like, cast(Encoding | None, encoding))
            records = read_records(file)
            async with ZmqEventPublisher(
                0,
                endpoint,
                replay_endpoint,
                max_queue_size=DEFAULT_MAX_QUEUE_SIZE,
                topic=topic,
                bind=bind,
                wire=like,
                encoding=form,
            ) as publisher:
                where = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
                _print(
                    json.dumps(where | {"wire": like, "encoding": form})
                    if as_json
                    else f"publishing {form}s at {publisher.endpoint}, replay at {publisher.replay_endpoint}"
                )
                await asyncio.sleep(wait)
                begin, first = time.monotonic(), None
                for one in records:
                    first = one.received_at if first is None else first
                    if speed:
                        due = begin + (one.received_at - first) / speed
                        await asyncio.sleep(max(0.0, due - time.monotonic()))
                    publisher.publish(decoder.decode(one.payload))
                    published += 1
                    show(published)
                    if not published % 100:
                        await publisher.flush()
                await publisher.flush()
                await asyncio.sleep(hold)
        _print(json.dumps({"published": published}) if as_json else f"{published} batches published")

    _run(run())


@events_app.command()
def stats(
    endpoints: Endpoints,
    replay: ReplayEndpoints = None,
    topic: Topic = "",
    from_start: FromStart = False,
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between reports.")] = 1.0,
    duration: Duration = None,
    as_json: AsJson = False,
) -> None:
    """Report rates, gaps and lag of every publisher, again and again."""

    async def run() -> None:
        async with _subscriber(endpoints, replay, topic, from_start) as subscriber:
            meters: dict[str, EventMeter] = {}
            reporting = asyncio.create_task(_report(subscriber, meters, interval, as_json))
            try:
                async for item in _deliveries(subscriber, duration):
                    if isinstance(item, PublisherGone):
                        meters.pop(str(item.source), None)
                        _complain(item)
                    else:
                        meters.setdefault(str(item.source), EventMeter()).count(item)
            finally:
                reporting.cancel()
                await asyncio.gather(reporting, return_exceptions=True)
            _print_report(subscriber, meters, interval, as_json)

    _run(run())


def _encoding_of(file: BinaryIO) -> Encoding:
    """Return the encoding of the first batch that has events; restore the file position."""
    decoder, begin = BatchDecoder(), file.tell()
    try:
        for one in read_records(file):
            if decoder.decode(one.payload).events:
                break
    finally:
        file.seek(begin)
    return decoder.encoding


async def _report(subscriber: EventSubscriber, meters: dict[str, EventMeter], interval: float, as_json: bool) -> None:
    while True:
        await asyncio.sleep(interval)
        _print_report(subscriber, meters, interval, as_json)


def _print_report(subscriber: EventSubscriber, meters: dict[str, EventMeter], interval: float, as_json: bool) -> None:
    reports = {name: meter.report(interval) for name, meter in meters.items()}
    if as_json:
        totals = msgspec.to_builtins(subscriber.stats())
        _print(json.dumps({"at": time.time(), "publishers": reports, "subscriber": totals}))
        return
    for name, line in reports.items() or {"no publisher yet": {}}.items():
        _print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in line.items()))


def _subscriber(endpoints: list[str], replays: list[str] | None, topic: str, from_start: bool) -> EventSubscriber:
    return EventSubscriber(endpoints, replays or None, topic, start=None if from_start else "live")


async def _deliveries(subscriber: EventSubscriber, duration: float | None) -> AsyncIterator[Delivery]:
    """Yield deliveries for ``duration`` seconds."""
    end = None if duration is None else time.monotonic() + duration
    while end is None or time.monotonic() < end:
        try:
            yield await subscriber.receive(None if end is None else max(0.0, end - time.monotonic()))
        except TimeoutError:
            return


@asynccontextmanager
async def _reporting_silence(subscriber: EventSubscriber, as_json: bool) -> AsyncIterator[None]:
    """Report, once, endpoints without a publisher."""

    async def report() -> None:
        await asyncio.sleep(_PATIENCE_S)
        for endpoint in subscriber.unconnected:
            if as_json:
                _print(json.dumps({"endpoint": endpoint, "type": "nobody", "reason": _NOBODY}))
            else:
                print(f"{endpoint}: {_NOBODY}", file=sys.stderr, flush=True)

    reporting_silence = asyncio.create_task(report())
    try:
        yield
    finally:
        reporting_silence.cancel()
        await asyncio.gather(reporting_silence, return_exceptions=True)


def _progress(done: str) -> Callable[[int], None]:
    """Return a function that shows on a terminal, a few times a second, how many batches are ``done``."""
    due = 0.0

    def show(count: int) -> None:
        nonlocal due
        if sys.stderr.isatty() and time.monotonic() >= due:
            due = time.monotonic() + _PROGRESS_S
            print(f"{count:,} batches {done}", end="\r", file=sys.stderr, flush=True)

    return show


def _print(line: str) -> None:
    print(line, flush=True)


def _complain(item: Delivery) -> None:
    for line in lines_of(item, set(), as_json=False):
        print(line, file=sys.stderr, flush=True)


def _run(work: Any) -> None:
    """Run to the end; errors of the user are one line, not a traceback."""
    try:
        run_interruptibly(work)
    except (AioshmError, OSError, ValueError) as error:
        print(f"aioshm events: {error}", file=sys.stderr)
        raise typer.Exit(UNUSABLE) from None
    except CommandFailed as interruption:
        raise typer.Exit(interruption.exit_code) from None


def lines_of(item: Delivery, kinds: set[str], as_json: bool) -> list[str]:
    """Return a line for each event of a delivery; ``kinds``, unless empty, selects event types."""
    source: dict[str, Any] = {"endpoint": item.source.endpoint, "rank": item.source.rank}
    if isinstance(item, Lost):
        found = {**source, "type": "lost", "first": item.first, "last": item.last, "reason": item.reason}
        return [json.dumps(found) if as_json else f"{item.source}: {item.first} to {item.last} lost: {item.reason}"]
    if isinstance(item, Restarted):
        found = {**source, "type": "restarted", "expected": item.expected, "reason": item.reason}
        text = f"{item.source}: began again, {item.expected} was next: {item.reason}"
        return [json.dumps(found) if as_json else text]
    if isinstance(item, PublisherGone):
        found = {**source, "type": "gone", "expected": item.expected, "after_s": round(item.after_s, 3)}
        return [json.dumps(found) if as_json else f"{item.source}: gone, no sign of it for {item.after_s:.3g} s"]
    lines = []
    for event in item.batch.events:
        kind = kind_of(event)
        if kinds and kind not in kinds:
            continue
        if as_json:
            head = {**source, "seq": item.seq, "ts": item.batch.ts, "replayed": item.replayed, "type": kind}
            lines.append(json.dumps(head | _fields(event)))
        else:
            shown = " ".join(f"{name}={value}" for name, value in _fields(event).items())
            lines.append(f"{item.source} #{item.seq} {kind} {shown}".rstrip())
    return lines


def kind_of(event: KVEvent) -> str:
    """Return the type of an event."""
    return event.type or "unknown" if isinstance(event, UnknownEvent) else type(event).__name__


def _fields(event: KVEvent) -> dict[str, Any]:
    """Return the fields that are set, with bytes as hex."""
    if isinstance(event, UnknownEvent):
        return {"data": _plain(event.data), "reason": event.reason}
    fields = msgspec.structs.asdict(event)
    return {name: _plain(value) for name, value in fields.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


class EventMeter:
    """Counts the deliveries of one publisher since the last report, and in total."""

    def __init__(self) -> None:
        self._batches = self._events = self._total = self._gaps = self._lost = self._restarts = 0
        self._lag_s: float | None = None
        self._kinds: Counter[str] = Counter()

    def count(self, item: Received | Lost | Restarted) -> None:
        """Count a delivery."""
        if isinstance(item, Lost):
            self._gaps += 1
            self._lost += item.last - item.first + 1
        elif isinstance(item, Restarted):
            self._restarts += 1
        else:
            self._batches += 1
            self._total += 1
            self._events += len(item.batch.events)
            self._kinds.update(kind_of(event) for event in item.batch.events)
            if not item.replayed:
                lag = time.time() - item.batch.ts
                self._lag_s = lag if self._lag_s is None else max(self._lag_s, lag)

    def report(self, seconds: float) -> dict[str, Any]:
        """Return the rates since the last report, ``seconds`` ago, and the totals."""
        line = {
            "batches_per_s": round(self._batches / seconds, 1),
            "events_per_s": round(self._events / seconds, 1),
            "max_lag_ms": None if self._lag_s is None else round(self._lag_s * 1000, 3),
            "batches": self._total,
            "gaps": self._gaps,
            "lost": self._lost,
            "restarts": self._restarts,
            "types": dict(self._kinds),
        }
        self._batches = self._events = 0
        self._lag_s = None
        return line
