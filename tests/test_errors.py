"""The error tree: who is whose kind, what each one tells, and that this survives pickling and copying."""

from __future__ import annotations

import asyncio
import copy
import errno
import inspect
import pickle
import queue

import pytest

from aioshm import errors
from aioshm.errors import (
    AioshmError,
    CallFailed,
    CodecError,
    CorruptSlot,
    EndClosed,
    EndpointError,
    EngineDead,
    EngineStartupError,
    EventsLost,
    GroupBroken,
    HandleError,
    HandshakeError,
    IdentityError,
    LimitReached,
    MessagesLost,
    MessageTooLarge,
    NameTaken,
    NoPlaceVacant,
    OutOfDescriptors,
    OutOfThreads,
    PeerClosed,
    PeerDied,
    ProcessDied,
    PublisherClosed,
    PublisherDisconnected,
    PublisherRestarted,
    QueueCancelled,
    QueueClosed,
    QueueEmpty,
    QueueFull,
    QueueGone,
    QueueRestarted,
    ReaderEvicted,
    RemoteFailure,
    RequestAborted,
    RequestFailed,
    RoleError,
    SharedMemoryError,
    UnsafePayload,
    WorkerDied,
    WorkerError,
)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """Replace the check of the other tests: nothing is opened or started here."""


PARENTS: dict[type[AioshmError], tuple[type[Exception], ...]] = {
    QueueClosed: (AioshmError,),
    EndClosed: (QueueClosed,),
    PeerClosed: (QueueClosed,),
    PublisherClosed: (EndClosed, RuntimeError),
    QueueCancelled: (AioshmError, RuntimeError),
    QueueEmpty: (AioshmError, asyncio.QueueEmpty, queue.Empty),
    QueueFull: (AioshmError, asyncio.QueueFull, queue.Full),
    RoleError: (AioshmError, RuntimeError),
    PeerDied: (AioshmError,),
    MessagesLost: (AioshmError,),
    ReaderEvicted: (AioshmError,),
    HandleError: (AioshmError, ValueError),
    QueueGone: (HandleError,),
    NoPlaceVacant: (HandleError,),
    QueueRestarted: (AioshmError,),
    NameTaken: (AioshmError,),
    IdentityError: (AioshmError, ValueError),
    CorruptSlot: (AioshmError,),
    CodecError: (AioshmError, ValueError),
    MessageTooLarge: (CodecError,),
    UnsafePayload: (CodecError,),
    SharedMemoryError: (AioshmError, OSError),
    LimitReached: (AioshmError,),
    EndpointError: (AioshmError, OSError),
    OutOfDescriptors: (LimitReached, OSError),
    OutOfThreads: (LimitReached, RuntimeError),
    EngineStartupError: (AioshmError, RuntimeError),
    HandshakeError: (EngineStartupError,),
    EngineDead: (AioshmError,),
    CallFailed: (AioshmError, RuntimeError),
    WorkerError: (CallFailed,),
    RequestAborted: (AioshmError,),
    RequestFailed: (AioshmError, RuntimeError),
    ProcessDied: (AioshmError, RuntimeError),
    WorkerDied: (ProcessDied,),
    EventsLost: (AioshmError,),
    PublisherRestarted: (AioshmError,),
    PublisherDisconnected: (AioshmError,),
    GroupBroken: (AioshmError, ConnectionError),
}

TELLING = {
    PeerDied,
    MessagesLost,
    QueueRestarted,
    NameTaken,
    CorruptSlot,
    EventsLost,
    PublisherRestarted,
    PublisherDisconnected,
    ProcessDied,
    WorkerDied,
    WorkerError,
}

RESTARTED = QueueRestarted("steps", 7, 8, PeerClosed("the writer has closed the queue"))
FAILURE = RemoteFailure("KeyError", "'a'", "Traceback ...\n")

