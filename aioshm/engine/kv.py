"""Small parts of a model runner: KV caches bound to their layers, slices copied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def bind_kv_cache(
    kv_caches: Mapping[str, Tensor], forward_context: Mapping[str, Any], runner_kv_caches: list[Tensor]
) -> None:
    """Bind KV caches on both sides: to the runner, which numbers its layers, and to the layers themselves.

    ``runner_kv_caches`` is filled in the order of the layers' indices; each ``forward_context[name].kv_cache`` becomes
    a list of that one tensor. Nothing is bound if anything is refused.

    Args:
        kv_caches: The caches by the names of their layers, such as ``model.layers.3.self_attn``.
        forward_context: The layers by their names.
        runner_kv_caches: The runner's list, empty as yet.

    Raises:
        ValueError: A name does not hold exactly one number, a layer is missing, or the list is not empty.
        NotImplementedError: Two layers have one index, as where an encoder and a decoder have layers of their own.
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
    """Copy the first ``length`` elements (of the first dimension); return that part of ``to_tensor``.

    Between host and device this does not wait for the copy: what is copied from pinned memory must stay as it is until
    the device has caught up.

    Raises:
        ValueError: One of the tensors is shorter.
    """
    shortest = min(from_tensor.shape[0], to_tensor.shape[0])
    if not 0 <= length <= shortest:  # a slice would just be shorter, and one element be copied to many
        raise ValueError(f"length must be between 0 and {shortest}, not {length}")
    part = to_tensor[:length]
    part.copy_(from_tensor[:length], non_blocking=True)
    return part


def _layer_index(name: str) -> int:
    numbers = [part for part in name.split(".") if part.isdecimal()]
    if len(numbers) != 1:
        raise ValueError(f"a layer's name must hold exactly one number between dots, not {name!r}")
    return int(numbers[0])
