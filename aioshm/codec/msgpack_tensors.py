"""Torch tensors inside MessagePack. Imports torch, so import this only where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from aioshm.codec.arrays import Memory, memory_of
from aioshm.codec.msgpack_arrays import Length
from aioshm.codec.tensors import array_of, rebuild_tensor

# dtype, shape, whether column-major, requires_grad, whether a Parameter, device or "" for the CPU
_encode_head = msgspec.msgpack.Encoder().encode
_decode_head = msgspec.msgpack.Decoder(tuple[str, tuple[Length, ...], bool, bool, bool, str]).decode


def pack_tensor(tensor: torch.Tensor) -> tuple[bytes, Memory]:
    """Return a tensor's description, and its memory: a copy for a tensor on another device."""
    device = ""
    found = array_of(tensor)
    if found is None and not tensor.is_meta and not tensor.is_cpu:
        device = str(tensor.device)
        found = array_of(tensor.detach().cpu())
    if found is None:
        raise TypeError(f"tensors of {tensor.dtype}, {tensor.layout} on {tensor.device} cannot travel")
    name, array = found
    memory, order = memory_of(array)
    is_parameter = type(tensor) is torch.nn.Parameter
    return _encode_head((name, array.shape, order == "F", tensor.requires_grad, is_parameter, device)), memory


def unpack_tensor(head: memoryview, memory: Any) -> torch.Tensor:
    """Return a tensor over memory, moved to its device."""
    name, shape, by_columns, requires_grad, is_parameter, device = _decode_head(head)
    tensor = rebuild_tensor(memory, name, shape, "F" if by_columns else "C")
    if device:
        tensor = tensor.to(device)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


PACKERS: dict[type, Callable[[Any], tuple[bytes, Memory]]] = {
    torch.Tensor: pack_tensor,
    torch.nn.Parameter: pack_tensor,
}
