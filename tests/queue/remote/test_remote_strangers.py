"""Who may read and write over the network, and what becomes of everybody else."""

from __future__ import annotations

import ast
import asyncio
import logging
import os
import random
import socket
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq
from remotes import ready_ends
from support import raising, until

from aioshm import HandleError, MessageQueue, Options, UnsafePayload
from aioshm.codec.frames import HEADER
from aioshm.queue import Handle
from aioshm.queue.remote import source, wire
from aioshm.ring.layout import VERSION
from aioshm.zeromq.hosts import own_address
from tools.campaign.attackers import RAW


def altered(handle: Handle, **changes: Any) -> Handle:
    return msgspec.structs.replace(handle, remote=msgspec.structs.replace(handle.remote, **changes))


def listening(pid: int) -> set[str]:
    found = psutil.Process(pid).net_connections("inet")
    return {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN}


# What is secret


async def test_no_secret_is_ever_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    shown = []
    async with ready_ends(0, 1, remote_timeout=1.0) as (writer, (reader,)):
        handle = writer.export_handle()
        assert handle.remote is not None
        remote = handle.remote
        shown += [f"{handle!r} {remote!r} {writer!r} {reader!r} {handle} {remote} {writer.stats()} {reader.stats()}"]
        for broken in (altered(handle, server_key=b"short"), altered(handle, data="ipc:///tmp/x")):
            with pytest.raises(HandleError) as caught:
                MessageQueue.create_from_handle(broken, 0)
            shown.append(f"{caught.value!r}")
        async with MessageQueue.create_from_handle(handle, 0) as second:
            with pytest.raises(HandleError, match="rank 0 is taken") as caught:
                await second.wait_until_ready(10)
            shown.append(f"{caught.value!r}")
    shown.append(caplog.text)
    topic = writer.end.network.topic  # type: ignore[union-attr]
    secrets = [handle.token, topic, remote.client_secret, remote.client_public, remote.server_key]
    for secret in secrets:
        assert secret is not None
        for form in (repr(secret)[2:-1], secret.hex(), secret.decode(errors="replace")):
            assert form not in " ".join(shown)


# Who gets in


@pytest.mark.slow_on_uvloop
@pytest.mark.parametrize("server_key", [False, True])
async def test_without_the_handles_key_there_is_no_way_in(server_key: bool) -> None:
    public, secret = zmq.curve_keypair()
    async with MessageQueue(1, 0, connect_ip="127.0.0.1") as writer:
        attaching = asyncio.create_task(writer.wait_until_ready())
        handle = writer.export_handle()
        wrong: dict[str, Any] = (
            {"server_key": public} if server_key else {"client_public": public, "client_secret": secret}
        )
        async with MessageQueue.create_from_handle(altered(handle, **wrong), 0) as stranger:
            if server_key:
                with pytest.raises(TimeoutError, match=r"no connection to tcp://127\.0\.0\.1"):
                    await stranger.wait_until_ready(0.5)
            else:
                with pytest.raises(HandleError, match="the writer refuses the handle's key"):
                    await stranger.wait_until_ready(10)
        assert writer.stats().readers == 0
        async with MessageQueue.create_from_handle(handle, 0) as reader:
            await asyncio.gather(attaching, reader.wait_until_ready(10))
            await writer.enqueue("for those who may")
            assert await reader.dequeue(10) == "for those who may"


async def test_another_queues_handle_and_ranks_that_nobody_has_are_refused() -> None:
    async with MessageQueue(1, 0, connect_ip="127.0.0.1") as writer:
        attaching = asyncio.create_task(writer.wait_until_ready())
        handle = writer.export_handle()
        for forged, rank, reason in (
            (msgspec.structs.replace(handle, token=bytes(32)), 0, "the handle is another queue's"),
            (msgspec.structs.replace(handle, queue_id=bytes(16)), 0, "the handle is another queue's"),
            (altered(handle, ranks=(7,)), 7, "no remote reader has rank 7"),
        ):
            async with MessageQueue.create_from_handle(forged, rank) as reader:
                for call in (reader.wait_until_ready(10), reader.dequeue()):
                    with pytest.raises(HandleError, match=reason):
                        await call
        attaching.cancel()


