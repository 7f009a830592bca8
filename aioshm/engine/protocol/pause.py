"""The order to pause or to resume engines. No I/O.

A client sends the order to each engine as a call of `PAUSE`, with the fields of a `PauseOrder` as arguments; the engine
answers with the order in force when it takes no step any more. Engines, front ends and the launching process keep the
newest order that they know, and pass it on: engines in a notice to aioshm's clients, and in their registration; front
ends and the launching process with the membership; the launching process to a starting engine in INIT.

Engines of vLLM get the calls that vLLM has for this, from one client.
"""

from __future__ import annotations

from time import time_ns
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_args

import msgspec

PauseMode: TypeAlias = Literal["finish", "abort", "keep"]

PAUSE = "_aioshm_pause"
"""The name of the call, and of the field of registrations and of INIT; no method that a client may call has it."""
NOTICE_ID = 0
"""The call id of a notice: an answer without a call."""

_VLLM_MODES = {"finish": "wait", "abort": "abort", "keep": "keep"}
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class PauseOrder(NamedTuple):
    """An order; of two orders the larger one holds."""

    version: _Number = 0  # when it was given, in microseconds, and above the order before; 0: no order yet
    client: _Number = 0  # the index of the client; 0 for the launching process, too
    mode: Literal["", "finish", "abort", "keep"] = ""  # "": resume

    def next(self, client: int, mode: Literal["", "finish", "abort", "keep"]) -> PauseOrder:
        """Return an order that replaces this one."""
        # A client that does not know the newest order gives a larger version nonetheless, by the clock.
        return PauseOrder(max(self.version + 1, time_ns() // 1000), client, mode)

    def call(self, *, of_vllm: bool) -> tuple[str, tuple[Any, ...]]:
        """Return the method and the arguments of the call that gives an engine this order."""
        if not of_vllm:
            return PAUSE, self
        if self.mode:
            return "pause_scheduler", (_VLLM_MODES[self.mode],)
        return "resume_scheduler", ()


NO_ORDER = PauseOrder()


def order_of(fields: Any) -> PauseOrder:
    """Return the decoded order; a `ValueError` describes an invalid one."""
    return msgspec.convert(fields, PauseOrder)


def order_or_none(fields: Any) -> PauseOrder:
    """Return the decoded order of an engine, or `NO_ORDER` if it is invalid."""
    try:
        return order_of(fields)
    except ValueError:
        return NO_ORDER


def check_mode(mode: object) -> None:
    """Raise `ValueError` unless the mode is valid."""
    if mode not in get_args(PauseMode):
        raise ValueError(f"mode must be 'finish', 'abort' or 'keep', not {mode!r}")


def describe_unpaused(ranks: list[int], timeout: float | None) -> str:
    """Return the text of the error of a pause that took too long."""
    return (
        f"engines {', '.join(map(str, ranks))} have not paused after {timeout} s: they have requests in flight, or are"
        " in a step; they pause later, unless resume() is called"
    )
