"""Queues from process groups; here the ranks are threads and tasks of one process."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest
from members import Member, meet, probe_sockets
from support import HELPERS, cancelled

from aioshm import AioshmError, HandleError, MessageQueue, MsgpackCodec, Options, SharedMemoryError
from aioshm.queue import Handle
from aioshm.queue.groups import factory
from aioshm.queue.groups.process_group import ObjectGroup

create_from_process_group = MessageQueue.create_from_process_group
create_from_process_group_single_reader = MessageQueue.create_from_process_group_single_reader
MAKERS = (create_from_process_group, create_from_process_group_single_reader)
SIZES = (4096, 4)
COLLECTIVES = 5  # that create_from_process_group consists of


async def everywhere(calls: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Await what each rank does; return results and errors, by rank."""
    return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)


async def close_all(ends: list[Any]) -> None:
    for end in ends:
        if isinstance(end, MessageQueue):
            await end.aclose()


async def check_messages(writer: MessageQueue, readers: list[MessageQueue], count: int = 20) -> None:
    async def read(reader: MessageQueue) -> list[Any]:
        return [await reader.dequeue(10) for _ in range(count)]

    reading = [asyncio.ensure_future(read(reader)) for reader in readers]
    for number in range(count):
        await writer.enqueue(number, 10)
    assert await asyncio.gather(*reading) == [list(range(count))] * len(readers)


def cancel_before(member: Member, number: int, task: asyncio.Task[Any]) -> None:
    """Cancel a rank's task before one of its collectives, which begins only then."""
    loop = asyncio.get_running_loop()
    cancelled = threading.Event()

    def cancel() -> None:
        task.cancel()
        loop.call_soon(cancelled.set)

    def before(call: int) -> None:
        if call == number:
            loop.call_soon_threadsafe(cancel)
            cancelled.wait(20)

    member.before = before


# One writer


@pytest.mark.parametrize(("world_size", "writer"), [(4, 2), (4, 3), (2, 0)])
async def test_one_rank_writes_to_all_others(world_size: int, writer: int) -> None:
    group = meet(world_size)
    waits = writer != 3
    ends = await everywhere([create_from_process_group(pg, *SIZES, writer, blocking=waits) for pg in group])
    readers = [end for rank, end in enumerate(ends) if rank != writer]
    handle = ends[writer].export_handle()
    assert handle.n_reader == world_size - 1
    assert handle.local_reader_ranks == tuple(rank for rank in range(world_size) if rank != writer)
    assert [end.stats().rank for end in readers] == list(handle.local_reader_ranks)
    assert all(end.stats().ready for end in ends) == waits
    await asyncio.gather(*(end.wait_until_ready(10) for end in ends))
    await check_messages(ends[writer], readers)
    assert probe_sockets() == set()
    await close_all(ends)


async def test_a_writer_outside_of_the_group() -> None:
    async with MessageQueue(3, 3, None, *SIZES, codec="msgpack") as writer:
        # Only the argument of rank 1 counts, which would write.
        passed = [None, writer.export_handle().to_json(), "nonsense"]
        calls = [
            create_from_process_group(pg, *SIZES, 1, external)  # type: ignore[arg-type]
            for pg, external in zip(meet(3), passed, strict=True)
        ]
        ends = await everywhere([*calls, writer.wait_until_ready(20)])
        assert [end.stats().rank for end in ends[:3]] == [0, 1, 2]
        await check_messages(writer, ends[:3])
        await close_all(ends)


async def test_only_rank_writes_to_nobody_reads_from_outside_and_reads_its_own_queue() -> None:
    (alone,) = meet(1)
    async with await create_from_process_group(alone, *SIZES) as writer:
        assert writer.stats().ready
        assert [await writer.broadcast_object(number) for number in range(20)] == list(range(20))
        assert writer.stats().messages == 20
    async with MessageQueue(1, 1, None, *SIZES) as writer:
        reading = create_from_process_group(alone, *SIZES, 0, writer.export_handle())
        ends = await everywhere([reading, writer.wait_until_ready(20)])
        await check_messages(writer, ends[:1])
        await close_all(ends)
    writer, (handle,) = await create_from_process_group_single_reader(alone, *SIZES, blocking=True)
    async with writer, MessageQueue.create_from_handle(handle, 0) as reader:
        await asyncio.gather(writer.wait_until_ready(10), reader.wait_until_ready(10))
        await check_messages(writer, [reader])


