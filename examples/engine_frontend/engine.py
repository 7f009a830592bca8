"""An engine: takes requests, has its workers do one step after the other for all of them together."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import Any

import msgspec
import torch
from engine_frontend.messages import Generation, Progress
from engine_frontend.model import END, Chunk, Config
from engine_frontend.workers import ModelWorker

from aioshm.engine import EngineHandshakeMetadata, WorkerGroup, run_engine_core

MAX_BATCH = 32
"""How many requests a step is for; the others wait."""


class Engine:
    """What `run_engine_core` drives."""

    def __init__(self, n_workers: int, config: Config) -> None:
        self._config = config
        self._group = WorkerGroup(ModelWorker, n_workers, args=(config, n_workers))
        self._requests: dict[str, Generation] = {}
        self._done: dict[str, int] = {}  # how many tokens of a request the workers know
        self._forget: list[str] = []

    async def initialize(self, metadata: EngineHandshakeMetadata) -> dict[str, Any]:
        await self._group.__aenter__()
        await self._group.collective_rpc("connect", (await self._group.collective_rpc("open"),))
        return {"max_model_len": self._config.context, "workers": self._group.pids}

    async def aclose(self) -> None:
        await self._group.aclose()

    def add_request(self, request: Any) -> None:
        wanted = msgspec.convert(request, Generation)
        if not wanted.tokens or not all(0 <= token < self._config.vocabulary for token in wanted.tokens):
            raise ValueError("a request needs tokens, all of the vocabulary")
        if len(wanted.tokens) + wanted.max_tokens > self._config.context:
            raise ValueError(f"prompt and max_tokens must not have more than {self._config.context} tokens together")
        self._requests[wanted.request_id] = wanted
        self._done[wanted.request_id] = 0
        wanted.max_tokens += len(wanted.tokens)  # from here on: of prompt and text together

    def abort_requests(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if self._requests.pop(request_id, None) is not None:
                self._forget.append(request_id)

    async def step(self) -> list[Progress]:
        batch = [
            Chunk(request.request_id, done, request.tokens[done:])
            for request in islice(self._requests.values(), MAX_BATCH)
            for done in (self._done[request.request_id],)
        ]
        if not batch:
            return []
        logits = await self._forward(batch)
        outputs = []
        for chunk, token in zip(batch, logits.argmax(1).tolist(), strict=True):
            request = self._requests.get(chunk.request_id)
            if request is None:  # aborted meanwhile
                continue
            request.tokens.append(token)
            self._done[chunk.request_id] = chunk.start + len(chunk.tokens)
            reason = "stop" if token == END else "length" if len(request.tokens) == request.max_tokens else None
            outputs.append(Progress(chunk.request_id, [token], reason))
            if reason is not None:
                self.abort_requests([chunk.request_id])
        return outputs

    async def _forward(self, batch: list[Chunk]) -> torch.Tensor:
        forget, self._forget = self._forget, []
        for request_id in forget:
            self._done.pop(request_id, None)
        return torch.cat(await self._group.collective_rpc("step", (batch, forget)), 1)

    # What the front end may call

    async def logits(self, tokens: list[int]) -> list[float]:
        """Return the logits for what follows the tokens."""
        request_id = f"logits of {len(tokens)} tokens"
        row: list[float] = (await self._forward([Chunk(request_id, 0, tokens)]))[0].tolist()
        self._forget.append(request_id)
        return row

    def running(self) -> list[str]:
        """Return the ids of the requests that the engine has."""
        return list(self._requests)


def run(n_workers: int, handshake_address: str, dp_rank: int, local_dp_rank: int) -> None:
    """Run an engine; what each process of a `CoreEngineProcManager` does."""

    async def work() -> None:
        engine = Engine(n_workers, Config())
        try:
            await run_engine_core(engine, handshake_address, dp_rank)
        finally:
            await engine.aclose()

    torch.set_num_threads(1)
    asyncio.run(work())
