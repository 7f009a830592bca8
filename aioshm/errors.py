"""The one error tree: everything aioshm raises on purpose, except ``TimeoutError``, ``TypeError`` and ``ValueError``.

Four words run through it, as in trio: *closed* (this end, or the other on purpose), *died* (the other end, not on
purpose), *nothing now* (the ``_nowait`` calls) and *wrong place* (role, loop, thread, process).
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

E = TypeVar("E", bound="AioshmError")


class AioshmError(Exception):
    """The root of every error that aioshm defines.

    Attributes:
        rank: Whom it is about, where that is a matter of ranks; raised by a merge: the rank that this has the queue by.
    """

    rank: int | None = None

    def __reduce__(self) -> tuple[Callable[..., AioshmError], tuple[Any, ...], dict[str, Any]]:
        return _remade, (type(self), self.args), self.__dict__


def _remade(kind: type[E], args: tuple[Any, ...]) -> E:
    """Return a pickled error's like, without its constructor, whose arguments are not its text."""
    error = kind.__new__(kind, *args)
    error.args = args
    return error


class QueueClosed(AioshmError):
    """Nothing more passes, on purpose: `EndClosed` if that was decided here, `PeerClosed` if on the other side."""


class EndClosed(QueueClosed):
    """This end was closed here, by `aclose`, `close`, or the end of its block; make a new one to go on."""


class PeerClosed(QueueClosed):
    """The other side has finished: the writer closed and all that it sent was read, or every reader has left."""


class PublisherClosed(EndClosed, RuntimeError):
    """A batch was published after its publisher was closed, or waited for room when it was; it is not sent."""


class QueueCancelled(AioshmError, RuntimeError):
    """The ``cancel`` event that was passed to a waiting call has been set; a `RuntimeError`, as in vLLM."""


class QueueEmpty(AioshmError, asyncio.QueueEmpty, queue.Empty):
    """``dequeue_nowait`` found no message; also an ``asyncio.QueueEmpty`` and a ``queue.Empty``."""


class QueueFull(AioshmError, asyncio.QueueFull, queue.Full):
    """``enqueue_nowait`` found no free slot; also an ``asyncio.QueueFull`` and a ``queue.Full``."""


class RoleError(AioshmError, RuntimeError):
    """The call does not belong here: wrong end of the queue, wrong event loop, wrong thread or wrong process."""


class PeerDied(AioshmError):
    """The process at the other end is gone without having said goodbye.

    Attributes:
        rank: Reader rank, or -1 for the writer; raised by a merge: the rank that this has the queue by.
        pid: Its process id as it saw itself.
        side: ``"reader"`` or ``"writer"``: which end died.
    """

    rank: int

    def __init__(self, rank: int, pid: int, side: str, detail: str = "") -> None:
        who = "the writer" if side == "writer" else f"reader {rank}"
        super().__init__(f"{who} (pid {pid}) died{': ' + detail if detail else ''}")
        self.rank = rank
        self.pid = pid
        self.side = side


class QueueRestarted(AioshmError):
    """The writer of a name, or of an identity, is another one now; the next call receives what that one sends.

    Or it is the same (``pid`` is ``old_pid``), that had given this reader up, and has it again.

    Told once, to a reader with ``reconnect=True`` that had been ready before, when it is ready again.

    Attributes:
        name: The queue's.
        old_pid: The process of the writer that is gone.
        pid: The process of the one that has come.
        ended: What the reader would have been told of the old one without ``reconnect``: how it has gone.
    """

    def __init__(self, name: str, old_pid: int, pid: int, ended: AioshmError) -> None:
        super().__init__(f"queue {name} has another writer (pid {pid}): {ended}")
        self.name = name
        self.old_pid = old_pid
        self.pid = pid
        self.ended = ended


class _RangeLost(AioshmError):
    """Numbers ``first`` to ``last`` (both included) are gone."""

    _what = "numbers"

    def __init__(self, first: int, last: int, why: str = "they can no longer be sent again") -> None:
        super().__init__(f"{self._what} {first} to {last} are lost: {why}")
        self.first = first
        self.last = last


class ReaderEvicted(AioshmError):
    """This reader was too slow, and its queue goes on without it (``slow_reader="evict"``)."""


class MessagesLost(_RangeLost):
    """Messages that a reader missed and the writer no longer holds: one that was too slow, with ``slow_reader="skip"``.

    Attributes:
        first: Sequence number of the first lost message.
        last: Sequence number of the last lost message.
    """

    _what = "messages"


