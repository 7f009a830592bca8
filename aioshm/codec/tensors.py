"""Torch tensors as arrays of their visible elements. Imports torch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import warn_if_has_hooks

from aioshm.codec.array_heads import TORCH, ArrayHead, Order, describers, message_head, packers, reducers
from aioshm.codec.arrays import Array, elements, exported, order_of, writable
from aioshm.codec.base import Encoded

_SHARED_NAMES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_CARRIERS = {  # types that NumPy lacks are encoded as integers of the same size
    "bfloat16": "int16",
    "complex32": "int32",
    "float4_e2m1fn_x2": "uint8",
    "float8_e4m3fn": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2": "uint8",
    "float8_e5m2fnuz": "uint8",
    "float8_e8m0fnu": "uint8",
    "bits16": "int16",
    **dict.fromkeys(("bits8", "bits1x8", "bits2x4", "bits4x2"), "uint8"),
    **dict.fromkeys((f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)), "uint8"),
}


def _known_dtypes() -> dict[torch.dtype, tuple[str, torch.dtype | None]]:
    """Map dtypes to their name and, if NumPy lacks the type, to the carrier. Older releases of torch have fewer."""
    known: dict[torch.dtype, tuple[str, torch.dtype | None]] = {}
    for name in (*_SHARED_NAMES, *_CARRIERS):
        dtype = getattr(torch, name, None)
        if dtype is None:
            continue
        carrier = getattr(torch, _CARRIERS[name]) if name in _CARRIERS else None
        known[dtype] = name, carrier
    return known


_OUTGOING = _known_dtypes()
_ARRIVING: dict[str, tuple[np.dtype[Any], torch.dtype | None]] = {
    name: (np.dtype(_CARRIERS.get(name, name)), dtype if carrier is not None else None)
    for dtype, (name, carrier) in _OUTGOING.items()
}


def array_of(tensor: torch.Tensor) -> tuple[str, Array] | None:
    """Return dtype name and array over the tensor's memory; None if this is no dense CPU tensor."""
    outgoing = _OUTGOING.get(tensor.dtype)
    if outgoing is None or not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    name, carrier = outgoing
    if carrier is not None:
        tensor = tensor.detach().resolve_conj().resolve_neg().view(carrier)
    return name, tensor.numpy(force=True)


def reduce_tensor(tensor: torch.Tensor) -> Any:
    """Reduce a tensor or a parameter for pickle, ten times as fast as torch does."""
    found = array_of(tensor)
    if found is None:
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    is_parameter = type(tensor) is torch.nn.Parameter
    if tensor._backward_hooks and not is_parameter:
        warn_if_has_hooks(tensor)
    name, array = found
    memory = exported(array)
    reduced = rebuild_tensor, (memory, name, array.shape, order_of(array), tensor.requires_grad, is_parameter)
    if not tensor.__dict__:
        return reduced
    # Not as plain state: Tensor.__setstate__ mistakes plain state for a pickle of an early torch release.
    return (*reduced, tensor.__dict__, None, None, _set_attributes)


def _set_attributes(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    tensor.__dict__.update(attributes)


def rebuild_tensor(
    memory: Any,
    name: str,
    shape: tuple[int, ...],
    order: Order = "C",
    requires_grad: bool = False,
    is_parameter: bool = False,
    device: str = "",
) -> torch.Tensor:
    """Return a tensor over memory, without a copy; a copy on another device than the CPU."""
    carrier, dtype = _ARRIVING[name]
    tensor = torch.from_numpy(writable(np.ndarray(shape, carrier, memory, 0, None, order)))
    if dtype is not None:
        tensor = tensor.view(dtype)
    if device:
        tensor = tensor.to(device)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    if requires_grad:
        tensor.requires_grad_()
    return tensor


def itemsize_of(name: str) -> int | None:
    """Return the size of an element in bytes; None if no dtype has this name."""
    found = _ARRIVING.get(name)
    return None if found is None else found[0].itemsize


def describe(tensor: torch.Tensor) -> tuple[ArrayHead, memoryview]:
    """Return a tensor's head and elements; `TypeError`: not dense, or a meta tensor."""
    device = ""
    found = array_of(tensor)
    if found is None and not tensor.is_meta and not tensor.is_cpu:
        device = str(tensor.device)
        found = array_of(tensor.detach().cpu())
    if found is None:
        raise TypeError(f"tensors of {tensor.dtype}, {tensor.layout} on {tensor.device} cannot be encoded")
    name, array = found
    is_parameter = type(tensor) is torch.nn.Parameter
    head = ArrayHead(TORCH, name, array.shape, order_of(array), tensor.requires_grad, is_parameter, device)
    return head, elements(array)


def pack(tensor: torch.Tensor) -> Encoded | None:
    """Encode a tensor as a message of its own; None for gradients, attributes, and tensors that are not dense."""
    if tensor.requires_grad or tensor.__dict__ or (found := array_of(tensor)) is None:
        return None
    name, array = found
    return (_message_head(name, array.shape, order_of(array)),), (elements(array),)


@lru_cache(256)
def _message_head(name: str, shape: tuple[int, ...], order: Order) -> bytes:
    return message_head(ArrayHead(TORCH, name, shape, order))


def rebuild(head: ArrayHead, memory: Any) -> torch.Tensor:
    """Return a tensor over memory, moved to its device."""
    return rebuild_tensor(
        memory, head.dtype, head.shape, head.order, head.requires_grad, head.is_parameter, head.device
    )


packers[torch.Tensor] = pack
for _kind in (torch.Tensor, torch.nn.Parameter):
    describers[_kind] = describe
    reducers[_kind] = reduce_tensor
