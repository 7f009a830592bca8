"""The progress and the result of a startup, and their texts. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aioshm.engine.protocol.addresses import CoreEngineState

_SHOWN_ENGINES = 8
PHASES = {
    CoreEngineState.NEW: "before HELLO",
    CoreEngineState.CONNECTED: "connected",
    CoreEngineState.READY: "ready",
}
"""States in sentences."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """An engine that is not ready yet.

    Attributes:
        index: Its rank.
        state: Its progress.
        seconds: The time since its last progress.
        pid: Its process id, where known.
    """

    index: int
    state: CoreEngineState
    seconds: float
    pid: int | None = None

    def __str__(self) -> str:
        pid = f"pid {self.pid}, " if self.pid is not None else ""
        return f"{self.index} ({pid}{PHASES[self.state]}, {self.seconds:.0f} s)"


@dataclass(frozen=True, slots=True)
class StartupProgress:
    """The progress of a startup; as a string, one line for people.

    Attributes:
        total: The number of engines.
        connected: How many have said HELLO, the ready ones included.
        ready: How many have said READY.
        waiting: The engines that are not ready.
        moved: The rank of the engine that has just advanced; None for a reminder.
    """

    total: int
    connected: int
    ready: int
    waiting: tuple[Waiting, ...] = ()
    moved: int | None = None

    def __str__(self) -> str:
        text = f"{self.connected} of {self.total} engines connected, {self.ready} ready"
        if not self.waiting:
            return text
        shown = ", ".join(map(str, self.waiting[:_SHOWN_ENGINES]))
        more = len(self.waiting) - _SHOWN_ENGINES
        return f"{text}; waiting for engines {shown}{f' and {more} more' if more > 0 else ''}"


@dataclass(frozen=True, slots=True)
class EngineReport:
    """The messages of one engine.

    Attributes:
        index: Its rank.
        local: Whether it runs on this host.
        hello: The map of its HELLO.
        ready: The map of its READY.
    """

    index: int
    local: bool
    hello: dict[str, Any]
    ready: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StartupReport:
    """The messages of all engines.

    Attributes:
        engines: The messages of each, by rank.
        num_gpu_blocks: The total; 0 if no engine reports a number.
        parallel_config_hash: The common hash; None if no engine reports one.
        stats_address: Where the coordinator publishes its counts, if an engine passes that on.
    """

    engines: Mapping[int, EngineReport]
    num_gpu_blocks: int = 0
    parallel_config_hash: Any = None
    stats_address: str | None = None


def engine_index(name: str) -> int | None:
    """Return the rank at the end of an engine process's name."""
    found = re.search(r"[0-9]+$", name)
    return int(found[0]) if found else None


def describe_failure(
    cause: str, exits: Sequence[str], progress: StartupProgress, tails: Mapping[str, Sequence[str]]
) -> str:
    """Return the text of an `EngineStartupError`."""
    causes = "; ".join(part for part in (cause, ", ".join(exits)) if part)
    lines = [f"engine startup failed: {causes} ({progress})"]
    for name, tail in tails.items():
        lines.append(f"last lines of {name}'s stderr:")
        lines += [f"  {line}" for line in tail]
    return "\n".join(lines)
