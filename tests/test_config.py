"""Options: their defaults, what the environment changes, and what is refused by name."""

from __future__ import annotations

import os
import pydoc
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aioshm import config
from aioshm.config import Options, default_runtime_dir, engine_ready_timeout, native_wanted, usage_stats_path

pytestmark = pytest.mark.opens_nothing


NAN = float("nan")
INFINITY = float("inf")

VALUES: dict[str, tuple[Any, list[Any]]] = {
    "backing": ("named", ["disk", None, ""]),
    "lifeline": ("directory", ["tcp", 1]),
    "overflow": ("zmq", ["tcp", None]),
    "wait": ("park", ["busy", "Spin"]),
    "on_reader_death": ("hold", ["ignore", True]),
    "max_readers": (1 << 16, [-1, 1 << 17, "1"]),
    "prefault_bytes": (0, [-1, 1.5, "1", True, None]),
    "max_message_bytes": (2**50, [0, -5, 1e9]),
    "slow_reader": ("evict", ["drop", None]),
    "stall_warning_s": (2.5, [0, -1.0, NAN, INFINITY, "60", True, None]),
    "max_spin_cpu": (0.25, [-0.01, 1.01, NAN, "0.1", True, None]),
    "remote_timeout": (0.1, [0, 0.05, 1e6, NAN, "10", None]),
    "remote_window": (1 << 20, [0, 1 << 21, 1.0]),
    "remote_history": (1, [-1, 1.0]),
    "linger_s": (0.0, [-1, INFINITY, None]),
    "remote_window_bytes": (1, [0, "1"]),
    "trace_context": (True, [1]),
    "secure": (False, [1, None]),
    "allow_insecure_pickle": (True, ["no"]),
    "runtime_dir": ("/run/ünlike", ["", None, Path("/tmp")]),
}
"""Of each option a value that is not its default, and values that are refused."""


