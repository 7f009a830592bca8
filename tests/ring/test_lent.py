"""Lent windows: what is filled through one is in the segment, and nothing that is kept reaches it afterwards."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from aioshm.ring.lent import LentWindow

START, ROOM = 4096 + 640, 100_000


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("lent")
    os.ftruncate(fd, START + ROOM + 5000)
    yield fd
    os.close(fd)


@pytest.fixture
def window(fd: int) -> LentWindow:
    return LentWindow(fd, START, ROOM)


def _array(window: LentWindow, at: int = 64, size: int = 1000) -> Any:
    return np.ndarray(size, np.uint8, window.memory, window.begin + at)  # type: ignore[arg-type]


def _tensor(window: LentWindow) -> Any:
    flat = torch.frombuffer(window.memory, dtype=torch.uint8, count=1000, offset=window.begin + 64)
    return torch.empty(0, dtype=torch.uint8).set_(flat.untyped_storage())


def _bytes(window: LentWindow) -> Any:
    return memoryview(window.memory)[window.begin + 64 : window.begin + 1064]


EVERY_KIND = pytest.mark.parametrize("make", [_array, _tensor, _bytes])
WAYS_TO_KEEP = pytest.mark.parametrize(
    "keep",
    [
        lambda array: array[5:],
        lambda array: array.base,
        lambda array: memoryview(array),
        lambda array: memoryview(array.base),
        lambda array: np.asarray(array.base),
        lambda array: np.frombuffer(array, np.uint16),
        lambda array: torch.from_numpy(array),
        lambda array: torch.from_dlpack(array)[1:].view(3, -1),
        lambda array: [array],
        lambda array: array.flat,
        lambda array: array.__dlpack__(),
    ],
)


def test_it_shows_the_segment(fd: int, window: LentWindow) -> None:
    array = _array(window)
    array[:] = 7
    window.write(0, b"head")
    assert os.pread(fd, 4, START) == b"head"
    assert os.pread(fd, 1000, START + 64) == b"\7" * 1000
    assert window.offset_of(memoryview(array)[10:20]) == 74
    assert window.offset_of(memoryview(bytearray(10))) == -1


@EVERY_KIND
def test_one_name_alone_leaves_the_window_as_it_is(fd: int, window: LentWindow, make: Any) -> None:
    for number in range(4):
        lent = [make(window)]
        name = lent[0]
        name[:] = bytes([number]) * 1000 if make is _bytes else number
        assert window.take_back(lent, 1064, sys._getframe()), "it can be used again"
        assert lent == []
        assert os.pread(fd, 1000, START + 64) == bytes([number]) * 1000
        if make is _array:
            with pytest.raises(ValueError, match="read-only"):
                name[0] = 1
        elif make is _tensor:
            assert name.numel() == 0
        else:
            with pytest.raises(ValueError, match="released"):
                name[0] = 1


@WAYS_TO_KEEP
def test_what_is_kept_of_an_array_is_a_private_copy(fd: int, window: LentWindow, keep: Any) -> None:
    lent = [_array(window)]
    name = lent[0]
    name[:] = 7
    kept = keep(name)
    assert not window.take_back(lent, 1064, sys._getframe())
    name[:] = 9
    assert os.pread(fd, 1000, START + 64) == b"\7" * 1000
    os.pwrite(fd, b"\5" * 1000, START + 64)
    assert name.tolist() == [9] * 1000
    del kept


def test_what_is_kept_of_a_tensor_is_a_private_copy(fd: int, window: LentWindow) -> None:
    for keep in (lambda it: it[5:], lambda it: it.numpy(), lambda it: it.untyped_storage(), lambda it: [it]):
        window = LentWindow(fd, START, ROOM)
        lent = [_tensor(window)]
        name = lent[0]
        name[:] = 7
        kept = keep(name)
        assert not window.take_back(lent, 1064, sys._getframe())
        view = kept[0] if isinstance(kept, list) else kept
        if isinstance(view, torch.UntypedStorage):
            view.fill_(9)
        else:
            view[:10] = 9
        assert os.pread(fd, 1000, START + 64) == b"\7" * 1000


@pytest.mark.parametrize(
    "keep",
    [
        lambda array: array[5:],
        lambda array: memoryview(array),
        lambda array: torch.from_numpy(array),
        lambda array: array.reshape(10, -1),
    ],
)
def test_one_reference_that_is_no_name_of_the_array(fd: int, window: LentWindow, keep: Any) -> None:
    lent = [_array(window)]
    lent[0][:] = 7
    array = keep(lent[0])
    assert not window.take_back(lent, 1064, sys._getframe())
    array[:] = b"\x09" * 1000 if isinstance(array, memoryview) else 9
    assert os.pread(fd, 1000, START + 64) == b"\7" * 1000


@pytest.mark.parametrize("make", [_tensor, _bytes])
def test_one_reference_that_is_no_name_of_something_else(fd: int, window: LentWindow, make: Any) -> None:
    lent = [make(window)]
    kept = lent[0].numpy() if make is _tensor else torch.frombuffer(lent[0], dtype=torch.uint8)
    kept[:] = 7
    assert not window.take_back(lent, 1064, sys._getframe())
    kept[:] = 9
    assert os.pread(fd, 1000, START + 64) == b"\7" * 1000


def test_what_is_read_only_may_stay_while_the_window_is_used_again(fd: int, window: LentWindow) -> None:
    lent = [_array(window)]
    first = lent[0]
    assert window.take_back(lent, 1064, sys._getframe())
    lent.append(_array(window))
    second = lent[0]
    second[:] = 7
    kept = second[1:]
    assert not window.take_back(lent, 1064, sys._getframe()), "the one that stays hides no other"
    kept[:] = 9
    assert not first.flags.writeable
    assert os.pread(fd, 1000, START + 64) == b"\7" * 1000


def test_closed_with_something_kept(fd: int, window: LentWindow) -> None:
    array = _array(window)
    array[:] = 3
    window.close()
    array[:] = 4
    assert os.pread(fd, 1000, START + 64) == b"\3" * 1000
    assert array.tolist() == [4] * 1000
