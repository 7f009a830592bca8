"""What the front end and the engines say to each other."""

from __future__ import annotations

import msgspec


class Generation(msgspec.Struct):
    """A request: continue these tokens by at most so many."""

    request_id: str
    tokens: list[int]
    max_tokens: int


class Progress(msgspec.Struct):
    """What a step has added to a request; the last one says why it is."""

    request_id: str
    tokens: list[int]
    finish_reason: str | None = None