class TestOptions:
    def test_defaults(self) -> None:
        options = Options()
        linux = sys.platform == "linux"
        assert options.backing == ("memfd" if linux else "named")
        assert options.lifeline == ("abstract" if linux else "directory")
        assert (options.wait, options.on_reader_death) == ("adaptive", "raise")
        assert options.stall_warning_s == 60
        assert 0 < options.prefault_bytes <= 16 << 20
        assert options.max_message_bytes >= 1 << 30
        assert options.runtime_dir == default_runtime_dir()

    def test_are_frozen_and_given_by_name(self) -> None:
        with pytest.raises(AttributeError):
            Options().wait = "spin"  # type: ignore[misc]
        with pytest.raises(TypeError):
            Options("memfd")  # type: ignore[misc]
        with pytest.raises(TypeError, match="wiat"):
            Options(wiat="spin")  # type: ignore[call-arg]

    @pytest.mark.parametrize("name", Options.__struct_fields__)
    def test_a_value_passes_through_a_handle_or_is_named(self, name: str) -> None:
        value, refused = VALUES[name]
        options = Options(**{name: value})
        assert options != Options()
        for codec in (msgspec.json, msgspec.msgpack):
            assert codec.decode(codec.encode(options), type=Options) == options
        for bad in refused:
            with pytest.raises((TypeError, ValueError), match=name) as caught:
                Options(**{name: bad})
            assert str(bad) in str(caught.value)

    @pytest.mark.parametrize(
        ("missing", "options"), [("memfd_create", {"backing": "memfd"}), (None, {"lifeline": "abstract"})]
    )
    def test_what_only_linux_has_is_refused_elsewhere(
        self, missing: str | None, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(config, "_ON_LINUX", False)
        if missing is not None:
            monkeypatch.delattr(os, missing, raising=False)
        ((name, value),) = options.items()
        with pytest.raises(ValueError, match=f"{name}='{value}' needs Linux; use {name}="):
            Options(**{"backing": "named", "lifeline": "directory", **options})

    def test_a_handle_cannot_smuggle_in_a_bad_one(self) -> None:
        for text in ('{"wait": "busy"}', '{"prefault_bytes": -1}', '{"stall_warning_s": 0}', '{"runtime_dir": ""}'):
            with pytest.raises(msgspec.ValidationError):
                msgspec.json.decode(text, type=Options)


class TestEnvironment:
    def test_none_changes_nothing(self) -> None:
        assert Options.from_env({}) == Options()
        assert Options.from_env({"AIOSHM_WAIT": "", "AIOSHM_STALL_WARNING_S": "", "OTHER": "1"}) == Options()

    @pytest.mark.parametrize(
        ("variable", "option", "text", "value", "refused"),
        [
            ("AIOSHM_BACKING", "backing", "named", "named", ["disk"]),
            ("AIOSHM_LIFELINE", "lifeline", "directory", "directory", ["tcp"]),
            ("AIOSHM_RUNTIME_DIR", "runtime_dir", "/run/mine", "/run/mine", []),
            ("AIOSHM_OVERFLOW", "overflow", "zmq", "zmq", ["shm"]),
            ("AIOSHM_WAIT", "wait", "park", "park", ["SPIN", " spin"]),
            ("AIOSHM_MAX_SPIN_CPU", "max_spin_cpu", "0.25", 0.25, ["much", "-0.1", "1.1", "nan"]),
            ("AIOSHM_STALL_WARNING_S", "stall_warning_s", "2.5", 2.5, ["soon", "0", "-1", "inf"]),
            ("AIOSHM_REMOTE_TIMEOUT_S", "remote_timeout", "3.5", 3.5, ["soon", "0.01"]),
        ],
    )
    def test_each_variable_sets_its_option_or_is_named(
        self, variable: str, option: str, text: str, value: Any, refused: list[str]
    ) -> None:
        assert Options.from_env({variable: text}) == Options(**{option: value})
        for bad in refused:
            with pytest.raises(ValueError, match=f"^{variable}={bad!r}: "):
                Options.from_env({variable: bad})

    def test_it_is_the_process_environment_by_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AIOSHM_WAIT", "spin")
        assert Options.from_env().wait == "spin"

    def test_nobody_else_reads_any(self) -> None:
        package = Path(config.__file__).parent
        reading = re.compile(r"""(environ(\.get\(|\[)|getenv\()["']AIOSHM_""")
        readers = [path for path in package.rglob("*.py") if reading.search(path.read_text())]
        assert readers == [Path(config.__file__)]


TIMEOUT = "AIOSHM_ENGINE_READY_TIMEOUT_S"
VARIABLES: dict[str, tuple[Callable[[dict[str, str]], Any], dict[str, Any], list[str], str]] = {
    "AIOSHM_NATIVE": (native_wanted, {"": True, "1": True, "0": False}, ["no", "2", " 0", "00"], "it must be 0 or 1"),
    "AIOSHM_USAGE_STATS": (
        usage_stats_path,
        {"": None, "/var/log/usage": "/var/log/usage"},
        ["1", "usage.jsonl", "./usage", "~/usage"],
        "it must be an absolute path",
    ),
    TIMEOUT: (engine_ready_timeout, {"": 600.0, "30": 30.0, "0.5": 0.5}, ["0", "-1", "nan", "inf", "soon", "1 s"], ""),
}
"""Of each variable that is no option: what reads it, values, values that are refused, and why."""


@pytest.mark.parametrize("variable", VARIABLES)
def test_other_variables_are_read_or_named(variable: str) -> None:
    read, values, refused, reason = VARIABLES[variable]
    assert read({}) == values[""]
    assert {value: read({variable: value}) for value in values} == values
    for value in refused:
        with pytest.raises(ValueError, match=rf"^{variable}={value!r}: {reason}"):
            read({variable: value})


class TestRuntimeDirectory:
    @pytest.fixture(autouse=True)
    def _variable_is_unset(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("AIOSHM_RUNTIME_DIR", raising=False)

    def test_variable_holds_for_options_of_ones_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AIOSHM_RUNTIME_DIR", "/run/mine")
        assert Options(wait="park").runtime_dir == Options.from_env().runtime_dir == "/run/mine"
        assert Options(runtime_dir="/run/other").runtime_dir == "/run/other"

    def test_is_the_users_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
        assert default_runtime_dir() == "/run/user/1000/aioshm"
        assert Options().runtime_dir == "/run/user/1000/aioshm"

    @pytest.mark.parametrize("environment", [{}, {"XDG_RUNTIME_DIR": ""}])
    def test_or_one_below_the_temporary_one(self, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
        monkeypatch.setattr(os, "environ", environment)
        monkeypatch.setattr(tempfile, "gettempdir", lambda: "/var/tmp")
        assert default_runtime_dir() == f"/var/tmp/aioshm-{os.getuid()}"


def test_help_does_not_print_the_environment_which_may_hold_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOSHM_TEST_PASSWORD", "correct horse")
    assert "correct horse" not in pydoc.render_doc(Options)
    assert "correct horse" not in pydoc.render_doc(config)
