"""Whoever else connects to a writer: is dropped, and harms nobody."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress

import msgspec
import pytest
from doors import Reader, frame, hello, knock, opened, until_hung_up
from loops import open_fds, turns
from support import descriptor_limit, until

from aioshm.errors import AioshmError, HandleError
from aioshm.lifeline import listener as listening
from aioshm.lifeline.dialer import attach, dial
from aioshm.lifeline.protocol import MAX_GREETING_BYTES, PROVEN, WAKE, pack, take_frame, unpack_answer

DEEP = frame(b"\x82\xa4type\xa5hello\xa4more" + b"\x91" * 3500 + b"\xc0")
NO_TEXT = frame(b"\x81\xa4type\xa2\xff\xfe")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "HELLO_TIMEOUT_S", 0.05)


async def admitted_at_last(address: str) -> Reader:
    """Return a reader that tries again: where time is short, a busy machine may be too slow for the first attempt."""
    for _ in range(200):
        try:
            return await Reader.admitted(address)
        except AioshmError:
            await asyncio.sleep(0.01)
    pytest.fail("no attempt was successful")


class TestOne:
    @pytest.mark.parametrize(
        "said",
        [
            b"GET / HTTP/1.1\r\n\r\n",
            b"\xff" * 4,
            (MAX_GREETING_BYTES + 1).to_bytes(4, "big"),
            bytes(4),
            frame(b"\xc1"),
            frame(b"\x80"),
            frame(bytes(1000)),
            b"\x00\x00" * 5000,
            DEEP,
            NO_TEXT,
            frame(msgspec.msgpack.encode({"type": "hello", "version": "1"})),
            frame(msgspec.msgpack.encode({"type": "welcome"})),
            PROVEN + WAKE + bytes(10),
        ],
        ids=lambda said: said[:12].hex(),
    )
    async def test_that_says_something_else_is_refused(self, address: str, said: bytes) -> None:
        async with opened(address) as door:
            reader = await Reader.admitted(address)
            sock = knock(address, said)
            answer = await until_hung_up(sock)
            sock.close()
            if answer:  # it may have been reset before
                body = take_frame(bytearray(answer))
                assert body is not None
                with pytest.raises(HandleError, match="refused this reader: "):
                    unpack_answer(body)
            assert door.log == [("attached", 0)]
            assert door.wakes == 0
            door.peers[0].go()
            await reader.hears("go")
            reader.lifeline.close()

    @pytest.mark.parametrize(
        "said", [b"", b"\0", bytes(3), pack(hello())[:4], pack(hello())[:-1]], ids=lambda said: f"{len(said)} bytes"
    )
    @pytest.mark.usefixtures("impatient")
    async def test_that_never_says_it_all_is_hung_up_on(self, address: str, said: bytes) -> None:
        async with opened(address) as door:
            sock = knock(address, said)
            assert await until_hung_up(sock) == b""
            sock.close()
            assert door.log == []
            reader = await admitted_at_last(address)
            reader.lifeline.close()

    async def test_that_says_it_byte_by_byte_is_a_reader(self, address: str) -> None:
        async with opened(address) as door:
            sock = knock(address)
            for byte in pack(hello(9)):
                sock.send(bytes([byte]))
                await turns(2)
            await until(lambda: door.log == [("attached", 9)], "the admission")
            sock.close()
            await until(lambda: door.log[-1] == ("died", 9), "its end")


class TestMany:
    async def test_silent_connections_do_not_keep_a_reader_out(self, address: str) -> None:
        async with opened(address) as door:
            inside = len(open_fds())
            strangers = [knock(address) for _ in range(200)]
            reader = await Reader.admitted(address)
            door.peers[0].go()
            await reader.hears("go")
            reader.lifeline.close()
            for sock in strangers:
                sock.close()
            await until(lambda: len(open_fds()) == inside, "the end of every connection")

    async def test_readers_of_whom_many_come_at_once_are_no_strangers(self, address: str) -> None:
        """They have greeted; that it was not read yet is the writer's own affair."""
        async with opened(address) as door:
            socks = [knock(address, pack(hello(rank))) for rank in range(250)]
            await until(lambda: len(door.log) >= 250, "the admission of all")
            assert sorted(door.log) == [("attached", rank) for rank in range(250)]
            for sock in socks:
                sock.close()
            await until(lambda: len(door.log) == 500, "their ends")

    async def test_that_talk_all_the_time_leave_the_others_their_turns(self, address: str) -> None:
        async with opened(address) as door:
            reader = await Reader.admitted(address)
            stop = False

            async def chatter() -> None:
                while not stop:
                    sock = knock(address, b"\xff" * 100)
                    await until_hung_up(sock)
                    sock.close()

            chatting = [asyncio.ensure_future(chatter()) for _ in range(20)]
            for number in range(1, 51):
                door.peers[0].ring()
                await reader.hears("wake", number)
            stop = True
            await asyncio.wait_for(asyncio.gather(*chatting), 20)
            reader.lifeline.close()


async def test_running_out_of_descriptors_is_survived(address: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "aioshm")
    async with opened(address) as door:
        sock = dial(address, hello())
        attaching = asyncio.ensure_future(attach(address, hello(), sock))
        with descriptor_limit(3):
            await until(lambda: caplog.records, "the failure")
            await turns(50)
            assert len(caplog.records) == 1, "it does not turn in circles"
            assert "cannot accept a reader" in caplog.text
        reader = Reader(await asyncio.wait_for(attaching, 10))
        assert door.log == [("attached", 0)]
        reader.lifeline.close()


async def test_closing_while_there_are_no_descriptors_tells_a_reader_that_waits(address: str) -> None:
    async with opened(address) as door:
        sock = knock(address)
        spent = [os.dup(sock.fileno()) for _ in range(20)]
        with descriptor_limit(max(spent) + 1):
            with suppress(OSError):
                while True:
                    spent.append(os.dup(sock.fileno()))
            door.close()
        for fd in spent:
            os.close(fd)
        assert b"closed" in await until_hung_up(sock)
        sock.close()
