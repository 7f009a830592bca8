"""Puts `aioshm.engine.compat.vllm.MessageQueue` in the place of vLLM's own.

vLLM calls `register` in each of its processes, before it makes its queues (its entry points' group
``vllm.general_plugins``). Its modules may have imported the class by then, so each of them gets the new one.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Mapping
from typing import Any, Final

from aioshm.config import vllm_wanted

logger: logging.Logger = logging.getLogger("aioshm.engine")

QUEUE_MODULE: Final = "vllm.distributed.device_communicators.shm_broadcast"

SIGNATURES: Final[Mapping[str, str]] = {
    "__init__": "self, n_reader, n_local_reader, local_reader_ranks=None, max_chunk_bytes=25165824, max_chunks=10, "
    "connect_ip=None, enable_shm_tensor_arena=False",
    "acquire_read": "self, timeout=None, indefinite=False",
    "acquire_write": "self, timeout=None",
    "broadcast_object": "self, obj=None",
    "create_from_handle": "handle, rank",
    "create_from_process_group": "pg, max_chunk_bytes, max_chunks, writer_rank=0, external_writer_handle=None, "
    "blocking=True",
    "create_from_process_group_single_reader": "pg, max_chunk_bytes, max_chunks, reader_rank=0, blocking=False",
    "dequeue": "self, timeout=None, indefinite=False",
    "enqueue": "self, obj, timeout=None",
    "export_handle": "self",
    "shutdown": "self",
    "wait_until_ready": "self",
}
"""The methods of vLLM 0.33's class, and what each takes."""


def register() -> None:
    """Replace vLLM's ``MessageQueue`` wherever this process has imported it, if ``AIOSHM_VLLM=1``. Idempotent.

    A vLLM whose queue has another interface than that of 0.33 keeps its own.
    """
    if not vllm_wanted():
        return
    from aioshm.engine.compat.vllm import MessageQueue

    own: Any = importlib.import_module(QUEUE_MODULE).MessageQueue
    if own is MessageQueue:
        return
    other = differences(own)
    if other:
        logger.error(
            "AIOSHM_VLLM=1 has no effect: this vLLM's message queue is not that of 0.33 (%s); install an aioshm "
            "made for it, or unset the variable",
            "; ".join(other),
        )
        return
    replaced = []
    for name, module in list(sys.modules.items()):
        # By its dictionary: packages that import lazily would import whatever has the name.
        if getattr(module, "__dict__", {}).get("MessageQueue") is own:
            module.MessageQueue = MessageQueue  # type: ignore[attr-defined]
            replaced.append(name)
    logger.info("vLLM's message queue is aioshm's, in %s", ", ".join(sorted(replaced)))


def differences(queue: Any) -> list[str]:
    """Return how a class differs from vLLM 0.33's ``MessageQueue``, as far as callers can tell."""
    found = []
    for name, expected in SIGNATURES.items():
        method = getattr(queue, name, None)
        parameters = None if method is None else described(method)
        if parameters != expected:
            found.append(f"{name}: {'missing' if parameters is None else f'({parameters})'} instead of ({expected})")
    return found


def described(method: Any) -> str:
    """Return what a method takes, without annotations, keyword-only additions left out."""
    parameters = inspect.signature(method).parameters.values()
    return ", ".join(
        parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"
        for parameter in parameters
        if parameter.kind is not parameter.KEYWORD_ONLY
    )
