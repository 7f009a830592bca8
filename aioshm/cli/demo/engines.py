"""A front end and its engines: started, given requests whose outputs stream back, and one of them killed."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import statistics
from collections.abc import Callable, Sequence
from time import monotonic

import msgspec

from aioshm.cli.demo.teller import Telling, Word, run_teller, words_of
from aioshm.cli.outcome import CommandFailed
from aioshm.engine import CoreEngineState, EngineClient, StartupProgress, launch_core_engines
from aioshm.errors import EngineDead, EngineStartupError, RequestFailed

REQUESTS_EACH = 8
"""How many requests there are for each engine."""
DOOMED_EACH = 2
"""How many more are in flight for each when one of them is killed."""
STARTUP_TIMEOUT_S = 60.0

_ENDLESS = 1000  # times a line is told to a request that is not to reach its end


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
        requests: How many requests were in flight, to all engines together; all were told.
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

    Attributes:
        figures: What each engine has done up to now.
        states: How far each engine is, in one word.
        latest: What each engine has said, its last words at the end.
        say: Called with a line for people about everything that happens.
    """

    def __init__(self, text: bytes, lines: Sequence[bytes], n_engines: int, loop: str) -> None:
        self.figures: list[EngineFigures] = [EngineFigures(index) for index in range(n_engines)]
        self.states: list[str] = ["starting"] * n_engines
        self.latest: list[str] = [""] * n_engines
        self.say: Callable[[str], object] = lambda _: None
        self._engine = {"text": text, "loop": loop}
        self._words = [words_of(line) for line in lines]
        self._worth_telling = [number for number, line in enumerate(lines) if line.split()] or [0]
        self._waits: list[float] = []
        self._began = monotonic()

    async def run(self) -> EnginesResult:
        """Do everything; when this returns, raises or is cancelled, no process is left.

        Raises:
            CommandFailed: Something was not as it must be; the text says what.
        """
        logging.getLogger("aioshm").addHandler(logging.NullHandler())  # what it says is shown here in another way
        self._began = monotonic()
        try:
            async with launch_core_engines(
                run_teller,
                len(self.figures),
                kwargs=self._engine,
                coordinator=False,  # the one client here knows what there is to do
                request_type=Telling,
                output_type=Word,
                on_progress=self.progressed,
                progress_timeout=STARTUP_TIMEOUT_S,
            ) as launch:
                for address in (*launch.addresses.inputs, *launch.addresses.outputs):
                    # All have connected: a crash from now on leaves no socket file behind.
                    os.unlink(address.removeprefix("ipc://"))
                for figures, process in zip(self.figures, launch.processes, strict=True):
                    figures.pid = process.pid or 0
                requests = REQUESTS_EACH * len(self.figures)
                await asyncio.gather(*(self._follow(launch.client, number) for number in range(requests)))
                killed = await self._kill(launch.client)
        except (EngineStartupError, EngineDead, RequestFailed, TimeoutError) as error:
            raise CommandFailed(str(error).partition("\n")[0]) from None  # an engine's stderr was shown already
        words = sum(figures.words for figures in self.figures)
        return EnginesResult(requests, words, statistics.median(self._waits) * 1e3, self.figures, killed)

    def progressed(self, progress: StartupProgress) -> None:
        """Note how far the engines are; called while they start."""
        waiting = {each.index: each for each in progress.waiting}
        for each in progress.waiting:
            self.states[each.index] = "connected" if each.state is CoreEngineState.CONNECTED else "starting"
            self.figures[each.index].pid = each.pid or 0
        if progress.moved is not None and progress.moved not in waiting:
            self.states[progress.moved] = "ready"
            self.figures[progress.moved].ready_s = monotonic() - self._began
        self.say(str(progress))

    async def _follow(self, client: EngineClient, number: int) -> None:
        """Have a line told, and check it word by word."""
        line = self._worth_telling[number % len(self._worth_telling)]
        expected = self._words[line]
        began, heard = monotonic(), 0
        outputs = client.submit(Telling(f"line {line}, request {number}", line))
        figures = self.figures[outputs.engine]
        figures.requests += 1
        async for output in outputs:
            if not heard:
                self._waits.append(monotonic() - began)
            if heard == len(expected) or output.word != expected[heard]:
                raise CommandFailed(f"engine {outputs.engine}: word {heard} of line {line} is not what it must be")
            heard += 1
            figures.words += 1
            self.heard(outputs.engine, output.word)
        if heard != len(expected):
            raise CommandFailed(f"engine {outputs.engine}: line {line} has {len(expected)} words, {heard} have come")
        self.say(f"engine {outputs.engine}: {b' '.join(expected).decode(errors='replace')}")

    def heard(self, engine: int, word: bytes) -> None:
        """Note a word that an engine has said."""
        shown = "".join(letter if letter.isprintable() else "?" for letter in word.decode(errors="replace"))
        self.latest[engine] = f"{self.latest[engine]} {shown}"[-1000:]

    async def _kill(self, client: EngineClient) -> Killing:
        """Kill the last engine while all of them are at work; see that every request in flight is told."""
        victim = self.figures[-1]
        count = DOOMED_EACH * len(self.figures)
        speaking = asyncio.Semaphore(0)
        try:
            async with asyncio.TaskGroup() as group:
                doomed = [group.create_task(self._follow_to_the_death(client, each, speaking)) for each in range(count)]
                for _ in doomed:
                    await speaking.acquire()
                self.states[victim.engine] = "killed"
                self.say(f"engine {victim.engine} is killed now, with more requests in flight")
                began = monotonic()
                os.kill(victim.pid, signal.SIGKILL)
        except BaseExceptionGroup as group_of_errors:
            raise group_of_errors.exceptions[0] from None
        noticed_s = monotonic() - began
        error = doomed[0].result()
        if {each.result().engine for each in doomed} != {victim.engine}:
            raise CommandFailed(f"engine {victim.engine} (pid {victim.pid}) was killed, not the one of: {error}")
        self.latest[victim.engine] = str(error)
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
                self.heard(outputs.engine, output.word)
        except EngineDead as error:
            if not heard:
                raise  # before its time: none has been killed yet
            return error
        raise CommandFailed(f"a request has ended after {heard} words, although an engine was killed")