class PublisherRestarted(AioshmError):
    """A publisher's numbers went back: it is another one now, and what the old one held is gone.

    Attributes:
        source: Which publisher, as `aioshm.events.Source` says it.
        expected: The number that should have come next.
    """

    def __init__(self, source: Any, expected: int) -> None:
        super().__init__(f"publisher {source} began again, where batch {expected} should have been next")
        self.source = source
        self.expected = expected


class PublisherDisconnected(AioshmError):
    """A publisher's connection ended, and nothing was heard of it for a while: the subscriber has forgotten it.

    Attributes:
        source: The publisher, an `aioshm.events.Source`.
        after_s: Seconds since the last sign of it.
    """

    def __init__(self, source: Any, after_s: float) -> None:
        super().__init__(f"publisher {source} is gone: no sign of it for {after_s:.3g} s")
        self.source = source
        self.after_s = after_s


class EventsLost(_RangeLost):
    """Events that a subscriber missed and the publisher's replay buffer no longer holds.

    Attributes:
        first: Sequence number of the first lost batch.
        last: Sequence number of the last lost batch.
    """

    _what = "event batches"


class HandleError(AioshmError, ValueError):
    """Not a handle, or one of another version, host, user or queue, or one whose queue is gone."""


class QueueGone(HandleError):
    """Nobody listens where the handle says: its queue's writer is gone."""


class NoPlaceVacant(HandleError):
    """All places of the queue have readers; the text names them."""


class NameTaken(AioshmError):
    """A queue's name, or its identity, is that of a writer that lives.

    Attributes:
        name: The name, or the identity's path.
        pid: The writer's process id as it saw itself; 0 where it is not known.
        path: The file by which it has it.
    """

    def __init__(self, name: str, pid: int, path: str) -> None:
        who = f"pid {pid}" if pid else "its pid is not known"
        super().__init__(f"{name!r} is taken by a writer that lives ({who}): close that one, or take another ({path})")
        self.name = name
        self.pid = pid
        self.path = path


class IdentityError(AioshmError, ValueError):
    """The file of a writer's identity is not one: cut short, forged, another user's, or open to others."""


class GroupBroken(AioshmError, ConnectionError):
    """The members of a process group, or its store, cannot be reached; or another group or process is in the way."""


class CorruptSlot(AioshmError):
    """A slot holds something else than the next message; it was skipped.

    Attributes:
        found: The sequence number in the slot, or None where even that is unreadable.
        expected: The sequence number that should be there.
    """

    def __init__(self, found: int | None, expected: int, detail: str = "") -> None:
        what = f"found message {found}" if found is not None and found != expected else "damaged"
        super().__init__(f"slot of message {expected}: {what}{': ' + detail if detail else ''}")
        self.found = found
        self.expected = expected


class CodecError(AioshmError, ValueError):
    """An object cannot be encoded, or bytes cannot be decoded."""


class MessageTooLarge(CodecError):
    """The encoded message is larger than ``options.max_message_bytes``."""


class UnsafePayload(CodecError):
    """Decoding this payload could run code, and its sender is not known."""


class SharedMemoryError(AioshmError, OSError):
    """Shared memory could not be created or mapped; the text says what was asked for, what is free, what to do."""


class EndpointError(AioshmError, OSError):
    """A ZeroMQ socket cannot be made for an endpoint, bound to it or connected to it; the text says what to do."""


class LimitReached(AioshmError):
    """This process may not have more of something; the text says of what, what the limit is, and what to do.

    What was begun has been given back: it can be tried again once there is room.
    """


class OutOfDescriptors(LimitReached, OSError):
    """There is no file descriptor left, for this process (``errno`` is EMFILE) or for the whole system (ENFILE)."""


class OutOfThreads(LimitReached, RuntimeError):
    """No thread can be started."""


class EngineStartupError(AioshmError, RuntimeError):
    """Engines did not come up; the text names each with its exit code, phase and last lines of stderr.

    Attributes:
        failed: Of every process that exited, by name: its exit code (minus the signal that killed it), or None where
            nobody knows it.
    """

    def __init__(self, *args: object, failed: Mapping[str, int | None] | None = None) -> None:
        super().__init__(*args)
        self.failed: dict[str, int | None] = dict(failed or {})


