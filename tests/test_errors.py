"""What each error tells, and that this survives pickling and copying; the tree is compared with the page of errors."""

from __future__ import annotations

import copy
import errno
import inspect
import pickle

import pytest

from aioshm import errors
from aioshm.errors import AioshmError, PeerClosed, PeerDied, QueueRestarted

pytestmark = pytest.mark.opens_nothing


RESTARTED = QueueRestarted("steps", 7, 8, PeerClosed("the writer has closed the queue"))
FAILURE = errors.RemoteFailure("KeyError", "'a'", "Traceback ...\n")

EXAMPLES: list[tuple[AioshmError, dict[str, object], str]] = [
    (
        errors.SharedMemoryError(errno.ENOSPC, "the ring needs 9 MiB"),
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
    (errors.MessagesLost(4, 9), {"first": 4, "last": 9}, "messages 4 to 9 are lost: they can no longer be sent again"),
    (
        errors.EventsLost(1, 1),
        {"first": 1, "last": 1},
        "event batches 1 to 1 are lost: they can no longer be sent again",
    ),
    (
        errors.PublisherRestarted("tcp://a:1 rank 0", 7),
        {"source": "tcp://a:1 rank 0", "expected": 7},
        "publisher tcp://a:1 rank 0 restarted, where batch 7 was expected next",
    ),
    (
        errors.PublisherDisconnected("tcp://a:1 rank 0", 60.2),
        {"source": "tcp://a:1 rank 0", "after_s": 60.2},
        "publisher tcp://a:1 rank 0 is gone: no message for 60.2 s",
    ),
    (
        RESTARTED,
        {"name": "steps", "old_pid": 7, "pid": 8},
        "queue steps has a new writer (pid 8): the writer has closed the queue",
    ),
    (
        errors.NameTaken("steps", 7, "/run/steps.queue"),
        {"name": "steps", "pid": 7, "path": "/run/steps.queue"},
        "'steps' is taken by a running writer (pid 7): close it, or use another name (/run/steps.queue)",
    ),
    (
        errors.ProcessDied("EngineCore_1", 7, -9),
        {"name": "EngineCore_1", "pid": 7, "exitcode": -9},
        "Process EngineCore_1 (PID: 7) died with exit code -9",
    ),
    (
        errors.WorkerDied(1, "Worker_1", 7, -9, "Worker_1 (pid 7) was killed", ["out of memory"]),
        {"rank": 1, "name": "Worker_1", "pid": 7, "exitcode": -9, "last_lines": ["out of memory"]},
        "Worker_1 (pid 7) was killed\nlast lines of Worker_1's stderr:\n  out of memory",
    ),
    (
        errors.WorkerError("step", {1: FAILURE}),
        {"method": "step", "errors": {1: FAILURE}},
        f"step failed: rank 1: {FAILURE}\nrank 1's traceback:\nTraceback ...",
    ),
    (errors.EngineStartupError("text", failed={"EngineCore_1": -9}), {"failed": {"EngineCore_1": -9}}, "text"),
    (
        errors.HandshakeError("text", engine=1, state="NEW", expected="HELLO", failed={"EngineCore_1": None}),
        {"engine": 1, "state": "NEW", "expected": "HELLO", "failed": {"EngineCore_1": None}},
        "text",
    ),
    (errors.HandshakeError("text"), {"engine": None, "state": None, "expected": "", "failed": {}}, "text"),
    (errors.EngineDead("text", engine=1, pid=7), {"engine": 1, "pid": 7}, "text"),
    (errors.EngineDead("text"), {"engine": None, "pid": None}, "text"),
    (errors.CallFailed("text", engine=1, method="add"), {"engine": 1, "method": "add"}, "text"),
    (errors.RequestAborted("text", engine=1, request_id="a"), {"engine": 1, "request_id": "a"}, "text"),
    (errors.RequestFailed("text", engine=1, request_id="a"), {"engine": 1, "request_id": "a"}, "text"),
    (errors.CorruptSlot(7, 6), {"found": 7, "expected": 6}, "slot of message 6: found message 7"),
    (errors.CorruptSlot(6, 6, "no codec 9"), {"found": 6, "expected": 6}, "slot of message 6: damaged: no codec 9"),
    (errors.CorruptSlot(None, 6), {"found": None, "expected": 6}, "slot of message 6: damaged"),
    (errors.CorruptSlot(0, 6), {"found": 0, "expected": 6}, "slot of message 6: found message 0"),
]


def through_pickle(error: AioshmError) -> AioshmError:
    return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]


PUBLIC = [
    kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, AioshmError) and not name.startswith("_")
]
TELLING = {type(error) for error, _, _ in EXAMPLES}
EXAMPLES += [(kind("text"), {}, "text") for kind in PUBLIC if kind not in TELLING]


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
