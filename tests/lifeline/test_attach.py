"""A reader on its way in: nobody there, a writer that answers strangely or dies, and second thoughts."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from doors import Door, Reader, frame, hello, opened
from loops import open_fds, turns
from support import until

from aioshm.errors import HandleError, PeerClosed, PeerDied
from aioshm.lifeline.dialer import attach, dial
from aioshm.lifeline.protocol import MAX_GREETING_BYTES, Welcome, pack

WELCOME = Welcome(pid=1, secret=b"", segment=True, bells=True)


class TestNobodyThere:
    @pytest.mark.parametrize("what", ["nothing", "a file", "a socket that nobody listens on"])
    def test_at_a_path(self, base: Path, what: str) -> None:
        before = open_fds()
        path = base / "lifeline"
        if what == "a file":
            path.write_text("mine")
        elif what == "a socket that nobody listens on":
            with socket.socket(socket.AF_UNIX) as sock:
                sock.bind(str(path))
        with pytest.raises(HandleError, match=f"nobody listens at {path}: the queue's writer is gone"):
            dial(str(path), hello())
        assert open_fds() == before

    @pytest.mark.parametrize("address", ["/" + "x" * 200, "@" + "x" * 200, "", "a\0b", "@a\0b", "/etc/passwd/x"])
    def test_at_no_address_at_all(self, address: str) -> None:
        before = open_fds()
        with pytest.raises(HandleError) as caught:
            dial(address, hello())
        assert "None" not in str(caught.value)
        assert open_fds() == before

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
        before = open_fds()
        with pytest.raises(HandleError):
            await self.ask(address, lambda sock: sock.sendall(said))
        assert open_fds() == before

    @pytest.mark.parametrize("said", [b"", bytes(2), pack(WELCOME)[:-1]], ids=lambda said: f"{len(said)} bytes")
    async def test_that_hang_up(self, address: str, said: bytes) -> None:
        before = open_fds()
        with pytest.raises(PeerDied, match=f"the writer .pid {os.getpid()}. died: while this reader was attaching"):
            await self.ask(address, lambda sock: sock.sendall(said))
        assert open_fds() == before

    @pytest.mark.parametrize("amount", [0, 1, 2, 4, 6])
    async def test_that_send_too_few_descriptors_or_too_many(self, address: str, amount: int) -> None:
        before = open_fds()
        fd = os.eventfd(0)

        def send(sock: socket.socket) -> None:
            half = amount // 2
            socket.send_fds(sock, [pack(WELCOME)[:7]], [fd] * half)
            socket.send_fds(sock, [pack(WELCOME)[7:]], [fd] * (amount - half))

        with pytest.raises(HandleError, match=f"sent {amount} descriptors instead of 3"):
            await self.ask(address, send)
        os.close(fd)
        assert open_fds() == before

    @pytest.mark.parametrize(("closes", "error"), [(True, PeerClosed), (False, PeerDied)], ids=["close", "die"])
    async def test_that_end_without_having_listened(self, address: str, closes: bool, error: type[Exception]) -> None:
        before = open_fds()
        door = Door(address)  # its loop never runs
        sock = dial(address, hello())
        attaching = asyncio.ensure_future(attach(address, hello(), sock))
        await turns(5)
        if not closes:
            door.listener.detach_after_fork()
        door.close()
        with pytest.raises(error):
            await asyncio.wait_for(attaching, 10)
        assert open_fds() == before


class TestSecondThoughts:
    async def test_at_any_moment_leave_nothing(self, address: str) -> None:
        before = open_fds()
        rng = random.Random(7)
        outcomes = set()
        async with opened(address) as door:
            for number in range(300):
                rank = number % 300
                sock = dial(address, hello(rank)) if rng.random() < 0.8 else None
                attaching = asyncio.ensure_future(attach(address, hello(rank), sock))
                await turns(1 + rng.randrange(12))
                attaching.cancel()
                with suppress(asyncio.CancelledError):
                    lifeline = await attaching
                    lifeline.close()
                outcomes.add(attaching.cancelled())
            reader = await Reader.admitted(address, 299)
            reader.lifeline.close()

            def ended() -> int:
                return sum(what in {"left", "died"} for what, _ in door.log)

            await until(lambda: ended() == len(door.log) / 2, "the end of all who came")
        assert outcomes == {True, False}
        assert open_fds() == before
