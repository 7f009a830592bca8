"""Remote readers that come after all were ready, also for ranks of readers that are gone."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import msgspec
import pytest
from proxy import proxied, through_proxies
from remotes import ready_ends, wide_writer
from replacing import REMOTE_TIMEOUT_S, becomes, bereaved, elsewhere, joined, lose_reader, state
from support import until

from aioshm import HandleError, MessageQueue, NoPlaceVacant, PeerClosed, PeerDied, ReaderEvicted
from aioshm.queue.remote import readers, source, wire

pytestmark = pytest.mark.slow_on_uvloop


class TestKilled:
    async def test_its_replacement_may_come_before_its_end_is_noticed(self) -> None:
        async with bereaved(0, 1) as (writer, patient, _):
            assert state(writer, 1) == "attached"
            async with joined(writer, 1) as newcomer:
                await writer.enqueue("x", 20)
                assert await newcomer.dequeue(20) == await patient.dequeue(20) == "x"

    async def test_a_newcomer_waits_for_the_answer_of_a_reader_that_is_cut_off(self, monkeypatch: Any) -> None:
        monkeypatch.setattr(readers, "CUT_OFF_S", 60.0)
        async with through_proxies(remote_timeout=60.0) as (writer, reader, _, control):
            control.refuse()
            async with MessageQueue.create_from_handle(writer.export_handle(), 0) as rival:
                with pytest.raises(TimeoutError, match=r"does not admit it yet: it asks whether .*: rank 0 \(pid"):
                    await rival.wait_until_ready(0.5)
                control.refusing = False
                with pytest.raises(HandleError, match="rank 0 is taken by pid"):
                    await rival.wait_until_ready(20)
            await writer.enqueue("x", 20)
            assert await reader.dequeue(20) == "x"

    async def test_one_that_was_replaced_and_comes_back_is_told(self) -> None:
        async with wide_writer(0, 1, remote_timeout=REMOTE_TIMEOUT_S) as writer:
            async with proxied(writer.export_handle()) as (handle, data, control):
                patient = msgspec.structs.replace(handle.options, remote_timeout=60.0)
                async with MessageQueue.create_from_handle(handle, 0, options=patient) as former:
                    await asyncio.gather(writer.wait_until_ready(20), former.wait_until_ready(20))
                    for proxy in (data, control):
                        proxy.refuse()
                    async with joined(writer, 0) as newcomer:
                        for proxy in (data, control):
                            proxy.refusing = False
                        with pytest.raises(PeerDied, match=r"its connection has ended, and another reader has come"):
                            await former.dequeue(20)
                        await writer.enqueue("x", 20)
                        assert await newcomer.dequeue(20) == "x"

    @pytest.mark.parametrize("slow", ["skip", "evict"])
    async def test_one_that_is_not_waited_for_is_not_waited_for_dead(self, slow: Any) -> None:
        options = {"on_reader_death": "hold", "remote_window": 4, "slow_reader": slow}
        async with bereaved(0, 1, **options) as (writer, patient, _):
            for number in range(10):
                await writer.enqueue(number, 20)
                assert await patient.dequeue(20) == number
            await becomes(writer, 1, "died")


class TestMaxReaders:
    async def test_either_kind_of_reader_may_have_them(self) -> None:
        async with wide_writer(1, 1, max_readers=4) as writer:
            handle = writer.export_handle()
            assert (handle.local_reader_ranks, handle.remote and handle.remote.ranks) == ((0, 2, 3), (1, 2, 3))
            far = elsewhere(handle)
            async with (
                MessageQueue.create_from_handle(handle, 0) as here,
                MessageQueue.create_from_handle(far) as there,
            ):
                await asyncio.gather(*(end.wait_until_ready(20) for end in (writer, here, there)))
                assert there.stats().rank == 1, "the lowest that a remote one may have"
                async with MessageQueue.create_from_handle(far) as extra, joined(writer) as fourth:
                    await extra.wait_until_ready(20)
                    assert {extra.stats().rank, fourth.stats().rank} == {2, 3}
                    taken = extra.stats().rank
                    with pytest.raises(HandleError, match=rf"rank {taken} is taken by pid {os.getpid()} on "):
                        async with joined(writer, taken):
                            pass
                    async with MessageQueue.create_from_handle(far, fourth.stats().rank) as late:
                        with pytest.raises(
                            HandleError, match=rf"rank {5 - taken} is taken by pid {os.getpid()}, which"
                        ):
                            await late.wait_until_ready(20)
                    with pytest.raises(NoPlaceVacant):
                        async with joined(writer):
                            pass
                    await writer.enqueue("x", 20)
                    assert [await end.dequeue(20) for end in (here, there, extra, fourth)] == ["x"] * 4
                    assert [(info.rank, info.state) for info in writer.readers] == [
                        (rank, "attached") for rank in range(4)
                    ]
                await becomes(writer, taken, "left")
                async with joined(writer, taken) as local:  # in the place of a remote one
                    await writer.enqueue("y", 20)
                    assert [await end.dequeue(20) for end in (here, there, local)] == ["y"] * 3
                    assert state(writer, taken) == "attached"
                    writer.dismiss(taken)
                    with pytest.raises(ReaderEvicted):
                        await local.dequeue(20)

    @pytest.mark.parametrize("held", [False, True])
    async def test_one_that_died_is_replaced_by_one_of_the_other_kind_unless_it_is_held(self, held: bool) -> None:
        options = {"max_readers": 2, "on_reader_death": "hold" if held else "raise", "linger_s": 0.1}
        async with wide_writer(0, 1, **options) as writer:
            handle = writer.export_handle()
            async with MessageQueue.create_from_handle(handle, 0) as patient:
                await lose_reader(writer, 1)
                await becomes(writer, 1, "held" if held else "died")
                if not held:
                    with pytest.raises(PeerDied):
                        await writer.enqueue("x", 20)
                async with MessageQueue.create_from_handle(elsewhere(handle), 1) as newcomer:
                    if held:
                        with pytest.raises(HandleError, match=r"rank 1 is taken: pid \d+ has died; its place is held"):
                            await newcomer.wait_until_ready(20)
                        with pytest.raises(NoPlaceVacant, match="has died; its place is held for a local reader"):
                            async with joined(writer, far=True):
                                pass
                    else:
                        await newcomer.wait_until_ready(20)
                    await writer.enqueue("x", 20)
                    assert await patient.dequeue(20) == "x"
                    assert held or await newcomer.dequeue(20) == "x"


async def test_newcomers_to_a_writer_that_closes_are_told_so() -> None:
    async with wide_writer(0, 2) as writer, proxied(writer.export_handle()) as (handle, _, control):
        async with MessageQueue.create_from_handle(handle, 0) as reader:
            async with MessageQueue.create_from_handle(handle, 1) as leaver:
                await asyncio.gather(*(end.wait_until_ready(20) for end in (writer, reader, leaver)))
            await becomes(writer, 1, "left")
            await writer.enqueue("unread", 20)
            control.stall()  # the word of the reader that it has everything is on its way for long
            closing = asyncio.ensure_future(writer.aclose())
            assert await reader.dequeue(20) == "unread"
            for rank in (0, 1):
                async with MessageQueue.create_from_handle(writer.export_handle(), rank) as newcomer:
                    with pytest.raises(PeerClosed, match="the writer has closed the queue"):
                        await newcomer.dequeue(20)
            assert not closing.done()
            control.resume()
            await asyncio.wait_for(closing, 20)


async def test_reader_that_is_not_admitted_yet_closes_without_delay(monkeypatch: Any) -> None:
    monkeypatch.setattr(source, "GOODBYE_S", 60.0)
    async with ready_ends(0, 1) as (writer, _):
        network: Any = writer.end.network  # type: ignore[union-attr]
        monkeypatch.setattr(network, "answer", lambda *_: wire.Wait("the answer of another reader"))
        async with MessageQueue.create_from_handle(writer.export_handle(), 0) as newcomer:
            with pytest.raises(TimeoutError, match="does not admit it yet: the answer of another reader"):
                await newcomer.wait_until_ready(0.3)
            async with asyncio.timeout(20):
                await newcomer.aclose()


async def test_newcomer_to_a_full_queue_of_many_readers_is_refused() -> None:
    """All readers are asked together: asked one after the other, the first has to be asked again before the last."""
    async with ready_ends(0, 14) as (writer, _):
        async with MessageQueue.create_from_handle(writer.export_handle()) as newcomer:
            with pytest.raises(NoPlaceVacant):
                await newcomer.wait_until_ready(10)


async def test_newcomer_is_refused_where_the_reader_that_has_the_rank_does_not_answer_in_time(monkeypatch: Any) -> None:
    async with ready_ends(0, 1, remote_timeout=0.3) as (writer, (reader,)):
        monkeypatch.setattr(reader.end.source, "receive_control", lambda _: None)  # as if its loop were held up
        async with MessageQueue.create_from_handle(writer.export_handle(), 0) as newcomer:
            with pytest.raises(HandleError, match="rank 0 is taken by"):
                await newcomer.wait_until_ready(10)


async def test_reader_that_was_given_up_before_all_are_ready_is_not_admitted_again() -> None:
    async with wide_writer(0, 2) as writer, proxied(writer.export_handle()) as (handle, _, control):
        opening = asyncio.ensure_future(writer.wait_until_ready())
        network: Any = writer.end.network  # type: ignore[union-attr]
        async with MessageQueue.create_from_handle(handle, 0) as reader:
            attaching = asyncio.ensure_future(reader.wait_until_ready(20))
            await until(lambda: network.attached)  # a greeting may be under way
            network._died(*network.attached.values(), "it was silent for 1 s")
            with pytest.raises(PeerDied, match="given this reader up"):
                await attaching
            link: Any = reader.end.source.sockets.control_connection  # type: ignore[union-attr]
            before = link.handshakes
            control.cut()
            await until(lambda: link.handshakes > before)
            await asyncio.sleep(0.1)
            assert not network.attached
        with pytest.raises(PeerDied, match="before all readers were ready"):
            await opening
