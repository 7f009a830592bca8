"""The queue with vLLM's interface, and the plugin that puts it in the place of vLLM's own."""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import multiprocessing
import pickle
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from members import meet
from support import eventually, until

from aioshm import HandleError, QueueClosed
from aioshm.engine.compat.vllm import (
    MAX_SPIN_CPU,
    QUEUE_MODULE,
    Handle,
    MessageQueue,
    differences,
    register,
    signatures,
)

LOCALHOST = "127.0.0.1"
WITHIN_S = 30.0
FILLS = bytes(60_000)  # a chunk, and so a ring that has only one

# The methods of vLLM 0.33's queue.
SIGNATURES = {
    "__init__": "(self, n_reader, n_local_reader, local_reader_ranks=None, max_chunk_bytes=25165824, max_chunks=10, "
    "connect_ip=None, enable_shm_tensor_arena=False)",
    "acquire_read": "(self, timeout=None, indefinite=False)",
    "acquire_write": "(self, timeout=None)",
    "broadcast_object": "(self, obj=None)",
    "create_from_handle": "(handle, rank)",
    "create_from_process_group": "(pg, max_chunk_bytes, max_chunks, writer_rank=0, external_writer_handle=None, "
    "blocking=True)",
    "create_from_process_group_single_reader": "(pg, max_chunk_bytes, max_chunks, reader_rank=0, blocking=False)",
    "dequeue": "(self, timeout=None, indefinite=False)",
    "enqueue": "(self, obj, timeout=None)",
    "export_handle": "(self)",
    "shutdown": "(self)",
    "wait_until_ready": "(self)",
}
STATIC = [name for name in SIGNATURES if not SIGNATURES[name].startswith("(self")]
METHODS = "\n".join(
    f"    {'@staticmethod' if name in STATIC else ''}\n    def {name}{parameters}: ..."
    for name, parameters in SIGNATURES.items()
)

Submit = Callable[..., Future[Any]]


@pytest.fixture
def submit() -> Iterator[Submit]:
    """Run functions in threads."""
    with ThreadPoolExecutor() as pool:
        yield pool.submit


@contextmanager
def attached(n_reader: int = 1, **kwargs: Any) -> Iterator[tuple[MessageQueue, list[MessageQueue]]]:
    """Give a writer and its local readers, all ready."""
    with ended(MessageQueue(n_reader, n_reader, **{"max_chunk_bytes": 1 << 16, **kwargs})) as [writer]:
        handle = writer.export_handle()
        with ended(*(MessageQueue.create_from_handle(handle, rank) for rank in range(n_reader))) as readers:
            ready(writer, *readers)
            yield writer, readers


@contextmanager
def ended(*ends: MessageQueue) -> Iterator[list[MessageQueue]]:
    try:
        yield list(ends)
    finally:
        for end in ends:
            end.shutdown()


def ready(*ends: MessageQueue) -> None:
    with ThreadPoolExecutor() as pool:
        for waiting in [pool.submit(end.wait_until_ready) for end in ends]:
            waiting.result(WITHIN_S)


def waits(queue: MessageQueue) -> Callable[[], bool]:
    return lambda: queue._queue.stats().parks > 0


