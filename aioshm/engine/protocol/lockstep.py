"""What an engine that works in lockstep with others knows of their waves. No I/O.

All engines step while one of them has work; what lies between two pauses is a wave, numbered from 0 on.
"""

from __future__ import annotations

from aioshm.engine.protocol.messages import StartWave


class Lockstep:
    """One engine's place in the waves."""

    def __init__(self, index: int) -> None:
        self.wave: int = 0  # the current wave, or the next one while engines are paused
        self.running: bool = False
        self.step: int = 0  # steps of this wave so far
        self._index = index

    def add(self, request_wave: int) -> int | None:
        """Note a request, and the wave that its front end believed in."""
        self.wave = max(self.wave, request_wave)
        if self.running:
            return None
        self.running = True
        return self.wave

    def start(self, start: StartWave) -> None:
        """Take what the coordinator says: another engine has started a wave. A wave that is over is not started."""
        if start.exclude != self._index and start.wave >= self.wave:
            self.wave = start.wave
            self.running = True

    def stepped(self, unfinished: bool) -> int | None:
        """Note a step, and whether any engine has work after it."""
        self.step += 1
        if unfinished:
            return None
        complete, self.running, self.step = self.wave, False, 0
        self.wave += 1
        return complete if self._index == 0 else None
