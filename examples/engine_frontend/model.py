"""A small transformer language model that can be cut into shards: it writes nonsense, but always the same nonsense.

As in Megatron-LM (arXiv 1909.08053): of each pair of linear layers the first is cut by its columns, the second by its
rows, so that every rank works on its own heads and hidden units, and one sum over the ranks makes up for each pair. The
last layer is cut by its columns, too: the ranks' logits are put one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine_frontend.batch import Chunk, Config
from engine_frontend.text import END, VOCABULARY

Sum = Callable[[Tensor], Awaitable[Tensor]]
"""Adds what every rank has, and gives each the whole."""


@dataclass
class Cache:
    """What a rank has kept of a request: keys and values, by layer, with shape (tokens, heads, width of a head)."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


def make_weights(config: Config) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(config.seed)
    shapes = {"tokens": (VOCABULARY, config.width), "positions": (config.context, config.width)}
    for layer in range(config.layers):
        shapes |= {f"{layer}.{name}": (config.width, config.width) for name in ("query", "key", "value", "out")}
        shapes |= {f"{layer}.up": (config.hidden, config.width), f"{layer}.down": (config.width, config.hidden)}
    shapes["head"] = (VOCABULARY, config.width)
    # The deviation of a layer with many inputs: high enough for texts that do not end in repetitions.
    weights = {
        name: torch.randn(shape, generator=generator) * 2 / math.sqrt(shape[1]) for name, shape in shapes.items()
    }
    weights["head"][END] /= 4  # or texts would end very soon
    return weights


def shard(weights: dict[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    """Return a rank's part: rows of the weights are a layer's outputs, columns its inputs."""
    part = {}
    for name, weight in weights.items():
        kind = name.rpartition(".")[2]
        if kind in ("tokens", "positions"):
            part[name] = weight
        else:
            part[name] = weight.tensor_split(size, 1 if kind in ("out", "down") else 0)[rank]
    return part


class Model:
    """One rank of the model; with a size of 1, all of it.

    Attributes:
        first_token: The token that the first column of its logits is about.
    """

    def __init__(self, config: Config, rank: int = 0, size: int = 1) -> None:
        if config.heads % size or config.hidden % size:
            raise ValueError(f"{config.heads} heads and {config.hidden} hidden units cannot be shared by {size} ranks")
        self.config = config
        self._weights = shard(make_weights(config), rank, size)
        self._heads = config.heads // size
        self.first_token = sum(len(part) for part in torch.arange(VOCABULARY).tensor_split(size)[:rank])
        self._caches: dict[str, Cache] = {}

    async def forward(self, batch: Sequence[Chunk], add: Sum) -> Tensor:
        """Return this rank's logits for what follows each chunk, one row for each.

        The chunks of one request must come in order.
        """
        weights = self._weights
        tokens = torch.tensor([token for chunk in batch for token in chunk.tokens])
        places = torch.tensor([chunk.start + at for chunk in batch for at in range(len(chunk.tokens))])
        state = weights["tokens"][tokens] + weights["positions"][places]
        for layer in range(self.config.layers):
            attended = self._attend(layer, _normalised(state), batch)
            state = state + await add(attended @ weights[f"{layer}.out"].T)
            hidden = torch.nn.functional.gelu(_normalised(state) @ weights[f"{layer}.up"].T)
            state = state + await add(hidden @ weights[f"{layer}.down"].T)
        last = torch.tensor([len(chunk.tokens) for chunk in batch]).cumsum(0) - 1
        return _normalised(state[last]) @ weights["head"].T

    def forget(self, request_ids: Sequence[str]) -> None:
        """Give back what is kept of requests; those that are not known do no harm."""
        for request_id in request_ids:
            self._caches.pop(request_id, None)

    def kept(self) -> list[str]:
        """Return the requests of which something is kept."""
        return sorted(self._caches)

    def _attend(self, layer: int, state: Tensor, batch: Sequence[Chunk]) -> Tensor:
        names = (f"{layer}.query", f"{layer}.key", f"{layer}.value")
        query, key, value = ((state @ self._weights[name].T).view(len(state), self._heads, -1) for name in names)
        results, end = [], 0
        for chunk in batch:
            part = slice(end, end := end + len(chunk.tokens))
            cache = self._caches.setdefault(chunk.request_id, Cache())
            if chunk.start == 0 and layer == 0:
                cache.keys, cache.values = [], []
            if len(cache.keys) == layer:
                cache.keys.append(key[part])
                cache.values.append(value[part])
            else:
                cache.keys[layer] = torch.cat((cache.keys[layer], key[part]))
                cache.values[layer] = torch.cat((cache.values[layer], value[part]))
            results.append(_attention(query[part], cache.keys[layer], cache.values[layer]))
        return torch.cat(results)


def _normalised(state: Tensor) -> Tensor:
    return state * torch.rsqrt(state.square().mean(-1, keepdim=True) + 1e-6)


def _attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return what the newest tokens see of all that came before them and of themselves; the heads side by side."""
    scores = torch.einsum("qhd,khd->hqk", query, keys) / math.sqrt(query.shape[-1])
    unseen = torch.ones(len(query), len(keys), dtype=torch.bool).triu(len(keys) - len(query) + 1)
    seen = scores.masked_fill(unseen, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", seen, values).flatten(1)


async def alone(partial: Tensor) -> Tensor:
    """The sum over the ranks where there is only one."""
    return partial
