"""`on_reader_death="hold"`: the place of a reader that was killed, and its messages, wait for the next one."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import pytest
from children import child
from pairs import EITHER_PLACE
from remotes import wide_writer
from replacing import becomes, bereaved, joined, lose_reader, received
from support import cancelled, cancelled_after, until

from aioshm import EndClosed, MessageQueue, Options, QueueFull, ReaderDied, ReaderJoined
from aioshm.queue.local import readers as local_readers

pytestmark = pytest.mark.slow_on_uvloop

KILLS = 3


async def test_killed_under_traffic_and_replaced() -> None:
    chance, sent, done = random.Random(KILLS), 0, False
    options = Options(on_reader_death="hold")
    async with MessageQueue(2, 2, max_chunk_bytes=4096, max_chunks=4, slots=16, options=options) as writer:
        handle = writer.export_handle()

        async def send() -> None:
            nonlocal sent
            await writer.wait_until_ready(20)
            while not done:
                await writer.enqueue(sent)
                sent += 1
            await writer.aclose()

        async def other() -> list[int]:
            return [number async for number in bystander]

        numbers: list[int] = []
        async with MessageQueue.create_from_handle(handle, 0) as bystander:
            sending, others = asyncio.ensure_future(send()), asyncio.ensure_future(other())
            for kill in range(KILLS + 1):
                async with child("tell", handle.to_json(), "1") as reader:
                    await reader.says("ready")
                    run = [int(await reader.says()) for _ in range(1 + chance.randrange(40))]
                    if kill < KILLS:
                        reader.signal(signal.SIGKILL)
                    done = kill == KILLS
                    run += map(int, await reader.rest())
                    if kill < KILLS:  # it may outlive the signal
                        await becomes(writer, 1, "held")
                assert run == list(range(run[0], run[-1] + 1)), "a hole within what one received"
                numbers += run
            await asyncio.wait_for(sending, 60)
            assert await asyncio.wait_for(others, 60) == list(range(sent)), "the other one loses nothing"
    assert numbers == sorted(set(numbers)), "nothing twice, all in order"
    assert numbers[-1] == sent - 1, "the last message"
    in_hands = set(range(sent)) - set(numbers)
    assert len(in_hands) <= KILLS, f"at most one each of {KILLS}: {sorted(in_hands)}"


@EITHER_PLACE
@pytest.mark.parametrize("replaced", [True, False], ids=["replaced", "dismissed"])
async def test_the_writer_waits_and_says_for_whom_until_the_place_is_taken_or_given_up(
    n_local: int, n_remote: int, replaced: bool
) -> None:
    options = {"on_reader_death": "hold", "chunks": 4, "remote_window": 4}
    async with bereaved(n_local, n_remote, **options) as (writer, patient, pid):
        changes = writer.membership(20)
        for number in range(4):
            await writer.enqueue(number, 20)
            assert await patient.dequeue(20) == number
        await becomes(writer, 1, "held")
        if n_remote:
            assert await anext(changes) == ReaderDied(1, pid, 0, held=True)
        held = rf"rank 1 \(pid {pid} " + ("on .* " if n_remote else "") + r"has died; its place is held\)"
        with pytest.raises(QueueFull, match=held):
            writer.enqueue_nowait(4)
        with pytest.raises(TimeoutError, match=held):
            await writer.enqueue(4, 0.01)
        (info,) = [info for info in writer.readers if info.rank == 1]
        assert (info.state, info.pid, info.read, info.lag) == ("held", pid, 0, 4)
        waiting = asyncio.ensure_future(writer.enqueue(4))
        if replaced:
            async with MessageQueue.create_from_handle(writer.export_handle(), history=2) as heir:
                assert await received(heir, 4) == list(range(4)), "what it had not taken, all of it"
                await asyncio.wait_for(waiting, 20)
                assert await heir.dequeue(20) == await patient.dequeue(20) == 4
                assert heir.stats().rank == 1
                assert await anext(changes) == ReaderJoined(1, os.getpid(), 0)
        else:
            writer.dismiss(1)
            await asyncio.wait_for(waiting, 20)
            assert await patient.dequeue(20) == 4
            async with joined(writer, 1) as newcomer:
                await writer.enqueue(5, 20)
                assert await newcomer.dequeue(20) == 5, "from the present on"


@pytest.mark.parametrize("what", ["hold", "lease"])
async def test_what_it_had_in_hands_comes_again(what: str) -> None:
    """A block that was not left has finished with nothing; a lease of less than 256 KiB has received the message."""
    async with wide_writer(1, 0, on_reader_death="hold", chunk=1 << 20) as writer:
        handle = writer.export_handle()
        async with child(what, handle.to_json(), "0") as doomed:
            for number in range(2):
                await writer.enqueue(bytes([number]) * 600_000, 20)
            await doomed.says("ready")
            await doomed.says({"hold": "holding", "lease": "leasing"}[what])
        async with MessageQueue.create_from_handle(handle, 0) as heir:
            assert [(await heir.dequeue(20))[0] for _ in range(2)] == [0, 1]


@EITHER_PLACE
async def test_an_heir_that_goes_before_it_has_anything_leaves_it_held(n_local: int, n_remote: int) -> None:
    async with bereaved(n_local, n_remote, on_reader_death="hold") as (writer, _, _pid):
        await writer.enqueue("kept", 20)
        await becomes(writer, 1, "held")
        for turns in (0, 1, 2, 3, 5, 8, 13):
            async with MessageQueue.create_from_handle(writer.export_handle(), 1) as quitter:
                await cancelled_after(quitter.wait_until_ready(20), turns)
                if quitter.stats().ready:
                    assert await quitter.dequeue(20) == "kept"
                    return
            await becomes(writer, 1, "held")
        async with joined(writer, 1) as heir:
            assert await heir.dequeue(20) == "kept"


class TestClosing:
    """A writer that closes waits for who is to have what it keeps."""

    @staticmethod
    async def bereave(writer: MessageQueue) -> int:
        """Kill the only reader, for which two messages are kept then; return its pid."""
        pid = await lose_reader(writer, unread=[0, "large" * 5000])
        await becomes(writer, 0, "held")
        return pid

    @EITHER_PLACE
    async def test_a_replacement_comes(self, n_local: int, n_remote: int, caplog: pytest.LogCaptureFixture) -> None:
        async with wide_writer(n_local, n_remote, on_reader_death="hold", remote_timeout=1.0) as writer:
            handle, pid = writer.export_handle(), await self.bereave(writer)
            closings = [asyncio.ensure_future(writer.aclose()) for _ in range(2)]
            await until(lambda: "closing: waiting for a replacement of reader 0" in caplog.text, "closing")
            with pytest.raises(EndClosed):
                await writer.enqueue("late")
            async with MessageQueue.create_from_handle(handle, 0) as heir:
                assert [message async for message in heir] == [0, "large" * 5000]
            await asyncio.wait_for(asyncio.gather(*closings), 20)
            assert f"(pid {pid}), which had read 0 messages" in caplog.text
            assert "lost" not in caplog.text

    @EITHER_PLACE
    @pytest.mark.parametrize("how", ["in time", "cancelled"])
    async def test_nobody_comes(self, n_local: int, n_remote: int, how: str, caplog: pytest.LogCaptureFixture) -> None:
        options = {"on_reader_death": "hold", "remote_timeout": 1.0, "linger_s": 0.05 if how == "in time" else 60.0}
        async with wide_writer(n_local, n_remote, **options) as writer:
            pid = await self.bereave(writer)
            closing = asyncio.ensure_future(writer.aclose())
            if how == "cancelled":
                await until(lambda: "closing: waiting for a replacement" in caplog.text, "closing")
                await cancelled(closing)
            await asyncio.wait_for(writer.aclose(), 20)
            assert f"no replacement of reader 0 (pid {pid}) has attached: messages 0 to 1 are lost" in caplog.text

    async def test_nothing_is_waited_for_where_all_was_read(self, caplog: pytest.LogCaptureFixture) -> None:
        async with wide_writer(1, 0, on_reader_death="hold", linger_s=60.0) as writer:
            await lose_reader(writer)
            await becomes(writer, 0, "held")
            await asyncio.wait_for(writer.aclose(), 20)
        assert "replacement of" not in caplog.text


async def test_a_replacement_that_comes_while_the_former_one_is_being_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for that, where the kernel has yet to close the files of a process that was killed."""
    dying: set[int] = set()
    monkeypatch.setattr(local_readers, "is_dying", dying.__contains__)
    async with wide_writer(1, 0, on_reader_death="hold") as writer:
        handle = writer.export_handle()
        async with child("idle", handle.to_json(), "0") as doomed:
            await writer.enqueue("kept", 20)
            doomed.signal(signal.SIGSTOP)  # its files are open
            dying.add(doomed.pid)
            for rank in (0, None):
                async with MessageQueue.create_from_handle(handle, rank) as quitter:
                    with pytest.raises(TimeoutError):
                        await quitter.wait_until_ready(0.05)
            async with MessageQueue.create_from_handle(handle, 0) as heir:
                waiting = asyncio.ensure_future(heir.dequeue(20))
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(waiting), 0.05)
                doomed.signal(signal.SIGKILL)
                assert await waiting == "kept"
            await doomed.end()
