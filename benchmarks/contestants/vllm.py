"""vLLM's own ``MessageQueue``, used as it documents: the same ring as aioshm's in slots and chunk size, no timeouts.

Two faces: as it comes, and with its optional arena for large tensors, whose readers see the writer's copy instead of
one of their own. Its optional spin-loop extension is left out: it loads only beside CUDA's libraries. It always
pickles, whatever the codec's name says.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection

from benchmarks.contestants.contestant import Contestant, Port, hand, handed
from benchmarks.contestants.vllm_shim import load_message_queue
from benchmarks.framework.workload import Workload


def open_writer(links: Sequence[Connection], workload: Workload, *, arena: bool) -> Port:
    """Create the queue, and give its handle to the readers."""
    queue = load_message_queue()(
        len(links),
        len(links),
        max_chunk_bytes=workload.chunk_bytes,
        max_chunks=workload.slots,
        enable_shm_tensor_arena=arena,
    )
    hand(links, queue.export_handle())
    queue.wait_until_ready()
    return Port(queue.enqueue, queue.shutdown)


def open_reader(link: Connection, _workload: Workload, rank: int) -> Port:
    """Attach to the queue."""
    queue_class = load_message_queue()  # first: the handle is of one of its module's classes
    queue = queue_class.create_from_handle(handed(link), rank)
    queue.wait_until_ready()
    return Port(queue.dequeue, queue.shutdown)


def _contestant(name: str, arena: bool) -> Contestant:
    return Contestant(name, partial(open_writer, arena=arena), open_reader, False, ("vllm", "torch"))


CONTESTANTS = [_contestant("vLLM", False), _contestant("vLLM arena", True)]
