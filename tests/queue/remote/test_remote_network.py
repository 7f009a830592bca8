"""Networks that cut, delay, truncate and swallow what passes between a writer and its remote readers."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from proxy import proxied, through_proxies
from remotes import wide_writer
from support import HELPERS, until
from two_hosts import TwoHosts, two_hosts

from aioshm import MessageQueue, MessagesLost, PeerClosed, PeerDied, QueueClosed

pytestmark = pytest.mark.slow_on_uvloop

SLACK_S = 1.0


def nothing_is_wrong(verdict: dict[str, Any]) -> None:
    assert verdict["received"] == verdict["sent"], verdict
    assert (verdict["lost"], verdict["twice or late"], verdict["damaged"]) == (0, 0, 0), verdict
    assert verdict["writer's error"] is None, verdict
    assert verdict["reader's error"] is None, verdict


# Connections that end, again and again


@pytest.mark.parametrize(
    ("which", "how"),
    [("data", "reset"), ("data", "half close"), ("data", "truncate"), ("control", "close"), ("control", "truncate")],
)
async def test_a_connection_that_ends(which: str, how: str) -> None:
    async with through_proxies(remote_timeout=5.0, remote_window=50) as (writer, reader, data, control):
        proxy = data if which == "data" else control
        for round_ in range(2):
            sending = asyncio.ensure_future(writer.enqueue_many((round_, number) for number in range(200)))
            for number in range(200):
                assert await reader.dequeue(10) == (round_, number)
                if number != 50:
                    continue
                if how == "half close":
                    proxy.half_close()
                elif how == "truncate":
                    proxy.truncate()
                else:
                    proxy.cut(reset=how == "reset")
            await sending
            async with asyncio.timeout(10):
                while reader.stats().reconnects <= round_:
                    await writer.enqueue("something to notice it by")
                    assert await reader.dequeue() == "something to notice it by"
        await writer.aclose()
        assert [message async for message in reader] == []


async def test_a_goodbye_that_is_lost_is_said_again() -> None:
    async with through_proxies(remote_timeout=5.0) as (writer, reader, _, control):
        control.stall()
        closing = asyncio.ensure_future(reader.aclose())
        await asyncio.sleep(0.05)
        assert not closing.done()
        control.cut()
        control.resume()
        await closing
        with pytest.raises(QueueClosed, match="every reader has left"):
            while True:
                await writer.enqueue("x", 1)


async def test_closing_over_connections_that_end_all_the_time(caplog: pytest.LogCaptureFixture) -> None:
    for seed in range(3):
        async with through_proxies(random.Random(seed), remote_timeout=5.0) as (writer, reader, data, control):
            data.misbehave(0.1, 0.001)
            control.misbehave(0.02, 0.001)
            await writer.enqueue_many(range(100))
            async with asyncio.timeout(10):
                closing = asyncio.ensure_future(writer.aclose())
                assert [number async for number in reader] == list(range(100))
                await reader.aclose()
                await closing
    assert " died" not in caplog.text


# Networks that swallow everything


SHORT_S = 0.5


@pytest.mark.parametrize("how", ["stall", "refuse"])
async def test_a_network_that_swallows_everything_for_too_long(how: str) -> None:
    async with through_proxies(remote_timeout=SHORT_S, stall_warning_s=0.2) as (writer, reader, *proxies):
        sent: list[int] = []
        received: list[int] = []

        async def send() -> None:
            while True:
                await writer.enqueue(len(sent))
                sent.append(len(sent))
                await asyncio.sleep(0.002)

        async def receive() -> None:
            async for number in reader:
                received.append(number)

        sending = asyncio.ensure_future(send())
        receiving = asyncio.ensure_future(receive())
        await until(lambda: len(received) > 10)
        for proxy in proxies:
            getattr(proxy, how)()
        began = time.monotonic()
        for ending, rank, side in ((sending, 0, "reader"), (receiving, -1, "writer")):
            with pytest.raises(PeerDied) as caught:
                await ending
            assert (caught.value.rank, caught.value.pid, caught.value.side) == (rank, os.getpid(), side)
        assert time.monotonic() - began < 1.5 * SHORT_S + SLACK_S
        assert received == sent[: len(received)]


# Two hosts


def verdict_of(*children: subprocess.Popen[str]) -> dict[str, Any]:
    verdict: dict[str, Any] = {}
    for child in children:
        output, complaints = child.communicate(timeout=60)
        assert (child.returncode, complaints) == (0, "")
        verdict |= json.loads(output)
    return verdict


@contextmanager
def running(hosts: TwoHosts, timeout: float, seconds: float) -> Iterator[tuple[subprocess.Popen[str], ...]]:
    with hosts.child(0, "uvloop", "write", hosts.addresses[0], str(timeout), str(seconds)) as writer:
        assert writer.stdout is not None
        handle = writer.stdout.readline()
        with hosts.child(1, "asyncio", "read", handle) as reader:
            assert reader.stdout is not None
            assert json.loads(reader.stdout.readline()) == "begun"
            yield writer, reader


def test_a_slow_network_that_loses_packets() -> None:
    with two_hosts("delay 20ms loss 1%") as hosts, running(hosts, 5.0, 5.0) as children:
        verdict = verdict_of(*children)
    nothing_is_wrong(verdict)
    assert verdict["sent"] > 50


def test_a_cable_that_is_pulled_out_for_a_while() -> None:
    with two_hosts() as hosts, running(hosts, 1.5, 2.0) as children:
        hosts.plug(False)
        time.sleep(0.6)
        hosts.plug(True)
        verdict = verdict_of(*children)
    nothing_is_wrong(verdict)


def test_cuts_delays_and_truncations_on_both_loops() -> None:
    seconds = 3.0
    command = [sys.executable, "-W", "error", str(HELPERS / "network_child.py")]
    with ExitStack() as stack:
        children = []
        for seed, loop in enumerate(["asyncio", "uvloop"]):
            arguments = [loop, "through_proxies", str(seconds), str(seed)]
            child = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            children.append(stack.enter_context(child))
            stack.callback(child.kill)
        for child in children:
            verdict = verdict_of(child)
            nothing_is_wrong(verdict)
            assert verdict["sent"] > 10 * seconds
            assert verdict["reconnects"] > seconds
            assert verdict["resent"] > seconds
            assert verdict["cpu_s"] < 1 + seconds / 2, "it leaves the machine to others"


# Messages that are slow, or lost


async def test_a_writer_that_closes_waits_for_a_slow_network(caplog: pytest.LogCaptureFixture) -> None:
    async with through_proxies(remote_timeout=SHORT_S, stall_warning_s=0.2) as (writer, reader, data, _):
        data.stall()
        await writer.enqueue_many(range(10))
        closing = asyncio.ensure_future(writer.aclose())
        await asyncio.sleep(2.5 * SHORT_S)
        assert not closing.done()
        assert "rank 0 (pid " in caplog.text
        assert "answers, but has not received everything" in caplog.text
        data.resume()
        assert [number async for number in reader] == list(range(10))
        await asyncio.wait_for(closing, 10)
    assert " died" not in caplog.text


async def test_what_a_closed_writer_cannot_deliver_is_named() -> None:
    async with through_proxies(remote_timeout=SHORT_S, stall_warning_s=0.2) as (writer, reader, data, control):
        await writer.enqueue_many(range(5))
        data.stall()  # what has arrived in the proxy already may or may not pass
        await writer.enqueue_many(range(5, 10))
        closing = asyncio.ensure_future(writer.aclose())
        await until(lambda: reader.end.source.window.end == 10)  # type: ignore[attr-defined]
        for proxy in (data, control):
            proxy.refuse()
        received = []
        with pytest.raises(MessagesLost) as caught:
            async for number in reader:
                received.append(number)
        assert received == list(range(caught.value.first))
        assert (caught.value.first in range(11), caught.value.last) == (True, 9)
        with pytest.raises(QueueClosed, match="the writer has closed the queue"):
            await reader.dequeue(10)
        await asyncio.wait_for(closing, 10)


async def test_a_data_port_that_lets_nothing_through_is_no_readiness() -> None:
    async with wide_writer(0, 1) as writer, proxied(writer.export_handle()) as (handle, data, _):
        data.stall()
        async with MessageQueue.create_from_handle(handle, 0) as reader:
            attaching = asyncio.ensure_future(reader.wait_until_ready(10))
            with pytest.raises(TimeoutError, match=r"not attached yet: rank 0$"):
                await writer.wait_until_ready(0.5)
            with pytest.raises(TimeoutError, match=r"nothing comes from tcp://.*: is the port open"):
                await reader.wait_until_ready(0.1)
            data.resume()
            await asyncio.gather(attaching, writer.wait_until_ready(10))


async def test_a_reader_that_loses_the_data_port_for_good_does_not_block_the_writer() -> None:
    async with through_proxies(remote_timeout=SHORT_S, remote_window=4) as (writer, reader, data, _):
        data.refuse()
        with pytest.raises(PeerDied, match="data port is not to be reached"):
            await reader.dequeue(10)
        with pytest.raises(PeerClosed, match="every reader has left"):
            await writer.enqueue_many(range(10), 10)
        await asyncio.wait_for(writer.aclose(), 10)
