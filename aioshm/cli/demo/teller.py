"""What an engine of the demo is: it tells lines of a text, a word of each of its requests in every step."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec

from aioshm.cli.demo.script import split_lines
from aioshm.cli.outcome import loop_factory
from aioshm.engine import EngineHandshakeMetadata, run_engine_core

STEP_S = 0.02


class Telling(msgspec.Struct, frozen=True):
    """A request to tell a line of the text, by its number, so many times."""

    request_id: str
    line: int
    times: int = 1


class Word(msgspec.Struct, frozen=True, omit_defaults=True):
    """The next word of a request; bytes, because a text need not be one."""

    request_id: str
    word: bytes
    finish_reason: str | None = None


class Teller:
    """The engine, see `run_engine_core`; it reads the text, at this path, for itself."""

    def __init__(self, text: bytes) -> None:
        self._path = text
        self._lines: list[bytes] = []
        self._left: dict[str, list[bytes]] = {}

    def initialize(self, metadata: EngineHandshakeMetadata) -> dict[str, Any]:
        """Read the text."""
        self._lines = split_lines(Path(os.fsdecode(self._path)).read_bytes())
        return {"lines": len(self._lines)}

    def add_request(self, request: Telling) -> None:
        """Take a request."""
        self._left[request.request_id] = (words_of(self._lines[request.line]) * request.times)[::-1]

    def abort_requests(self, request_ids: list[str]) -> None:
        """Forget requests."""
        for request_id in request_ids:
            del self._left[request_id]

    async def step(self) -> list[Word]:
        """Tell a word of each request."""
        await asyncio.sleep(STEP_S)
        words = [Word(name, left.pop(), None if left else "stop") for name, left in self._left.items()]
        self._left = {name: left for name, left in self._left.items() if left}
        return words


def words_of(line: bytes) -> list[bytes]:
    """Return the words of a line; of an empty one a word without letters."""
    return line.split() or [b""]


def run_teller(text: bytes, loop: str, handshake_address: str, dp_rank: int, local_dp_rank: int) -> None:
    """Run an engine in its own process."""
    with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
        runner.run(run_engine_core(Teller(text), handshake_address, dp_rank, request_type=Telling))