class HandshakeError(EngineStartupError):
    """A handshake message was refused; the text names engine, state and what was expected.

    Attributes:
        engine: The engine's rank; None where the sender's identity is not even one.
        state: What the engine's state was (``"NEW"``, ``"CONNECTED"``, ``"READY"``); None for an unknown sender.
        expected: What was expected instead.
    """

    def __init__(
        self,
        *args: object,
        engine: int | None = None,
        state: str | None = None,
        expected: str = "",
        failed: Mapping[str, int | None] | None = None,
    ) -> None:
        super().__init__(*args, failed=failed)
        self.engine = engine
        self.state = state
        self.expected = expected


class EngineDead(AioshmError):
    """An engine that was running is gone.

    Attributes:
        engine: Its rank; None where nobody knows which one it was.
        pid: Its process id; None where it is not known.
    """

    def __init__(self, *args: object, engine: int | None = None, pid: int | None = None) -> None:
        super().__init__(*args)
        self.engine = engine
        self.pid = pid


class CallFailed(AioshmError, RuntimeError):
    """A method that was called in an engine or in workers has raised there; the text says what it raised.

    Attributes:
        engine: The engine's rank; None for workers, see `WorkerError`.
        method: The name of the method.
    """

    def __init__(self, *args: object, engine: int | None = None, method: str = "") -> None:
        super().__init__(*args)
        self.engine = engine
        self.method = method


class RequestFailed(AioshmError, RuntimeError):
    """An engine has refused a request, its last output says "error", or its output cannot be decoded; see the text.

    Attributes:
        engine: The engine's rank.
        request_id: Of the request.
    """

    def __init__(self, *args: object, engine: int | None = None, request_id: str = "") -> None:
        super().__init__(*args)
        self.engine = engine
        self.request_id = request_id


class RequestAborted(AioshmError):
    """A request was aborted before its last output: its stream was left, or its id was aborted or submitted again.

    Attributes:
        engine: The rank of the engine that had the request, or of the worker that had the stream.
        request_id: Of the request; of a worker's stream the name of its method.
    """

    def __init__(self, *args: object, engine: int | None = None, request_id: str = "") -> None:
        super().__init__(*args)
        self.engine = engine
        self.request_id = request_id


class ProcessDied(AioshmError, RuntimeError):
    """A process that was to run, or to exit well, has exited with a code other than 0.

    Attributes:
        name: The name of the process.
        pid: Its process id.
        exitcode: Its exit code; ``-n`` if signal ``n`` killed it.
        story: What else there is to tell, such as the deaths before this one; in the text, too.
    """

    def __init__(self, name: str, pid: int | None, exitcode: int | None, story: str = "") -> None:
        super().__init__(f"Process {name} (PID: {pid}) died with exit code {exitcode}{story and f'; {story}'}")
        self.name = name
        self.pid = pid
        self.exitcode = exitcode
        self.story = story


class WorkerDied(ProcessDied):
    """A worker of a group has exited while the group was open, with any exit code; the group is broken.

    Attributes:
        rank: Its rank.
        exitcode: As in `ProcessDied`, but it may be 0, or None where nobody knows it.
        last_lines: The last lines that it wrote to its standard error.
    """

    rank: int

    def __init__(
        self, rank: int, name: str, pid: int | None, exitcode: int | None, text: str, last_lines: Sequence[str] = ()
    ) -> None:
        super().__init__(name, pid, exitcode)
        self.rank = rank
        self.last_lines: list[str] = list(last_lines)
        tail = [f"last lines of {name}'s stderr:", *(f"  {line}" for line in last_lines)] if last_lines else []
        self.args: tuple[Any, ...] = ("\n".join([text, *tail]),)


class RemoteFailure(NamedTuple):
    """An exception in another process, as it can be told here.

    Attributes:
        kind: The exception's type, with its module unless that is ``builtins``.
        text: The exception as a string.
        traceback: Its traceback as Python prints it; empty where there is none.
    """

    kind: str
    text: str
    traceback: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.text else self.kind


class WorkerError(CallFailed):
    """A method has raised in at least one worker of a group; the group continues.

    The text names every rank that failed, and has the traceback of the first.

    Attributes:
        method: The name of the method.
        errors: The exceptions, by rank.
    """

    def __init__(self, method: str, errors: Mapping[int, RemoteFailure]) -> None:
        lines = [f"{method} failed: " + "; ".join(f"rank {rank}: {error}" for rank, error in errors.items())]
        rank, first = next(iter(errors.items()))
        if first.traceback:
            lines += [f"rank {rank}'s traceback:", first.traceback.rstrip()]
        super().__init__("\n".join(lines), method=method)
        self.errors: dict[int, RemoteFailure] = dict(errors)
