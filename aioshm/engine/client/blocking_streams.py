"""The outputs of one request, for a plain thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any, Generic, Self, TypeVar

from aioshm.closing import Closing
from aioshm.engine.client.streams import Inbox
from aioshm.engine.client.streams import OutputStream as AwaitedStream
from aioshm.errors import RoleError
from aioshm.process.loop_thread import LoopThread

Output = TypeVar("Output")


class OutputStream(Closing, Iterator[Output], Generic[Output]):
    """The outputs of one request: ``for`` iterates over them.

    Leaving the loop early, an interrupt in it, or `close` aborts the request; received outputs remain. A timeout aborts
    nothing: the next output may be waited for again.

    Attributes:
        request_id: The id of the request.
        timeout: Seconds that each output may take; None: no limit. May be changed.
    """

    __slots__ = ("__weakref__", "_bell", "_host", "_inbox", "_stream", "_turn", "request_id", "timeout")

    def __init__(self, stream: AwaitedStream[Output], host: LoopThread, timeout: float | None) -> None:
        self.request_id: str = stream.request_id
        self.timeout: float | None = timeout
        # It aborts the request when it is forgotten. At the end the client's thread forgets it: where nothing of it is
        # left here, no interrupt can get lost in a __del__.
        self._stream: AwaitedStream[Output] | None = stream
        self._host = host
        self._inbox: Inbox = stream.inbox
        self._bell = self._inbox.waiter = _Bell(self, self._inbox)
        self._turn = threading.Lock()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Output:
        """Wait for the next output.

        Raises:
            EngineDead: An engine is dead.
            RequestFailed: The engine has refused the request.
            RequestAborted: The stream was closed, or its id was aborted.
            QueueClosed: The client was closed.
            RoleError: Another thread waits for the next output, or this is a forked child.
            TimeoutError: The output took longer than ``timeout``; the request continues.
        """
        inbox = self._inbox
        try:
            while not inbox.outputs:
                if inbox.ended and not inbox.outputs:  # in this order: the last ones come before the end does
                    if inbox.error is not None:
                        raise inbox.error()
                    raise StopIteration
                self._wait()
            output: Output = inbox.outputs.popleft()
            return output
        except Exception:
            raise
        except BaseException:  # an interrupt, anywhere in here
            self.close()
            raise

    def close(self) -> None:
        """Abort the request unless it is finished. Idempotent; may be called in any thread."""
        stream = self._stream
        if stream is not None:
            self._host.post(stream.leave)

    def forget_stream(self) -> None:
        """Drop the stream that aborts the request: the request has ended. Called in the client's thread."""
        self._stream = None

    @property
    def engine(self) -> int:
        """The rank of the engine that has the request."""
        return self._inbox.engine

    def __repr__(self) -> str:
        return f"<OutputStream of request {self.request_id!r} at engine {self.engine}>"

    def _wait(self) -> None:
        self._host.check()
        if not self._turn.acquire(blocking=False):
            raise RoleError(f"two threads wait for outputs of request {self.request_id!r}")
        try:
            rung = self._bell.wait(self.timeout)
        except BaseException:  # whatever a signal handler has raised
            self.close()
            raise
        finally:
            self._turn.release()
        if not rung:
            raise TimeoutError(f"request {self.request_id!r}: no output within {self.timeout:g} s")


class _Bell:
    """Stands for the future of a waiting task in an `Inbox`, and wakes a thread, again and again."""

    __slots__ = ("_inbox", "_lock", "_owner")

    def __init__(self, owner: OutputStream[Any], inbox: Inbox) -> None:
        self._owner = weakref.ref(owner)
        self._inbox = inbox
        self._lock = threading.Lock()
        self._lock.acquire()

    def done(self) -> bool:
        """Return whether it cannot be notified."""
        return False

    def set_result(self, _result: None) -> None:
        """Wake the thread. Only the client's thread calls this, so no other thread opens the lock meanwhile."""
        if self._inbox.ended:
            owner = self._owner()
            if owner is not None:
                owner.forget_stream()
        if self._lock.locked():
            self._lock.release()

    def wait(self, timeout: float | None) -> bool:
        """Wait until it was notified since the last wait; return whether it was."""
        if timeout is None:
            return self._lock.acquire()
        return self._lock.acquire(timeout=min(timeout, threading.TIMEOUT_MAX))
