"""The errors of aioshm; besides these, calls raise ``TimeoutError``, ``TypeError`` and ``ValueError``.

The names follow trio: *closed* (this end, or the peer on purpose), *died* (the peer, not on purpose), *empty* and
*full* (the ``_nowait`` calls), and *role* (wrong end, loop, thread or process).
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, Final, NamedTuple, TypeVar

E = TypeVar("E", bound="AioshmError")

CODE_ERRORS: Final = Exception, asyncio.CancelledError
"""What code of a value or a message may raise. A codec awaits nothing: a `CancelledError` cancels no task."""


class AioshmError(Exception):
    """The root of every error that aioshm defines.

    Attributes:
        rank: The rank that the error is about, if any; from `merge`, the rank of the queue there.
    """

    rank: int | None = None

    def __reduce__(self) -> tuple[Callable[..., AioshmError], tuple[Any, ...], dict[str, Any]]:
        return _remade, (type(self), self.args), self.__dict__


def _remade(kind: type[E], args: tuple[Any, ...]) -> E:
    """Recreate a pickled error without its constructor, whose arguments are not the text."""
    error = kind.__new__(kind, *args)
    error.args = args
    return error


class QueueClosed(AioshmError):
    """The queue was closed: `EndClosed` if this end was closed, `PeerClosed` if the peer has closed."""


class EndClosed(QueueClosed):
    """This end was closed, by `aclose`, `close`, or the end of its block; create a new one to continue."""


class PeerClosed(QueueClosed):
    """The peer has finished: the writer closed and this end has read every message, or every reader has left."""


class PublisherClosed(EndClosed, RuntimeError):
    """The publisher was closed before it sent the batch."""


class QueueCancelled(AioshmError, RuntimeError):
    """The ``cancel`` event of a waiting call was set; a `RuntimeError`, as in vLLM."""


class QueueEmpty(AioshmError, asyncio.QueueEmpty, queue.Empty):
    """``dequeue_nowait`` found no message; also an ``asyncio.QueueEmpty`` and a ``queue.Empty``."""


class QueueFull(AioshmError, asyncio.QueueFull, queue.Full):
    """``enqueue_nowait`` found no free slot; also an ``asyncio.QueueFull`` and a ``queue.Full``."""


class RoleError(AioshmError, RuntimeError):
    """The call came from the wrong end of the queue, event loop, thread or process."""


class PeerDied(AioshmError):
    """The peer's process is gone, and had not closed its end of the queue.

    Attributes:
        rank: Reader rank, or -1 for the writer; from `merge`, the rank of the queue there.
        pid: The process id in the process's own pid namespace.
        side: ``"reader"`` or ``"writer"``: which end died.
    """

    rank: int

    def __init__(self, rank: int, pid: int, side: str, detail: str = "") -> None:
        text = "the writer" if side == "writer" else f"reader {rank}"
        text += f" (pid {pid}) died"
        if detail:
            text += f": {detail}"
        super().__init__(text)
        self.rank = rank
        self.pid = pid
        self.side = side


class QueueRestarted(AioshmError):
    """A queue's name, or identity, has a new writer; the next call receives its messages.

    Or the same writer (``pid`` is ``old_pid``) had dropped this reader, and has attached it again.

    Raised once, by a reader with ``reconnect=True`` that had been ready before, when it is ready again.

    Attributes:
        name: The name of the queue.
        old_pid: The process id of the old writer.
        pid: The process id of the new writer.
        ended: The error about the old writer, which a reader without ``reconnect`` raises.
    """

    def __init__(self, name: str, old_pid: int, pid: int, ended: AioshmError) -> None:
        super().__init__(f"queue {name} has a new writer (pid {pid}): {ended}")
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
    """This reader was too slow, and the queue continues without this reader (``slow_reader="evict"``)."""


class MessagesLost(_RangeLost):
    """This reader was too slow, and the writer no longer holds these messages (``slow_reader="skip"``).

    Attributes:
        first: Sequence number of the first lost message.
        last: Sequence number of the last lost message.
    """

    _what = "messages"


class PublisherRestarted(AioshmError):
    """A publisher's numbers went back: the publisher has restarted, and its replay buffer is lost.

    Attributes:
        source: The publisher, an `aioshm.events.Source`.
        expected: The expected next number.
    """

    def __init__(self, source: Any, expected: int) -> None:
        super().__init__(f"publisher {source} restarted, where batch {expected} was expected next")
        self.source = source
        self.expected = expected


class PublisherDisconnected(AioshmError):
    """A publisher's connection ended, and did not come back in time: the subscriber has dropped the publisher.

    Attributes:
        source: The publisher, an `aioshm.events.Source`.
        after_s: Seconds since its last message.
    """

    def __init__(self, source: Any, after_s: float) -> None:
        super().__init__(f"publisher {source} is gone: no message for {after_s:.3g} s")
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
    """Not a handle, a handle of another version, host, user or queue, or the queue is gone."""


class QueueGone(HandleError):
    """No writer listens at the address of the handle: the queue is gone."""


class NoPlaceVacant(HandleError):
    """All ranks of the queue have readers; the text names the readers."""


class NameTaken(AioshmError):
    """A running writer has the name, or the identity.

    Attributes:
        name: The name, or the path of the identity.
        pid: The writer's process id in its own pid namespace; 0 if unknown.
        path: The file of the name.
    """

    def __init__(self, name: str, pid: int, path: str) -> None:
        writer = f"pid {pid}" if pid else "pid unknown"
        super().__init__(f"{name!r} is taken by a running writer ({writer}): close it, or use another name ({path})")
        self.name = name
        self.pid = pid
        self.path = path


class IdentityError(AioshmError, ValueError):
    """The file of a writer's identity is invalid: cut short, forged, of another user, or readable by others."""


