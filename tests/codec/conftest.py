from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aioshm.codec import Codec
from aioshm.codec.frames import body_bytes, split_body, write_body


def carry_through_a_slot(codec: Codec, obj: Any) -> Any:
    """Encode into a slot, decode from it, then overwrite the slot, which destroys results that alias the slot."""
    encoded = codec.encode(obj)
    parts, buffers = ((encoded,), ()) if type(encoded) is bytes else encoded
    main_bytes = sum(map(len, parts))
    size = body_bytes(main_bytes, [len(buffer) for buffer in buffers])
    slot = bytearray(size + 100)
    write_body(memoryview(slot), parts, buffers)
    with memoryview(slot) as body:
        main_view, views = split_body(body, len(buffers), main_bytes)
        result = codec.decode(main_view, views)
        for view in (main_view, *views):
            view.release()
    slot[:] = b"\xa5" * len(slot)
    slot.append(0)  # a BufferError here is a view that lives on
    return result


@pytest.fixture
def carry() -> Callable[[Codec, Any], Any]:
    return carry_through_a_slot


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """Replace the check of the other tests: codecs start and open nothing, and it takes longer than these tests do."""
