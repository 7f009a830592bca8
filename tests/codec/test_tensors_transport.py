"""The encoding of tensors; test_tensors.py checks the decoded tensors."""

from __future__ import annotations

import dataclasses
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from codec_helpers import encode
from tensor_helpers import check_equal, filled

from aioshm.codec import Codec, get_codec
from aioshm.codec.base import HUGE_PAGE_BYTES, OUT_OF_BAND_BYTES
from aioshm.errors import CodecError

Carry = Callable[[Codec, Any], Any]
PICKLE = get_codec("pickle")
SMALL, LARGE = 24, 9600  # elements


@dataclasses.dataclass
class Batch:
    tokens: torch.Tensor
    more: dict[str, Any]


class TestHowTheyTravel:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
    @pytest.mark.parametrize(
        "view",
        [lambda t: t, lambda t: t.view(4, -1).T, lambda t: t[::2], lambda t: t.view(4, 1, -1).expand(4, 3, -1)],
        ids=["contiguous", "transposed", "strided", "expanded"],
    )
    def test_beside_the_stream(self, dtype: torch.dtype, view: Callable[[Any], Any]) -> None:
        source = view(filled(LARGE, dtype))
        for tensor in (source, torch.nn.Parameter(source, False), source.detach().requires_grad_()):
            main, [buffer] = encode(PICKLE, tensor)
            assert len(main) < 200
            assert buffer.nbytes == source.numel() * source.element_size()
            assert (buffer.format, buffer.ndim) == ("B", 1)

    def test_small_ones_inside_of_other_objects_are_in_the_stream(self) -> None:
        assert len(encode(PICKLE, [torch.zeros(OUT_OF_BAND_BYTES, dtype=torch.uint8)])[1]) == 1
        main, buffers = encode(PICKLE, [torch.zeros(OUT_OF_BAND_BYTES - 1, dtype=torch.uint8)])
        assert buffers == ()
        assert len(main) < OUT_OF_BAND_BYTES + 200

    def test_slice_encodes_only_its_own_elements(self) -> None:
        main, [buffer] = encode(PICKLE, torch.zeros(10_000_000)[5:10])
        assert buffer.nbytes == 20
        assert len(main) < 200

    @pytest.mark.parametrize("source", [torch.zeros(LARGE), torch.zeros(64, 64).T, torch.zeros(LARGE).bfloat16()])
    def test_contiguous_memory_is_not_copied(self, source: torch.Tensor) -> None:
        _, [buffer] = encode(PICKLE, source)
        source.fill_(1)
        assert any(buffer)

    def test_nested_in_other_objects(self, carry: Carry) -> None:
        source = Batch(torch.arange(LARGE), {"list": [torch.ones(3), (filled(LARGE, torch.bfloat16), "text")]})
        result = carry(PICKLE, source)
        check_equal(result.tokens, source.tokens)
        check_equal(result.more["list"][0], source.more["list"][0])
        check_equal(result.more["list"][1][0], source.more["list"][1][0])
        assert result.more["list"][1][1] == "text"
        assert len(encode(PICKLE, source)[1]) == 2

    @pytest.mark.parametrize("size", [SMALL, LARGE])
    def test_one_tensor_twice_is_one_tensor_twice(self, carry: Carry, size: int) -> None:
        source = filled(size, torch.float32)
        first, second, view, equal = carry(PICKLE, [source, source, source[:], source.clone()])
        assert first is second
        view.zero_()
        check_equal(first, source)
        check_equal(equal, source)

    @pytest.mark.parametrize("size", [SMALL, LARGE, HUGE_PAGE_BYTES])
    def test_writing_to_the_result_leaves_the_source_alone(self, size: int) -> None:
        main, buffers = encode(PICKLE, torch.zeros(size, dtype=torch.int8))
        slot = [bytearray(buffer) for buffer in buffers]
        before = bytes(main)
        result = PICKLE.decode(memoryview(main), [memoryview(part) for part in slot])
        result.fill_(1)
        assert not any(map(any, slot))
        assert main == before

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e5m2], ids=str)
    def test_the_buffer_keeps_its_memory_alive(self, dtype: torch.dtype) -> None:
        buffers = [encode(PICKLE, torch.full((LARGE,), 7, dtype=torch.uint8).view(dtype))[1][0] for _ in range(20)]
        gc.collect()
        torch.zeros(LARGE, dtype=torch.uint8)
        assert [bytes(buffer) for buffer in buffers] == [b"\7" * LARGE] * 20

    def test_arriving_tensors_give_no_warning(self, carry: Carry) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for size in (SMALL, LARGE):
                carry(PICKLE, torch.zeros(size)).numpy()

    def test_damaged_fields(self) -> None:
        main, buffers = encode(PICKLE, torch.zeros(LARGE))
        for damaged in (
            main.replace(b"float32", b"float99"),
            main.replace(b"float32", b"float64"),  # then the memory is too small for the shape
        ):
            assert damaged != main
            with pytest.raises(CodecError):
                PICKLE.decode(memoryview(damaged), buffers)
        with pytest.raises(CodecError):
            PICKLE.decode(memoryview(main), [buffers[0][:-4]])
