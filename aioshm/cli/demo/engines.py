"""A front end and its engines: given requests whose outputs stream back, and one of them killed, which comes back."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from time import monotonic

import msgspec

from aioshm.cli.demo.teller import Telling, Word, run_teller, words_of
from aioshm.cli.outcome import CommandFailed
from aioshm.engine import (
    CoreEngineState,
    EngineClient,
    EngineSupervisor,
    EngineZmqAddresses,
    OutputStream,
    RankInfo,
    StartupProgress,
    get_engine_client_zmq_addr,
)
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
        requests: How many requests it had; all were told.
        noticed_ms: How long it took until the last of them was, in milliseconds.
        error: What they were told.
        went_on: How many requests the other engines had, which went on.
        back_s: How long after it was killed it was ready again, in seconds.
        new_pid: The process id of its successor, which then had a request told.
    """

    engine: int
    pid: int
    requests: int
    noticed_ms: float
    error: str
    went_on: int
    back_s: float
    new_pid: int


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
            async with EngineSupervisor(
                run_teller,
                len(self.figures),
                kwargs=self._engine,
                coordinator=False,  # the one client here knows what there is to do
                request_type=Telling,
                output_type=Word,
                on_progress=self.progressed,
                progress_timeout=STARTUP_TIMEOUT_S,
                start_timeout=STARTUP_TIMEOUT_S,
                on_change=self.changed,
                handshake_address=_address(),
                addresses=EngineZmqAddresses([_address()], [_address()]),
            ) as supervisor:
                for figures, engine in zip(self.figures, supervisor.engines, strict=True):
                    figures.pid = engine.pid or 0
                requests = REQUESTS_EACH * len(self.figures)
                await asyncio.gather(*(self._follow(supervisor.client, number) for number in range(requests)))
                words = sum(figures.words for figures in self.figures)
                killed = await self._kill(supervisor)
        except (EngineStartupError, EngineDead, RequestFailed, TimeoutError) as error:
            raise CommandFailed(str(error).partition("\n")[0]) from None  # an engine's stderr was shown already
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

    def changed(self, engine: RankInfo) -> None:
        """Note how an engine fares that was killed."""
        self.states[engine.rank] = "ready" if engine.state == "running" else engine.state
        self.figures[engine.rank].pid = engine.pid or 0

    async def _follow(self, client: EngineClient, number: int, engine: int | None = None) -> None:
        """Have a line told, and check it word by word."""
        line = self._worth_telling[number % len(self._worth_telling)]
        expected = self._words[line]
        began, heard = monotonic(), 0
        outputs = client.submit(Telling(f"line {line}, request {number}", line), engine=engine)
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

    async def _kill(self, supervisor: EngineSupervisor) -> Killing:
        """Kill the last engine while all of them are at work; see its requests told, the others go on, and it back."""
        client, victim = supervisor.client, self.figures[-1]
        pid = victim.pid
        streams = [
            client.submit(
                Telling(f"endless request {engine} {number}", self._worth_telling[0], _ENDLESS), engine=engine
            )
            for engine in range(len(self.figures))
            for number in range(DOOMED_EACH)
        ]
        for stream in streams:
            await self._hear(stream)
        self.states[victim.engine] = "killed"
        self.say(f"engine {victim.engine} is killed now, with more requests in flight")
        began = monotonic()
        os.kill(pid, signal.SIGKILL)
        doomed = [stream for stream in streams if stream.engine == victim.engine]
        errors = await asyncio.gather(*map(self._hear_to_the_death, doomed))
        noticed_s = monotonic() - began
        error = errors[0]
        if error.pid != pid:
            raise CommandFailed(f"engine {victim.engine} (pid {pid}) was killed, not the one of: {error}")
        self.latest[victim.engine] = str(error)
        self.say(f"{error}; the others go on")
        others = [stream for stream in streams if stream.engine != victim.engine]
        for stream in others:
            await self._hear(stream)
        await supervisor.wait_until_ready(STARTUP_TIMEOUT_S)
        back_s = monotonic() - began
        for stream in others:
            await self._hear(stream)
            await stream.aclose()
        self.latest[victim.engine] = ""
        new_pid = supervisor.engines[victim.engine].pid or 0
        await self._follow(client, 0, victim.engine)
        self.say(f"engine {victim.engine} is back after {back_s:.2f} s, with pid {new_pid}")
        return Killing(victim.engine, pid, len(doomed), noticed_s * 1e3, str(error), len(others), back_s, new_pid)

    async def _hear(self, stream: OutputStream[Word]) -> None:
        """Hear one more word."""
        self.heard(stream.engine, (await anext(stream)).word)

    async def _hear_to_the_death(self, stream: OutputStream[Word]) -> EngineDead:
        heard = 0
        try:
            async for output in stream:
                heard += 1
                self.heard(stream.engine, output.word)
        except EngineDead as error:
            return error
        raise CommandFailed(f"a request has ended after {heard} words, although its engine was killed")


def _address() -> str:
    """Return an address for a socket that leaves nothing behind when this process is killed, where there are such."""
    if sys.platform == "linux":
        return f"ipc://@aioshm-demo-{secrets.token_hex(8)}"
    return get_engine_client_zmq_addr(True, "")
