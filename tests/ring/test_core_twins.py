"""The same calls on native and portable cores over the same garbage: the same answers, and the same bytes after."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rings import NATIVE
from support import examples

from aioshm.ring import reference
from tools.fuzz.targets.ring import slots


@pytest.mark.skipif(NATIVE is None, reason="the native core was not built")
@given(st.binary(min_size=100, max_size=600))
@settings(max_examples=examples(200), deadline=None)
def test_any_calls_on_any_garbage(data: bytes) -> None:
    slots(data)


@pytest.mark.skipif(NATIVE is None, reason="the native core was not built")
def test_core_that_answers_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference.ReaderBase, "skip", lambda self: None)
    with pytest.raises(AssertionError, match="step 1"):
        slots(b"\x00" + b"\x00\x03\x05hello" + b"\x02\x00\x01")
