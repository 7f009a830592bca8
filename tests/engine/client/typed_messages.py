"""Requests and outputs with types of their own. Apart from the engine, whose processes need no numpy."""

from __future__ import annotations

import msgspec
import numpy as np


class Output(msgspec.Struct):
    request_id: str
    token: int
    finish_reason: str | None = None


class Request(msgspec.Struct):
    request_id: str
    prompt: np.ndarray
    client_index: int = -1
    current_wave: int = -1
