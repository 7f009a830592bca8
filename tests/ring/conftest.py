from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from pairs_of_cores import NewPair, Pair, close_pair, make_pair
from rings import CORES, Cores, NewRing

from aioshm.ring import ShmRingBuffer


@pytest.fixture
def new_ring() -> Iterator[NewRing]:
    """Make rings, which are closed after the test."""
    with ExitStack() as stack:

        def make(n_reader: int = 2, max_chunk_bytes: int = 100, max_chunks: int = 3, **kwargs: Any) -> ShmRingBuffer:
            ring = ShmRingBuffer(n_reader, max_chunk_bytes, max_chunks, **{"slots": max_chunks, **kwargs})
            stack.callback(ring.close)
            return ring

        yield make


@pytest.fixture(params=[kind for kind in CORES if kind != "ordered"])
def cores(request: pytest.FixtureRequest) -> Cores:
    """The native core, where it was built, then its twin; what that fences where order is weak, `test_copying` runs."""
    return CORES[request.param]


@pytest.fixture
def inline_bytes(request: pytest.FixtureRequest) -> int | None:
    """Room in a slot: for every message, unless a test says otherwise."""
    return getattr(request, "param", None)


@pytest.fixture
def new_pair(cores: Cores, new_ring: NewRing, inline_bytes: int | None) -> Iterator[NewPair]:
    """Make rings with bare cores over them."""
    with ExitStack() as stack:

        def make(
            n_reader: int = 1, chunks: int = 3, chunk_bytes: int = 100, raw: bool = True, **sizes: int | None
        ) -> Pair:
            pair = make_pair(
                new_ring(n_reader, chunk_bytes, chunks, **{"inline_bytes": inline_bytes, **sizes}), cores, raw
            )
            stack.callback(close_pair, pair)
            return pair

        yield make
