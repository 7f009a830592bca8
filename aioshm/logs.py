"""Rate limits of log messages."""

from __future__ import annotations

import logging
import time


class LogLimiter:
    """Admits one message every ``interval`` seconds and counts the messages in between."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._next = 0.0
        self._suppressed = 0

    def admit(self) -> int | None:
        """Return None to suppress a message, else the number of messages suppressed since the last one."""
        now = time.monotonic()
        if now < self._next:
            self._suppressed += 1
            return None
        self._next = now + self._interval
        suppressed = self._suppressed
        self._suppressed = 0
        return suppressed

    def warn(self, logger: logging.Logger, text: str, *args: object, level: int = logging.WARNING) -> None:
        """Log or suppress a message; a logged message has the number of suppressed ones."""
        suppressed = self.admit()
        if suppressed:
            logger.log(level, f"{text} (and %d more like this)", *args, suppressed)
        elif suppressed is not None:
            logger.log(level, text, *args)
