"""What a signal's handler raised: which error of a call is none of its own.

Python runs signal handlers between any two instructions of the main thread, and what they raise comes out of whatever
was running, such as the decoding of a message, whose errors are taken for damage otherwise.
"""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterable, Iterator
from inspect import CO_VARARGS
from types import CodeType, FrameType


def from_handler(error: BaseException) -> bool:
    """Return whether a signal's handler raised an error, or one that it was made of."""
    return find_raised(error) is not None


def find_raised(error: BaseException) -> BaseException | None:
    """Return what a signal's handler raised: this error, or its cause or context, or theirs; None if none did."""
    codes: set[CodeType] | None = None
    for link in chain_of(error):
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


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause and context, and theirs, each once."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            yield link
            waiting += link.__cause__, link.__context__


def _was_handed_its_caller(frame: FrameType) -> bool:
    """Return whether a function got the frame that it interrupted, as handlers do, also one that is set no more.

    Its locals are looked at from outside: asking for them (``f_locals``) would leave a copy of them in the frame, which
    keeps views of messages alive, and CPython 3.11 crashes when its collector frees a cycle with one.
    """
    code, caller = frame.f_code, frame.f_back
    if caller is None or code.co_argcount + bool(code.co_flags & CO_VARARGS) == 0:
        return False
    held = gc.get_referents(frame)
    return _count(held, caller) > _LINKS or any(type(value) is tuple and _count(value, caller) for value in held)


def _count(values: Iterable[object], wanted: object) -> int:
    return sum(value is wanted for value in values)


def _links_to_a_caller() -> int:
    """Return how often a frame that an error has left refers to its caller by itself, which is CPython's affair."""
    try:
        _fail()
    except ZeroDivisionError as error:
        left = error.__traceback__ and error.__traceback__.tb_next
    assert left is not None
    return _count(gc.get_referents(left.tb_frame), left.tb_frame.f_back)


def _fail() -> None:
    raise ZeroDivisionError


_LINKS = _links_to_a_caller()


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
