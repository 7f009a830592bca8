"""Live queues and processes of this host, from outside: `find_queues`, `find_processes`, `Watch`, `who`; and metrics.

Reading a queue from outside needs no cooperation of its processes and costs them nothing. `HostCollector` exports the
queues of this host, `PrometheusCollector` and `OpenTelemetryMetrics` the objects of this process.
"""

from typing import TYPE_CHECKING

from aioshm.deferred import import_when_used as _import_when_used

if TYPE_CHECKING:
    from aioshm.observe.messages import MessageHeader, last_messages
    from aioshm.observe.opentelemetry import OpenTelemetryMetrics, process_span
    from aioshm.observe.processes import StartedProcess, find_processes
    from aioshm.observe.prometheus import HostCollector, PrometheusCollector
    from aioshm.observe.scan import Watch, find_queue, find_queues
    from aioshm.observe.snapshot import QueueSnapshot, Scan
    from aioshm.observe.suspects import Suspect, who

__all__ = [
    "HostCollector", "MessageHeader", "OpenTelemetryMetrics", "PrometheusCollector", "QueueSnapshot", "Scan",
    "StartedProcess", "Suspect", "Watch", "find_processes", "find_queue", "find_queues", "last_messages",
    "process_span", "who",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__, __dir__ = _import_when_used(
        __name__,
        {
            "aioshm.observe.messages": ("MessageHeader", "last_messages"),
            "aioshm.observe.opentelemetry": ("OpenTelemetryMetrics", "process_span"),
            "aioshm.observe.processes": ("StartedProcess", "find_processes"),
            "aioshm.observe.prometheus": ("HostCollector", "PrometheusCollector"),
            "aioshm.observe.scan": ("Watch", "find_queue", "find_queues"),
            "aioshm.observe.snapshot": ("QueueSnapshot", "Scan"),
            "aioshm.observe.suspects": ("Suspect", "who"),
        },
    )
