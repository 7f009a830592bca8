"""Slots seen through windows, and ways to keep something of them."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aioshm.ring import ShmRingBuffer
from aioshm.ring.layout import CHUNK_HEADER_BYTES, chunk_at

OLD, NEW = b"old message ", b"NEW MESSAGE "

Keep = Callable[[memoryview], tuple[Any, Callable[[], bytes]]]
"""Keeps something of a view; returns that, and what reads its bytes."""


def _keep_view(view: memoryview) -> tuple[Any, Callable[[], bytes]]:
    return view, lambda: bytes(view)


def _keep_nested(view: memoryview) -> tuple[Any, Callable[[], bytes]]:
    nested = memoryview(memoryview(memoryview(view[:]).cast("b")).toreadonly()).cast("B")
    return nested, lambda: bytes(nested)


def _keep_array(view: memoryview) -> tuple[Any, Callable[[], bytes]]:
    array = np.frombuffer(view, np.uint8)
    return array, array.tobytes


def _keep_tensor(view: memoryview) -> tuple[Any, Callable[[], bytes]]:
    tensor = as_tensor(view)
    return tensor, lambda: bytes(tensor.numpy())


def _keep_pickle_buffer(view: memoryview) -> tuple[Any, Callable[[], bytes]]:
    buffer = pickle.PickleBuffer(view)
    return buffer, lambda: bytes(buffer)


def _keep_cycle(view: memoryview) -> tuple[Any, Callable[[], bytes]]:
    cycle: list[Any] = [view]
    cycle.append(cycle)
    return cycle, lambda: bytes(cycle[0])


def _keep_object(view: memoryview) -> tuple[Any, Callable[[], bytes]]:
    mapping = view.obj
    return mapping, lambda: mapping[mapping.find(OLD[:1]) :][: len(view)]


KEEP: list[Keep] = [_keep_view, _keep_nested, _keep_array, _keep_tensor, _keep_pickle_buffer, _keep_cycle, _keep_object]


def as_tensor(view: memoryview) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it cannot be written to
        return torch.frombuffer(view, dtype=torch.uint8)


def put(ring: ShmRingBuffer, index: int, message: bytes) -> int:
    """Write to a slot through the ring's own mapping; return the length."""
    place = chunk_at(ring.layout.pools, index)
    assert place is not None
    start = place[0] + CHUNK_HEADER_BYTES
    ring.view[start : start + len(message)] = message
    return len(message)


def mappings(ring: ShmRingBuffer) -> int:
    """Return how often this process maps the segment."""
    file = os.fstat(ring.fd)
    wanted = [f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}", str(file.st_ino)]
    return sum(line.split()[3:5] == wanted for line in Path("/proc/self/maps").read_text().splitlines())


def permissions(address: int) -> str | None:
    """Return the permissions of the mapping at an address, or None if there is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, flags, _ = line.split(maxsplit=2)
        begin, end = (int(text, 16) for text in addresses.split("-"))
        if begin <= address < end:
            return flags
    return None


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)