# Without encryption


def test_without_encryption_pickle_is_refused_at_both_ends() -> None:
    with pytest.raises(UnsafePayload, match="allow_insecure_pickle"):
        MessageQueue(1, 0, connect_ip="127.0.0.1", options=Options(secure=False))
    options = Options(secure=False, allow_insecure_pickle=True)
    writer = MessageQueue(1, 0, connect_ip="127.0.0.1", options=options)
    handle = writer.export_handle()
    with pytest.raises(UnsafePayload):
        MessageQueue.create_from_handle(handle, 0, options=Options(secure=False))
    with pytest.raises(HandleError, match="not encrypted"):
        MessageQueue.create_from_handle(handle, 0, options=Options())
    asyncio.run(writer.aclose())


async def test_without_encryption_a_stranger_gets_nothing_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with ready_ends(0, 1, codec="msgpack", secure=False) as (writer, (reader,)):
        remote = writer.export_handle().remote
        assert remote is not None
        context = zmq.Context()
        try:
            sub = context.socket(zmq.SUB)
            dealer = context.socket(zmq.DEALER)
            sub.subscribe(b"")
            sub.subscribe(bytes(wire.ADDRESS_BYTES))
            sub.connect(remote.data)
            dealer.connect(remote.control)
            forged = [
                wire.Acknowledge(10**6).pack(),
                wire.Resend([(0, 10**6)]).pack(),
                wire.Leave().pack(),
                wire.Hello(1, bytes(16), bytes(32), 0, 1, "elsewhere", True).pack(),
                b"",
                b"\x93\xa5Hello",
                os.urandom(1000),
            ]
            for number in range(30):
                for data in forged:
                    dealer.send(data)
                await writer.enqueue(number, timeout=10)
                assert await reader.dequeue(10) == number
            assert await asyncio.to_thread(sub.poll, 200) == 0
            refusals = 0
            while await asyncio.to_thread(dealer.poll, 200):
                assert isinstance(wire.parse_from_writer(dealer.recv()), wire.Refused)
                refusals += 1
            assert refusals > 0
        finally:
            context.destroy(linger=0)
        assert writer.stats().readers == 1
    assert len(caplog.records) <= 2  # rate-limited


async def test_damaged_address_leaves_no_closed_descriptor_watched() -> None:
    loop = asyncio.get_running_loop()
    async with MessageQueue(1, 0, connect_ip="127.0.0.1") as writer:
        damaged = altered(writer.export_handle(), control="tcp://nonsense")
        async with MessageQueue.create_from_handle(damaged, 0) as reader:
            with pytest.raises(HandleError, match="cannot connect to tcp://nonsense"):
                await reader.wait_until_ready(5)
        pairs = [socket.socketpair() for _ in range(20)]  # these get the numbers of closed descriptors
        for pair in pairs:
            for mine, peer in (pair, pair[::-1]):
                mine.setblocking(False)
                receiving = asyncio.ensure_future(loop.sock_recv(mine, 1))
                await asyncio.sleep(0)
                peer.send(b"x")
                assert await asyncio.wait_for(receiving, 5) == b"x"
        for each in chain(*pairs):
            each.close()


async def test_a_reader_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    version = VERSION + 1
    async with ready_ends(0, 1) as (writer, _):
        monkeypatch.setattr(source, "VERSION", version)
        with pytest.raises(HandleError, match=f"speaks version {VERSION}, not {version}: both ends need the same"):
            async with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
                await reader.wait_until_ready(10)


# Where it listens


@pytest.mark.parametrize(
    ("connect_ip", "bound"),
    [("127.0.0.1", "127.0.0.1"), ("[::1]", "::1"), ("::1", "::1"), (None, own_address()), ("*", "0.0.0.0")],
)
async def test_no_wildcard_is_bound_unless_asked_for(connect_ip: str | None, bound: str) -> None:
    before = listening(os.getpid())
    async with MessageQueue(1, 0, connect_ip=connect_ip) as writer:
        assert listening(os.getpid()) - before == {bound}
        remote = writer.export_handle().remote
        assert remote is not None
        host = own_address() if bound == "0.0.0.0" else bound
        shown = f"[{host}]" if ":" in host else host
        assert remote.data.startswith(f"tcp://{shown}:")
        assert remote.control.startswith(f"tcp://{shown}:")
        async with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            await asyncio.gather(writer.enqueue("x", 20), reader.wait_until_ready(20))
            assert await reader.dequeue(20) == "x"
    assert listening(os.getpid()) == before
    async with MessageQueue(1, 1) as writer:
        assert listening(os.getpid()) == before, "local readers need no port"
        assert writer.export_handle().remote is None


