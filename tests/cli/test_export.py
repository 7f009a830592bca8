"""``aioshm export``: metrics of the queues of a host for Prometheus."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aioshm import MessageQueue
from aioshm.cli.app import run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")

NAME = "exported"


def samples_of(text: str) -> dict[tuple[str, str, str], float]:
    """Return the samples of the queue, by name, side and rank."""
    return {
        (sample.name, sample.labels.get("side", ""), sample.labels.get("rank", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("queue") == NAME and "le" not in sample.labels
    }


@pytest.fixture
def a_queue() -> Iterator[None]:
    """Open a queue of two messages, one of them read; the loop does not run during the test."""
    with asyncio.Runner() as runner:

        async def begin() -> tuple[MessageQueue, MessageQueue]:
            writer = MessageQueue(1, 1, codec="raw", name=NAME)
            reader = MessageQueue.attach(NAME, 0)
            await asyncio.gather(writer.wait_until_ready(20), reader.wait_until_ready(20))
            await writer.enqueue_many([b"x" * 10, b"y" * 5])
            await reader.dequeue(20)
            return writer, reader

        ends = runner.run(begin())
        try:
            yield
        finally:
            for end in reversed(ends):
                runner.run(end.aclose())


def check(text: str) -> None:
    samples = samples_of(text)
    assert samples["aioshm_queue_messages_total", "writer", ""] == 2
    assert samples["aioshm_queue_bytes_total", "writer", ""] == 15
    assert samples["aioshm_queue_backlog_messages", "writer", ""] == 1
    assert samples["aioshm_queue_reader_messages_total", "", "0"] == 1
    assert samples["aioshm_queue_reader_bytes_total", "", "0"] == 10
    assert samples["aioshm_queue_reader_lag_messages", "", "0"] == 1
    assert samples["aioshm_queue_reader_up", "", "0"] == 1
    assert samples["aioshm_queue_latency_seconds_count", "", "0"] == 1
    assert samples["aioshm_queue_memory_bytes", "", ""] > 0
    assert samples["aioshm_queue_end_stopped", "reader", "0"] == 0
    assert samples["aioshm_queue_end_cpu_seconds_total", "writer", ""] > 0


def test_metrics_are_served_and_printed_once(a_queue: None, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "aioshm", "export", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline().split()
            assert line, process.stderr and process.stderr.read()
            assert line[-1].startswith("http://127.0.0.1:"), "nobody else is asked in by default"
            for _ in range(2):
                with urllib.request.urlopen(line[-1], timeout=30) as response:
                    check(response.read().decode())
            assert run(["export", "--once"]) == 0
            check(capsys.readouterr().out)
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=30)
            assert (process.returncode, errors) == (128 + signal.SIGTERM, "aioshm: terminated\n")
        finally:
            process.kill()


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(["export", "--port", str(port)]) == 2
        assert f"aioshm: cannot serve at 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


def test_without_prometheus_client(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert run(["export", "--once"]) == 2
    assert "pip install 'aioshm[prometheus]'" in capsys.readouterr().err
