from __future__ import annotations

import sys
import types

import pytest

from aioshm.codec.base import HUGE_PAGE_BYTES, is_loaded, own_copy


@pytest.mark.parametrize("size", [0, 1, 4096, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 1])
@pytest.mark.parametrize("with_numpy", [True, False])
def test_own_copy(size: int, with_numpy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy  # noqa: F401

    if not with_numpy:
        monkeypatch.delitem(sys.modules, "numpy")
    source = bytearray(b"\x5a" * size)
    copy = memoryview(own_copy(memoryview(source).toreadonly()))
    assert (copy.nbytes, copy.format, copy.ndim, copy.readonly) == (size, "B", 1, False)
    source[:] = b"\xa5" * size
    assert copy == b"\x5a" * size
    copy[:] = bytes(size)
    assert source == b"\xa5" * size


def test_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_loaded("sys")
    assert not is_loaded("no.such.module")
    monkeypatch.setitem(sys.modules, "blocked", None)
    assert not is_loaded("blocked")
    monkeypatch.setitem(sys.modules, "made_by_hand", types.ModuleType("made_by_hand"))
    assert is_loaded("made_by_hand")
