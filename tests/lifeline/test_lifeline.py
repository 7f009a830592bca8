"""A reader and its writer: admission, a writer that answers strangely or dies, and the signals that pass."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from doors import TOKEN, Door, Reader, frame, hello, knock, opened, until_hung_up
from loops import open_fds, turns
from support import until

from aioshm.errors import HandleError, PeerDied
from aioshm.lifeline import listener as listening
from aioshm.lifeline.dialer import attach, dial
from aioshm.lifeline.protocol import BYE, MAX_GREETING_BYTES, PONG, PROVEN, WAKE, Welcome, pack
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
            attaching = [attach(any_address, greeting, sock) for greeting, sock in zip(greetings, socks, strict=True)]
            lifelines = await asyncio.wait_for(asyncio.gather(*attaching), 20)
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
            sock = knock(address, pack(hello()))
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
            sock = knock(address, pack(hello(5)) + PROVEN + WAKE)
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


WELCOME = Welcome(pid=1, secret=b"", segment=True, bells=True)


class TestNobodyThere:
    @pytest.mark.parametrize("what", ["nothing", "a file", "a socket that nobody listens on"])
    def test_at_a_path(self, base: Path, what: str) -> None:
        path = base / "lifeline"
        if what == "a file":
            path.write_text("mine")
        elif what == "a socket that nobody listens on":
            with socket.socket(socket.AF_UNIX) as sock:
                sock.bind(str(path))
        with pytest.raises(HandleError, match=f"nobody listens at {path}: the queue's writer is gone"):
            dial(str(path), hello())

    @pytest.mark.parametrize("address", ["/" + "x" * 200, "@" + "x" * 200, "", "a\0b", "@a\0b", "/etc/passwd/x"])
    def test_at_no_address_at_all(self, address: str) -> None:
        with pytest.raises(HandleError) as caught:
            dial(address, hello())
        assert "None" not in str(caught.value)

    async def test_any_more_when_its_turn_has_come(self, address: str) -> None:
        """The backlog was full, and then the writer went."""
        door = Door(address, backlog=1)
        waiting = []
        while (sock := dial(address, hello())) is not None:
            waiting.append(sock)
        attaching = asyncio.ensure_future(attach(address, hello(), None))
        await turns(3)
        door.close()
        with pytest.raises(HandleError, match="nobody listens"):
            await asyncio.wait_for(attaching, 10)
        for sock in waiting:
            sock.close()


class TestStrangeWriters:
    """What a reader makes of answers that no writer gives."""

    @staticmethod
    async def ask(address: str, answer: Callable[[socket.socket], None]) -> None:
        """Attach to a writer that receives the greeting, does ``answer``, and hangs up."""
        with socket.socket(socket.AF_UNIX) as writer:
            writer.bind("\0" + address[1:])
            writer.listen()
            sock = dial(address, hello())
            connection, _ = writer.accept()
            with connection:
                assert connection.recv(4096) == pack(hello())
                attaching = asyncio.ensure_future(attach(address, hello(), sock))
                await turns(3)
                answer(connection)
            lifeline = await asyncio.wait_for(attaching, 10)
            lifeline.close()

    @pytest.mark.parametrize(
        "said",
        [
            b"\xff" * 4,
            (MAX_GREETING_BYTES + 1).to_bytes(4, "big"),
            bytes(4),
            frame(b"\xc1"),
            frame(msgspec.msgpack.encode({"type": "hello"})),
            pack(hello()),
            frame(b"\x82\xa4type\xa7welcome\xa4more" + b"\x91" * 3500 + b"\xc0"),
            frame(b"\x82\xa4type\xa7refusal\xa6reason\xa2\xff\xfe"),
        ],
        ids=lambda said: said[:12].hex(),
    )
    async def test_that_say_something_else(self, address: str, said: bytes) -> None:
        with pytest.raises(HandleError):
            await self.ask(address, lambda sock: sock.sendall(said))

    @pytest.mark.parametrize("said", [b"", bytes(2), pack(WELCOME)[:-1]], ids=lambda said: f"{len(said)} bytes")
    async def test_that_hang_up(self, address: str, said: bytes) -> None:
        with pytest.raises(PeerDied, match=f"the writer .pid {os.getpid()}. died: while this reader was attaching"):
            await self.ask(address, lambda sock: sock.sendall(said))

    @pytest.mark.parametrize("amount", [0, 1, 2, 4, 6])
    async def test_that_send_too_few_descriptors_or_too_many(self, address: str, amount: int) -> None:
        fd = os.eventfd(0)

        def send(sock: socket.socket) -> None:
            half = amount // 2
            socket.send_fds(sock, [pack(WELCOME)[:7]], [fd] * half)
            socket.send_fds(sock, [pack(WELCOME)[7:]], [fd] * (amount - half))

        with pytest.raises(HandleError, match=f"sent {amount} descriptors instead of 3"):
            await self.ask(address, send)
        os.close(fd)

    async def test_that_die_without_having_listened(self, address: str) -> None:
        door = Door(address)  # its loop never runs
        sock = dial(address, hello())
        attaching = asyncio.ensure_future(attach(address, hello(), sock))
        await turns(5)
        door.listener.detach_after_fork()
        door.close()
        with pytest.raises(PeerDied):
            await asyncio.wait_for(attaching, 10)
