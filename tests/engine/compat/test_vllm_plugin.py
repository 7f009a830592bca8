"""The plugin replaces vLLM's queue in modules that have the names of vLLM's."""

from __future__ import annotations

import importlib
import logging
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from vllm_signatures import SIGNATURES

from aioshm.engine.compat.vllm import QUEUE_MODULE, MessageQueue, differences, register, signatures

STATIC = [name for name in SIGNATURES if not SIGNATURES[name].startswith("(self")]
METHODS = "\n".join(
    f"    {'@staticmethod' if name in STATIC else ''}\n    def {name}{parameters}: ..."
    for name, parameters in SIGNATURES.items()
)


def a_class(source: str = METHODS) -> Any:
    """Return a class with vLLM's methods, as far as their parameters go."""
    names: dict[str, Any] = {}
    exec(f"class MessageQueue:\n{source}", names)
    return names["MessageQueue"]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Put modules in place that have the names of vLLM's, and the queue that its own has."""
    made: dict[str, Any] = {}
    for name in [QUEUE_MODULE, "vllm.v1.executor.multiproc_executor", "another.plugin"]:
        module: Any = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        made[name] = module
    own = a_class()
    for module in made.values():
        module.MessageQueue = own
    monkeypatch.setenv("AIOSHM_VLLM", "1")
    return made


def test_every_module_that_has_imported_the_queue_gets_the_replacement(
    modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lazily(name: str) -> Any:
        raise AssertionError(f"{name} was imported")

    lazy: Any = ModuleType("lazy")
    lazy.__getattr__ = lazily
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    other = modules.pop("another.plugin")
    kept = other.MessageQueue = a_class()
    for _ in range(2):  # as vLLM may do
        register()
        assert all(module.MessageQueue is MessageQueue for module in modules.values())
    assert other.MessageQueue is kept


@pytest.mark.parametrize("value", ["", "0", None])
def test_register_does_nothing_unless_asked(
    modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    own = modules[QUEUE_MODULE].MessageQueue
    monkeypatch.delenv("AIOSHM_VLLM") if value is None else monkeypatch.setenv("AIOSHM_VLLM", value)
    register()
    assert all(module.MessageQueue is own for module in modules.values())


def test_invalid_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOSHM_VLLM", "yes")
    with pytest.raises(ValueError, match="AIOSHM_VLLM='yes'"):
        register()


def test_a_vllm_with_another_interface_keeps_its_own(modules: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    own = a_class(METHODS.replace("obj, timeout=None", "obj, timeout=None, priority=0"))
    for module in modules.values():
        module.MessageQueue = own
    with caplog.at_level(logging.ERROR, "aioshm.engine"):
        register()
    assert all(module.MessageQueue is own for module in modules.values())
    assert "enqueue: (self, obj, timeout=None, priority=0) instead of" in caplog.text


def test_entry_point_names_register() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["aioshm"].partition(":")
    assert getattr(importlib.import_module(module), name) is register
    assert project["optional-dependencies"]["vllm"] == []


def test_keyword_only_parameters_do_not_count() -> None:
    class Other(MessageQueue):
        def dequeue(self, timeout: float | None = None, indefinite: bool = False, *, cancel: Any = None) -> None: ...
        def enqueue(self, obj: Any, *, timeout: float | None = None) -> None: ...

    assert signatures(Other)["dequeue"] == SIGNATURES["dequeue"]
    assert differences(Other, MessageQueue) == [f"enqueue: (self, obj) instead of {SIGNATURES['enqueue']}"]
    assert len(differences(object, MessageQueue)) == len(SIGNATURES)