EXAMPLES: list[tuple[AioshmError, dict[str, object], str]] = [
    *((kind("text"), {}, "text") for kind in PARENTS if kind not in TELLING),
    (
        SharedMemoryError(errno.ENOSPC, "the ring needs 9 MiB"),
        {"errno": errno.ENOSPC, "strerror": "the ring needs 9 MiB"},
        f"[Errno {errno.ENOSPC}] the ring needs 9 MiB",
    ),
    (PeerDied(3, 77, "reader"), {"rank": 3, "pid": 77, "side": "reader"}, "reader 3 (pid 77) died"),
    (PeerDied(-1, 5, "writer"), {"rank": -1, "pid": 5, "side": "writer"}, "the writer (pid 5) died"),
    (
        PeerDied(0, 1, "reader", "queue cafe"),
        {"rank": 0, "pid": 1, "side": "reader"},
        "reader 0 (pid 1) died: queue cafe",
    ),
    (
        MessagesLost(4, 9),
        {"first": 4, "last": 9},
        "messages 4 to 9 are lost: they can no longer be sent again",
    ),
    (
        EventsLost(1, 1),
        {"first": 1, "last": 1},
        "event batches 1 to 1 are lost: they can no longer be sent again",
    ),
    (
        PublisherRestarted("tcp://a:1 rank 0", 7),
        {"source": "tcp://a:1 rank 0", "expected": 7},
        "publisher tcp://a:1 rank 0 restarted, where batch 7 was expected next",
    ),
    (
        PublisherDisconnected("tcp://a:1 rank 0", 60.2),
        {"source": "tcp://a:1 rank 0", "after_s": 60.2},
        "publisher tcp://a:1 rank 0 is gone: no message for 60.2 s",
    ),
    (
        RESTARTED,
        {"name": "steps", "old_pid": 7, "pid": 8},
        "queue steps has a new writer (pid 8): the writer has closed the queue",
    ),
    (
        NameTaken("steps", 7, "/run/steps.queue"),
        {"name": "steps", "pid": 7, "path": "/run/steps.queue"},
        "'steps' is taken by a running writer (pid 7): close it, or use another name (/run/steps.queue)",
    ),
    (
        ProcessDied("EngineCore_1", 7, -9),
        {"name": "EngineCore_1", "pid": 7, "exitcode": -9},
        "Process EngineCore_1 (PID: 7) died with exit code -9",
    ),
    (
        WorkerDied(1, "Worker_1", 7, -9, "Worker_1 (pid 7) was killed", ["out of memory"]),
        {"rank": 1, "name": "Worker_1", "pid": 7, "exitcode": -9, "last_lines": ["out of memory"]},
        "Worker_1 (pid 7) was killed\nlast lines of Worker_1's stderr:\n  out of memory",
    ),
    (
        WorkerError("step", {1: FAILURE}),
        {"method": "step", "errors": {1: FAILURE}},
        f"step failed: rank 1: {FAILURE}\nrank 1's traceback:\nTraceback ...",
    ),
    (EngineStartupError("text", failed={"EngineCore_1": -9}), {"failed": {"EngineCore_1": -9}}, "text"),
    (
        HandshakeError("text", engine=1, state="NEW", expected="HELLO", failed={"EngineCore_1": None}),
        {"engine": 1, "state": "NEW", "expected": "HELLO", "failed": {"EngineCore_1": None}},
        "text",
    ),
    (HandshakeError("text"), {"engine": None, "state": None, "expected": "", "failed": {}}, "text"),
    (EngineDead("text", engine=1, pid=7), {"engine": 1, "pid": 7}, "text"),
    (EngineDead("text"), {"engine": None, "pid": None}, "text"),
    (CallFailed("text", engine=1, method="add"), {"engine": 1, "method": "add"}, "text"),
    (RequestAborted("text", engine=1, request_id="a"), {"engine": 1, "request_id": "a"}, "text"),
    (RequestFailed("text", engine=1, request_id="a"), {"engine": 1, "request_id": "a"}, "text"),
    (CorruptSlot(7, 6), {"found": 7, "expected": 6}, "slot of message 6: found message 7"),
    (CorruptSlot(6, 6, "no codec 9"), {"found": 6, "expected": 6}, "slot of message 6: damaged: no codec 9"),
    (CorruptSlot(None, 6), {"found": None, "expected": 6}, "slot of message 6: damaged"),
    (CorruptSlot(0, 6), {"found": 0, "expected": 6}, "slot of message 6: found message 0"),
]


def through_pickle(error: AioshmError) -> AioshmError:
    return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", PARENTS, ids=lambda kind: kind.__name__)
def test_the_tree(kind: type[AioshmError]) -> None:
    assert issubclass(kind, AioshmError)
    for parent in PARENTS[kind]:
        assert issubclass(kind, parent)
    others = set(PARENTS) - set(kind.__mro__)
    assert not [other for other in others if issubclass(kind, other)]


def test_the_tree_is_whole() -> None:
    public = {
        kind
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, AioshmError) and not name.startswith("_")
    }
    assert public == {AioshmError, *PARENTS}
    assert all(kind.__doc__ for kind in public)


def test_a_restart_tells_how_the_one_before_has_gone() -> None:
    for arrived in (RESTARTED, through_pickle(RESTARTED), copy.deepcopy(RESTARTED)):
        assert isinstance(arrived, QueueRestarted)
        assert type(arrived.ended) is PeerClosed
        assert str(arrived.ended) == "the writer has closed the queue"


@pytest.mark.parametrize(("error", "attributes", "text"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_texts_and_attributes(error: AioshmError, attributes: dict[str, object], text: str) -> None:
    for arrived in (error, through_pickle(error), copy.copy(error), copy.deepcopy(error)):
        assert type(arrived) is type(error)
        assert str(arrived) == text
        assert arrived.args == error.args
        for name, value in attributes.items():
            assert getattr(arrived, name) == value


def test_a_subclass_of_a_users_own_is_passed_on_too() -> None:
    arrived = through_pickle(_OurReaderDied(2, 3, "reader", "ours"))
    assert isinstance(arrived, _OurReaderDied)
    assert (arrived.rank, arrived.pid, str(arrived)) == (2, 3, "reader 2 (pid 3) died: ours")


class _OurReaderDied(PeerDied):
    pass
