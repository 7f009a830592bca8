"""The queue with vLLM's interface: its names, arguments, results and errors."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from support import eventually
from vllm_signatures import SIGNATURES

from aioshm import HandleError, PeerDied, QueueClosed
from aioshm.engine.compat.vllm import MAX_SPIN_CPU, Handle, MessageQueue
from aioshm.engine.compat.vllm_plugin import signatures

LOCALHOST = "127.0.0.1"
WITHIN_S = 30.0
FILLS = bytes(60_000)  # a chunk, and so a ring that has only one


class Thread(threading.Thread):
    """Runs a function; `result` hands on what it returned or raised."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        super().__init__()
        self._function = function
        self._args = args
        self._outcome = None
        self._error = None
        self.start()

    def run(self) -> None:
        try:
            self._outcome = self._function(*self._args)
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self.join(WITHIN_S)
        assert not self.is_alive(), "the thread did not end"
        if self._error is not None:
            raise self._error
        return self._outcome


@contextmanager
def attached(n_reader: int = 1, **kwargs: Any) -> Iterator[tuple[MessageQueue, list[MessageQueue]]]:
    """Give a writer and its local readers, all ready."""
    writer = MessageQueue(n_reader, n_reader, **{"max_chunk_bytes": 1 << 16, **kwargs})
    readers = [MessageQueue.create_from_handle(writer.export_handle(), rank) for rank in range(n_reader)]
    threads = [Thread(reader.wait_until_ready) for reader in readers]
    try:
        writer.wait_until_ready()
        for thread in threads:
            thread.result()
        yield writer, readers
    finally:
        for end in [*readers, writer]:
            end.shutdown()


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
        queue = MessageQueue(1, 1)
        options = queue.export_handle().queue.options
        assert (options.stall_warning_s, options.max_spin_cpu) == (stall_warning_s, max_spin_cpu)
        queue.shutdown()

    def test_invalid_warning_interval_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_RINGBUFFER_WARNING_INTERVAL", "soon")
        with pytest.raises(ValueError, match="VLLM_RINGBUFFER_WARNING_INTERVAL='soon'"):
            MessageQueue(1, 1)


class TestMessages:
    def test_all_readers_get_all_of_every_size(self) -> None:
        sent = [
            {"step": 1},
            np.arange(50_000),
            torch.arange(40_000, dtype=torch.bfloat16),
            bytes(300_000),
            ("execute_model", (), {}, None),
        ]
        with attached(2, enable_shm_tensor_arena=True) as (writer, readers):
            threads = [Thread(lambda reader: [reader.dequeue(WITHIN_S) for _ in sent], reader) for reader in readers]
            for message in sent:
                writer.enqueue(message, WITHIN_S)
            for thread in threads:
                got = thread.result()
                assert (got[0], got[3], got[4]) == (sent[0], sent[3], sent[4])
                assert np.array_equal(got[1], sent[1])
                assert torch.equal(got[2], sent[2])

    def test_a_second_thread_sends(self) -> None:
        with attached() as (writer, [reader]):
            for number in range(3):
                Thread(writer.enqueue, number).result()
                assert reader.dequeue(WITHIN_S) == number
            writer.enqueue("main")
            assert Thread(reader.dequeue, WITHIN_S).result() == "main"

    def test_raw_slots(self) -> None:
        with attached() as (writer, [reader]):
            with writer.acquire_write(WITHIN_S) as chunk:
                chunk[:3] = b"abc"
            with reader.acquire_read(WITHIN_S, indefinite=True) as chunk:
                assert bytes(chunk[:3]) == b"abc"

    def test_broadcast_object(self) -> None:
        with attached() as (writer, [reader]):
            assert writer.broadcast_object([1]) == [1]
            assert reader.broadcast_object() == [1]

    def test_writer_without_readers(self) -> None:
        queue = MessageQueue(0, 0)
        queue.wait_until_ready()
        queue.enqueue("to nobody")
        queue.shutdown()

    def test_only_readers_receive_and_only_writers_send(self) -> None:
        with attached() as (writer, [reader]):
            with pytest.raises(RuntimeError, match="reader"):
                writer.dequeue(0)
            with pytest.raises(RuntimeError, match="writer"):
                reader.enqueue(1)


