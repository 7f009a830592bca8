"""Arguments that no call can take: each is a TypeError or ValueError that names the argument and the value."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
from pairs import EITHER_PLACE
from remotes import ready_ends

import aioshm
from aioshm import MessageQueue, ShmRingBuffer, StatelessProcessGroup, blocking

create_from_process_group = MessageQueue.create_from_process_group
create_from_process_group_single_reader = MessageQueue.create_from_process_group_single_reader


NAN, INF = float("nan"), float("inf")
HUGE, ENDLESS = 10**30, 10**5000  # Python writes no int of that many digits

TEXT, NUMBERS = "some text", [1, 2]
NO_INT: list[Any] = [NAN, INF, 1.5, True, TEXT, NUMBERS, None, object()]
NO_SECONDS: list[Any] = [NAN, -INF, -1, -0.5, 10**400, -(10**400), ENDLESS, True, TEXT, NUMBERS, object()]
NO_OPTION_SECONDS: list[Any] = [NAN, INF, -INF, -1, 0, 1e300, 10**400, ENDLESS, True, TEXT, NUMBERS, None]
NO_BOOL: list[Any] = [0, 1, NAN, TEXT, NUMBERS, None]
NO_COUNT: list[Any] = [*NO_INT, -1, -HUGE, -ENDLESS]
NO_SMALL_COUNT: list[Any] = [*NO_COUNT, HUGE, 10**400, ENDLESS]


def label(value: Any) -> str:
    text = "endless" if value in (ENDLESS, -ENDLESS) else repr(value)
    return "object()" if "object at" in text else text[:20]


def bad(values: list[Any], name: str = "value") -> pytest.MarkDecorator:
    return pytest.mark.parametrize(name, values, ids=label)


@contextlib.contextmanager
def refused(name: str, value: Any) -> Iterator[None]:
    """Expect the error that names an argument and its value."""
    with pytest.raises((TypeError, ValueError)) as caught:
        yield
    assert type(caught.value) in (TypeError, ValueError), caught.value
    text = str(caught.value)
    assert name in text
    shown = f"an int of {value.bit_length()} bits" if value in (ENDLESS, -ENDLESS) else repr(value)[:100]
    assert shown in text
    assert len(text) < 400


SECONDS_OF: list[tuple[str, int]] = [
    ("wait_until_ready", 0),
    ("enqueue", 1),
    ("enqueue_many", 1),
    ("acquire_write", 0),
    ("dequeue", 0),
    ("dequeue_many", 1),
    ("acquire_read", 0),
    ("lease", 0),
]
"""The calls of an end with a timeout, and how many arguments come before."""

READING = ("dequeue", "dequeue_many", "acquire_read", "lease")


async def use(ends: tuple[MessageQueue, list[MessageQueue]], name: str, arguments: int, **named: Any) -> None:
    writer, (reader,) = ends
    first: dict[str, tuple[Any, ...]] = {"enqueue": ("x",), "enqueue_many": (["x"],), "dequeue_many": (1,)}
    end = writer if name.startswith(("enqueue", "acquire_write")) else reader
    call = getattr(end, name)(*first.get(name, ())[:arguments], **named)
    await (call.__aenter__() if isinstance(call, AbstractAsyncContextManager) else call)


@pytest.mark.slow_on_uvloop
@EITHER_PLACE
@pytest.mark.parametrize(("name", "arguments"), SECONDS_OF, ids=[name for name, _ in SECONDS_OF])
async def test_timeouts(n_local: int, n_remote: int, name: str, arguments: int) -> None:
    async with ready_ends(n_local, n_remote, chunks=1) as ends:
        if name.startswith(("enqueue", "acquire_write")):
            await ends[0].enqueue("fills the only slot")
        for value in NO_SECONDS:
            if n_remote and name != "wait_until_ready":
                ends[0].end.state.core.open = ends[1][0].end.state.core.open = False  # type: ignore[attr-defined]
            with refused("timeout", value):
                await use(ends, name, arguments, timeout=value)


@EITHER_PLACE
@pytest.mark.parametrize("name", READING)
async def test_what_ends_and_reports_a_wait(n_local: int, n_remote: int, name: str) -> None:
    async with ready_ends(n_local, n_remote) as ends:
        for value in (5, True, TEXT, NAN, HUGE, ENDLESS, threading.Event(), asyncio.Event, object()):
            with refused("cancel", value):
                await use(ends, name, 1, cancel=value)
        for value in NO_BOOL:
            with refused("indefinite", value):
                await use(ends, name, 1, indefinite=value)
        await ends[0].enqueue("still in order")
        assert await ends[1][0].dequeue(10) == "still in order"


@EITHER_PLACE
async def test_infinity_is_for_ever(n_local: int, n_remote: int) -> None:
    async with ready_ends(n_local, n_remote) as (writer, (reader,)):
        for seconds in (INF, 1e300, 10**300, 1e12):
            waiting = asyncio.ensure_future(reader.dequeue(seconds))
            while not reader.stats().parks and not waiting.done():
                await asyncio.sleep(0)
            await writer.enqueue(seconds, seconds)
            assert await waiting == seconds


@EITHER_PLACE
async def test_batches(n_local: int, n_remote: int) -> None:
    async with ready_ends(n_local, n_remote) as (_, (reader,)):
        for value in [*NO_COUNT, 0]:
            with refused("max_items", value):
                await reader.dequeue_many(value)


def test_waits_of_threads() -> None:
    def call(name: str, **named: Any) -> None:
        result = getattr(reader, name)(*((1,) if name == "dequeue_many" else ()), **named)
        if isinstance(result, AbstractContextManager):
            result.__enter__()

    writer = blocking.MessageQueue(1, 1, max_chunk_bytes=100)
    reader = blocking.MessageQueue.create_from_handle(writer.export_handle(), 0)
    wrong = {"timeout": NO_SECONDS, "cancel": [5, True, TEXT, HUGE, ENDLESS, object()], "indefinite": NO_BOOL}
    with writer, reader:
        for name in READING:
            for argument, values in wrong.items():
                for value in values:
                    with refused(argument, value):
                        call(name, **{argument: value})
        for value in NO_SECONDS:
            with refused("timeout", value):
                writer.wait_until_ready(value)


SIZES = {"n_reader": 1, "n_local_reader": 1, "max_chunk_bytes": 100, "max_chunks": 2}

QUEUE: list[tuple[str, list[Any]]] = [
    ("n_reader", [*NO_SMALL_COUNT, 1 << 17]),
    ("n_local_reader", [value for value in [*NO_SMALL_COUNT, 2] if value is not None]),
    ("max_chunk_bytes", [*NO_COUNT, 0]),
    ("max_chunks", [*NO_COUNT, 0]),
    ("slots", [*(value for value in NO_COUNT if value is not None), 0]),
    ("local_reader_ranks", [5, NAN, True, TEXT, [-1], [1.5], ["0"], [HUGE], [ENDLESS], [0, 1], []]),
    ("remote_reader_ranks", [5, NAN, True, TEXT, [-1], [ENDLESS], [0], [1]]),
    ("connect_ip", [5, NAN, True, NUMBERS, "", TEXT, "10.0.0.256"]),
    ("codec", [5, NAN, True, NUMBERS, None, TEXT]),
    ("options", [5, NAN, True, TEXT, {}]),
    ("type", [5, NAN, True, TEXT, {}]),
    ("name", [5, NAN, True, NUMBERS, "", TEXT, "a/b", "..", "a\0b", "a" * 500]),
    ("identity", [5, NAN, True, NUMBERS, b"path", "", "a\0b"]),
]


@pytest.mark.parametrize(("name", "values"), QUEUE, ids=[name for name, _ in QUEUE])
def test_queues(name: str, values: list[Any]) -> None:
    for face in (MessageQueue, blocking.MessageQueue):
        for value in values:
            with pytest.raises((TypeError, ValueError)) as caught:
                face(**{**SIZES, name: value})
            assert type(caught.value) in (TypeError, ValueError)
            assert name in str(caught.value)
            assert len(str(caught.value)) < 400


def test_every_argument_of_a_queue_was_tried() -> None:
    assert {name for name, _ in QUEUE} == {*inspect.signature(MessageQueue.__init__).parameters} - {"self"}


@pytest.mark.parametrize("n_reader", [0, 1, 3])
async def test_queue_without_n_local_reader_has_local_readers_only(n_reader: int) -> None:
    async with MessageQueue(n_reader) as writer:
        assert writer.export_handle().local_reader_ranks == tuple(range(n_reader))


def test_both_faces_show_the_same_arguments_and_describe_each() -> None:
    shown = inspect.signature(MessageQueue)
    assert [*shown.parameters][:2] == ["n_reader", "n_local_reader"]
    for face in (MessageQueue, blocking.MessageQueue):
        assert inspect.signature(face) == shown
        described = inspect.getdoc(face.__init__) or ""
        assert all(f"\n    {name}: " in described for name in shown.parameters)


def test_blocking_calls_have_the_docstrings_of_the_awaited_ones() -> None:
    for name in dir(MessageQueue):
        if not name.startswith("_") and hasattr(blocking.MessageQueue, name):
            assert inspect.getdoc(getattr(MessageQueue, name))
            if name not in ("aclose", "messages"):
                described = inspect.getdoc(getattr(blocking.MessageQueue, name))
                assert described == inspect.getdoc(getattr(MessageQueue, name)), name


@pytest.mark.parametrize("face", [MessageQueue, blocking.MessageQueue])
def test_call_without_its_arguments_names_the_class_that_users_know(face: Any) -> None:
    with pytest.raises(TypeError, match=r"^MessageQueue\.__init__\(\) missing"):
        face()
    with pytest.raises(TypeError, match=r"^MessageQueue\.attach\(\) missing"):
        face.attach()


@bad([NAN, INF, 1.5, True, TEXT, NUMBERS, -1, 1, HUGE, 10**400, ENDLESS])
async def test_ranks_of_readers(value: Any) -> None:
    async with MessageQueue(1, 1, max_chunk_bytes=100) as writer:
        for face in (MessageQueue, blocking.MessageQueue):
            with refused("rank", value):
                face.create_from_handle(writer.export_handle(), value)
            for wrong in (5, TEXT, {}):
                with pytest.raises(TypeError, match="options must be an Options"):
                    face.create_from_handle(writer.export_handle(), 0, options=wrong)  # type: ignore[arg-type]
            for wrong in (5, NAN, None, NUMBERS, TEXT):
                with pytest.raises(aioshm.HandleError):
                    face.create_from_handle(wrong, 0)  # type: ignore[arg-type]


GROUP: list[tuple[str, list[Any]]] = [
    ("host", [5, None, True, NUMBERS, ""]),
    ("port", [*NO_SMALL_COUNT, 0, 65536]),
    ("rank", [*NO_SMALL_COUNT, 1]),
    ("world_size", [*NO_SMALL_COUNT, 0]),
    ("timeout", NO_OPTION_SECONDS),
    ("name", [5, None, b"group", NUMBERS]),
]


@pytest.mark.parametrize(("name", "values"), GROUP, ids=[name for name, _ in GROUP])
def test_stateless_groups(name: str, values: list[Any]) -> None:
    good: dict[str, Any] = {"host": "127.0.0.1", "port": 1, "rank": 0, "world_size": 1}
    for value in values:
        with refused(name, value):
            StatelessProcessGroup.create(**{**good, name: value})


def alone() -> Any:
    """Return a process group of one."""
    return SimpleNamespace(rank=0, world_size=1, broadcast_obj=lambda obj, src: obj, all_gather_obj=lambda obj: [obj])


@bad([*NO_SMALL_COUNT, 1])
async def test_ranks_in_groups(value: Any) -> None:
    with refused("writer_rank", value):
        await create_from_process_group(alone(), 100, 2, value)
    with refused("reader_rank", value):
        await create_from_process_group_single_reader(alone(), 100, 2, value)
    with refused("source_rank", value):
        aioshm.in_the_same_node_as(alone(), value)
    with pytest.raises(TypeError, match="options must be an Options or None, not 'mine'"):
        aioshm.in_the_same_node_as(alone(), options="mine")  # type: ignore[arg-type]


@bad([5, NAN, TEXT, NUMBERS, None, object()])
async def test_process_groups(value: Any) -> None:
    with refused("pg", value):
        await create_from_process_group(value, 100, 2)
    with refused("pg", value):
        await create_from_process_group_single_reader(value, 100, 2)
    with refused("pg", value):
        aioshm.in_the_same_node_as(value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n_reader", NO_COUNT),
        ("max_chunk_bytes", [*NO_COUNT, 0]),
        ("max_chunks", [*NO_COUNT, 0]),
        ("slots", [*(value for value in NO_COUNT if value is not None), 0]),
        ("inline_bytes", [value for value in NO_COUNT if value is not None]),
        ("backing", [5, NAN, TEXT, NUMBERS, ENDLESS]),
    ],
)
def test_rings(name: str, values: list[Any]) -> None:
    for value in values:
        with refused(name, value):
            ShmRingBuffer(**{"n_reader": 1, "max_chunk_bytes": 1, "max_chunks": 1, name: value})
