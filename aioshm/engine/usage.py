"""Usage reports, which the user must ask for, and which never leave the host by themselves."""

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
"""The destination of reports: the path of a file, or a function that gets each report."""

# The attributes of vLLM's configuration that a report has; some have other names in the report.
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
_REPORTED_AS = {
    "cache_dtype": "kv_cache_dtype",
    "backend": "attention_backend",
    "mode": "compilation_mode",
    "method": "spec_decode_method",
}

_log = logging.getLogger("aioshm.engine")


def report_usage_stats(stats: object = None, usage_context: str | Enum = "unknown", *, to: Sink | None = None) -> bool:
    """Report the usage of this process, if the user wants reports; return whether a report was made.

    A report has the time, the versions of aioshm, Python and the system, the context, and the caller's fields. A file
    gets a line of JSON for each report. A report that fails is logged as a warning, and raises nothing.

    Args:
        stats: More fields: a mapping, whose values become text if JSON cannot express them; or a configuration object
            like vLLM's ``VllmConfig``, whose sizes and features are reported.
        usage_context: The kind of program, such as ``"api_server"``; of an `Enum` its value.
        to: The destination. None: the file that the environment variable ``AIOSHM_USAGE_STATS`` names, if set.

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
            **_fields_of(stats),
        }
        if callable(sink):
            sink(report)
        else:
            _append(os.fspath(sink), msgspec.json.encode(report, enc_hook=str) + b"\n")
    except Exception as error:
        _log.warning("the usage report failed: %s", error)
        return False
    return True


def _fields_of(stats: object) -> Mapping[str, Any]:
    if stats is None:
        return {}
    if isinstance(stats, Mapping):
        return stats
    found = {
        _REPORTED_AS.get(name, name): value.name if isinstance(value, Enum) else value
        for part, names in _OF_CONFIG.items()
        for name in names.split()
        if (value := getattr(getattr(stats, part, None), name, None)) is not None
    }
    if hasattr(stats, "lora_config"):
        found["enable_lora"] = bool(stats.lora_config)
    if not found:
        raise TypeError(f"stats must be a mapping or a configuration like vLLM's, not {stats!r}")
    return found


def _append(path: str, line: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, line)  # one write, so that lines of several processes do not mix
    finally:
        os.close(fd)
