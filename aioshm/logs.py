"""Rate limits of log messages: how many were held back is said with the next one."""

from __future__ import annotations

import logging
import time


class LogLimiter:
    """Lets one message through every ``interval`` seconds and counts the others."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._next = 0.0
        self._held_back = 0

    def admit(self) -> int | None:
        """Return None to say nothing now, else how many were held back since the last one."""
        now = time.monotonic()
        if now < self._next:
            self._held_back += 1
            return None
        self._next = now + self._interval
        held, self._held_back = self._held_back, 0
        return held

    def warn(self, logger: logging.Logger, text: str, *args: object, level: int = logging.WARNING) -> None:
        """Log a message, with how many were held back since the last one, or hold it back."""
        held_back = self.admit()
        if held_back:
            logger.log(level, f"{text} (and %d more like this)", *args, held_back)
        elif held_back is not None:
            logger.log(level, text, *args)