class GroupBroken(AioshmError, ConnectionError):
    """The members of a process group, or its store, cannot be reached, or another group or process is in the way."""


class CorruptSlot(AioshmError):
    """A slot does not hold the expected message; the reader has skipped the slot.

    Attributes:
        found: The sequence number in the slot, or None if unreadable.
        expected: The expected sequence number.
    """

    def __init__(self, found: int | None, expected: int, detail: str = "") -> None:
        text = f"slot of message {expected}: "
        if found is None or found == expected:
            text += "damaged"
        else:
            text += f"found message {found}"
        if detail:
            text += f": {detail}"
        super().__init__(text)
        self.found = found
        self.expected = expected


class CodecError(AioshmError, ValueError):
    """An object cannot be encoded, or bytes cannot be decoded."""


class MessageTooLarge(CodecError):
    """The encoded message is larger than ``options.max_message_bytes``."""


class UnsafePayload(CodecError):
    """Decoding this payload could run code, and the sender is not authenticated."""


class SharedMemoryError(AioshmError, OSError):
    """Shared memory could not be created or mapped; the text has the size, the free memory, and a remedy."""


class EndpointError(AioshmError, OSError):
    """A ZeroMQ socket cannot be created for, bound or connected to an endpoint; the text has a remedy."""


class LimitReached(AioshmError):
    """This process has reached a limit of the system; the text names the limit and a remedy.

    The failed call has released everything, and can be repeated later.
    """


class OutOfDescriptors(LimitReached, OSError):
    """No file descriptor is left, for this process (``errno`` is EMFILE) or for the whole system (ENFILE)."""


class OutOfThreads(LimitReached, RuntimeError):
    """No thread can be started."""


class EngineStartupError(AioshmError, RuntimeError):
    """Engines did not start; the text names each with its exit code, phase and last lines of stderr.

    Attributes:
        failed: The exit code of each exited process, by name; ``-n`` if signal ``n`` killed it, None if unknown.
    """

    def __init__(self, *args: object, failed: Mapping[str, int | None] | None = None) -> None:
        super().__init__(*args)
        self.failed: dict[str, int | None] = dict(failed or {})


