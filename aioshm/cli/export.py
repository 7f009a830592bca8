"""``aioshm export``: every queue of this user on this host, for Prometheus."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aioshm.cli.outcome import UNUSABLE, CommandFailed, run_interruptibly
from aioshm.deferred import import_extra
from aioshm.errors import AioshmError
from aioshm.zeromq.hosts import bracketed

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry

PORT = 9464
"""The port of OpenTelemetry's exporters for Prometheus."""


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("export")(_export)


def _export(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to serve at; 0: one that is free.")] = PORT,
    host: Annotated[str, typer.Option(help="Address to bind; anybody who reaches it may read.")] = "127.0.0.1",
    once: Annotated[bool, typer.Option("--once", help="Print the metrics once, and end.")] = False,
) -> None:
    """Serve metrics of every queue of this user on this host to Prometheus."""
    try:
        client = import_extra("prometheus_client", "prometheus", "aioshm export needs prometheus_client")
        from aioshm.observe.prometheus import HostCollector

        collector = HostCollector()
    except (ImportError, AioshmError) as error:
        raise CommandFailed(str(error), UNUSABLE) from error
    registry = client.CollectorRegistry()
    registry.register(collector)
    try:
        if once:
            sys.stdout.write(client.generate_latest(registry).decode())
        else:
            run_interruptibly(_serve(client, registry, host, port))
    finally:
        collector.close()


async def _serve(client: Any, registry: CollectorRegistry, host: str, port: int) -> None:
    """Serve in a thread until this is cancelled."""
    try:
        server, thread = client.start_http_server(port, host, registry)
    except OSError as error:
        raise CommandFailed(f"cannot serve at {host}:{port}: {error.strerror or error}", UNUSABLE) from error
    try:
        typer.echo(f"metrics of the queues of this host: http://{bracketed(host)}:{server.server_port}/metrics")
        sys.stdout.flush()
        await asyncio.Event().wait()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
