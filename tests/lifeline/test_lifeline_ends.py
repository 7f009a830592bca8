"""How a lifeline ends: with a goodbye, or with death, which the other side learns at once."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
from children import child
from doors import TOKEN, Reader, hello, knock, opened, until_hung_up
from loops import turns
from support import until

from aioshm import MessageQueue, PeerDied, SharedMemoryError
from aioshm.lifeline import sockets
from aioshm.lifeline.dialer import attach, dial
from aioshm.lifeline.listener import LifelineListener
from aioshm.lifeline.protocol import BYE, GO, PROVEN, Welcome, pack


class TestLeaving:
    @pytest.mark.parametrize("goodbye", [b"", BYE, PROVEN + BYE])
    @pytest.mark.parametrize("closed", [True, False])
    async def test_a_reader_that_goes_before_its_greeting_is_read_was_never_there(
        self, address: str, goodbye: bytes, closed: bool
    ) -> None:
        async with opened(address) as door:
            sock = knock(address, pack(hello()))
            if goodbye:
                sock.send(goodbye)
            if closed or not goodbye:
                sock.close()
            reader = await Reader.admitted(address)
            assert (door.log, door.missing) == ([("attached", 0)], [(0, BYE in goodbye)])
            reader.lifeline.close()
            if sock.fileno() >= 0:
                assert await until_hung_up(sock) == b""
                sock.close()

    async def test_a_reader_that_has_gone_is_noticed_before_its_successor_is_asked_in(self, address: str) -> None:
        """Its successor may be read before the connection that has ended."""
        async with opened(address) as door:
            for _ in range(20):
                reader = await Reader.admitted(address)
                sock = knock(address, pack(hello()))
                reader.lifeline.close()
                door.log.clear()
                door.listener.look()
                assert door.log == [("left", 0), ("attached", 0)]
                sock.close()
                await until(lambda: door.log[-1] == ("died", 0), "the end")

    @pytest.mark.parametrize("said_goodbye", [False, True], ids=["dead", "left"])
    async def test_one_that_is_evicted_while_its_socket_is_full_is_told_of_when_it_ends(
        self, address: str, said_goodbye: bool
    ) -> None:
        """Else nobody could ever have its place. It finds the end of file after what it has not read yet."""
        async with opened(address) as door:
            sock = knock(address, pack(hello()))
            await until(lambda: door.log, "the admission")
            peer = door.peers[0]
            with pytest.raises(BlockingIOError):
                while True:
                    peer._sock.send(GO * 65536)
            peer.evict()
            await turns(10)
            assert door.log == [("attached", 0)], "its end is open, so it may still write to the ring"
            peer.hand_over(door.segment)  # which comes to nothing, and turns in no circles
            assert (await until_hung_up(sock)).endswith(GO)
            if said_goodbye:
                sock.send(BYE)
            sock.close()
            await until(lambda: door.log == [("attached", 0), ("left" if said_goodbye else "died", 0)], "its end")

    async def test_a_newcomer_that_is_closed_by_what_its_predecessor_s_end_brings_about(
        self, address: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with opened(address) as door:
            first = await Reader.admitted(address)
            newcomer = dial(address, hello())
            assert newcomer is not None
            monkeypatch.setattr(door, "gone", lambda *_: door.close())
            first.lifeline.close()
            door.listener.look()
            await turns(10)
            assert door.log == [("attached", 0)]
            newcomer.close()

    @pytest.mark.parametrize("last_words", [b"", PROVEN, PROVEN + BYE], ids=["", "proven", "goodbye"])
    async def test_a_reader_that_leaves_something_unread(self, address: str, last_words: bytes) -> None:
        """The kernel then reports a reset, on top of what was said last (unix(7))."""
        async with opened(address) as door:
            sock = knock(address, pack(hello()))
            await until(lambda: door.log, "the admission")
            sock.send(last_words)
            sock.close()
            await until(lambda: door.log[-1][0] in {"left", "died"}, "the end")
            said = ([("proven", 0)] if PROVEN in last_words else []) + [("left" if BYE in last_words else "died", 0)]
            assert door.log == [("attached", 0), *said]

    @pytest.mark.parametrize("last_words", [b"", GO, GO + BYE], ids=["", "go", "goodbye"])
    async def test_a_writer_that_leaves_something_unread(self, address: str, last_words: bytes) -> None:
        with socket.socket(socket.AF_UNIX) as writer:
            writer.bind("\0" + address[1:])
            writer.listen()
            sock = dial(address, hello())
            connection, _ = writer.accept()
            with connection:
                connection.recv(4096)
                connection.send(pack(Welcome(1, b"", segment=False, bells=False)))
                reader = Reader(await attach(address, hello(), sock))
                reader.lifeline.prove()
                connection.send(last_words)
        await until(lambda: set(reader.heard) & {"closed", "died"}, "the end")
        assert reader.heard == ["go"] * (GO in last_words) + ["closed" if BYE in last_words else "died"]
        reader.lifeline.close()

    async def test_an_address_is_free_again(self, any_address: str) -> None:
        for _ in range(3):
            async with opened(any_address):
                with pytest.raises(SharedMemoryError, match=r"cannot listen on .*: Address already in use"):
                    LifelineListener(any_address, bytes(16), TOKEN, 1)
                reader = await Reader.admitted(any_address)
                reader.lifeline.close()


@contextmanager
def living(said: str) -> Iterator[None]:
    """Check that a child lives whose end of a line this is, then kill it."""
    pid = int(said.split()[-1])
    try:
        yield
        assert psutil.pid_exists(pid)
    finally:
        os.kill(pid, signal.SIGKILL)


class TestDeath:
    """Also where a forked child of the dead process lives on, with copies of its descriptors."""

    async def test_of_a_reader(self) -> None:
        async with MessageQueue(1, 1) as writer, child("fork", writer.export_handle().to_json(), "0") as reader:
            await writer.wait_until_ready(20)
            await reader.says("ready")
            with living(await reader.says("child ")):
                reader.signal(signal.SIGKILL)
                with pytest.raises(PeerDied, match=f"reader 0 .pid {reader.pid}. died"):
                    while True:
                        await writer.enqueue(None, 20)

    @pytest.mark.slow_on_uvloop
    async def test_of_the_writer(self) -> None:
        async with child("wait_and_fork") as writer:
            async with MessageQueue.create_from_handle(await writer.says(), 0) as reader:
                await reader.wait_until_ready(20)
                with living(await writer.says("child ")):
                    writer.signal(signal.SIGKILL)
                    with pytest.raises(PeerDied, match=f"the writer .pid {writer.pid}. died"):
                        await reader.dequeue(20)


@pytest.mark.parametrize("event", ["POLLRDHUP", "POLLHUP"])
def test_an_end_behind_unread_bytes_is_seen_on_linux_and_on_macos(event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_CLOSED", getattr(select, event))
    ours, theirs = socket.socketpair()
    with ours:
        theirs.send(b"unread")
        assert not sockets.has_hung_up(ours)
        theirs.close()
        assert sockets.has_hung_up(ours)
        assert ours.recv(10) == b"unread"
