"""Environment variables, which are read in ``aioshm/config.py`` alone."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from aioshm import config
from aioshm.config import Options
from tools.fuzz.target import Target, attempt

_NAMES = [f"AIOSHM_{field.name.upper()}" for field in msgspec.structs.fields(Options)] + [
    "AIOSHM_NATIVE",
    "AIOSHM_VLLM",
    "AIOSHM_ENGINE_READY_TIMEOUT_S",
    "AIOSHM_ENGINE_KEYS",
    "AIOSHM_USAGE_STATS",
    "VLLM_RINGBUFFER_WARNING_INTERVAL",
]


def environment(data: bytes) -> None:
    """Read an environment: lines, each a byte for the variable's name, then its value as the system has it."""
    environ = {}
    for line in data.split(b"\n"):
        if line:
            environ[_NAMES[line[0] % len(_NAMES)]] = line[1:].decode(errors="surrogateescape")
    for read in (
        Options.from_env,
        config.native_wanted,
        config.vllm_wanted,
        lambda environ: config.vllm_options(0.5, environ),
        config.engine_ready_timeout,
        config.engine_keys_path,
        config.usage_stats_path,
    ):
        value = attempt(ValueError, read, environ)
        if isinstance(value, Options):
            assert msgspec.json.decode(msgspec.json.encode(value), type=Options) == value


def _seeds() -> Iterator[bytes]:
    for number in range(len(_NAMES)):
        for value in (b"1", b"0.5", b"true", b"block", b"/tmp/x", b"inf", b"-1", b"nan", b"1e400", b"9" * 30):
            yield bytes([number]) + value


TARGETS = (Target("environment", environment, _seeds),)
