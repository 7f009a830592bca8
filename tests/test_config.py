"""Options: their defaults, what the environment changes, and what is refused by name."""

from __future__ import annotations

import itertools
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
from hypothesis import given
from hypothesis import strategies as st

from aioshm import config
from aioshm.config import (
    SLOW_READER,
    Options,
    default_runtime_dir,
    engine_ready_timeout,
    native_wanted,
    usage_stats_path,
)


def options_of(waits_or_segments: tuple[Any, Any], **others: Any) -> Options:
    """Return options with a pair of ``slow_reader`` and ``overflow`` that go together."""
    slow_reader, overflow = waits_or_segments
    return Options(slow_reader=slow_reader, overflow=overflow, **others)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """Replace the check of the other tests: nothing is opened or started here."""


NAN = float("nan")
INFINITY = float("inf")

BAD: dict[str, list[Any]] = {
    "backing": ["disk", None, ""],
    "lifeline": ["tcp", 1],
    "overflow": ["tcp", None],
    "wait": ["busy", "Spin"],
    "on_reader_death": ["ignore", True],
    "max_readers": [-1, 1 << 17, "1"],
    "prefault_bytes": [-1, 1.5, "1", True, None],
    "max_message_bytes": [0, -5, 1e9],
    "slow_reader": ["drop", None],
    "stall_warning_s": [0, -1.0, NAN, INFINITY, "60", True, None],
    "max_spin_cpu": [-0.01, 1.01, NAN, "0.1", True, None],
    "remote_timeout": [0, 0.05, 1e6, NAN, "10", None],
    "remote_window": [0, 1 << 21, 1.0],
    "remote_history": [-1, 1.0],
    "linger_s": [-1, INFINITY, None],
    "remote_window_bytes": [0, "1"],
    "trace_context": [1],
    "secure": [1, None],
    "allow_insecure_pickle": ["no"],
    "runtime_dir": ["", None, Path("/tmp")],
}


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
    def test_a_bad_value_is_named(self, name: str) -> None:
        for value in BAD[name]:
            with pytest.raises((TypeError, ValueError), match=name) as caught:
                Options(**{name: value})
            assert str(value) in str(caught.value)

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

    @pytest.mark.parametrize("encoding", ["json", "msgpack"])
    @given(
        st.builds(
            options_of,
            waits_or_segments=st.sampled_from([("block", "zmq"), *itertools.product(SLOW_READER, ["segments"])]),
            backing=st.sampled_from(["memfd", "named"]),
            lifeline=st.sampled_from(["abstract", "directory"]),
            wait=st.sampled_from(["adaptive", "spin", "park"]),
            on_reader_death=st.sampled_from(["raise", "evict", "hold"]),
            max_readers=st.none() | st.integers(0, 1 << 16),
            prefault_bytes=st.integers(0, 2**40),
            max_message_bytes=st.integers(1, 2**50),
            stall_warning_s=st.floats(1e-9, 1e9),
            max_spin_cpu=st.floats(0, 1),
            remote_timeout=st.floats(0.1, 86_400),
            remote_window=st.integers(1, 1 << 20),
            remote_window_bytes=st.integers(1, 2**50),
            remote_history=st.integers(0, 1 << 20),
            linger_s=st.just(0.0) | st.floats(1e-9, 1e9),
            trace_context=st.booleans(),
            secure=st.booleans(),
            allow_insecure_pickle=st.booleans(),
            runtime_dir=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=30),
        )
    )
    def test_pass_through_a_handle(self, encoding: str, options: Options) -> None:
        codec = getattr(msgspec, encoding)
        assert codec.decode(codec.encode(options), type=Options) == options

    def test_a_handle_cannot_smuggle_in_a_bad_one(self) -> None:
        for text in ('{"wait": "busy"}', '{"prefault_bytes": -1}', '{"stall_warning_s": 0}', '{"runtime_dir": ""}'):
            with pytest.raises(msgspec.ValidationError):
                msgspec.json.decode(text, type=Options)


