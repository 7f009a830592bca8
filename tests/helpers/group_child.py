"""One rank of process groups in a process of its own: ``python group_child.py ROLE ARGUMENTS...``."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import uvloop
from members import FileGroup, meet

from aioshm import MessageQueue, Options
from aioshm.engine.compat.vllm import MessageQueue as VllmQueue
from aioshm.queue.groups.process_group import in_the_same_node_as
from aioshm.queue.groups.stateless import StatelessProcessGroup

create_from_process_group = MessageQueue.create_from_process_group
create_from_process_group_single_reader = MessageQueue.create_from_process_group_single_reader


def say(text: str) -> None:
    print(text, flush=True)


def store(port: str) -> None:
    """Be rank 0 of three, until somebody ends it."""
    with StatelessProcessGroup.create("127.0.0.1", int(port), 0, 3, timeout=60):
        sys.stdin.read()


def leave() -> None:
    """Wait for another rank, which does not come, and end."""

    async def give_up() -> None:
        alone, _ = meet(2, timeout=1000)
        try:
            await asyncio.wait_for(create_from_process_group(alone, 100, 2), 0.1)
        except TimeoutError:
            say("left")

    asyncio.run(give_up())


def same_node(directory: str, rank: str, world_size: str, uid: str, *ways: str) -> None:
    """Say who shares memory with each rank, as this one sees it with each of the options."""
    if int(uid):
        os.setuid(int(uid))
    group = FileGroup(directory, int(rank), int(world_size))
    for way in ways:
        options = Options(**dict(option.split("=") for option in way.split(",") if option))  # type: ignore[arg-type]
        answers = [in_the_same_node_as(group, source, options=options) for source in range(group.world_size)]
        say(json.dumps(answers))


def mixed(directory: str, rank: str, world_size: str, run: str) -> None:
    """Make a queue from rank 0 to all others, and check what it carries; say who is where."""
    group = FileGroup(directory, int(rank), int(world_size))
    options = Options(lifeline="directory", runtime_dir=run)

    async def exchange() -> None:
        async with await create_from_process_group(group, 4096, 4, options=options, connect_ip="127.0.0.1") as queue:
            if queue.stats().side == "writer":
                handle = queue.export_handle()
                say(json.dumps([handle.local_reader_ranks, handle.remote and handle.remote.ranks]))
                for number in range(1000):
                    await queue.enqueue(number, 20)
            else:
                say(json.dumps([message async for message in queue] == list(range(1000))))

    asyncio.run(exchange())


def rank(number: str, world_size: str, gloo_port: str, store_port: str) -> None:
    """Be one rank of several groups; do what each line of standard input says, and answer with a line."""
    global dist, torch
    import torch
    import torch.distributed as dist

    me, world = int(number), int(world_size)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{gloo_port}", rank=me, world_size=world, timeout=timedelta(seconds=60)
    )
    stateless = StatelessProcessGroup.create("127.0.0.1", int(store_port), me, world, timeout=60)
    groups = {
        "gloo": dist.group.WORLD,
        "stateless": stateless,
        "some": dist.new_group([1, 2]),
        "deaf": dist.new_group(backend="cuda:gloo"),
        "hasty": dist.new_group(),
        "destroyed": dist.new_group(),
    }
    dist.destroy_process_group(groups["destroyed"])
    say("ready")
    for line in sys.stdin:
        order = json.loads(line)
        scenario: Callable[..., Any] = globals()[order["do"]]
        factory = uvloop.new_event_loop if order["loop"] == "uvloop" else asyncio.new_event_loop
        try:
            with asyncio.Runner(loop_factory=factory) as runner:
                answer = {"returned": runner.run(scenario(me, groups, **order["how"]))}
        except Exception as error:
            answer = {"raised": type(error).__name__, "text": str(error)}
        say(json.dumps(answer))
    stateless.close()
    dist.destroy_process_group()


def array_of(seed: int, number: int) -> Any:
    return torch.arange(number % 50, dtype=torch.int32) + (seed + number)


async def pause(rng: random.Random) -> None:
    if rng.random() < 0.01:
        await asyncio.sleep(rng.random() * 0.003)


async def send(queue: MessageQueue, seed: int, count: int) -> None:
    rng = random.Random(seed)
    for number in range(count):
        await pause(rng)
        await queue.enqueue((number, array_of(seed, number)), 20)


async def receive(queue: MessageQueue, seed: int, count: int) -> int:
    """Check every message, and return how many there were until the writer closed the queue."""
    rng = random.Random(os.getpid())
    received = 0
    async for number, array in queue:
        assert number == received, f"{number} came instead of {received}"
        expected = array_of(seed, number)
        assert array.dtype == expected.dtype
        assert torch.equal(array, expected)
        received += 1
        await pause(rng)
    assert received == count
    return received


async def arrays(me: int, groups: dict[str, Any], group: str, writer: int, count: int) -> int:
    """One rank writes arrays to all others; say how many were received."""
    async with await create_from_process_group(groups[group], 4096, 10, writer) as queue:
        if queue.stats().side == "writer":
            await send(queue, 7, count)
            return 0
        return await receive(queue, 7, count)


async def ranks(me: int, groups: dict[str, Any]) -> list[int]:
    """Say which ranks read in a subgroup."""
    async with await create_from_process_group(groups["some"], 4096, 4, 1) as queue:
        stats = queue.stats()
        return [stats.rank] if stats.side == "reader" else list(queue.export_handle().local_reader_ranks)


async def vllm_to_one(me: int, groups: dict[str, Any], group: str, reader: int, count: int) -> list[Any]:
    """All ranks of the group write to one, itself included, through vLLM's interface; say what was received."""

    def member() -> list[Any]:
        own, handles = VllmQueue.create_from_process_group_single_reader(groups[group], 1 << 16, count, reader)
        queues = [VllmQueue.create_from_handle(handle, 0) for handle in handles]
        try:
            send = threading.Thread(target=send_all, args=(own,))
            send.start()
            for queue in queues:
                queue.wait_until_ready()
            received = [[queue.dequeue(20) for _ in range(count)] for queue in queues]
            send.join()
            return received
        finally:
            for queue in [*queues, own]:
                queue.shutdown()

    def send_all(own: VllmQueue) -> None:
        own.wait_until_ready()
        for number in range(count):
            own.enqueue([me, number], 20)

    return await asyncio.to_thread(member) if groups[group] is not dist.GroupMember.NON_GROUP_MEMBER else []


async def missing(me: int, groups: dict[str, Any]) -> None:
    """One rank does not come."""
    if me != 1:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.3), groups["hasty"])
        async with await create_from_process_group(groups["hasty"], 4096, 4):
            pass


async def same(me: int, groups: dict[str, Any], group: str) -> list[list[bool]]:
    """Who shares memory with each rank; blocks the loop, which it may."""
    return [in_the_same_node_as(groups[group], source) for source in range(3)]


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
