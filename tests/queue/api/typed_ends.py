"""What type checkers make of queues. `make types` checks this file, ``test_typed.py`` calls what is in it.

An error that has to be one is marked ``type: ignore``, and mypy complains where it is none.
"""

from __future__ import annotations

from typing import Any, assert_type

import msgspec

from aioshm import Handle, MessageQueue, MsgpackCodec, blocking, merge


class Step(msgspec.Struct):
    """A message."""

    number: int


class Other(msgspec.Struct, tag=True):
    """One of two kinds of messages."""

    name: str


class Third(msgspec.Struct, tag=True):
    """The other one."""


Either = Other | Third


class Loud(MessageQueue[Step]):
    """A class of one's own."""


async def writers() -> None:
    """Make writers' ends."""
    async with MessageQueue(0, 0) as untyped:
        assert_type(untyped, MessageQueue[Any])
        await untyped.enqueue(object)
    async with MessageQueue(0, 0, codec="msgpack", type=Step) as typed:
        assert_type(typed, MessageQueue[Step])
        await typed.enqueue(Step(1))
        typed.enqueue_nowait(Step(2))
        await typed.enqueue_many([Step(3)])
        await typed.enqueue({"number": 4})  # type: ignore[arg-type]
        assert_type(await typed.broadcast_object(Step(5)), Step)
    async with MessageQueue[Step](0, 0) as subscripted:
        assert_type(subscripted, MessageQueue[Step])
    async with MessageQueue(0, 0, codec="msgpack", type=list[Step]) as of_lists:
        assert_type(of_lists, MessageQueue[list[Step]])


def blocking_writers() -> None:
    """Make writers' ends whose calls block."""
    with blocking.MessageQueue(0, 0) as plain:
        assert_type(plain, blocking.MessageQueue[Any])
    with blocking.MessageQueue(0, 0, type=Step) as still:
        assert_type(still, blocking.MessageQueue[Step])
        still.enqueue(Step(1))
        still.enqueue("a step")  # type: ignore[arg-type]


def readers(handle: Handle) -> list[MessageQueue]:
    """Make readers' ends."""
    untyped = MessageQueue.create_from_handle(handle, 0)
    assert_type(untyped, MessageQueue[Any])
    typed = MessageQueue.create_from_handle(handle, 0, type=Step)
    assert_type(typed, MessageQueue[Step])
    by_codec = MessageQueue.create_from_handle(handle, 0, codec=MsgpackCodec(type=Step))
    assert_type(by_codec, MessageQueue[Step])
    by_name = MessageQueue.create_from_handle(handle, 0, codec="msgpack")
    assert_type(by_name, MessageQueue[Any])
    union: MessageQueue[Either] = MessageQueue.create_from_handle(handle, 0, type=Either)
    of_codec = MessageQueue.create_from_handle(handle, 0, codec=MsgpackCodec(type=Either))
    assert_type(of_codec, MessageQueue[Any])
    own = Loud.create_from_handle(handle, 0)
    assert_type(own, Loud)
    return [untyped, typed, by_codec, by_name, union, own, of_codec]


async def receive(queue: MessageQueue[Step]) -> list[Step]:
    """Receive eight messages, each in another way."""
    steps = [assert_type(await queue.dequeue(), Step), assert_type(queue.dequeue_nowait(), Step)]
    steps += assert_type(await queue.dequeue_many(1), list[Step])
    async with queue.lease() as leased:
        assert_type(leased, Step)
        steps.append(Step(leased.number))
    steps.append(assert_type(await queue.broadcast_object(), Step))
    async with queue.acquire_read() as memory:
        assert_type(memory, memoryview)
        steps.append(msgspec.msgpack.decode(memory, type=Step))
    async for step in queue:
        steps.append(assert_type(step, Step))
        break
    async for rank, message in merge({7: queue}):
        assert_type(rank, int)
        steps.append(assert_type(message, Step | Any))
        break
    return steps


def receive_blocking(queue: blocking.MessageQueue[Step]) -> list[Step]:
    """Receive seven messages, each in another way."""
    steps = [assert_type(queue.dequeue(), Step), assert_type(queue.dequeue_nowait(), Step)]
    steps += assert_type(queue.dequeue_many(1), list[Step])
    with queue.lease() as leased:
        assert_type(leased, Step)
        steps.append(Step(leased.number))
    steps.append(assert_type(queue.broadcast_object(), Step))
    for step in queue:
        steps.append(assert_type(step, Step))
        break
    for _, message in blocking.merge({7: queue}):
        steps.append(assert_type(message, Step | Any))
        break
    return steps


async def in_group(member: Any) -> int:
    """Pass one message around a group, by a queue of its own and by one from every rank to rank 0."""
    async with await MessageQueue.create_from_process_group(member, 4096, 4, codec="msgpack", type=Step) as queue:
        assert_type(queue, MessageQueue[Step])
        step = await queue.broadcast_object(Step(1) if member.rank == 0 else None)
    writer, handles = await MessageQueue.create_from_process_group_single_reader(
        member, 4096, 4, codec="msgpack", type=Step
    )
    assert_type(writer, MessageQueue[Step])
    async with writer:
        assert_type(handles, list[Handle])
        if handles:
            async with MessageQueue.create_from_handle(handles[1], 0, type=Step) as reader:
                step = await reader.dequeue()
        else:
            await writer.enqueue(Step(step.number + 1))
    return step.number
