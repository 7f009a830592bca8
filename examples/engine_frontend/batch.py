"""What an engine and its workers say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Config:
    """The sizes of the model."""

    width: int = 64
    heads: int = 4
    hidden: int = 256
    layers: int = 2
    context: int = 256
    seed: int = 1


class Chunk(NamedTuple):
    """The tokens of one request that a step is about: all of its prompt, or the one that came last."""

    request_id: str
    start: int
    tokens: list[int]


class Best(NamedTuple):
    """The best of a rank's tokens for what follows a chunk; the better one is the greater one."""

    logit: float
    minus_token: int