class Step(msgspec.Struct):
    number: int


async def test_options_and_codec_are_the_queues() -> None:
    options = Options(backing="named", lifeline="abstract", wait="park")
    codec = MsgpackCodec(type=Step)
    calls = [create_from_process_group(pg, *SIZES, options=options, codec=codec, connect_ip="::1") for pg in meet(2)]
    ends = await everywhere(calls)
    handle = ends[0].export_handle()
    assert handle.options == options
    assert handle.segment is not None
    assert handle.connect_ip == "::1"
    await ends[0].enqueue(Step(3))
    assert await ends[1].dequeue(10) == Step(3)
    await close_all(ends)
    codecs = ["msgpack", "pickle"]
    ends = await everywhere([create_from_process_group(pg, *SIZES, codec=codecs[pg.rank]) for pg in meet(2)])
    await check_messages(ends[0], ends[1:])  # a reader takes the writer's codec
    await close_all(ends)


# One reader


@pytest.mark.parametrize("blocking", [False, True])
async def test_every_rank_writes_to_one(blocking: bool) -> None:
    group = meet(4)

    async def reader() -> list[list[Any]]:
        own, handles = await create_from_process_group_single_reader(group[2], *SIZES, 2, blocking)
        assert [type(handle) for handle in handles] == [Handle] * 4
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(own)
            queues = [await stack.enter_async_context(MessageQueue.create_from_handle(handle, 0)) for handle in handles]
            await asyncio.gather(own.wait_until_ready(20), *(queue.wait_until_ready(20) for queue in queues))
            await own.enqueue((2, 0))
            await own.enqueue((2, 1))
            return [[await queue.dequeue(20), await queue.dequeue(20)] for queue in queues]

    async def writer(pg: Member) -> list[Handle]:
        queue, handles = await create_from_process_group_single_reader(pg, *SIZES, 2, blocking)
        async with queue:
            assert queue.stats().ready == blocking
            await queue.wait_until_ready(20)
            await queue.enqueue((pg.rank, 0))
            await queue.enqueue((pg.rank, 1))
        return handles

    results = await everywhere([writer(group[0]), writer(group[1]), reader(), writer(group[3])])
    assert results == [[], [], [[(rank, 0), (rank, 1)] for rank in range(4)], []]


