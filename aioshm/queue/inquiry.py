"""The report of a reader's long wait: does the writer's event loop answer?"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

from aioshm.process.state import SUSPECT_STATES
from aioshm.wait.stall import seconds

Answers = Literal["always", "by a thread", "unknown"]
"""Whether a writer answers that its event loop runs: always, also while the program hangs, or perhaps never."""

ANSWER_S, MIN_ANSWER_S = 1.0, 0.25
"""How long a writer may take to answer; less only where reports are wanted sooner."""


class Inquiry:
    """A report in two steps, ask the writer and log the outcome, for one wait."""

    def __init__(self, after_s: float, ask: Callable[[], bool], report: Callable[[float], None]) -> None:
        self._after_s = after_s
        # Returns whether to wait for an answer.
        self._ask = ask
        self._report = report
        self._asked = False

    def __call__(self, waited_s: float) -> float | None:
        """Take the next step; return the seconds until the following step."""
        answer_s = answer_within(self._after_s)
        if not self._asked and self._ask():
            self._asked = True
            return answer_s
        self._report(waited_s)
        if not self._asked:
            return None
        self._asked = False
        return self._after_s - answer_s


def answer_within(after_s: float) -> float:
    """Return how long to wait for an answer where a report is wanted after so many seconds."""
    return min(ANSWER_S, max(MIN_ANSWER_S, after_s))


def findings(who: str, state: str, silent_s: float | None, answers: Answers) -> tuple[int, str]:
    """Return log level and text about a writer; ``silent_s``: None if no answer is due."""
    is_ = f" is {state}" if state else ""
    if state in SUSPECT_STATES:
        return logging.WARNING, f"{who}{is_}"
    also = f"{is_} and" if state else ""
    if silent_s is None and answers == "by a thread":
        text = "answers by a thread of its own: whether the program that uses the queue hangs is not known here"
        return logging.WARNING, f"{who}{also} {text}"
    if silent_s is None:
        return logging.INFO, f"{who}{also} answers: its event loop runs, and there is nothing to read"
    if answers != "unknown":
        text = f"its event loop has not answered for {seconds(silent_s)}: it is blocked, or busy without a pause"
        return logging.WARNING, f"{who}{is_}, but {text}" if state else f"{who}: {text}"
    return logging.WARNING, f"{who}{also} has not answered whether its event loop runs; older releases never do"
