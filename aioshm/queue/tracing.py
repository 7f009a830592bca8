"""Trace contexts that travel with messages, as W3C's ``traceparent`` has them.

With ``Options(trace_context=True)`` each message takes along the context of the OpenTelemetry span that is current
where it is sent, so that its reader can link to it what it does with it. In a slot, and in what goes to remote readers,
it takes 26 bytes (`layout.TRACE`). A reader needs no OpenTelemetry: `TraceContext.traceparent` is text.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from aioshm.config import shown
from aioshm.deferred import import_extra
from aioshm.ring.layout import TRACE, TRACE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.context import Context
    from opentelemetry.trace import Link, SpanContext

NO_TRACE = bytes(TRACE_BYTES)
"""What travels where no span is current."""

SAMPLED = 1
"""In the flags: whoever sent the message may have recorded its span."""

# https://www.w3.org/TR/trace-context/#traceparent-header: later versions may have more behind a further dash.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)


class TraceContext(msgspec.Struct, frozen=True):
    """The context of the span in which a message was sent.

    Attributes:
        trace_id: Of the whole trace: 32 hexadecimal digits, not all of them 0.
        span_id: Of the span: 16 hexadecimal digits, not all of them 0.
        flags: W3C's; bit 0 says that the sender may have recorded the span.
    """

    trace_id: str
    span_id: str
    flags: int = 0

    @classmethod
    def from_traceparent(cls, text: str) -> TraceContext:
        """Return what the value of a ``traceparent`` header says.

        Raises:
            ValueError: It is none.
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
        """Return it as OpenTelemetry's, of a remote span."""
        trace = _opentelemetry()
        flags = trace.TraceFlags(self.flags)
        found: SpanContext = trace.SpanContext(int(self.trace_id, 16), int(self.span_id, 16), True, flags)
        return found

    def link(self) -> Link:
        """Return a link to it, for the span of a consumer that has a parent of its own, or of a batch."""
        link: Link = _opentelemetry().Link(self.span_context())
        return link

    def context(self) -> Context:
        """Return an OpenTelemetry context in which it is the current span: the parent of what is started in it."""
        trace = _opentelemetry()
        context: Context = trace.set_span_in_context(trace.NonRecordingSpan(self.span_context()))
        return context


def unpack_trace(packed: bytes) -> TraceContext | None:
    """Return the trace context that a core, or a source, has found well-formed; None where it was zeros."""
    is_there, flags, trace_id, span_id = TRACE.unpack(packed)
    return TraceContext(trace_id.hex(), span_id.hex(), flags) if is_there else None


def is_trace(packed: bytes) -> bool:
    """Return whether this is a trace context; zeros are none."""
    is_there, _, trace_id, span_id = TRACE.unpack(packed)
    return is_there == 1 and any(trace_id) and any(span_id)


def current_trace() -> Callable[[], bytes]:
    """Return a function that returns the current span's context, packed."""
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
