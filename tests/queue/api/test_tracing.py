"""Trace contexts that travel with messages: whichever way these take, and whatever stands in their place."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
from faces import Thread, make_writer, pair, reading
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from pairs import EITHER_PLACE, attached
from remotes import ready_ends

from aioshm import MessagesLost, RoleError, TraceContext
from aioshm.ring.layout import TRACE

TRACER = TracerProvider().get_tracer("tests")


def said(span: trace.Span) -> str:
    """Return what a message of this span has to come with, by OpenTelemetry's own account."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def heard(reader: Any, count: int = 1) -> list[str | None]:
    return [context and context.traceparent for context in reader.trace_contexts(count)]


class TestTraceContext:
    def test_traceparent(self) -> None:
        text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
        context = TraceContext.from_traceparent(text)
        assert (context.traceparent, context.sampled) == (text, True)
        assert (context.trace_id, context.span_id) == ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")
        later = TraceContext.from_traceparent(text.replace("00-4", "01-4").replace("-01", "-02-more"))
        assert (later.flags, later.sampled) == (2, False)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4BF92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4bf92f3577b34da6a3ce929d0e0e473\u0666-00f067aa0ba902b7-01",
        ],
    )
    def test_no_traceparent(self, text: str) -> None:
        with pytest.raises(ValueError, match="no traceparent"):
            TraceContext.from_traceparent(text)

    def test_as_opentelemetry_has_it(self) -> None:
        context = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", 1)
        span_context = context.span_context()
        assert span_context.is_remote
        assert span_context.is_valid
        assert said(trace.NonRecordingSpan(span_context)) == context.traceparent
        assert context.link().context == span_context
        assert trace.get_current_span(context.context()).get_span_context() == span_context


@EITHER_PLACE
async def test_with_every_call(n_local: int, n_remote: int) -> None:
    async with ready_ends(n_local, n_remote, trace_context=True, chunks=16, chunk=4096) as (writer, (reader,)):
        assert reader.last_trace_context is None
        for size in (10, 3000, 20_000):  # in a slot, in a chunk, beside the ring; or joined to its head, and apart
            with TRACER.start_as_current_span("one") as span:
                await writer.enqueue(bytearray(size))
                writer.enqueue_nowait(bytes(size))
            await writer.enqueue("no span")
            received = []
            for _ in range(3):
                received.append(len(await reader.dequeue(20)))
                received.append(heard(reader))
            assert received == [size, [said(span)], size, [said(span)], 7, [None]]
        with TRACER.start_as_current_span("many") as first:
            await writer.enqueue_many([1, bytearray(9000), 2])
        with TRACER.start_as_current_span("more") as second:
            await writer.enqueue_many([3])
        batch = await reader.dequeue_many(10, 20)
        while len(batch) < 4:
            batch += await reader.dequeue_many(10, 20)
        assert len(batch) == 4
        assert heard(reader, 4) == [said(first)] * 3 + [said(second)]
        for size in (100, 3000):
            with TRACER.start_as_current_span("raw") as span:
                async with writer.acquire_write(nbytes=size) as room:
                    room[:] = b"r" * size
            async with reader.acquire_read(20) as view:
                assert bytes(view) == b"r" * size
                assert heard(reader) == [said(span)]
            assert heard(reader) == [said(span)]
        assert heard(reader, 3)[-1] == said(span)
        assert heard(reader, 3)[0] == said(second)
        with pytest.raises(RoleError, match="reader"):
            writer.trace_contexts(1)
        with pytest.raises(ValueError, match="count"):
            reader.trace_contexts(-1)


@EITHER_PLACE
async def test_loans_and_leases(n_local: int, n_remote: int) -> None:
    async with ready_ends(n_local, n_remote, trace_context=True, chunk=1 << 20) as (writer, (reader,)):
        for shape in ((1000,), (100_000,), (400_000,)):
            with TRACER.start_as_current_span("loan") as span:
                async with writer.loan(shape, "float32") as array:
                    array[...] = 5
            async with reader.lease(20) as seen:
                assert (seen.shape, seen[0]) == (shape, 5)
                assert heard(reader) == [said(span)]
        contexts = []
        for number in range(5):
            with TRACER.start_as_current_span("lease") as span:
                await writer.enqueue(number)
            async with reader.lease() as obj:
                assert obj == number
                assert heard(reader) == [said(span)]
            contexts.append(said(span))
        assert heard(reader, 5) == contexts


