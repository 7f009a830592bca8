"""Trace contexts of messages, as in W3C's ``traceparent`` header."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from aioshm.arguments import shown
from aioshm.deferred import import_extra
from aioshm.ring.layout import TRACE, TRACE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.context import Context
    from opentelemetry.trace import Link, SpanContext

NO_TRACE = bytes(TRACE_BYTES)
"""The packed context of a message that was sent without a current span."""

SAMPLED = 1
"""Flag: the sender may have recorded the span."""

# https://www.w3.org/TR/trace-context/#traceparent-header: later versions may have more behind a further dash.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)


class TraceContext(msgspec.Struct, frozen=True):
    """The context of the span in which a message was sent.

    Attributes:
        trace_id: Id of the trace: 32 hexadecimal digits, not all 0.
        span_id: Id of the span: 16 hexadecimal digits, not all 0.
        flags: W3C's trace flags. Bit 0: the sender may have recorded the span.
    """

    trace_id: str
    span_id: str
    flags: int = 0

    @classmethod
    def from_traceparent(cls, text: str) -> TraceContext:
        """Parse the value of a ``traceparent`` header.

        Raises:
            ValueError: The text is no ``traceparent``.
        """
        match = _TRACEPARENT.fullmatch(text)
        if match is not None:
            version, trace_id, span_id, flags, more = match.groups()
            if version != "ff" and not (version == "00" and more) and int(trace_id, 16) and int(span_id, 16):
                return cls(trace_id, span_id, int(flags, 16))
        raise ValueError(f"no traceparent as W3C has them (00-trace id-span id-flags): {shown(text)}")

    @property
    def traceparent(self) -> str:
        """The value of a ``traceparent`` header."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"

    @property
    def sampled(self) -> bool:
        """Whether the sender may have recorded the span."""
        return bool(self.flags & SAMPLED)

    def span_context(self) -> SpanContext:
        """Return the OpenTelemetry context of this remote span."""
        trace = _opentelemetry()
        flags = trace.TraceFlags(self.flags)
        found: SpanContext = trace.SpanContext(int(self.trace_id, 16), int(self.span_id, 16), True, flags)
        return found

    def link(self) -> Link:
        """Return a link to the span, for a consumer span with another parent, or for a batch."""
        link: Link = _opentelemetry().Link(self.span_context())
        return link

    def context(self) -> Context:
        """Return an OpenTelemetry context in which this span is current, and so the parent of new spans."""
        trace = _opentelemetry()
        context: Context = trace.set_span_in_context(trace.NonRecordingSpan(self.span_context()))
        return context


def unpack_trace(packed: bytes) -> TraceContext | None:
    """Unpack a well-formed trace context; None if the context is all zeros."""
    present, flags, trace_id, span_id = TRACE.unpack(packed)
    if not present:
        return None
    return TraceContext(trace_id.hex(), span_id.hex(), flags)


def is_trace(packed: bytes) -> bool:
    """Return whether the bytes are a well-formed trace context; all zeros are not."""
    present, _, trace_id, span_id = TRACE.unpack(packed)
    return present == 1 and any(trace_id) and any(span_id)


def current_trace() -> Callable[[], bytes]:
    """Return a function that packs the current span's context."""
    get_current_span = _opentelemetry().get_current_span
    pack = TRACE.pack

    def current() -> bytes:
        context = get_current_span().get_span_context()
        if not context.is_valid:
            return NO_TRACE
        return pack(1, context.trace_flags, context.trace_id.to_bytes(16, "big"), context.span_id.to_bytes(8, "big"))

    return current


def _opentelemetry() -> Any:
    return import_extra("opentelemetry.trace", "opentelemetry", "trace contexts need OpenTelemetry's API")
