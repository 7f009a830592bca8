"""A reader on its way in: nobody there, a writer that answers strangely or dies, and second thoughts."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from doors import Door, frame, hello
from loops import turns

from aioshm.errors import HandleError, PeerDied
from aioshm.lifeline.dialer import attach, dial
from aioshm.lifeline.protocol import MAX_GREETING_BYTES, Welcome, pack

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