class HandshakeError(EngineStartupError):
    """A handshake message was refused; the text names the engine, its state and the expected message.

    Attributes:
        engine: The engine's rank; None if the sender's identity is invalid.
        state: The engine's state (``"NEW"``, ``"CONNECTED"``, ``"READY"``); None for an unknown sender.
        expected: The expected message.
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
    """A running engine has died.

    Attributes:
        engine: The rank of the engine; None if unknown.
        pid: The process id of the engine; None if unknown.
    """

    def __init__(self, *args: object, engine: int | None = None, pid: int | None = None) -> None:
        super().__init__(*args)
        self.engine = engine
        self.pid = pid


class CallFailed(AioshmError, RuntimeError):
    """A called method has raised in an engine or in workers; the text has the exception.

    Attributes:
        engine: The engine's rank; None for workers, see `WorkerError`.
        method: The name of the method.
    """

    def __init__(self, *args: object, engine: int | None = None, method: str = "") -> None:
        super().__init__(*args)
        self.engine = engine
        self.method = method


class RequestFailed(AioshmError, RuntimeError):
    """An engine refused a request, the last output says "error", or an output cannot be decoded; see the text.

    Attributes:
        engine: The engine's rank.
        request_id: The id of the request.
    """

    def __init__(self, *args: object, engine: int | None = None, request_id: str = "") -> None:
        super().__init__(*args)
        self.engine = engine
        self.request_id = request_id


class RequestAborted(AioshmError):
    """A request was aborted before its last output: its stream was closed, or its id was aborted or submitted again.

    Also: the engines were paused with the mode ``"abort"``.

    Attributes:
        engine: The rank of the engine, or of the worker of the stream.
        request_id: The id of the request; for a worker's stream the name of the method.
    """

    def __init__(self, *args: object, engine: int | None = None, request_id: str = "") -> None:
        super().__init__(*args)
        self.engine = engine
        self.request_id = request_id


class ProcessDied(AioshmError, RuntimeError):
    """A process has exited that should run, or has exited with a code other than 0.

    Attributes:
        name: The name of the process.
        pid: Its process id.
        exitcode: Its exit code; ``-n`` if signal ``n`` killed it.
        story: More about the death, such as earlier deaths; also in the text.
    """

    def __init__(self, name: str, pid: int | None, exitcode: int | None, story: str = "") -> None:
        text = f"Process {name} (PID: {pid}) died with exit code {exitcode}"
        if story:
            text += f"; {story}"
        super().__init__(text)
        self.name = name
        self.pid = pid
        self.exitcode = exitcode
        self.story = story


class WorkerDied(ProcessDied):
    """A worker of a group has exited while the group was open, with any exit code; the group is broken.

    Attributes:
        rank: The rank of the worker.
        exitcode: As in `ProcessDied`; may be 0, or None if unknown.
        last_lines: The last lines of its standard error.
    """

    rank: int

    def __init__(
        self, rank: int, name: str, pid: int | None, exitcode: int | None, text: str, last_lines: Sequence[str] = ()
    ) -> None:
        super().__init__(name, pid, exitcode)
        self.rank = rank
        self.last_lines: list[str] = list(last_lines)
        if last_lines:
            text = "\n  ".join([f"{text}\nlast lines of {name}'s stderr:", *last_lines])
        self.args: tuple[Any, ...] = (text,)


class RemoteFailure(NamedTuple):
    """An exception of another process, as text.

    Attributes:
        kind: The type of the exception, with its module unless the module is ``builtins``.
        text: The exception as a string.
        traceback: The traceback as Python prints it; may be empty.
    """

    kind: str
    text: str
    traceback: str = ""

    def __str__(self) -> str:
        if not self.text:
            return self.kind
        return f"{self.kind}: {self.text}"


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


def copy_error(error: E) -> E:
    """Return a copy of an error, so that each call raises an error with a traceback and notes of its own."""
    other = copy(error)
    if hasattr(error, "__notes__"):
        other.__notes__ = error.__notes__.copy()
    if error.__cause__ is not None:
        other.__cause__ = error.__cause__
    return other


MAX_TEXT = 1 << 14
"""Characters of an exception's text that are sent to another process."""


def text_of(error: BaseException) -> str:
    """Return an error's text, shortened to `MAX_TEXT`, also if its ``__str__`` raises."""
    try:
        return str(error)[:MAX_TEXT]
    except Exception as broken:
        return f"the text is not available: {type(broken).__name__}"
