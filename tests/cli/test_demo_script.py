from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from aioshm.cli.demo.blocks import Blocks
from aioshm.cli.demo.script import (
    MAX_TENSOR_BYTES,
    TENSOR_SIZES,
    Mismatch,
    Phase,
    Tensors,
    make_script,
    outline,
    split_lines,
)

TEXT = b"one\n\ntwo\r\nnot UTF-8: \xff\n   \nthe last, without an end"
LINES = split_lines(TEXT)
SIZE = 64 * 1024
KINDS = ["torch", "numpy", "bytes"]


@pytest.fixture(scope="module", params=KINDS)
def blocks(request):
    return Blocks(request.param, MAX_TENSOR_BYTES)


def test_no_line_is_lost():
    assert len(LINES) == 6
    assert b"".join(LINES) == TEXT


def test_outline_tells_what_the_script_holds(blocks):
    script = make_script(LINES, 3, blocks)
    assert outline(len(LINES), 3) == {phase.name: len(phase) for phase in script}
    first = 0
    for phase in script:
        assert phase.first == first
        first += len(phase)


def test_text_is_repeated_in_order():
    phase = Phase("lines", 0, LINES, 12)
    sent = [phase.make(index, 0) for index in range(len(phase))]
    assert [number for number, _, _ in sent] == list(range(12))
    assert b"".join(line for _, _, line in sent) == TEXT * 2
    for index, message in enumerate(sent):
        phase.check(index, message)


def test_wrong_line_is_named():
    phase = Phase("lines", 5, LINES, 6)
    phase.check(2, (7, 0, b"two\r\n"))
    for wrong in (b"one\n", b"", "", None):
        with pytest.raises(Mismatch, match=r"message 7 \(lines\) is .*, not b'two\\r\\n'"):
            phase.check(2, (7, 0, wrong))
    for wrong in [(6, 0, b"two\r\n"), (7, 123, b"two\r\n"), (7, b"two\r\n"), b"\n", None]:
        with pytest.raises(Mismatch, match=r"message 7 \(lines\) (is|has number and time) "):
            phase.check(2, wrong)


def test_paced_line_has_the_time_it_was_sent():
    phase = Phase("paced", 5, LINES, 6, paced=True)
    assert phase.make(1, 123) == (6, 123, b"\n")
    phase.check(1, (6, 456, b"\n"))
    for wrong in [(5, 456, b"\n"), (6, 456, b""), (6, 0, b"\n"), (6, None, b"\n"), (6, b"\n"), None]:
        with pytest.raises(Mismatch, match=r"message 6 \(paced\)"):
            phase.check(1, wrong)


def test_tensors_have_the_sizes_and_check(blocks):
    phase = Tensors(1000, blocks)
    sizes = sorted(phase.size(index) for index in range(len(phase)))
    assert sizes == sorted(size for size, count in TENSOR_SIZES for _ in range(count))
    for index in range(len(phase)):
        number, _, block = phase.make(index, 0)
        assert number == 1000 + index
        assert getattr(block, "nbytes", len(block)) == phase.size(index)
        phase.check(index, (number, 0, block))


def test_tensor_of_another_message_is_refused(blocks):
    phase = Tensors(0, blocks)
    with pytest.raises(Mismatch, match=r"message 3 \(tensors\) has number and time \(4, 0\)"):
        phase.check(3, phase.make(4, 0))
    for wrong in (None, (3, 0), list(phase.make(3, 0))):
        with pytest.raises(Mismatch, match="message 3"):
            phase.check(3, wrong)


def test_other_numbers_have_other_blocks(blocks):
    assert blocks.difference(8, SIZE, blocks.make(8, SIZE)) is None
    for other in range(9, 200):
        assert blocks.difference(8, SIZE, blocks.make(other, SIZE)) is not None


@pytest.mark.parametrize("kind", KINDS)
def test_one_wrong_bit_is_found(kind):
    blocks = Blocks(kind, SIZE)
    for number, offset in product(range(8), (0, 1, 4097, SIZE - 1)):  # every dtype
        good = blocks.make(number, SIZE)
        if kind == "bytes":
            bad = good[:offset] + bytes([good[offset] ^ 1]) + good[offset + 1 :]
        elif kind == "numpy":
            bad = good.copy()
            bad.view(np.uint8).reshape(-1)[offset] ^= 1
        else:
            bad = good.clone()
            bad.view(torch.uint8).flatten()[offset] ^= 1
        assert blocks.difference(number, SIZE, bad) == f"differs from byte {offset} on"


def test_wrong_form_is_told():
    blocks = Blocks("torch", SIZE)
    good = blocks.make(0, SIZE)
    assert "dtype torch.int32, not torch.float32" in blocks.difference(0, SIZE, good.view(torch.int32))
    assert "shape (256, 64), not (128, 128)" in blocks.difference(0, SIZE, good.view(256, 64))
    assert "not contiguous" in blocks.difference(0, SIZE, good.T)
    assert "type ndarray, not Tensor" in blocks.difference(0, SIZE, good.numpy())
    blocks = Blocks("bytes", SIZE)
    assert "has 10 bytes" in blocks.difference(0, SIZE, b"0123456789")
    assert "type str" in blocks.difference(0, SIZE, "")