# What strangers can do to the ports


def connections() -> int:
    return len(psutil.Process().net_connections("inet"))


@pytest.mark.slow_on_uvloop
@pytest.mark.parametrize(("secure", "seconds"), [(True, 1.0), (False, 0.5)])
async def test_strangers_at_every_port_do_no_harm(
    secure: bool, seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    codec = "pickle" if secure else "msgpack"
    async with ready_ends(1, 1, codec=codec, secure=secure) as (writer, readers):
        remote = writer.export_handle().remote
        assert remote is not None
        ports = [endpoint.removeprefix("tcp://") for endpoint in (remote.data, remote.control)]
        before = connections()
        command = [sys.executable, "-m", "tools.campaign.attackers", str(seconds), str(int(10 * seconds)), *ports]
        attack = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        attacking = asyncio.create_task(attack.communicate())
        number = 0
        generator = random.Random(6)
        while not attacking.done():
            message = [number, generator.randbytes(generator.choice([10, 1000, 100_000]))]
            await writer.enqueue(message, timeout=10)
            for reader in readers:
                assert await reader.dequeue(10) == message
            number += 1
            await asyncio.sleep(0.001)
        output, _ = await attacking
        made = ast.literal_eval(output.decode().splitlines()[-1])
        assert made["received"] == 0
        assert made["refused"] == 0
        assert all(made[way] > int(10 * seconds) for way in RAW), made
        assert made["zeromq"] > int(10 * seconds)
        assert number > 100 * seconds
        assert writer.stats().readers == 2
        assert readers[1].stats().reconnects == 0
        await until(lambda: connections() <= before, "the end of the strangers' connections")
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) <= 3


async def test_bad_data_frames_are_dropped_before_anything_is_decoded(caplog: pytest.LogCaptureFixture) -> None:
    async with ready_ends(0, 1, codec="msgpack", secure=False) as (writer, (reader,)):
        address = wire.address(writer.end.network.topic)  # type: ignore[union-attr]
        xpub = writer.end.network.sockets._data.socket  # type: ignore[union-attr]
        for number in range(20):
            for frames in (
                [address],
                [address + os.urandom(32)],
                [address + os.urandom(31), b"body"],
                [address + HEADER.pack(1, 1, 1, 0, 5, 0, 10**12), b"short"],
                [address + HEADER.pack(1, 1, 0, 2**32 - 1, 0, 0, 0)],
                [address + HEADER.pack(1, 1, 0, 0, 10**15, 0, 0)],
                [address, b"a", b"b", b"c"],
                [address + HEADER.pack(wire.MARK, 0, 0, 0, 0, 0, 0), b"x" * 1000],
            ):
                xpub.send_multipart(frames)
            await writer.enqueue(number)
            assert await reader.dequeue(10) == number
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "dropped a malformed message" in warnings[0]


def test_sockets_are_not_inherited_by_programs_that_are_started() -> None:
    writer = MessageQueue(1, 0, connect_ip="127.0.0.1")
    try:
        inodes = {
            os.readlink(f"/proc/self/fd/{each.fd}")
            for each in psutil.Process().net_connections("inet")
            if each.status == psutil.CONN_LISTEN
        }
        assert inodes
        child = psutil.Popen([sys.executable, "-c", "input('started ')"], stdin=-1, stdout=-1, close_fds=False)
        assert child.stdout.read(8) == b"started "
        held = {os.readlink(path) for path in Path(f"/proc/{child.pid}/fd").iterdir()}
        child.communicate(b"\n")
        assert not inodes & held
    finally:
        asyncio.run(writer.aclose())


def test_the_loopback_is_the_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", raising(OSError("no route")))
    assert own_address() == "127.0.0.1"