class TestTimeouts:
    @pytest.mark.parametrize("timeout", [-1.0, 0, 0.01])
    def test_dequeue_without_a_message(self, timeout: float) -> None:
        with attached() as (_, [reader]):
            with pytest.raises(TimeoutError):
                reader.dequeue(timeout)

    def test_dequeue_without_time_takes_a_message(self) -> None:
        with attached() as (writer, [reader]):
            writer.enqueue("there")
            assert reader.dequeue(-1.0) == "there"

    @pytest.mark.parametrize("timeout", [-1.0, 0, 0.01])
    def test_enqueue_without_a_free_slot(self, timeout: float) -> None:
        with attached(max_chunks=1) as (writer, [reader]):
            writer.enqueue(FILLS, timeout)
            with pytest.raises(TimeoutError):
                writer.enqueue(FILLS, timeout)
            assert reader.dequeue() == FILLS


class TestShutdown:
    @pytest.mark.parametrize("end", ["reader", "writer"])
    def test_cancels_a_waiting_call(self, end: str) -> None:
        with attached(max_chunks=1) as (writer, [reader]):
            if end == "reader":
                queue = reader
                thread = Thread(lambda: reader.dequeue(indefinite=True))
            else:
                queue = writer
                writer.enqueue(FILLS)
                thread = Thread(writer.enqueue, FILLS)
            eventually(waits(queue), "parking")
            queue.shutdown()
            with pytest.raises(RuntimeError, match=r"^cancelled$"):
                thread.result()
            assert queue.shutting_down

    def test_later_calls_are_cancelled_too(self) -> None:
        with attached() as (writer, [reader]):
            for end in (writer, reader):
                end.shutdown()
                end.shutdown()
            with pytest.raises(RuntimeError, match=r"^cancelled$"):
                reader.dequeue()
            with pytest.raises(RuntimeError, match=r"^cancelled$"):
                writer.enqueue(1)

    async def test_shutdown_in_a_thread_with_an_event_loop(self) -> None:
        def make() -> Any:
            block = attached()
            return block, block.__enter__()

        block, (_writer, [reader]) = await asyncio.to_thread(make)
        thread = Thread(reader.dequeue)
        while not waits(reader)():
            await asyncio.sleep(0.001)
        reader.shutdown()
        with pytest.raises(RuntimeError, match=r"^cancelled$"):
            thread.result()
        block.__exit__(None, None, None)

    def test_cancel_event_ends_a_wait(self) -> None:
        cancel = threading.Event()
        with attached() as (_, [reader]):
            thread = Thread(lambda: reader.dequeue(cancel=cancel))
            eventually(waits(reader), "parking")
            cancel.set()
            with pytest.raises(RuntimeError, match="cancel"):
                thread.result()

    def test_reader_learns_that_the_writer_closed(self) -> None:
        with attached() as (writer, [reader]):
            writer.enqueue("last")
            writer.shutdown()
            assert reader.dequeue() == "last"
            with pytest.raises(QueueClosed, match="closed"):
                reader.dequeue()

    def test_dropped_end_closes_itself(self) -> None:
        writer = MessageQueue(1, 1)
        reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
        thread = Thread(reader.wait_until_ready)
        writer.wait_until_ready()
        thread.result()
        del writer, thread
        gc.collect()
        with pytest.raises(QueueClosed):
            reader.dequeue()
        del reader
        gc.collect()