class TestInterface:
    def test_is_that_of_vllm_0_33(self) -> None:
        assert signatures(MessageQueue) == SIGNATURES

    def test_attributes_that_callers_read(self) -> None:
        with attached(2) as (writer, [first, second]):
            assert (writer.n_local_reader, writer.n_remote_reader, writer.local_reader_rank) == (2, 0, -1)
            assert (first.local_reader_rank, second.local_reader_rank) == (0, 1)
            assert (first.n_local_reader, first.n_remote_reader) == (2, 0)
            assert [end._is_writer for end in (writer, first)] == [True, False]
            assert [end._is_local_reader for end in (writer, first)] == [False, True]
            assert not any(end._is_remote_reader or end.shutting_down for end in (writer, first))
            assert writer.tensor_arena is None

    @pytest.mark.parametrize(
        ("environment", "stall_warning_s", "max_spin_cpu"),
        [({}, 7.0, MAX_SPIN_CPU), ({"AIOSHM_STALL_WARNING_S": "8", "AIOSHM_MAX_SPIN_CPU": "0.2"}, 8.0, 0.2)],
    )
    def test_options_are_those_of_workers(
        self, environment: dict[str, str], stall_warning_s: float, max_spin_cpu: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("VLLM_RINGBUFFER_WARNING_INTERVAL", "7")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with ended(MessageQueue(1, 1)) as [queue]:
            options = queue.export_handle().queue.options
        assert (options.stall_warning_s, options.max_spin_cpu) == (stall_warning_s, max_spin_cpu)

    def test_invalid_warning_interval_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_RINGBUFFER_WARNING_INTERVAL", "soon")
        with pytest.raises(ValueError, match="VLLM_RINGBUFFER_WARNING_INTERVAL='soon'"):
            MessageQueue(1, 1)


class TestMessages:
    def test_raw_slots_and_broadcasts(self) -> None:
        with attached() as (writer, [reader]):
            with writer.acquire_write(WITHIN_S) as chunk:
                chunk[:3] = b"abc"
            with reader.acquire_read(WITHIN_S, indefinite=True) as chunk:
                assert bytes(chunk[:3]) == b"abc"
            assert writer.broadcast_object([1]) == [1]
            assert reader.broadcast_object() == [1]

    def test_writer_without_readers(self) -> None:
        with ended(MessageQueue(0, 0)) as [queue]:
            queue.wait_until_ready()
            queue.enqueue("to nobody")

    @pytest.mark.parametrize("timeout", [-1.0, 0, 0.01])
    def test_timeouts(self, timeout: float) -> None:
        with attached(max_chunks=1) as (writer, [reader]):
            with pytest.raises(TimeoutError):
                reader.dequeue(timeout)
            writer.enqueue(FILLS, timeout)
            with pytest.raises(TimeoutError):
                writer.enqueue(FILLS, timeout)
            assert reader.dequeue(timeout) == FILLS


class TestShutdown:
    @pytest.mark.parametrize("end", ["reader", "writer"])
    def test_cancels_a_waiting_call_and_later_ones(self, end: str, submit: Submit) -> None:
        with attached(max_chunks=1) as (writer, [reader]):
            if end == "reader":
                queue = reader
                waiting = submit(reader.dequeue, indefinite=True)
            else:
                queue = writer
                writer.enqueue(FILLS)
                waiting = submit(writer.enqueue, FILLS)
            eventually(waits(queue), "parking")
            for _ in range(2):
                queue.shutdown()
            assert queue.shutting_down
            for attempt in (lambda: waiting.result(WITHIN_S), lambda: queue.broadcast_object(1)):
                with pytest.raises(RuntimeError, match=r"^cancelled$"):
                    attempt()

    async def test_in_a_thread_with_an_event_loop(self, submit: Submit) -> None:
        with ExitStack() as stack:
            _, [reader] = await asyncio.to_thread(stack.enter_context, attached())
            waiting = submit(reader.dequeue)
            await until(waits(reader), "parking")
            reader.shutdown()
            with pytest.raises(RuntimeError, match=r"^cancelled$"):
                waiting.result(WITHIN_S)

    def test_cancel_event_ends_a_wait(self, submit: Submit) -> None:
        cancel = threading.Event()
        with attached() as (_, [reader]):
            waiting = submit(reader.dequeue, cancel=cancel)
            eventually(waits(reader), "parking")
            cancel.set()
            with pytest.raises(RuntimeError, match="cancel"):
                waiting.result(WITHIN_S)

    def test_dropped_end_closes_itself(self) -> None:
        writer = MessageQueue(1, 1)
        with ended(MessageQueue.create_from_handle(writer.export_handle(), 0)) as [reader]:
            ready(writer, reader)
            del writer
            gc.collect()
            with pytest.raises(QueueClosed):
                reader.dequeue()


class TestHandles:
    def test_handle_passes_through_a_pipe_and_is_refused_by_vllms_own_queue(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        with closing(ours), closing(theirs), ended(MessageQueue(3, 2, connect_ip=LOCALHOST)) as [writer]:
            theirs.send({"handle": writer.export_handle()})
            handle = ours.recv()["handle"]
            assert handle == writer.export_handle()
            assert handle.local_reader_ranks == [0, 1]
            assert handle.remote_subscribe_addr.startswith(f"tcp://{LOCALHOST}:")
            assert "token" not in repr(handle)
            for name in ("buffer_handle", "local_subscribe_addr", "local_notify_addr", "tensor_arena_handle"):
                with pytest.raises(HandleError, match="AIOSHM_VLLM=1"):
                    getattr(handle, name)

    def test_other_handles_and_ranks_are_refused(self) -> None:
        class Theirs:
            local_reader_ranks = (0,)
            buffer_handle = (1, 2, 3, "name")

        with pytest.raises(HandleError, match="AIOSHM_VLLM=1"):
            MessageQueue.create_from_handle(Theirs(), 0)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="handle"):
            MessageQueue.create_from_handle("nothing", 0)  # type: ignore[arg-type]
        with ended(MessageQueue(2, 2)) as [writer]:
            assert writer.export_handle().remote_subscribe_addr is None
            with pytest.raises(ValueError, match="rank must be one of"):
                MessageQueue.create_from_handle(writer.export_handle(), -1)


@pytest.mark.parametrize(("n_local", "ranks"), [(1, [0, 1]), (0, [-1])])
def test_remote_readers(n_local: int, ranks: list[int]) -> None:
    """The only remote reader may have any rank."""
    with ended(MessageQueue(len(ranks), n_local, connect_ip=LOCALHOST)) as [writer]:
        handle = pickle.loads(pickle.dumps(writer.export_handle()))
        with ended(*(MessageQueue.create_from_handle(handle, rank) for rank in ranks)) as readers:
            assert [reader._is_remote_reader for reader in readers] == [False, True][-len(ranks) :]
            ready(writer, *readers)
            writer.enqueue(np.arange(9))
            for reader in readers:
                assert reader.dequeue(WITHIN_S).tolist() == list(range(9))


def each_rank(world_size: int, member: Callable[[Any], Any]) -> list[Any]:
    """Run a function for each rank of a group; return its results."""
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(member, meet(world_size)))


