"""The messages between a group and its workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import worker_targets as targets

from aioshm.engine.workers.worker import RESULT, MessageCodec, Undecodable


@pytest.mark.parametrize("beside", [None, np.zeros(100_000)], ids=["small", "with a buffer"])
@pytest.mark.parametrize("number", [1, 300, 1 << 20, 1 << 40])
def test_message_with_an_undecodable_value_names_its_call(number: int, beside: Any) -> None:
    codec = MessageCodec()
    encoded = codec.encode((RESULT, number, 2 * number, [beside, targets.FaultyAt("driver")]))
    if isinstance(encoded, bytes):
        message = codec.loads(encoded)
    else:
        parts, buffers = encoded
        message = codec.decode(b"".join(bytes(part) for part in parts), buffers)
    kind, call, _, value = message
    assert (kind, call) == (RESULT, number)
    assert isinstance(value, Undecodable)
    assert "not in the driver" in str(value.error)
