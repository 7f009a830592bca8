"""A reader and its writer on good terms: admission, and the signals that pass."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest
from doors import (
    TOKEN,
    Reader,
    hello,
    knock,
    opened,
    until_hung_up,
)
from loops import open_fds
from support import until

from aioshm.errors import HandleError
from aioshm.lifeline import listener as listening
from aioshm.lifeline.dialer import attach, dial
from aioshm.lifeline.protocol import BYE, PONG, PROVEN, WAKE, pack
from aioshm.ring.layout import VERSION


@pytest.fixture(params=[True, False], ids=["eventfd", "socket"])
def bells(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run a test with wake-ups through eventfds, and through the socket as where there are none."""
    if not request.param:
        monkeypatch.setattr(listening, "HAVE_EVENTFD", False)
    return bool(request.param)


class TestAdmission:
    async def test_passes_what_a_reader_needs(self, any_address: str, bells: bool) -> None:
        async with opened(any_address) as door:
            assert (door.listener.doorbell is not None) is bells
            reader = await Reader.admitted(any_address, 3)
            lifeline = reader.lifeline
            assert lifeline.welcome == door.admit(hello(3))[0]
            assert lifeline.writer_pid == os.getpid()
            assert not lifeline.said_goodbye
            segment = lifeline.take_segment()
            assert os.pread(segment, 100, 0) == b"the segment"
            os.close(segment)
            peer = door.peers[3]
            assert (peer.rank, peer.pid, peer.seen_pid) == (3, os.getpid(), os.getpid())
            assert door.log == [("attached", 3)]
            lifeline.close()
            await until(lambda: ("left", 3) in door.log, "the goodbye")

    async def test_passes_nothing_on_to_other_programs(self, address: str) -> None:
        """A descriptor that came over a socket is inherited by whatever is executed, unless that is forbidden."""
        async with opened(address):
            before = open_fds()
            reader = await Reader.admitted(address)
            came = [fd for fd, what in open_fds().items() if fd not in before or before[fd] != what]
            assert len(came) >= 4, "the connection, the segment, and two bells"
            assert [open_fds()[fd] for fd in came if os.get_inheritable(int(fd))] == []
            reader.lifeline.close()

    async def test_of_many_through_a_narrow_door(self, any_address: str) -> None:
        async with opened(any_address, backlog=1) as door:
            greetings = [hello(rank) for rank in range(20)]
            socks = [dial(any_address, greeting) for greeting in greetings]
            assert None in socks, "the backlog is full"
            lifelines = await asyncio.wait_for(
                asyncio.gather(
                    *(attach(any_address, greeting, sock) for greeting, sock in zip(greetings, socks, strict=True))
                ),
                20,
            )
            assert sorted(door.peers) == list(range(20))
            for lifeline in lifelines:
                lifeline.close()

    @pytest.mark.parametrize(
        ("greeting", "reason"),
        [
            (hello(token=TOKEN[:-1]), "the handle's token is wrong"),
            (hello(version=VERSION + 1), f"the reader has layout version {VERSION + 1}, the writer {VERSION}"),
        ],
        ids=lambda value: None if isinstance(value, str) else "",
    )
    async def test_of_others_is_refused_with_the_reason(self, address: str, greeting: object, reason: str) -> None:
        async with opened(address) as door:
            with pytest.raises(HandleError, match=f"the writer refused this reader: {reason}"):
                await attach(address, greeting, dial(address, greeting))  # type: ignore[arg-type]
            assert door.log == []
            reader = await Reader.admitted(address)
            reader.lifeline.close()

    async def test_of_another_user_is_refused_by_the_writer(
        self, address: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with opened(address) as door:
            monkeypatch.setattr(listening, "peer_credentials", lambda _: (1, os.geteuid() + 1))
            sock = knock(address)
            sock.send(pack(hello()))
            assert await until_hung_up(sock) == b""
            sock.close()
            assert door.log == []

    async def test_a_listener_of_another_user_is_told_nothing(
        self, address: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with socket.socket(socket.AF_UNIX) as theirs:
            theirs.bind("\0" + address[1:])
            theirs.listen()
            monkeypatch.setattr("aioshm.lifeline.dialer.peer_credentials", lambda _: (1, os.geteuid() + 1))
            with pytest.raises(HandleError, match=f"belongs to another user .uid {os.geteuid() + 1}"):
                dial(address, hello())
            connection, _ = theirs.accept()
            assert connection.recv(100) == b"", "no token was sent"
            connection.close()


class TestSignals:
    async def test_that_come_together_with_the_greeting(self, address: str, bells: bool) -> None:
        async with opened(address) as door:
            door.go_once_proven = True
            sock = knock(address)
            sock.send(pack(hello(5)) + PROVEN + WAKE)
            await until(lambda: door.log == [("attached", 5), ("proven", 5)], "admission and proof")
            assert door.wakes == 1
            sock.send(BYE)
            sock.close()
            await until(lambda: door.log[-1] == ("left", 5), "the goodbye")

    async def test_of_a_newer_release_are_ignored(self, address: str, bells: bool) -> None:
        async with opened(address) as door:
            reader = await Reader.admitted(address)
            reader.lifeline._send(b"\x00~z")
            door.peers[0].send(b"\x00~z" + PONG)
            reader.lifeline.ask()
            await until(lambda: reader.lifeline.silent_s is None, "the answer")
            assert (reader.heard, door.wakes, door.log) == ([], 0, [("attached", 0)])
            reader.lifeline.close()

    @pytest.mark.parametrize("segment", [True, False])
    async def test_that_come_together_with_the_answer(self, address: str, bells: bool, segment: bool) -> None:
        """With no descriptor in between, one read returns all of them."""
        async with opened(address) as door:
            door.passes_segment = segment
            door.go_once_proven = True
            sock = dial(address, hello())
            assert sock is not None
            sock.send(PROVEN)
            await until(lambda: ("proven", 0) in door.log, "the proof")
            door.close()  # now welcome, go and goodbye lie in the reader's socket
            reader = Reader(await attach(address, hello(), sock))
            await reader.hears("closed")
            assert reader.heard == ["go", "closed"]
            reader.lifeline.close()

    async def test_to_whoever_is_gone_are_harmless(self, address: str, bells: bool) -> None:
        async with opened(address) as door:
            reader = await Reader.admitted(address)
            reader.lifeline.close()
            for left in (False, True):
                door.peers[0].ring()
                door.peers[0].go()
                await until(lambda left=left: not left or ("left", 0) in door.log, "the goodbye")
            reader = await Reader.admitted(address)
            door.close()
            for closed in (False, True):
                reader.lifeline.ring()
                reader.lifeline.prove()
                await until(lambda closed=closed: not closed or "closed" in reader.heard, "the goodbye")
            reader.lifeline.close()
            reader.lifeline.close()
            reader.lifeline.ring()
            assert not [entry for entry in door.log if entry[0] == "died"]
