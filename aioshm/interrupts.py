"""What a signal's handler raised: which error of a call is none of its own.

Python runs signal handlers between any two instructions of the main thread, and what they raise comes out of whatever
was running, such as the decoding of a message, whose errors are taken for damage otherwise.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import CodeType, FrameType


def from_handler(error: BaseException) -> bool:
    """Return whether a signal's handler raised an error, or one that it was made of."""
    return find_raised(error) is not None


def find_raised(error: BaseException) -> BaseException | None:
    """Return what a signal's handler raised: this error, or its cause or context, or theirs; None if none did."""
    codes: set[CodeType] | None = None
    for link in _chain(error):
        traceback = link.__traceback__
        while traceback is not None:
            frame = traceback.tb_frame
            if _was_handed_its_caller(frame):
                return link
            if codes is None:
                codes = set(_codes_of_handlers())
            if frame.f_code in codes:
                return link
            traceback = traceback.tb_next
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            yield link
            waiting += link.__cause__, link.__context__


def _was_handed_its_caller(frame: FrameType) -> bool:
    """Return whether a function got the frame that it interrupted, as handlers do, also one that is set no more."""
    code, caller = frame.f_code, frame.f_back
    if caller is None or code.co_argcount + bool(code.co_flags & 4) == 0:  # 4: CO_VARARGS
        return False
    values = frame.f_locals
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 1]
    found = [values.get(name) for name in names]
    return any(value is caller or (type(value) is tuple and any(each is caller for each in value)) for value in found)


def _codes_of_handlers() -> Iterator[CodeType]:
    for number in signal.valid_signals():
        handler: object = signal.getsignal(number)
        for _ in range(8):  # layers of wrappers
            handler = getattr(handler, "func", getattr(handler, "__func__", handler))  # of a partial, of a method
            code = getattr(handler, "__code__", None)
            if isinstance(code, CodeType):
                yield code
                break
            if isinstance(handler, int) or not callable(handler):
                break
            handler = getattr(type(handler), "__call__", None)  # noqa: B004  # what runs when it is called
