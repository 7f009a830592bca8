"""Functions for model runners: bind KV caches to layers, copy slices of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def bind_kv_cache(
    kv_caches: Mapping[str, Tensor], forward_context: Mapping[str, Any], runner_kv_caches: list[Tensor]
) -> None:
    """Bind KV caches to the runner, which numbers its layers, and to the layers.

    ``runner_kv_caches`` is filled in the order of the layers' indices; each ``forward_context[name].kv_cache`` becomes
    a list of its tensor. An error binds nothing.

    Args:
        kv_caches: The caches by the names of their layers, such as ``model.layers.3.self_attn``.
        forward_context: The layers by their names.
        runner_kv_caches: The runner's list, which is empty.

    Raises:
        ValueError: A name does not hold exactly one number, a layer is missing, or the list is not empty.
        NotImplementedError: Two layers have the same index, as those of an encoder and a decoder.
    """
    if runner_kv_caches:
        raise ValueError(f"runner_kv_caches must be empty, not of {len(runner_kv_caches)} caches")
    names: dict[int, str] = {}
    for name in kv_caches:
        index = _layer_index(name)
        if index in names:
            raise NotImplementedError(f"layers {names[index]!r} and {name!r} have one index, {index}")
        if name not in forward_context:
            raise ValueError(f"forward_context must have every layer of kv_caches: {name!r} is missing")
        names[index] = name
    runner_kv_caches.extend(kv_caches[names[index]] for index in sorted(names))
    for name, kv_cache in kv_caches.items():
        forward_context[name].kv_cache = [kv_cache]


def copy_slice(from_tensor: Tensor, to_tensor: Tensor, length: int) -> Tensor:
    """Copy the first ``length`` elements of the first dimension; return that part of ``to_tensor``.

    Between host and device this does not wait for the copy: do not change pinned memory until the device has copied it.

    Raises:
        ValueError: A tensor is shorter.
    """
    shortest = min(from_tensor.shape[0], to_tensor.shape[0])
    if not 0 <= length <= shortest:  # torch would copy a shorter slice, or one element to many
        raise ValueError(f"length must be between 0 and {shortest}, not {length}")
    part = to_tensor[:length]
    part.copy_(from_tensor[:length], non_blocking=True)
    return part


def _layer_index(name: str) -> int:
    numbers = [part for part in name.split(".") if part.isdecimal()]
    if len(numbers) != 1:
        raise ValueError(f"a layer's name must hold exactly one number between dots, not {name!r}")
    return int(numbers[0])
