"""Usage reports: nothing is reported unless the user asks for it, and never over a network."""

from __future__ import annotations

import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import msgspec

import aioshm
from aioshm.arguments import check_plain
from aioshm.config import usage_stats_path

Sink = str | os.PathLike[str] | Callable[[dict[str, Any]], object]
"""Where reports go: a file's path, or something to call with each."""

# What a report says of a configuration, by the parts that vLLM's has; some names are told in another way.
_OF_CONFIG = {
    "model_config": "architecture dtype quantization enforce_eager max_model_len",
    "cache_config": "block_size gpu_memory_utilization kv_cache_memory_bytes cache_dtype enable_prefix_caching",
    "parallel_config": "tensor_parallel_size data_parallel_size pipeline_parallel_size enable_expert_parallel "
    "all2all_backend enable_eplb disable_custom_all_reduce",
    "scheduler_config": "max_num_seqs max_num_batched_tokens",
    "kv_transfer_config": "kv_connector",
    "attention_config": "backend",
    "compilation_config": "mode",
    "speculative_config": "method num_speculative_tokens",
}
_TOLD_AS = {
    "cache_dtype": "kv_cache_dtype",
    "backend": "attention_backend",
    "mode": "compilation_mode",
    "method": "spec_decode_method",
}

_log = logging.getLogger("aioshm.engine")


def report_usage_stats(stats: object = None, usage_context: str | Enum = "unknown", *, to: Sink | None = None) -> bool:
    """Report how this process is used, if that is wanted; return whether a report was made.

    A report has the time, the versions of aioshm, of Python and of the system, the context, and what the caller adds. A
    file gets one line of JSON for each. A report that fails is a warning in the log: nobody's service ends for it.

    Args:
        stats: What to add: a mapping, whose values become text where JSON cannot express them; or a configuration
            object with the parts and the attributes of vLLM's ``VllmConfig``, of which the sizes and the features are
            told, as far as it has them.
        usage_context: What kind of program this is; of an `Enum` its value.
        to: Where it goes. None: to the file that ``AIOSHM_USAGE_STATS`` names, or nowhere if it names none.

    Raises:
        TypeError: ``to`` is a coroutine function.
    """
    sink = usage_stats_path() if to is None else check_plain("to", to)
    if sink is None:
        return False
    try:
        report = {
            "time": time.time(),
            "usage_context": usage_context.value if isinstance(usage_context, Enum) else usage_context,
            "aioshm": aioshm.__version__,
            "python": platform.python_version(),
            "platform": sys.platform,
            "machine": platform.machine(),
            **_told(stats),
        }
        if callable(sink):
            sink(report)
        else:
            _append(os.fspath(sink), msgspec.json.encode(report, enc_hook=str) + b"\n")
    except Exception as error:
        _log.warning("the usage report failed: %s", error)
        return False
    return True


def _told(stats: object) -> Mapping[str, Any]:
    if stats is None:
        return {}
    if isinstance(stats, Mapping):
        return stats
    found = {
        _TOLD_AS.get(name, name): value.name if isinstance(value, Enum) else value
        for part, names in _OF_CONFIG.items()
        for name in names.split()
        if (value := getattr(getattr(stats, part, None), name, None)) is not None
    }
    if hasattr(stats, "lora_config"):
        found["enable_lora"] = bool(stats.lora_config)
    if not found:
        raise TypeError(f"stats must be a mapping or a configuration with the parts of vLLM's, not {stats!r}")
    return found


def _append(path: str, line: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, line)  # at once, so that lines of several processes do not mix
    finally:
        os.close(fd)
