"""An engine: takes requests, has its workers do one step after the other for all of them together."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from aioshm.engine import EngineHandshakeMetadata, WorkerGroup, run_engine_core
from engine_frontend.batch import Chunk, Config
from engine_frontend.messages import Generation, Progress
from engine_frontend.text import END, VOCABULARY

if TYPE_CHECKING:
    from engine_frontend.workers import ModelWorker

MAX_BATCH = 32
"""How many requests a step is for; the others wait."""


def make_worker(config: Config, size: int, rank: int) -> ModelWorker:
    """Make a rank of the model, in its own process."""
    # Here, because nobody else needs torch, which takes a second to import.
    from engine_frontend.workers import ModelWorker

    return ModelWorker(config, size, rank)


@dataclass
class Text:
    """A request while it is worked on.

    Attributes:
        tokens: The prompt, and what has been added to it.
        known: How many of them the workers know.
        end: How many there may be.
    """

    tokens: list[int]
    known: int
    end: int


class Engine:
    """What `run_engine_core` drives."""

    def __init__(self, n_workers: int, config: Config) -> None:
        self._config = config
        self.group = WorkerGroup(make_worker, n_workers, args=(config, n_workers))
        self._texts: dict[str, Text] = {}
        self._forget: list[str] = []
        self._finished = self._aborted = 0

    async def initialize(self, metadata: EngineHandshakeMetadata) -> dict[str, Any]:
        await self.group.__aenter__()
        await self.group.collective_rpc("connect", (await self.group.collective_rpc("open"),))
        return {"max_model_len": self._config.context, "workers": self.group.pids}

    async def shutdown(self) -> None:
        await self.group.aclose()

    def add_request(self, wanted: Generation) -> None:
        if not wanted.tokens or not all(0 <= token < VOCABULARY for token in wanted.tokens):
            raise ValueError("a request needs tokens, all of the vocabulary")
        end = len(wanted.tokens) + wanted.max_tokens
        if end > self._config.context:
            raise ValueError(f"prompt and max_tokens must not have more than {self._config.context} tokens together")
        self._texts[wanted.request_id] = Text(wanted.tokens, 0, end)

    def abort_requests(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._end(request_id)
            self._aborted += 1

    def _end(self, request_id: str) -> None:
        del self._texts[request_id]
        self._forget.append(request_id)

    async def step(self) -> list[Progress]:
        texts = islice(self._texts.items(), MAX_BATCH)
        batch = [Chunk(request_id, text.known, text.tokens[text.known :]) for request_id, text in texts]
        if not batch:
            return []
        forget, self._forget = self._forget, []
        ranks = await self.group.collective_rpc("step", (batch, forget))
        outputs = []
        for chunk, *candidates in zip(batch, *ranks, strict=True):
            token = -max(candidates).minus_token
            text = self._texts[chunk.request_id]  # requests are aborted only between steps
            text.known = len(text.tokens)
            text.tokens.append(token)
            reason = "stop" if token == END else "length" if len(text.tokens) == text.end else None
            outputs.append(Progress(chunk.request_id, [token], reason))
            if reason is not None:
                self._end(chunk.request_id)
                self._finished += 1
        return outputs

    # What the front end calls

    def status(self) -> dict[str, int]:
        """Return how many requests the engine has, and how many have come to an end, or were aborted, so far."""
        return {"requests": len(self._texts), "finished": self._finished, "aborted": self._aborted}


def run(n_workers: int, handshake_address: str, dp_rank: int, local_dp_rank: int) -> None:
    """Run an engine; what each process of `launch_core_engines` does."""
    asyncio.run(serve(Engine(n_workers, Config()), handshake_address, dp_rank))


async def serve(engine: Engine, handshake_address: str, index: int) -> None:
    """Serve until told to end; end with an error when a worker has ended, also if there is nothing to do."""
    core = asyncio.ensure_future(run_engine_core(engine, handshake_address, index, request_type=Generation))
    first = asyncio.ensure_future(engine.group.join_first())
    await asyncio.wait((core, first), return_when=asyncio.FIRST_COMPLETED)
    death = first.result() if first.done() else None
    first.cancel()
    if death is None:
        await core
        return
    await asyncio.wait((core,), timeout=1)  # a step that runs fails, and that ends it
    core.cancel()
    await asyncio.wait((core,))
    raise death
