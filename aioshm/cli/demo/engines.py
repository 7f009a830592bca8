"""A front end and its engines: started, given requests whose outputs stream back, and one of them killed."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from time import monotonic
from typing import Protocol

import msgspec

from aioshm.cli.demo.teller import Telling, Word, run_teller, words_of
from aioshm.cli.outcome import CommandFailed
from aioshm.engine import EngineClient, StartupProgress, launch_core_engines
from aioshm.errors import EngineDead, EngineStartupError, RequestFailed

REQUESTS_EACH = 8
"""How many requests there are for each engine."""
DOOMED_EACH = 2
"""How many more are in flight for each when one of them is killed."""
STARTUP_TIMEOUT_S = 60.0

_ENDLESS = 1000  # that often a line is told to whom it is not told to the end


class Display(Protocol):
    """Shows what happens."""

    def progressed(self, progress: StartupProgress) -> None:
        """An engine has come further, or is still waited for."""

    def ready(self, pids: Sequence[int]) -> None:
        """All engines are ready; these are their processes."""

    def heard(self, engine: int, word: str, said: str | None) -> None:
        """An engine has said a word; ``said`` is the whole line if that was the last one."""

    def killing(self, engine: int) -> None:
        """An engine is being killed."""

    def died(self, error: EngineDead) -> None:
        """It was noticed."""


class EngineFigures(msgspec.Struct):
    """What one engine has done.

    Attributes:
        engine: Its rank.
        pid: Its process id.
        ready_s: How long it took to be ready, in seconds.
        requests: How many of the requests it has had.
        words: How many words it has said for them.
    """

    engine: int
    pid: int = 0
    ready_s: float = 0.0
    requests: int = 0
    words: int = 0


class Killing(msgspec.Struct, frozen=True):
    """What became of the engine that was killed.

    Attributes:
        engine: Its rank.
        pid: Its process id.
        requests: How many requests were in flight, to whichever engine; all were told.
        noticed_ms: How long it took until the last of them was, in milliseconds.
        error: What they were told.
    """

    engine: int
    pid: int
    requests: int
    noticed_ms: float
    error: str


class EnginesResult(msgspec.Struct, frozen=True):
    """What was measured.

    Attributes:
        requests: How many there were.
        words: How many words came back.
        first_word_p50_ms: Median of the time from a request to its first word, in milliseconds; an engine takes
            `STEP_S` for each.
        engines: What each engine has done.
        killed: What became of the one that was killed.
    """

    requests: int
    words: int
    first_word_p50_ms: float
    engines: list[EngineFigures]
    killed: Killing


class FrontEnd:
    """The front end.

    Args:
        text: The path of the text.
        lines: Its lines.
        n_engines: How many engines there are.
        loop: The name of their event loop.
        display: Shows what happens.
    """

    def __init__(self, text: bytes, lines: Sequence[bytes], n_engines: int, loop: str, display: Display) -> None:
        self._text = text
        self._lines = lines
        self._worth_telling = [number for number, line in enumerate(lines) if line.split()] or [0]
        self._loop = loop
        self._display = display
        self._figures = [EngineFigures(index) for index in range(n_engines)]
        self._waits: list[float] = []
        self._began = monotonic()

    async def run(self) -> EnginesResult:
        """Do everything; when this returns, raises or is cancelled, no process is left.

        Raises:
            CommandFailed: Something was not as it must be; the text says what.
        """
        logging.getLogger("aioshm").addHandler(logging.NullHandler())  # what it says is shown here in another way
        try:
            async with AsyncExitStack() as stack:
                client = await self._start(stack)
                requests = REQUESTS_EACH * len(self._figures)
                await asyncio.gather(*(self._follow(client, number) for number in range(requests)))
                killed = await self._kill(client)
        except (EngineStartupError, EngineDead, RequestFailed, TimeoutError) as error:
            raise CommandFailed(str(error).partition("\n")[0]) from None  # an engine's stderr was shown already
        words = sum(figures.words for figures in self._figures)
        return EnginesResult(requests, words, statistics.median(self._waits) * 1e3, self._figures, killed)

    async def _start(self, stack: AsyncExitStack) -> EngineClient:
        self._began = monotonic()
        launching = launch_core_engines(
            run_teller,
            len(self._figures),
            kwargs={"text": self._text, "loop": self._loop},
            coordinator=False,  # the one client here knows what there is to do
            request_type=Telling,
            output_type=Word,
            on_progress=self._progressed,
            progress_timeout=STARTUP_TIMEOUT_S,
        )
        launch = await stack.enter_async_context(launching)
        _unlink([*launch.addresses.inputs, *launch.addresses.outputs])
        for figures, process in zip(self._figures, launch.processes, strict=True):
            figures.pid = process.pid or 0
        self._display.ready([figures.pid for figures in self._figures])
        return launch.client

    def _progressed(self, progress: StartupProgress) -> None:
        waiting = {each.index for each in progress.waiting}
        if progress.moved is not None and progress.moved not in waiting:
            self._figures[progress.moved].ready_s = monotonic() - self._began
        self._display.progressed(progress)

    async def _follow(self, client: EngineClient, number: int) -> None:
        """Have a line told, and check it word by word."""
        line = self._worth_telling[number % len(self._worth_telling)]
        expected = words_of(self._lines[line])
        began, heard = monotonic(), 0
        outputs = client.submit(Telling(f"line {line}, request {number}", line))
        figures = self._figures[outputs.engine]
        figures.requests += 1
        async for output in outputs:
            if not heard:
                self._waits.append(monotonic() - began)
            if heard == len(expected) or output.word != expected[heard]:
                raise CommandFailed(f"engine {outputs.engine}: word {heard} of line {line} is not what it must be")
            heard += 1
            figures.words += 1
            self._display.heard(outputs.engine, _shown(output.word), _said(expected) if output.finish_reason else None)
        if heard != len(expected):
            raise CommandFailed(f"engine {outputs.engine}: line {line} has {len(expected)} words, {heard} have come")

    async def _kill(self, client: EngineClient) -> Killing:
        """Kill the last engine while all of them are at work; see that everybody who waits is told."""
        victim = self._figures[-1]
        count = DOOMED_EACH * len(self._figures)
        speaking = asyncio.Semaphore(0)
        doomed = [asyncio.create_task(self._follow_to_the_death(client, number, speaking)) for number in range(count)]
        try:
            for _ in doomed:
                await speaking.acquire()
            self._display.killing(victim.engine)
            began = monotonic()
            os.kill(victim.pid, signal.SIGKILL)
            errors = await asyncio.gather(*doomed)
            noticed_s = monotonic() - began
        finally:
            for task in doomed:
                task.cancel()
            await asyncio.gather(*doomed, return_exceptions=True)
        error = errors[0]
        if {each.engine for each in errors} != {victim.engine}:
            raise CommandFailed(f"engine {victim.engine} (pid {victim.pid}) was killed, not the one of: {error}")
        self._display.died(error)
        return Killing(victim.engine, victim.pid, count, noticed_s * 1e3, str(error))

    async def _follow_to_the_death(self, client: EngineClient, number: int, speaking: asyncio.Semaphore) -> EngineDead:
        line = self._worth_telling[number % len(self._worth_telling)]
        outputs = client.submit(Telling(f"endless request {number}", line, _ENDLESS))
        heard = 0
        try:
            async for output in outputs:
                heard += 1
                if heard == 1:
                    speaking.release()
                self._display.heard(outputs.engine, _shown(output.word), None)
        except EngineDead as error:
            if not heard:
                raise  # before its time: nobody has killed one yet
            return error
        raise CommandFailed(f"a request has ended after {heard} words, although an engine was killed")


def _unlink(addresses: Sequence[str]) -> None:
    """Remove the files of sockets to which all have connected: a crash from now on leaves none behind."""
    for address in addresses:
        Path(address.removeprefix("ipc://")).unlink()


def _shown(word: bytes) -> str:
    return word.decode(errors="replace")


def _said(words: Sequence[bytes]) -> str:
    return " ".join(map(_shown, words))