async def test_a_writer_that_waits_for_room() -> None:
    """The context is that of the task which sends, not of the one that sent last."""
    async with attached(1, trace_context=True, chunks=2) as (writer, (reader,)):

        async def send(number: int) -> str:
            with TRACER.start_as_current_span(f"task {number}") as span:
                await writer.enqueue(number, 20)
                return said(span)

        sending = [asyncio.create_task(send(number)) for number in range(8)]
        got = {}
        for _ in range(8):
            number = await reader.dequeue(20)
            (got[number],) = heard(reader)
        assert got == dict(enumerate(await asyncio.gather(*sending)))


async def test_a_reader_that_skips() -> None:
    async with attached(trace_context=True, slow_reader="skip") as (writer, (reader,)):
        spans = []
        for number in range(9):
            with TRACER.start_as_current_span("skipped") as span:
                await writer.enqueue(bytearray(10) if number % 2 else number)
            spans.append(said(span))
        with pytest.raises(MessagesLost) as lost:
            await reader.dequeue(20)
        for span in spans[lost.value.last + 1 :]:
            await reader.dequeue(20)
            assert heard(reader) == [span]
        with TRACER.start_as_current_span("leased") as current:
            await writer.enqueue(1)
        async with reader.lease(20):
            assert heard(reader) == [said(current)]


def test_plain_threads() -> None:
    spans: list[str] = []

    def read(reader: Any) -> list[Any]:
        got: list[Any] = []
        for _ in range(3):
            reader.dequeue(20)
            got += heard(reader)
        with reader.lease(20):
            got += heard(reader)
        got.append(reader.last_trace_context.traceparent)
        reader.held.undelivered.append("of a call that a signal's handler ended")
        got += heard(reader, 2)
        reader.held.undelivered.clear()
        return got

    with reading(read, trace_context=True) as (writer, thread):
        for number in range(4):
            with TRACER.start_as_current_span("thread") as span:
                writer.enqueue(bytearray(9000) if number == 2 else number, 20)
            spans.append(said(span))
        assert thread.result() == [*spans, spans[-1], *spans[1:3]]


def test_threads_that_wait_for_room() -> None:
    with pair(trace_context=True, chunks=2) as (writer, reader):

        def send(number: int) -> str:
            with TRACER.start_as_current_span(f"thread {number}") as span:
                writer.enqueue(number, 20)
                return said(span)

        threads = [Thread(send, number) for number in range(8)]
        got = {}
        for _ in range(8):
            number = reader.dequeue(20)
            (got[number],) = heard(reader)
        assert got == {number: thread.result() for number, thread in enumerate(threads)}


async def test_not_asked_for() -> None:
    async with ready_ends(1, 1) as (writer, readers):
        with TRACER.start_as_current_span("nobody"):
            await writer.enqueue(1)
        for reader in readers:
            await reader.dequeue(20)
            assert reader.last_trace_context is None
            assert reader.trace_contexts(5) == []
        assert writer.export_handle().layout.trace_at == 0


async def test_a_garbled_one_is_ignored_and_counted() -> None:
    async with ready_ends(1, 1, trace_context=True) as (writer, (local, remote)):
        sender: Any = writer.end.sender
        sender._current_trace = lambda: TRACE.pack(9, 1, b"x" * 16, b"y" * 8)
        await writer.enqueue("whole")
        for reader in (local, remote):
            assert await reader.dequeue(20) == "whole"
            assert reader.last_trace_context is None
            assert reader.trace_contexts(2) == [None]
            assert reader.stats().garbled_traces == 1


def test_without_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with pytest.raises(ImportError, match=r"pip install 'aioshm\[opentelemetry\]'"):
        make_writer(trace_context=True)
