"""Satisfies the imports of vLLM's message queue, so that its module runs by itself, as it came in the wheel.

Only names that the module itself uses are here, each with the behaviour that it has in vLLM by default.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import ipaddress
import logging
import os
import sys
import tempfile
import uuid
from types import ModuleType, SimpleNamespace
from typing import Any

DEVICES = "vllm.distributed.device_communicators"
QUEUE_MODULE = f"{DEVICES}.shm_broadcast"


def load_message_queue() -> Any:
    """Return vLLM's ``MessageQueue``, from its module in the installed wheel.

    Raises:
        ModuleNotFoundError: vllm is not installed.
    """
    if QUEUE_MODULE not in sys.modules:
        _pretend_packages()
        _pretend("vllm.envs", **_environment())
        _pretend("vllm.logger", init_logger=logging.getLogger)
        # No accelerator: nothing is pinned.
        _pretend("vllm.platforms", current_platform=SimpleNamespace(device_count=lambda: 0, **_no_accelerator()))
        _pretend("vllm.distributed.utils", StatelessProcessGroup=type(None), sched_yield=os.sched_yield)
        _pretend("vllm.utils.cpu_resource_utils", check_cgroup_memory_available=_enough)
        _pretend(
            "vllm.utils.network_utils",
            get_ip=lambda: "127.0.0.1",
            get_open_zmq_inproc_path=lambda: f"inproc://{uuid.uuid4()}",
            get_open_zmq_ipc_path=lambda: f"ipc://{tempfile.gettempdir()}/{uuid.uuid4()}",
            is_valid_ipv6_address=_is_ipv6,
        )
    return importlib.import_module(QUEUE_MODULE).MessageQueue


def _pretend_packages() -> None:
    """Put the packages' names in place without running their code, which wants everything that vLLM depends on."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError("No module named 'vllm'; `make bench-rivals` gets it", name="vllm")
    roots = list(spec.submodule_search_locations)
    for name in ["vllm", "vllm.utils", "vllm.distributed", DEVICES]:
        parts = name.split(".")[1:]
        package = _pretend(name)
        package.__path__ = [os.path.join(root, *parts) for root in roots]


def _pretend(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(members)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module


def _environment() -> dict[str, Any]:
    return {
        "VLLM_USE_SPINLOOP_EXT": False,
        "VLLM_RINGBUFFER_WARNING_INTERVAL": 60,
    }


def _no_accelerator() -> dict[str, Any]:
    def no() -> bool:
        return False

    return {"is_cuda": no, "is_cuda_alike": no, "is_rocm": no, "is_xpu": no, "is_cpu": lambda: True}


def _enough(_required_bytes: int, _name: str = "") -> None:
    """Take it for granted that the memory is there."""


def _is_ipv6(address: str) -> bool:
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return True