class TestEnvironment:
    def test_none_changes_nothing(self) -> None:
        assert Options.from_env({}) == Options()
        assert Options.from_env({"AIOSHM_WAIT": "", "AIOSHM_STALL_WARNING_S": "", "OTHER": "1"}) == Options()

    def test_each_variable_sets_its_option(self) -> None:
        options = Options.from_env(
            {
                "AIOSHM_BACKING": "named",
                "AIOSHM_LIFELINE": "directory",
                "AIOSHM_RUNTIME_DIR": "/run/mine",
                "AIOSHM_OVERFLOW": "zmq",
                "AIOSHM_WAIT": "park",
                "AIOSHM_MAX_SPIN_CPU": "0.25",
                "AIOSHM_STALL_WARNING_S": "2.5",
                "AIOSHM_REMOTE_TIMEOUT_S": "3.5",
            }
        )
        assert options == Options(
            backing="named",
            lifeline="directory",
            runtime_dir="/run/mine",
            overflow="zmq",
            wait="park",
            max_spin_cpu=0.25,
            remote_timeout=3.5,
            stall_warning_s=2.5,
        )

    @pytest.mark.parametrize(
        ("variable", "values"),
        [
            ("AIOSHM_BACKING", ["disk"]),
            ("AIOSHM_LIFELINE", ["tcp"]),
            ("AIOSHM_OVERFLOW", ["shm"]),
            ("AIOSHM_WAIT", ["SPIN", " spin"]),
            ("AIOSHM_MAX_SPIN_CPU", ["much", "-0.1", "1.1", "nan"]),
            ("AIOSHM_STALL_WARNING_S", ["soon", "0", "-1", "nan", "inf"]),
            ("AIOSHM_REMOTE_TIMEOUT_S", ["soon", "0.01"]),
        ],
    )
    def test_a_bad_value_names_its_variable(self, variable: str, values: list[str]) -> None:
        for value in values:
            with pytest.raises(ValueError, match=f"^{variable}={value!r}: "):
                Options.from_env({variable: value})

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
    "AIOSHM_NATIVE": (
        native_wanted, {"": True, "1": True, "0": False}, ["no", "2", "-1", " 0", "true", "00"], "it must be 0 or 1"
    ),
    "AIOSHM_USAGE_STATS": (
        usage_stats_path,
        {"": None, "/var/log/usage": "/var/log/usage"},
        ["0", "1", "usage.jsonl", "./usage", "~/usage"],
        "it must be an absolute path",
    ),
    TIMEOUT: (engine_ready_timeout, {"": 600.0, "30": 30.0, "0.5": 0.5}, ["0", "-1", "nan", "inf", "soon", "1 s"], ""),
}  # fmt: skip
"""Of each variable that is no option: what reads it, values, values that are refused, and why."""


@pytest.mark.parametrize("variable", VARIABLES)
class TestOtherVariables:
    def test_values_are_read(self, variable: str) -> None:
        read, values, _, _ = VARIABLES[variable]
        assert read({}) == values[""]
        assert {value: read({variable: value}) for value in values} == values

    def test_a_bad_value_names_the_variable(self, variable: str) -> None:
        read, _, refused, reason = VARIABLES[variable]
        for value in refused:
            with pytest.raises(ValueError, match=rf"^{variable}={value!r}: {reason}"):
                read({variable: value})


def test_engine_ready_timeout_is_read_from_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT, "7")
    assert engine_ready_timeout() == 7.0


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

    @pytest.mark.parametrize("value", [None, ""])
    def test_or_one_below_the_temporary_one(self, monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
        if value is None:
            monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        else:
            monkeypatch.setenv("XDG_RUNTIME_DIR", value)
        monkeypatch.setattr(tempfile, "gettempdir", lambda: "/var/tmp")
        assert default_runtime_dir() == f"/var/tmp/aioshm-{os.getuid()}"


class TestHelp:
    """The environment, which may hold passwords, is nowhere a default value: `help` and signatures would print it."""

    def test_of_options(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AIOSHM_TEST_PASSWORD", "correct horse")
        assert "correct horse" not in pydoc.render_doc(Options)
        assert "correct horse" not in pydoc.render_doc(config)