class TestProcessGroups:
    def test_from_one_to_all_others(self) -> None:
        queues = each_rank(3, lambda group: MessageQueue.create_from_process_group(group, 1 << 16, 6, writer_rank=1))
        with ended(*queues) as [first, writer, third]:
            assert [queue._is_writer for queue in queues] == [False, True, False]
            writer.broadcast_object("news")
            assert [first.broadcast_object(), third.broadcast_object()] == ["news"] * 2

    def test_a_writer_outside_of_the_group(self) -> None:
        with ended(MessageQueue(2, 2)) as [writer]:

            def member(group: Any) -> MessageQueue:
                external = writer.export_handle() if group.rank == 0 else None
                return MessageQueue.create_from_process_group(
                    group, 1 << 16, 6, external_writer_handle=external, blocking=False
                )

            with ended(*each_rank(2, member)) as readers:
                ready(writer, *readers)
                writer.enqueue("from outside")
                assert [reader.dequeue(WITHIN_S) for reader in readers] == ["from outside"] * 2

    def test_from_all_to_one(self) -> None:
        made = each_rank(
            2, lambda group: MessageQueue.create_from_process_group_single_reader(group, 1 << 16, 6, reader_rank=1)
        )
        with ended(*(queue for queue, _ in made)) as writers:
            handles = made[1][1]
            assert made[0][1] == []
            assert all(isinstance(handle, Handle) for handle in handles)
            with ended(*(MessageQueue.create_from_handle(handle, 0) for handle in handles)) as readers:
                ready(*writers, *readers)
                for rank in range(2):
                    writers[rank].enqueue(rank)
                    assert readers[rank].dequeue(WITHIN_S) == rank


