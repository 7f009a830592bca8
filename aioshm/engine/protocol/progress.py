"""How far a startup is, how it ended, and how that is said. No I/O."""

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
"""What a state is called in sentences."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """An engine that is not ready yet.

    Attributes:
        index: Its rank.
        state: How far it is.
        seconds: For how long it has been no further.
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
    """How far a startup is; as a string, one line for people.

    Attributes:
        total: How many engines there are.
        connected: How many have said HELLO, the ready ones included.
        ready: How many have said READY.
        waiting: Those that have not.
        moved: The rank of the engine that has just come further; None if this is only a reminder.
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
    """What one engine has said.

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
    """What the engines have said.

    Attributes:
        engines: What each has said, by rank.
        num_gpu_blocks: What they have in all; 0 if none of them says.
        parallel_config_hash: What they agree on; None if none of them says.
        stats_address: Where the coordinator's counts are published, if an engine passes that on.
    """

    engines: Mapping[int, EngineReport]
    num_gpu_blocks: int = 0
    parallel_config_hash: Any = None
    stats_address: str | None = None


def engine_index(name: str) -> int | None:
    """Return the rank that the name of an engine's process ends in."""
    found = re.search(r"[0-9]+$", name)
    return int(found[0]) if found else None


def describe_failure(
    cause: str, exits: Sequence[str], progress: StartupProgress, tails: Mapping[str, Sequence[str]]
) -> str:
    """Return the text of an `EngineStartupError`."""
    what = "; ".join(part for part in (cause, ", ".join(exits)) if part)
    lines = [f"engine startup failed: {what} ({progress})"]
    for name, tail in tails.items():
        lines.append(f"last lines of {name}'s stderr:")
        lines += [f"  {line}" for line in tail]
    return "\n".join(lines)
