"""Live queues from outside, which needs no cooperation of theirs and costs them nothing; metrics of one's own objects.

`find_queues`, `Watch` and `who` look at this host's queues from outside, as `HostCollector` does for Prometheus.
`PrometheusCollector` and `OpenTelemetryMetrics` tell of the objects of this process.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioshm.observe.messages import MessageHeader as MessageHeader
    from aioshm.observe.messages import last_messages as last_messages
    from aioshm.observe.opentelemetry import OpenTelemetryMetrics as OpenTelemetryMetrics
    from aioshm.observe.opentelemetry import process_span as process_span
    from aioshm.observe.prometheus import HostCollector as HostCollector
    from aioshm.observe.prometheus import PrometheusCollector as PrometheusCollector
    from aioshm.observe.scan import Watch as Watch
    from aioshm.observe.scan import find_queue as find_queue
    from aioshm.observe.scan import find_queues as find_queues
    from aioshm.observe.snapshot import QueueSnapshot as QueueSnapshot
    from aioshm.observe.snapshot import Scan as Scan
    from aioshm.observe.suspects import Suspect as Suspect
    from aioshm.observe.suspects import who as who

_HOME = {
    "HostCollector": "prometheus",
    "MessageHeader": "messages",
    "OpenTelemetryMetrics": "opentelemetry",
    "PrometheusCollector": "prometheus",
    "QueueSnapshot": "snapshot",
    "Scan": "snapshot",
    "Suspect": "suspects",
    "Watch": "scan",
    "find_queue": "scan",
    "find_queues": "scan",
    "last_messages": "messages",
    "process_span": "opentelemetry",
    "who": "suspects",
}
"""Which module of this package has a name; imported when it is asked for."""

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