class TestHandles:
    def test_handle_passes_through_a_pipe(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        writer = MessageQueue(3, 2, connect_ip=LOCALHOST)
        theirs.send({"handle": writer.export_handle()})
        handle = ours.recv()["handle"]
        assert handle == writer.export_handle()
        assert handle.local_reader_ranks == [0, 1]
        assert handle.remote_subscribe_addr.startswith(f"tcp://{LOCALHOST}:")
        assert "token" not in repr(handle)
        writer.shutdown()
        ours.close()
        theirs.close()

    def test_handle_of_local_readers_has_no_remote_address(self) -> None:
        writer = MessageQueue(1, 1)
        assert writer.export_handle().remote_subscribe_addr is None
        writer.shutdown()

    def test_vllms_own_queue_refuses_the_handle(self) -> None:
        writer = MessageQueue(1, 1)
        handle: Any = writer.export_handle()
        for name in ("buffer_handle", "local_subscribe_addr", "local_notify_addr", "tensor_arena_handle"):
            with pytest.raises(HandleError, match="AIOSHM_VLLM=1"):
                getattr(handle, name)
        writer.shutdown()

    def test_a_handle_of_vllms_own_queue_is_refused(self) -> None:
        class Theirs:
            local_reader_ranks = (0,)
            buffer_handle = (1, 2, 3, "name")

        with pytest.raises(HandleError, match="AIOSHM_VLLM=1"):
            MessageQueue.create_from_handle(Theirs(), 0)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="handle"):
            MessageQueue.create_from_handle("nothing", 0)  # type: ignore[arg-type]

    def test_unknown_rank_is_refused(self) -> None:
        writer = MessageQueue(2, 2)
        with pytest.raises(ValueError, match="rank must be one of"):
            MessageQueue.create_from_handle(writer.export_handle(), -1)
        writer.shutdown()


class TestRemoteReaders:
    def test_beside_local_ones(self) -> None:
        writer = MessageQueue(2, 1, connect_ip=LOCALHOST)
        handle = pickle.loads(pickle.dumps(writer.export_handle()))
        readers = [MessageQueue.create_from_handle(handle, rank) for rank in range(2)]
        assert [reader._is_remote_reader for reader in readers] == [False, True]
        threads = [Thread(lambda reader: (reader.wait_until_ready(), reader.dequeue(WITHIN_S)), end) for end in readers]
        writer.wait_until_ready()
        writer.enqueue(np.arange(9))
        for thread in threads:
            assert thread.result()[1].tolist() == list(range(9))
        for end in [*readers, writer]:
            end.shutdown()

    def test_single_remote_reader_may_have_rank_minus_1(self) -> None:
        writer = MessageQueue(1, 0, connect_ip=LOCALHOST)
        reader = MessageQueue.create_from_handle(writer.export_handle(), -1)
        thread = Thread(lambda: (reader.wait_until_ready(), reader.dequeue(WITHIN_S)))
        writer.wait_until_ready()
        writer.enqueue("answer")
        assert thread.result()[1] == "answer"
        reader.shutdown()
        writer.shutdown()


