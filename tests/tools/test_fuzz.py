"""Every fuzz target over its seeds, its corpus and some changes of both, without atheris; and that targets can fail."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from aioshm.lifeline import protocol
from tools.fuzz.target import smoke
from tools.fuzz.targets import TARGETS

# Anything that is not NumPy's name for a dtype is looked up in torch, which takes seconds to import.
SLOW = {"envelopes"}


@pytest.fixture(scope="module", autouse=True)
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let targets have their files where pytest removes them: they do so themselves as late as their process ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("fuzz")))
        yield


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in TARGETS]
)
def test_a_target(name: str) -> None:
    assert smoke(TARGETS[name], changes=60) > 60


class TestAFaultIsFound:
    def test_another_error_than_the_documented_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def decode(body: bytes) -> Any:
            return msgspec.msgpack.decode(body, type=protocol.Hello)

        monkeypatch.setattr(protocol, "unpack_hello", decode)
        with pytest.raises(AssertionError, match="greetings fails on"):
            smoke(TARGETS["greetings"], changes=10)
