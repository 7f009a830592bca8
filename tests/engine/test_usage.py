"""Usage reports: none unless wanted, and then in one place of one's own."""

from __future__ import annotations

import json
import logging
import platform
import socket
import time
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from aioshm.engine import report_usage_stats

pytestmark = pytest.mark.opens_nothing


@pytest.fixture(autouse=True)
def no_network_and_no_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise AssertionError("nobody wanted a network")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.delenv("AIOSHM_USAGE_STATS", raising=False)


def test_nothing_unless_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert report_usage_stats() is False
    assert report_usage_stats({"model": "m"}, "test") is False
    assert not list(tmp_path.iterdir())


def test_one_line_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "usage.jsonl"
    monkeypatch.setenv("AIOSHM_USAGE_STATS", str(path))
    before = time.time()
    assert report_usage_stats({"engines": 2, "dtype": complex(1, 2)}, "api_server") is True
    assert report_usage_stats() is True
    first, second = map(json.loads, path.read_text().splitlines())
    assert before <= first.pop("time") <= time.time()
    assert first.pop("aioshm")
    assert first.pop("python") == platform.python_version()
    own = {"usage_context": "api_server", "platform": "linux", "machine": platform.machine()}
    assert first == own | {"engines": 2, "dtype": "(1+2j)"}
    assert second["usage_context"] == "unknown"
    assert path.stat().st_mode & 0o777 == 0o600


def test_argument_comes_before_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOSHM_USAGE_STATS", str(tmp_path / "not here"))
    assert report_usage_stats(to=tmp_path / "here")
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    reports: list[dict[str, Any]] = []
    value = object()
    assert report_usage_stats({"value": value}, "mine", to=reports.append)
    assert (reports[0]["value"], reports[0]["usage_context"]) == (value, "mine")


def test_a_configuration_object() -> None:
    """As vLLM's callers have it: `report_usage_stats(vllm_config, UsageContext.API_SERVER)`."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype="torch.bfloat16", max_model_len=4096, quantization=None, secret="x"),
        cache_config=SimpleNamespace(block_size=16, cache_dtype="fp8"),
        parallel_config=SimpleNamespace(data_parallel_size=2),
        compilation_config=SimpleNamespace(mode=Enum("Mode", {"EAGER": 3})(3)),
        speculative_config=None,
        lora_config=None,
    )
    reports: list[dict[str, Any]] = []
    assert report_usage_stats(config, Enum("Context", {"SERVER": "server"})("server"), to=reports.append)
    (report,) = reports
    said = {name: value for name, value in report.items() if name not in {"time", "aioshm", "python"}}
    own = {"usage_context": "server", "platform": "linux", "machine": platform.machine()}
    sizes = {"max_model_len": 4096, "block_size": 16, "data_parallel_size": 2}
    kinds = {"dtype": "torch.bfloat16", "kv_cache_dtype": "fp8", "compilation_mode": "EAGER", "enable_lora": False}
    assert said == own | sizes | kinds


def test_what_fails_is_only_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: object) -> NoReturn:
        raise RuntimeError("not today")

    with caplog.at_level(logging.WARNING, "aioshm.engine"):
        assert report_usage_stats(to=fail) is False
        assert report_usage_stats(to=tmp_path / "no" / "such" / "directory") is False
        assert report_usage_stats(7, to=[].append) is False
    assert "stats must be a mapping or a configuration like vLLM's, not 7" in caplog.text
    assert "the usage report failed: not today" in caplog.text
    assert "No such file or directory" in caplog.text


def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOSHM_USAGE_STATS", "1")
    with pytest.raises(ValueError, match=r"^AIOSHM_USAGE_STATS='1': it must be an absolute path"):
        report_usage_stats()
