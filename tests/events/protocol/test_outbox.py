"""The queue of a publisher's batches."""

from __future__ import annotations

from collections import deque

import pytest

from aioshm.errors import RoleError
from aioshm.events import EventBatch
from aioshm.events.protocol.outbox import Outbox

BATCH = EventBatch(0.0, [])


class Interrupted(deque[tuple[int, EventBatch]]):
    """Calls back while the outbox has its lock, as a signal handler may."""

    def append(self, item: tuple[int, EventBatch]) -> None:
        with pytest.raises(RoleError, match="a signal handler has interrupted a call"):
            OUTBOX.put(BATCH)
        super().append(item)

    def popleft(self) -> tuple[int, EventBatch]:
        with pytest.raises(RoleError, match="a signal handler has interrupted a call"):
            OUTBOX.put(BATCH)
        assert OUTBOX.close()
        return super().popleft()


OUTBOX = Outbox(4)


def test_call_that_interrupts_another_one_is_refused_and_close_is_not() -> None:
    OUTBOX.waiting = Interrupted()
    assert OUTBOX.put(BATCH)
    assert OUTBOX.take() == (0, BATCH)
    assert (OUTBOX.published, OUTBOX.closed, OUTBOX.dropped) == (1, True, 0)
