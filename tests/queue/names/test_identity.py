"""Writers with an identity: remote readers find the next one where the last one was."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from children import child
from faces import Thread
from proxy import proxied
from support import eventually, raising, until
from test_names import NAMED

from aioshm import (
    Handle,
    HandleError,
    IdentityError,
    MessageQueue,
    NameTaken,
    Options,
    PeerClosed,
    PeerDied,
    QueueRestarted,
    SharedMemoryError,
    blocking,
)
from aioshm.queue.names import files
from aioshm.queue.remote import sockets as remote_sockets

pytestmark = pytest.mark.slow_on_uvloop


@pytest.fixture
def identity(tmp_path: Path) -> Path:
    return tmp_path / "steps.identity"


def new_writer(identity: Any, n_remote: int = 1, n_local: int = 0, **arguments: Any) -> MessageQueue:
    arguments.setdefault("options", Options(remote_timeout=5.0))
    return MessageQueue(
        n_local + n_remote,
        n_local,
        max_chunk_bytes=4096,
        max_chunks=4,
        connect_ip="127.0.0.1",
        identity=identity,
        **arguments,
    )


def made(identity: Path, **options: Any) -> Handle:
    """Let there be the identity of a writer that is gone; return its handle."""
    writer = new_writer(identity, options=Options(**options))
    handle = writer.export_handle()
    writer.end.state.discard()
    return handle


def reading(handle: Handle, rank: int = 0) -> MessageQueue:
    return MessageQueue.create_from_handle(handle, rank, reconnect=True)


# Finding the next writer


async def test_a_goodbye_to_the_last_writer_that_is_on_its_way(identity: Path) -> None:
    """So that this still counts on the reader that comes for the next one: it does not say that the rank is taken."""
    first = new_writer(identity)
    handle = first.export_handle()
    async with reading(handle) as reader:
        await asyncio.gather(first.wait_until_ready(20), reader.wait_until_ready(20))
        network: Any = first.end.network  # type: ignore[union-attr]
        hear, late = network.receive, []

        def hear_no_goodbye(identity: bytes, data: bytes) -> None:
            if b"Finished" in data or b"Leave" in data:
                late.append((identity, data))
            else:
                hear(identity, data)

        network.receive = hear_no_goodbye
        await first.enqueue("last", 20)
        closing = asyncio.ensure_future(first.aclose())
        assert await reader.dequeue(20) == "last"
        with pytest.raises(TimeoutError, match="the writer has closed the queue"):
            while True:
                await reader.dequeue(0.2)
        assert late
        hear(*late[0])
        await closing
        async with new_writer(identity) as second:
            starting = asyncio.ensure_future(second.wait_until_ready(20))
            with pytest.raises(QueueRestarted):
                await reader.dequeue(20)
            await starting
            await second.enqueue("first", 20)
            assert await reader.dequeue(20) == "first"


@pytest.mark.parametrize("secure", [True, False], ids=["encrypted", "open"])
async def test_a_reader_goes_on_with_the_next_writer(identity: Path, secure: bool) -> None:
    options = Options(secure=secure, allow_insecure_pickle=True, remote_timeout=5.0)
    first = new_writer(identity, options=options)
    handle = first.export_handle()
    topics: set[bytes] = set()
    async with reading(handle) as reader:
        for incarnation in range(3):
            async with first if not incarnation else new_writer(identity, options=options) as writer:
                assert writer.export_handle().remote == handle.remote
                topics.add(writer.end.network.topic)  # type: ignore[union-attr]
                starting = asyncio.ensure_future(writer.wait_until_ready(20))
                if incarnation:
                    with pytest.raises(QueueRestarted, match="the writer has closed the queue") as caught:
                        await reader.dequeue(20)
                    assert isinstance(caught.value.ended, PeerClosed)
                # More than the last one sent: numbers begin anew, and nothing of either is taken for the other's.
                messages = [(incarnation, number) for number in range(5 + 5 * incarnation)]
                await asyncio.gather(reader.wait_until_ready(20), starting)
                for message in messages:
                    await writer.enqueue(message, 20)
                closing = asyncio.ensure_future(writer.aclose())
                assert [await reader.dequeue(20) for _ in messages] == messages
                await closing
        assert (reader.stats().restarts, reader.stats().messages, len(topics)) == (2, 30, 3)


async def test_next_writer_may_have_a_wider_window_and_larger_messages(identity: Path) -> None:
    async with reading(made(identity, remote_window=2, max_message_bytes=1000)) as reader:
        async with new_writer(identity, options=Options(remote_window=50)) as writer:
            await asyncio.gather(reader.wait_until_ready(20), writer.wait_until_ready(20))
            messages = [*range(20), bytes(5_000_000)]
            await writer.enqueue_many(messages, 20)
            assert [await reader.dequeue(5) for _ in messages] == messages


async def test_a_writer_that_is_killed_and_comes_back(identity: Path) -> None:
    reader: MessageQueue | None = None
    handle, before = "", 0
    for _ in range(2):
        async with child("write", "steps", "4", str(identity), script=NAMED) as running:
            new_handle = await running.says("{")
            handle = handle or new_handle
            reader = reader or reading(Handle.from_json(handle))
            if before:
                with pytest.raises(QueueRestarted) as caught:
                    await reader.dequeue(20)
                assert (caught.value.old_pid, caught.value.pid) == (before, running.pid)
                assert isinstance(caught.value.ended, PeerDied)
            assert [await reader.dequeue(20) for _ in range(4)] == [(running.pid, number) for number in range(4)]
            before = running.pid
            await running.says("written")
            await running.kill()
    assert reader is not None
    await reader.aclose()


async def test_a_reader_that_comes_before_the_writer(identity: Path) -> None:
    handle = made(identity, remote_timeout=0.2)
    async with reading(handle) as reader:
        with pytest.raises(TimeoutError, match="no connection to tcp://127"):
            await reader.dequeue(0.5)  # longer than the writer may be silent
        async with new_writer(identity) as writer:
            await writer.enqueue("at last", 20)
            assert await reader.dequeue(20) == "at last"
        assert reader.stats().restarts == 0


async def test_a_reader_that_is_not_to_reconnect_is_told_at_once(identity: Path) -> None:
    async with child("write", "steps", "1", str(identity), script=NAMED) as running:
        handle = Handle.from_json(await running.says("{"))
        async with MessageQueue.create_from_handle(
            handle, 0, options=msgspec.structs.replace(handle.options, remote_timeout=60.0)
        ) as reader:
            assert await reader.dequeue(20) == (running.pid, 0)
            await running.kill()
            async with new_writer(identity) as writer:
                with pytest.raises(PeerDied, match="another writer has taken its place") as caught:
                    await asyncio.gather(writer.wait_until_ready(20), reader.dequeue(20))
                assert caught.value.pid == running.pid


@pytest.mark.parametrize("policy", ["evict", "hold"])
async def test_a_reader_that_was_given_up_comes_back(identity: Path, policy: Any) -> None:
    options = Options(remote_timeout=1.0, on_reader_death=policy)
    async with new_writer(identity, options=options) as writer, proxied(writer.export_handle()) as (handle, *proxies):
        patient = msgspec.structs.replace(options, remote_timeout=60.0)
        async with MessageQueue.create_from_handle(handle, 0, options=patient, reconnect=True) as reader:
            await asyncio.gather(writer.wait_until_ready(20), reader.wait_until_ready(20))
            for proxy in proxies:
                proxy.stall()
            writer.enqueue_nowait("on its way")
            await until(lambda: not writer.stats().readers)
            for proxy in proxies:
                proxy.resume()
            arrived = []
            with pytest.raises(QueueRestarted, match=r"it (has given|does not know) this reader") as told:
                while True:
                    arrived.append(await reader.dequeue(20))
            assert (told.value.old_pid, told.value.pid) == (os.getpid(), os.getpid())
            await writer.enqueue("back", 20)
            while (message := await reader.dequeue(20)) != "back":
                arrived.append(message)
            # It may have come before, too, which the writer was not told.
            assert set(arrived) == {"on its way"} if policy == "hold" else len(arrived) <= 1


async def test_data_port_that_lets_nothing_through_is_named_and_tried_again(
    identity: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = Options(remote_timeout=1.0, stall_warning_s=0.2)
    async with new_writer(identity, options=options) as writer, proxied(writer.export_handle()) as (handle, data, _):
        data.stall()
        async with reading(handle) as reader:
            starting = asyncio.ensure_future(writer.wait_until_ready(20))
            with pytest.raises(HandleError, match=f"nobody answers at {data.endpoint}: "):
                await reader.dequeue(20)
            assert f"no connection to the writer at {data.endpoint}, last heard" in caplog.text
            data.resume()
            await asyncio.gather(starting, reader.wait_until_ready(20))
            await writer.enqueue("through", 20)
            assert await reader.dequeue(20) == "through"


def test_reader_of_a_loop_that_has_ended_closes_while_the_writer_closes(identity: Path) -> None:
    with blocking.MessageQueue(1, 0, connect_ip="127.0.0.1", identity=identity) as writer:
        reader = reading(writer.export_handle())
        starting = Thread(writer.wait_until_ready, 20)
        asyncio.run(reader.wait_until_ready(20))
        starting.result()
        network: Any = writer.held.end.network  # type: ignore[union-attr]
        closing = Thread(writer.close)
        eventually(lambda: network.closing, "the writer's announcement")
        asyncio.run(reader.aclose())
        closing.result()


# What forbids it


async def test_arguments_are_checked(identity: Path) -> None:
    with pytest.raises(ValueError, match="identity is for remote readers, and there are none"):
        MessageQueue(1, 1, identity=identity)
    assert not identity.exists()
    with pytest.raises(TypeError, match="reconnect must be True or False"):
        MessageQueue.create_from_handle(made(identity), 0, reconnect="yes")  # type: ignore[arg-type]
    async with MessageQueue(2, 1, connect_ip="127.0.0.1") as writer:
        with pytest.raises(ValueError, match=r"reconnect=True needs a writer that has an identity"):
            reading(writer.export_handle(), 1)
        with pytest.raises(ValueError, match=r"reconnect=True is for remote readers; .*MessageQueue\.attach"):
            reading(writer.export_handle(), 0)


async def test_two_writers_of_one_identity(identity: Path) -> None:
    async with new_writer(identity):
        with pytest.raises(NameTaken, match=rf"steps\.identity' is taken .* \(pid {os.getpid()}\)") as caught:
            new_writer(identity)
        assert caught.value.path == str(identity)


async def test_a_writer_that_could_not_be_made_has_no_identity(identity: Path) -> None:
    async with MessageQueue(1, 1, name="taken", options=Options(runtime_dir=str(identity.parent / "names"))) as other:
        with pytest.raises(NameTaken, match="'taken'"):
            new_writer(identity, name="taken", options=other.end.state.options)
    async with new_writer(identity):
        pass


# The file


def test_file_that_others_may_use_is_refused(identity: Path) -> None:
    made(identity)
    identity.chmod(0o604)
    expected = "others may use it: its mode is 0604 instead of 0600"
    with pytest.raises(IdentityError, match=rf"steps\.identity: .*{expected}"):
        new_writer(identity)


FORGERIES: list[Callable[[dict[str, Any]], object]] = [
    lambda content: content["server"].update(public=content["client"]["public"]),
    lambda content: content.update(client=None),
    lambda content: content["server"].update(secret=content["server"]["secret"][:8]),
    lambda content: content.update(data=70_000),
    lambda content: content.update(control=0),
    lambda content: content.update(control=content["data"]),
    lambda content: content.update(token="AAAA"),
    lambda content: content.update(type="aioshm-name"),
]


def test_every_truncation_and_what_is_forged(identity: Path) -> None:
    made(identity)
    whole = identity.read_bytes()
    texts = [whole[:length] for length in range(0, len(whole) - 1, 7)]  # the last byte ends the line
    for forge in FORGERIES:
        content = json.loads(whole)
        forge(content)
        texts.append(json.dumps(content).encode())
    for text in texts:
        identity.write_bytes(text)
        with pytest.raises(IdentityError, match=r"steps\.identity is damaged: .*give readers new handles"):
            new_writer(identity)
    identity.unlink()
    made(identity)


def test_keys_and_the_wish_for_them(identity: Path) -> None:
    made(identity, secure=False, allow_insecure_pickle=True)
    with pytest.raises(IdentityError, match=r"was made without keys, and options.secure is True"):
        new_writer(identity)
    identity.unlink()
    made(identity)
    with pytest.raises(IdentityError, match=r"was made with keys, and options.secure is False"):
        made(identity, secure=False, allow_insecure_pickle=True)


def test_where_it_cannot_be_written(identity: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SharedMemoryError, match=r"/no/where: No such file or directory"):
        new_writer("/no/where")
    write = files._write
    refuse = raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with monkeypatch.context() as patch:
        patch.setattr(files, "_write", refuse)
        with pytest.raises(SharedMemoryError, match=r"steps\.identity: No space left") as caught:
            new_writer(identity)
        assert caught.value.errno == errno.ENOSPC
    assert os.listdir(identity.parent) == []
    once = [write, refuse]
    with monkeypatch.context() as patch:  # when the ports are to be kept
        patch.setattr(files, "_write", lambda fd, content: once.pop(0)(fd, content))
        with pytest.raises(SharedMemoryError, match=r"steps\.identity: No space left"):
            new_writer(identity)
    handle = made(identity)
    with monkeypatch.context() as patch:  # nor is anything new to be kept from here on
        patch.setattr(files, "_write", refuse)
        assert made(identity).remote == handle.remote


def test_a_port_that_another_process_has(identity: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = made(identity)
    assert handle.remote is not None
    port = int(handle.remote.control.rpartition(":")[2])
    monkeypatch.setattr(remote_sockets, "PORT_PATIENCE_S", 0.05)
    with socket.create_server(("127.0.0.1", port), reuse_port=False):
        with pytest.raises(SharedMemoryError, match=rf"port {port} of this writer's identity is in use"):
            new_writer(identity)
    made(identity)
