"""What a front end needs to know of a parallel configuration: a mapping, or an object with vLLM's attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PARALLEL_FIELDS = (
    "data_parallel_master_ip",
    "data_parallel_master_port",
    "_data_parallel_master_port_list",
    "_coord_store_port",
    "data_parallel_size",
)


def parallel_settings(config: object) -> dict[str, Any]:
    """Return what of a parallel configuration engines are told: a mapping as it is, of an object vLLM's names."""
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    return {name: getattr(config, name) for name in _PARALLEL_FIELDS if hasattr(config, name)}


def balanced_outside(config: object) -> bool:
    """Return whether a parallel configuration says that hybrid or external load balancing is on."""
    names = ("data_parallel_hybrid_lb", "data_parallel_external_lb")
    if isinstance(config, Mapping):
        return any(config.get(name) for name in names)
    return any(getattr(config, name, False) for name in names)
