"""The replay port: answers, malformed requests, slow and leaving clients."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import pytest
import zmq
from support import until

from aioshm.events import Received
from aioshm.events.protocol import wire
from aioshm.events.protocol.encoding import BatchDecoder
from aioshm.events.publish import replay_server

from ..helpers import PATIENCE_S, Ends, batch, publish_all, take


@pytest.mark.parametrize(("wire_name", "form"), [("vllm-0.24+", "topic"), ("vllm-0.24", "legacy")])
async def test_replay_answers(ends: Ends, raw: Any, wire_name: Any, form: Any) -> None:
    publisher = await ends.filled(8, topic="kv", buffer_steps=5, wire=wire_name)
    client = raw(zmq.DEALER, publisher.replay_endpoint)
    for start, first in ((0, 3), (6, 6)):  # batches that left the buffer are missing in the answer
        *replies, end = await client.ask(b"", wire.pack_seq(start))
        parsed = [wire.parse_reply(reply) for reply in replies]
        assert [reply.seq for reply in parsed if reply] == list(range(first, 8))
        assert {reply.topic for reply in parsed if reply} == {b"kv" if form == "topic" else None}
        assert end == wire.end_reply(form)
    assert await client.ask(b"", wire.pack_seq(8)) == [wire.end_reply(form)]
    assert publisher.stats().replay_requests == 3


async def test_req_socket_as_in_vllms_example_gets_the_first_reply_of_each_answer(ends: Ends, raw: Any) -> None:
    publisher = await ends.filled(5, topic="kv-events")
    for n in range(5):
        client = raw(zmq.REQ, publisher.replay_endpoint)  # a used one may still get replies of the answer before
        client.socket.send(wire.pack_seq(n))
        topic, seq, payload = await client.receive()
        assert (topic, seq) == (b"kv-events", wire.pack_seq(n))
        assert BatchDecoder().decode(payload).events == batch(n).events
    client = raw(zmq.REQ, publisher.replay_endpoint)
    for start in (5, 1 << 40):
        client.socket.send(wire.pack_seq(start))
        assert await client.receive() == wire.end_reply("topic")[1:]


async def test_malformed_requests_are_counted_named_and_answered_with_the_end(
    ends: Ends, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = ends.publisher()
    publisher.publish(batch(0))
    client = raw(zmq.DEALER, publisher.replay_endpoint)
    bad = [[b""], [b"x", wire.pack_seq(0)], [b"", b"123"], [b"", wire.pack_seq(0), b"more"], [b"\xff" * 9]]
    with caplog.at_level(logging.WARNING, "aioshm.events"):
        for frames in bad:
            assert await client.ask(*frames) == [wire.end_reply("topic")]
    assert len(await client.ask(b"", wire.pack_seq(0))) == 2  # it still works
    assert publisher.stats().malformed_requests == len(bad)
    assert len(caplog.records) == 1, "rate-limited"
    assert "127.0.0.1" in caplog.text


async def test_strangers_that_do_not_speak_zeromq(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    publisher = ends.publisher()
    subscriber = ends.subscriber(publisher)
    with caplog.at_level(logging.WARNING, "aioshm.events"):
        for endpoint in (publisher.endpoint, publisher.replay_endpoint):
            with socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2]))) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
        await until(lambda: publisher.stats().handshake_failures >= 2)
    assert "handshake" in caplog.text
    publisher.publish(batch(0))
    assert [item.seq for item in await take(subscriber, 1) if isinstance(item, Received)] == [0]


async def test_peer_with_a_too_large_request_is_disconnected(ends: Ends, raw: Any) -> None:
    publisher = ends.publisher()
    await raw(zmq.DEALER, publisher.replay_endpoint).send_and_be_disconnected(b"", b"x" * 100_000)
    publisher.publish(batch(0))
    client = raw(zmq.DEALER, publisher.replay_endpoint)
    await until(lambda: publisher.stats().sent == 1)
    assert len(await client.ask(b"", wire.pack_seq(0))) == 2
    assert publisher.stats().malformed_requests == 0


@pytest.mark.slow_on_uvloop
async def test_slow_client_is_served_fully_without_delaying_further_clients(ends: Ends, raw: Any) -> None:
    publisher = await ends.filled(3000, 20, buffer_steps=3000)
    slow = raw(zmq.DEALER, publisher.replay_endpoint, hwm=1)
    slow.socket.rcvbuf = 4096
    slow.socket.send_multipart(wire.request(0))
    await until(lambda: publisher.stats().replay_requests == 1)
    publish_all(publisher, range(3000, 7000))  # pushes everything the slow client still has to get out of the buffer
    await publisher.flush(PATIENCE_S)
    quick = raw(zmq.DEALER, publisher.replay_endpoint)
    assert len(await quick.ask(b"", wire.pack_seq(6990))) == 11
    assert publisher.stats().replayed < 3000 + 10
    seen = []
    while (reply := wire.parse_reply(await slow.receive())) is not None:
        seen.append(reply.seq)
    assert seen == list(range(3000))


@pytest.mark.slow_on_uvloop
@pytest.mark.parametrize("leaves", [False, True])
async def test_client_that_stops_reading_or_leaves_is_given_up(
    ends: Ends, raw: Any, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    if not leaves:
        monkeypatch.setattr(replay_server, "STALLED_S", 0.1)
    publisher = await ends.filled(2500, 100)
    client = raw(zmq.DEALER, publisher.replay_endpoint, hwm=1)
    client.socket.send_multipart(wire.request(0))
    await until(lambda: publisher.stats().replay_requests == 1)
    if leaves:
        client.socket.close()
    await until(lambda: publisher.stats().abandoned_replays == 1)


async def test_requests_that_arrive_while_answers_are_sent_are_answered(ends: Ends) -> None:
    publisher = await ends.filled(1)

    def ask_at_once() -> None:
        with zmq.Context() as context:
            clients = [context.socket(zmq.DEALER) for _ in range(4)]
            try:
                for client in clients:
                    client.connect(publisher.replay_endpoint)
                for _ in range(100):
                    for client in clients:
                        client.send_multipart(wire.request(0))
                    for client in clients:
                        for _ in ("the batch", "the end"):
                            assert client.poll(PATIENCE_S * 1000), "this request was not noticed"
                            client.recv_multipart()
            finally:
                for client in clients:
                    client.close(linger=0)

    await asyncio.to_thread(ask_at_once)
    assert publisher.stats().replayed == 4 * 100


@pytest.mark.slow_on_uvloop
async def test_answers_to_many_clients_leave_time_to_the_loop(
    ends: Ends, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_server, "_SLICE_S", 0.0)
    publisher = await ends.filled(50)
    clients = [raw(zmq.DEALER, publisher.replay_endpoint) for _ in range(16)]
    for client in clients:
        client.socket.send_multipart(wire.request(0))
    most = 0
    while (before := publisher.stats().replayed) < 16 * 50:
        await asyncio.sleep(0)
        most = max(most, publisher.stats().replayed - before)
    assert most <= 2 * replay_server._BATCHES_AT_A_TIME, "one client in each call"
