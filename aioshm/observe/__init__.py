"""Live queues and processes of this host, from outside: `find_queues`, `find_processes`, `Watch`, `who`; and metrics.

Reading a queue from outside needs no cooperation of its processes and costs them nothing. `HostCollector` exports the
queues of this host, `PrometheusCollector` and `OpenTelemetryMetrics` the objects of this process.
"""

from aioshm.deferred import import_when_used as _import_when_used

__getattr__, __dir__, __all__ = _import_when_used(__name__, __file__)
