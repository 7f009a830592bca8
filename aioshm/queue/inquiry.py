"""What is known of a silent writer: does its event loop answer?"""

from __future__ import annotations

import logging
from typing import Literal

from aioshm.process.state import SUSPECT_STATES
from aioshm.wait.limits import seconds

Answers = Literal["always", "by a thread", "unknown"]
"""Whether a writer answers that its event loop runs: always, also while the program hangs, or perhaps never."""


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