def _echo(handle: Handle, pipe: Any) -> None:
    requests = MessageQueue.create_from_handle(handle, 0)
    answers = MessageQueue(1, 1)
    pipe.send(answers.export_handle())
    requests.wait_until_ready()
    answers.wait_until_ready()
    while (message := requests.dequeue(indefinite=True)) is not None:
        answers.enqueue(message)


def test_worker_process_answers_until_it_ends() -> None:
    """With the queues that vLLM's executor makes."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    with closing(ours), ended(MessageQueue(1, 1)) as [requests]:
        process = context.Process(target=_echo, args=(requests.export_handle(), theirs), daemon=True)
        process.start()
        theirs.close()
        with ended(MessageQueue.create_from_handle(ours.recv(), 0)) as [answers]:
            requests.wait_until_ready()
            answers.wait_until_ready()
            for message in [*range(50), np.arange(50_000), bytes(300_000)]:
                requests.enqueue(message)
                assert np.array_equal(answers.dequeue(WITHIN_S), message)
            requests.enqueue(None)
            process.join(WITHIN_S)
            assert process.exitcode == 0
            process.close()
            with pytest.raises(QueueClosed):
                answers.dequeue(WITHIN_S)


# The plugin


def a_class(source: str = METHODS) -> Any:
    """Return a class with vLLM's methods, as far as their parameters go."""
    names: dict[str, Any] = {}
    exec(f"class MessageQueue:\n{source}", names)
    return names["MessageQueue"]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Put modules in place that have the names of vLLM's, and the queue that its own has."""
    made: dict[str, Any] = {}
    own = a_class()
    for name in [QUEUE_MODULE, "vllm.v1.executor.multiproc_executor", "another.plugin"]:
        made[name] = ModuleType(name)
        made[name].MessageQueue = own
        monkeypatch.setitem(sys.modules, name, made[name])
    monkeypatch.setenv("AIOSHM_VLLM", "1")
    return made


def test_every_module_that_has_imported_the_queue_gets_the_replacement(
    modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lazily(name: str) -> Any:
        raise AssertionError(f"{name} was imported")

    lazy: Any = ModuleType("lazy")
    lazy.__getattr__ = lazily
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    other = modules.pop("another.plugin")
    kept = other.MessageQueue = a_class()
    for _ in range(2):  # as vLLM may do
        register()
        assert all(module.MessageQueue is MessageQueue for module in modules.values())
    assert other.MessageQueue is kept


@pytest.mark.parametrize("value", ["", "0", None])
def test_register_does_nothing_unless_asked(
    modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    own = modules[QUEUE_MODULE].MessageQueue
    monkeypatch.delenv("AIOSHM_VLLM") if value is None else monkeypatch.setenv("AIOSHM_VLLM", value)
    register()
    assert all(module.MessageQueue is own for module in modules.values())


def test_invalid_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOSHM_VLLM", "yes")
    with pytest.raises(ValueError, match="AIOSHM_VLLM='yes'"):
        register()


def test_a_vllm_with_another_interface_keeps_its_own(modules: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    own = a_class(METHODS.replace("obj, timeout=None", "obj, timeout=None, priority=0"))
    for module in modules.values():
        module.MessageQueue = own
    with caplog.at_level(logging.ERROR, "aioshm.engine"):
        register()
    assert all(module.MessageQueue is own for module in modules.values())
    assert "enqueue: (self, obj, timeout=None, priority=0) instead of" in caplog.text


def test_entry_point_names_register() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["aioshm"].partition(":")
    assert getattr(importlib.import_module(module), name) is register
    assert project["optional-dependencies"]["vllm"] == []


def test_keyword_only_parameters_do_not_count() -> None:
    class Other(MessageQueue):
        def dequeue(self, timeout: float | None = None, indefinite: bool = False, *, cancel: Any = None) -> None: ...
        def enqueue(self, obj: Any, *, timeout: float | None = None) -> None: ...

    assert signatures(Other)["dequeue"] == SIGNATURES["dequeue"]
    assert differences(Other, MessageQueue) == [f"enqueue: (self, obj) instead of {SIGNATURES['enqueue']}"]
    assert len(differences(object, MessageQueue)) == len(SIGNATURES)
