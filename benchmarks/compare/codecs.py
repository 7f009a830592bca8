"""How rivals that carry bytes turn objects into bytes: the quickest way with what the codec's name says."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.compare.contestant import Codec


def encoder(codec: Codec) -> Callable[[Any], Any]:
    """Return what makes one bytes-like object of a message."""
    if codec == "raw":
        return bytes  # so that the caller may change its message
    if codec == "msgpack":
        import msgspec

        return msgspec.msgpack.Encoder().encode
    if codec == "tensor":
        return lambda message: pickle.dumps([message[0], message[1].numpy()], 5)
    return lambda message: pickle.dumps(message, 5)


def decoder(codec: Codec) -> Callable[[Any], Any]:
    """Return what makes a message of its bytes."""
    if codec == "raw":
        return _as_it_is
    if codec == "msgpack":
        import msgspec

        return msgspec.msgpack.Decoder().decode
    if codec == "tensor":
        import torch

        def decode(data: Any) -> list[Any]:
            number, array = pickle.loads(data)
            return [number, torch.from_numpy(array)]

        return decode
    return pickle.loads


def to_frames(message: Sequence[Any]) -> list[Any]:
    """Return the pickle of a number and a tensor, and beside it the tensor's memory."""
    buffers: list[pickle.PickleBuffer] = []
    main = pickle.dumps([message[0], message[1].numpy()], 5, buffer_callback=buffers.append)
    return [main, *buffers]


def from_frames(frames: Sequence[Any]) -> list[Any]:
    """Return the number and the tensor, in the frames' own memory."""
    import torch

    number, array = pickle.loads(frames[0], buffers=frames[1:])
    return [number, torch.from_numpy(array)]


def _as_it_is(data: Any) -> Any:
    return data
