"""Replaces vLLM's ``MessageQueue`` by `aioshm.engine.compat.vllm.MessageQueue`.

vLLM calls `register` in each of its processes before it creates its queues (the entry points' group
``vllm.general_plugins``). vLLM's modules may have imported the class before; `register` replaces it in each of them.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from typing import Any, Final

from aioshm.config import vllm_wanted

logger: logging.Logger = logging.getLogger("aioshm.engine")

QUEUE_MODULE: Final = "vllm.distributed.device_communicators.shm_broadcast"


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
    found = differences(own, MessageQueue)
    if found:
        logger.error(
            "AIOSHM_VLLM=1 has no effect: this vLLM's message queue is not that of 0.33 (%s); install an aioshm "
            "made for it, or unset the variable",
            "; ".join(found),
        )
        return
    replaced = []
    for name, module in list(sys.modules.items()):
        # By its dictionary: packages that import lazily would import whatever has the name.
        if getattr(module, "__dict__", {}).get("MessageQueue") is own:
            module.MessageQueue = MessageQueue  # type: ignore[attr-defined]
            replaced.append(name)
    logger.info("vLLM's message queue is aioshm's, in %s", ", ".join(sorted(replaced)))


def differences(found: type, expected: type) -> list[str]:
    """Return how the public methods of a class differ from the expected ones."""
    different = []
    for name, parameters in signatures(expected).items():
        other = signatures(found).get(name, "missing")
        if other != parameters:
            different.append(f"{name}: {other} instead of {parameters}")
    return different


def signatures(queue: type) -> dict[str, str]:
    """Return the parameters of a class's public methods, without annotations and keyword-only ones."""
    found = {}
    for name in dir(queue):
        method = getattr(queue, name)
        if name == "__init__" or (not name.startswith("_") and inspect.isfunction(method)):
            shown = []
            for parameter in inspect.signature(method).parameters.values():
                text = parameter.name
                if parameter.default is not parameter.empty:
                    text += f"={parameter.default!r}"
                if parameter.kind is not parameter.KEYWORD_ONLY:
                    shown.append(text)
            found[name] = f"({', '.join(shown)})"
    return found
