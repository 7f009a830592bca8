from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from rings import Ends, NewEnds, NewRing

from aioshm.ring import RingReader, RingWriter, ShmRingBuffer
from aioshm.ring.cursors import OrderedReader, OrderedWriter


@pytest.fixture
def new_ring() -> Iterator[NewRing]:
    """Make rings, which are closed after the test."""
    with ExitStack() as stack:

        def make(n_reader: int = 2, max_chunk_bytes: int = 100, max_chunks: int = 3, **kwargs: Any) -> ShmRingBuffer:
            ring = ShmRingBuffer(n_reader, max_chunk_bytes, max_chunks, **kwargs)
            stack.callback(ring.close)
            return ring

        yield make


@pytest.fixture(params=[(RingWriter, RingReader), (OrderedWriter, OrderedReader)], ids=["strong", "weak"])
def new_ends(request: pytest.FixtureRequest, new_ring: NewRing) -> Iterator[NewEnds]:
    """Make rings with all of their cursors: those of one memory order, and those of the other."""
    writer_type, reader_type = request.param
    with ExitStack() as stack:

        def make(n_reader: int = 2, chunks: int = 3, chunk_bytes: int = 100) -> Ends:
            ring = new_ring(n_reader, chunk_bytes, chunks)
            writer = writer_type(ring.layout, ring.view)
            readers = [reader_type(ring.layout, ring.view, index) for index in range(n_reader)]
            for cursor in (writer, *readers):
                stack.callback(cursor.close)
            return Ends(ring, writer, readers)

        yield make