# Where memory is not shared


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Give a set of ranks to fill, which then share memory with nobody."""
    ranks: set[int] = set()

    def pretend(group: ObjectGroup, source: int, options: Options | None) -> list[bool]:
        everybody = range(group.world_size)
        return [rank == source or not {rank, source} & ranks for rank in everybody]

    monkeypatch.setattr(factory, "probe", pretend)
    return ranks


@pytest.mark.parametrize(
    ("apart", "local", "remote"), [({0, 3}, (1,), (0, 3)), ({2}, (), (0, 1, 3)), ({3}, (0, 1), (3,))]
)
async def test_the_others_are_remote_readers(
    far: set[int], apart: set[int], local: tuple[int, ...], remote: tuple[int, ...]
) -> None:
    far |= apart
    ends = await everywhere([create_from_process_group(pg, *SIZES, 2, connect_ip="127.0.0.1") for pg in meet(4)])
    handle = ends[2].export_handle()
    assert (handle.n_reader, handle.local_reader_ranks) == (3, local)
    assert handle.remote is not None
    assert handle.remote.ranks == remote
    await check_messages(ends[2], [ends[0], ends[1], ends[3]])
    await close_all(ends)


async def test_the_one_reader_is_remote_for_some(far: set[int]) -> None:
    far.add(1)
    made = await everywhere([MAKERS[1](pg, *SIZES, connect_ip="127.0.0.1") for pg in meet(3)])
    handles = made[0][1]
    assert [handle.local_reader_ranks for handle in handles] == [(0,), (), (0,)]
    readers = [MessageQueue.create_from_handle(handle, 0) for handle in handles]
    writers = [queue for queue, _ in made]
    await everywhere([end.wait_until_ready(20) for end in [*writers, *readers]])
    for writer, reader in zip(writers, readers, strict=True):
        await check_messages(writer, [reader])
    await close_all([*writers, *readers])


# The loop


async def test_the_loop_goes_on_while_a_rank_is_late() -> None:
    one, two = meet(2)
    come = threading.Event()
    two.before = lambda number: come.wait(20) and None
    calls = asyncio.gather(*(create_from_process_group(pg, *SIZES) for pg in (one, two)))
    for _ in range(50):
        await asyncio.sleep(0.002)
    assert not calls.done()
    come.set()
    await close_all(await calls)


async def test_calls_with_one_group_take_turns() -> None:
    group = meet(3)
    for pg in group:
        pg.before = lambda number, pg=pg: time.sleep(0.001 * pg.rank)  # type: ignore[misc]

    async def rank(pg: Member) -> list[Any]:
        first = asyncio.ensure_future(create_from_process_group(pg, *SIZES, 0))
        second = asyncio.ensure_future(create_from_process_group_single_reader(pg, *SIZES, 1))
        third = asyncio.ensure_future(create_from_process_group(pg, *SIZES, 2))
        return [await first, (await second)[0], await third]

    ends = await everywhere([rank(pg) for pg in group])
    await check_messages(ends[0][0], [ends[1][0], ends[2][0]])
    await check_messages(ends[2][2], [ends[0][2], ends[1][2]])
    await close_all([end for of_rank in ends for end in of_rank])


# Cancellation


@pytest.mark.parametrize("number", range(COLLECTIVES))
@pytest.mark.parametrize("rank", [0, 1])
async def test_cancelling_one_rank_at_any_step_fails_at_all(rank: int, number: int) -> None:
    group = meet(3)
    tasks = [asyncio.ensure_future(create_from_process_group(pg, *SIZES)) for pg in group]
    cancel_before(group[rank], number, tasks[rank])
    await asyncio.wait(tasks, timeout=20)
    assert tasks[rank].cancelled()
    for other in (task for task in tasks if task is not tasks[rank]):
        if number < COLLECTIVES - 1:
            assert type(other.exception()) is HandleError
            assert f"rank {rank} " in str(other.exception())
            assert str(other.exception()).endswith(": HandleError: the call was cancelled there")
        else:  # too late to call it off: its queue was closed instead
            assert isinstance(other.exception(), AioshmError), other
    assert all(pg.calls == group[0].calls for pg in group)
    assert probe_sockets() == set()


@pytest.mark.parametrize("number", range(COLLECTIVES - 1))
async def test_cancelling_every_rank_at_any_step_leaves_nothing(number: int) -> None:
    group = meet(3)
    loop = asyncio.get_running_loop()
    tasks = [asyncio.ensure_future(create_from_process_group_single_reader(pg, *SIZES)) for pg in group]
    reached = asyncio.Event()
    go_on = threading.Event()

    def before(call: int) -> None:
        if call == number:
            loop.call_soon_threadsafe(reached.set)
            go_on.wait(20)

    group[2].before = before
    await asyncio.wait_for(reached.wait(), 20)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=20)
    assert all(task.cancelled() for task in tasks)
    go_on.set()
    # The next call waits until the cancelled ones are over, and is not disturbed by them.
    ends = await everywhere([create_from_process_group(pg, *SIZES) for pg in group])
    await check_messages(ends[0], ends[1:])
    await close_all(ends)


async def test_cancelling_the_wait_for_the_others_closes_the_queue() -> None:
    one, two = meet(2)
    call = asyncio.ensure_future(create_from_process_group(one, *SIZES))
    reader = await create_from_process_group(two, *SIZES, blocking=False)
    await asyncio.sleep(0.02)
    await cancelled(call)
    with pytest.raises(AioshmError):
        await reader.wait_until_ready(10)
    await reader.aclose()


def test_a_stuck_collective_holds_up_nobody_who_leaves() -> None:
    command = [sys.executable, str(HELPERS / "group_child.py"), "leave"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "left\n", "")


# Errors


@pytest.mark.parametrize(
    ("arguments", "error"),
    [((0, 4), ValueError), ((4096, "4"), TypeError), ((1 << 60, 4), SharedMemoryError)],
    ids=["value", "type", "memory"],
)
async def test_an_error_of_the_writer_reaches_all(arguments: tuple[Any, Any], error: type[Exception]) -> None:
    group = meet(3)
    wrong = [create_from_process_group(group[rank], *(arguments if rank == 1 else SIZES), 1) for rank in range(3)]
    errors = await everywhere(wrong)
    assert type(errors[1]) is error
    for other in (errors[0], errors[2]):
        assert type(other) is HandleError
        assert str(other) == f"rank 1 could not make the queue: {error.__name__}: {errors[1]}"
    # And the group can be used again.
    await close_all(await everywhere([create_from_process_group(pg, *SIZES, 1) for pg in group]))


@pytest.mark.parametrize(
    ("maker", "wrong", "error"),
    [
        (create_from_process_group, {"codec": MsgpackCodec(type=Step)}, "ValueError: codec must be 'pickle'"),
        (create_from_process_group_single_reader, {"options": "mine"}, "TypeError: options must be an Options or None"),
    ],
    ids=["codec", "options of the single reader"],
)
async def test_an_error_of_any_rank_reaches_all(maker: Any, wrong: dict[str, Any], error: str) -> None:
    errors = await everywhere([maker(pg, *SIZES, **(wrong if pg.rank == 2 else {})) for pg in meet(3)])
    assert type(errors[2]).__name__ == error.partition(":")[0]
    for other in errors[:2]:
        assert type(other) is HandleError
        assert f"rank 2 could not take part: {error}" in str(other)


async def test_a_broken_group_leaves_nothing() -> None:
    group = meet(2)
    group[1].before = lambda number: number == 4 and group[1].break_off() and None
    errors = await everywhere([create_from_process_group(pg, *SIZES) for pg in group])
    assert [type(error) for error in errors] == [threading.BrokenBarrierError, ConnectionResetError]
    assert probe_sockets() == set()


@pytest.mark.parametrize(("maker", "name"), [(MAKERS[0], "writer_rank"), (MAKERS[1], "reader_rank")])
async def test_ranks_must_be_the_same_everywhere(maker: Any, name: str) -> None:
    errors = await everywhere([maker(pg, *SIZES, pg.rank) for pg in meet(2)])
    errors += await everywhere([make(pg, *SIZES) for make, pg in zip(MAKERS, meet(2), strict=True)])
    assert [str(error) for error in errors] == [
        f"{name} must be the same at every rank: it is 0 at rank 0, 1 at rank 1"
    ] * 2 + ["every rank must make the same call: rank 0 has writer_rank, rank 1 reader_rank"] * 2


@pytest.mark.parametrize("external", [3, "nonsense", b""], ids=repr)
async def test_an_external_handle_is_checked(external: Any) -> None:
    errors = await everywhere([create_from_process_group(pg, *SIZES, 0, external) for pg in meet(2)])
    assert type(errors[0]) is (TypeError if external == 3 else HandleError)
    assert type(errors[1]) is HandleError
    assert "rank 0" in str(errors[1])


async def test_a_group_of_ones_own_is_checked() -> None:
    member = meet(2)[0]
    member.rank = 2
    with pytest.raises(ValueError, match=r"pg.rank must be below pg.world_size \(2\), not 2"):
        await create_from_process_group(member, *SIZES)


async def test_places_beyond_the_group_are_not_the_writers_rank() -> None:
    options = Options(max_readers=3)
    ends = await everywhere([create_from_process_group(pg, *SIZES, 1, options=options) for pg in meet(2)])
    assert ends[1].export_handle().local_reader_ranks == (0, 2, 3)
    await close_all(ends)