class Group:
    """A process group whose ranks are threads, with the methods of vLLM's ``StatelessProcessGroup``."""

    def __init__(self, rank: int, table: list[Any], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.world_size = len(table)
        self._table = table
        self._barrier = barrier

    def all_gather_obj(self, obj: Any) -> list[Any]:
        self._table[self.rank] = pickle.dumps(obj)
        self._barrier.wait(WITHIN_S)
        everybody = [pickle.loads(sent) for sent in self._table]
        self._barrier.wait(WITHIN_S)
        return everybody

    def broadcast_obj(self, obj: Any, src: int) -> Any:
        return self.all_gather_obj(obj)[src]


def meet(world_size: int) -> list[Any]:
    table = [None] * world_size
    barrier = threading.Barrier(world_size)
    return [Group(rank, table, barrier) for rank in range(world_size)]


class TestProcessGroups:
    def test_from_one_to_all_others(self) -> None:
        def member(group: Any) -> Any:
            queue = MessageQueue.create_from_process_group(group, 1 << 16, 6, writer_rank=1)
            try:
                return queue._is_writer, queue.broadcast_object("news" if group.rank == 1 else None)
            finally:
                if group.rank != 1:
                    queue.shutdown()
                else:
                    ends.append(queue)

        ends: list[MessageQueue] = []
        outcomes = [thread.result() for thread in [Thread(member, group) for group in meet(3)]]
        assert outcomes == [(False, "news"), (True, "news"), (False, "news")]
        ends[0].shutdown()

    def test_a_writer_outside_of_the_group(self) -> None:
        writer = MessageQueue(2, 2)

        def member(group: Any) -> Any:
            external = writer.export_handle() if group.rank == 0 else None
            queue = MessageQueue.create_from_process_group(
                group, 1 << 16, 6, external_writer_handle=external, blocking=False
            )
            queue.wait_until_ready()
            try:
                return queue.dequeue(WITHIN_S)
            finally:
                queue.shutdown()

        threads = [Thread(member, group) for group in meet(2)]
        writer.wait_until_ready()
        writer.enqueue("from outside")
        assert [thread.result() for thread in threads] == ["from outside"] * 2
        writer.shutdown()

    def test_from_all_to_one(self) -> None:
        groups = meet(2)

        def member(group: Any) -> Any:
            queue, handles = MessageQueue.create_from_process_group_single_reader(group, 1 << 16, 6, reader_rank=1)
            assert all(isinstance(handle, Handle) for handle in handles)
            if group.rank == 1:
                readers = [MessageQueue.create_from_handle(handle, 0) for handle in handles]
                own = Thread(lambda: (queue.wait_until_ready(), queue.enqueue("from 1")))
                answers = [(reader.wait_until_ready(), reader.dequeue(WITHIN_S))[1] for reader in readers]
                own.result()
                for reader in readers:
                    reader.shutdown()
                queue.shutdown()
                return answers
            queue.wait_until_ready()
            queue.enqueue("from 0")
            ends.append(queue)
            return handles

        ends: list[MessageQueue] = []
        threads = [Thread(member, group) for group in groups]
        assert [thread.result() for thread in threads] == [[], ["from 0", "from 1"]]
        ends[0].shutdown()


def _echo(handle: Handle, pipe: Any) -> None:
    requests = MessageQueue.create_from_handle(handle, 0)
    answers = MessageQueue(1, 1)
    pipe.send(answers.export_handle())
    requests.wait_until_ready()
    answers.wait_until_ready()
    while (message := requests.dequeue(indefinite=True)) is not None:
        answers.enqueue(message)


@pytest.fixture(params=["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def worker(request: pytest.FixtureRequest) -> Iterator[tuple[Any, MessageQueue, MessageQueue]]:
    """Give a worker process, the queue to it and the queue of its answers, as vLLM's executor makes them."""
    context = multiprocessing.get_context(request.param)
    ours, theirs = context.Pipe()
    requests = MessageQueue(1, 1)
    process = context.Process(target=_echo, args=(requests.export_handle(), theirs), daemon=True)
    process.start()
    theirs.close()
    answers = MessageQueue.create_from_handle(ours.recv(), 0)
    requests.wait_until_ready()
    answers.wait_until_ready()
    yield process, requests, answers
    process.kill()
    process.join(WITHIN_S)
    process.close()
    ours.close()
    answers.shutdown()
    requests.shutdown()


class TestProcesses:
    def test_questions_and_answers(self, worker: tuple[Any, MessageQueue, MessageQueue]) -> None:
        process, requests, answers = worker
        for number in range(200):
            requests.enqueue(number)
            assert answers.dequeue(WITHIN_S) == number
        requests.enqueue(None)
        process.join(WITHIN_S)
        assert process.exitcode == 0
        with pytest.raises(QueueClosed):
            answers.dequeue(WITHIN_S)

    def test_dead_process_is_named(self, worker: tuple[Any, MessageQueue, MessageQueue]) -> None:
        process, requests, answers = worker
        waiting = Thread(answers.dequeue)
        eventually(waits(answers), "parking")
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(PeerDied, match=str(process.pid)):
            waiting.result()
        with pytest.raises(PeerDied, match=str(process.pid)):
            for _ in range(10_000):  # more than the ring holds
                requests.enqueue("anybody?", WITHIN_S)
