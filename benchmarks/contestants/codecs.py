"""Encoders and decoders for rivals that carry bytes: the quickest way of each codec."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.framework.workload import Codec


def encoder(codec: Codec) -> Callable[[Any], Any]:
    """Return what makes one bytes-like object of a message."""
    if codec == "raw":
        return _as_it_is
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
        return lambda data: _with_tensor(pickle.loads(data))
    return pickle.loads


def decoding(codec: Codec, receive: Callable[[], Any]) -> Callable[[], Any]:
    """Return what receives a message where ``receive`` receives its bytes."""
    decode = decoder(codec)
    return receive if codec == "raw" else lambda: decode(receive())


def to_frames(message: Sequence[Any]) -> list[Any]:
    """Return the pickle of a number and an array or tensor, and beside it the array's memory."""
    number, array = message
    buffers: list[pickle.PickleBuffer] = []
    if hasattr(array, "numpy"):
        array = array.numpy()
    return [pickle.dumps([number, array], 5, buffer_callback=buffers.append), *buffers]


def from_frames(codec: Codec, frames: Sequence[Any]) -> list[Any]:
    """Return the number and the array or tensor, in the frames' own memory."""
    message: list[Any] = pickle.loads(frames[0], buffers=frames[1:])
    return _with_tensor(message) if codec == "tensor" else message


def _with_tensor(message: Sequence[Any]) -> list[Any]:
    import torch

    number, array = message
    return [number, torch.from_numpy(array)]


def _as_it_is(data: Any) -> Any:
    return data
