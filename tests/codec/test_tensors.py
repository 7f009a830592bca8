from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from codec_helpers import encode
from hypothesis import given
from hypothesis import strategies as st
from tensor_helpers import CARRIER, bits, check_equal, filled

from aioshm.codec import Codec, get_codec

Carry = Callable[[Codec, Any], Any]
PICKLE = get_codec("pickle")
MSGPACK = get_codec("msgpack")
both_codecs: Any = pytest.mark.parametrize("codec", [PICKLE, MSGPACK], ids=["pickle", "msgpack"])
SMALL, LARGE = 24, 4800  # elements
QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)} - QUANTIZED, key=str)


class Subclass(torch.Tensor):
    pass


def check_writable(result: torch.Tensor) -> None:
    if result.numel():
        before = bits(result).clone()
        with torch.no_grad():
            result.view(CARRIER[result.dtype.itemsize]).zero_()
        assert not torch.equal(bits(result), before) or not before.any()


def check_both_ways(carry: Carry, codec: Codec, source: torch.Tensor) -> None:
    """A tensor arrives equal as a message of its own, and inside of another object."""
    for result in (carry(codec, source), carry(codec, [source])[0]):
        check_equal(result, source)
        check_writable(result)


@pytest.mark.parametrize("size", [SMALL, LARGE])
class TestValues:
    @both_codecs
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
    def test_dtypes(self, carry: Carry, codec: Codec, dtype: torch.dtype, size: int) -> None:
        for source in (filled(size, dtype), filled(size, dtype).view(4, -1).T, filled(size, dtype)[::3]):
            check_both_ways(carry, codec, source)

    @both_codecs
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize(
        "view",
        [
            lambda t: t.view(2, 3, -1).permute(2, 0, 1),
            lambda t: t.view(4, -1)[:, 1:-1],
            lambda t: t[3:],
            lambda t: t.view(2, 1, -1).expand(2, 5, -1),
            lambda t: t.unfold(0, 4, 1),
            lambda t: t.view(1, 2, 3, -1).contiguous(memory_format=torch.channels_last),
        ],
        ids=["permuted", "columns", "tail", "expanded", "overlapping", "channels last"],
    )
    def test_layouts(
        self, carry: Carry, codec: Codec, dtype: torch.dtype, view: Callable[[Any], Any], size: int
    ) -> None:
        check_both_ways(carry, codec, view(filled(size, dtype)))

    @both_codecs
    def test_conjugate_and_negative_views(self, carry: Carry, codec: Codec, size: int) -> None:
        numbers = torch.complex(torch.arange(size, dtype=torch.float32), torch.ones(size))
        for source in (numbers.conj(), numbers.conj().imag, numbers.conj().view(4, -1).T, numbers.conj()[::2].imag):
            assert source.is_conj() or source.is_neg()
            result = carry(codec, source)
            check_equal(result, source)
            assert torch.equal(result, source)
            check_writable(result.resolve_conj())

    @both_codecs
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
    def test_requires_grad(self, carry: Carry, codec: Codec, dtype: torch.dtype, size: int) -> None:
        leaf = filled(size, dtype).requires_grad_()
        for source in (leaf, leaf * 2):
            result = carry(codec, source)
            check_equal(result, source)
            assert result.is_leaf
            result.abs().sum().backward()
            assert result.grad is not None
            assert leaf.grad is None

    @both_codecs
    @pytest.mark.parametrize("requires_grad", [True, False])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_parameters(self, carry: Carry, codec: Codec, dtype: torch.dtype, requires_grad: bool, size: int) -> None:
        source = torch.nn.Parameter(filled(size, dtype).view(4, -1).T, requires_grad)
        result = carry(codec, source)
        check_equal(result, source)
        check_writable(result.detach())

    def test_under_a_default_device(self, carry: Carry, size: int) -> None:
        source = filled(size, torch.bfloat16)
        main, buffers = encode(PICKLE, source)
        with torch.device("meta"):
            check_equal(PICKLE.decode(memoryview(main), buffers), source)
            assert len(encode(PICKLE, source)[0]) == len(main)

    def test_in_inference_mode(self, carry: Carry, size: int) -> None:
        with torch.inference_mode():
            source = torch.arange(size).bfloat16() + 1
            check_equal(carry(PICKLE, source), source)
        check_equal(carry(PICKLE, source), source)

    def test_attributes(self, carry: Carry, size: int) -> None:
        for source in (filled(size, torch.float32), torch.nn.Parameter(filled(size, torch.float32))):
            source.note = {"layer": 3}
            source.itself = source
            result = carry(PICKLE, source)
            check_equal(result, source)
            assert result.note == {"layer": 3}
            assert result.itself is result

    def test_hooks_stay_behind(self, carry: Carry, size: int) -> None:
        source = filled(size, torch.float32).requires_grad_()
        source.register_hook(lambda grad: grad)
        with pytest.warns(UserWarning, match="will not be serialized"):
            result = carry(PICKLE, source)
        check_equal(result, source)
        assert not result._backward_hooks
        parameter = torch.nn.Parameter(filled(size, torch.float32))
        parameter.register_hook(lambda grad: grad)
        check_equal(carry(PICKLE, parameter), parameter)

    def test_subclasses(self, carry: Carry, size: int) -> None:
        source = filled(size, torch.float32).as_subclass(Subclass)
        source.note = "kept"
        result = carry(PICKLE, source)
        check_equal(result, source)
        assert result.note == "kept"


class TestShapes:
    @pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0, 2), (1,), (1, 1, 1)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.bool, torch.uint16])
    def test_empty_and_single(self, carry: Carry, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        source = torch.zeros(shape, dtype=dtype)
        for codec in (PICKLE, MSGPACK):
            check_both_ways(carry, codec, source)
            check_equal(carry(codec, torch.nn.Parameter(source, False)), torch.nn.Parameter(source, False))

    @given(
        st.sampled_from([torch.int8, torch.float64, torch.bfloat16, torch.complex64]),
        st.lists(st.integers(0, 9), max_size=4),
        st.randoms(use_true_random=False),
    )
    def test_any_shape_and_order(self, dtype: torch.dtype, shape: list[int], random: Any) -> None:
        axes = list(range(len(shape)))
        random.shuffle(axes)
        source = filled(int(torch.Size(shape).numel()), dtype).view(shape).permute(axes)
        source = source[tuple(slice(random.randrange(2), None, random.choice((1, 2))) for _ in shape)]
        main, buffers = encode(PICKLE, [source])
        check_equal(PICKLE.decode(memoryview(main), buffers)[0], source)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(3, 4, dtype=torch.bfloat16, device="meta"),
        lambda: torch.empty(0, device="meta", requires_grad=True),
        lambda: torch.nn.Parameter(torch.empty(100_000, device="meta")),
        lambda: torch.eye(40).to_sparse(),
        lambda: torch.eye(40).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(torch.linspace(-1, 1, 50), 0.1, 3, torch.qint8),
        lambda: torch.quantize_per_channel(
            torch.ones(2, 25), torch.tensor([0.1, 0.2]), torch.zeros(2), 0, torch.quint8
        ),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.arange(3.0)]),
    ],
    ids=["meta", "meta, gradient", "meta, parameter", "sparse", "sparse csr", "quantized", "per channel", "nested"],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_tensors_that_are_not_dense_have_torchs_own_reductions(carry: Carry, make: Callable[[], Any]) -> None:
    source = make()
    result = carry(PICKLE, source)
    assert (type(result), result.dtype, result.device) == (type(source), source.dtype, source.device)
    assert repr(result) == repr(source), "which has the numbers"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@both_codecs
def test_cuda(carry: Carry, codec: Codec) -> None:
    for source in (torch.arange(LARGE, device="cuda"), torch.nn.Parameter(torch.ones(3, device="cuda"))):
        result = carry(codec, source)
        assert (type(result), result.device) == (type(source), source.device)
        assert torch.equal(result, source)


class TestHowTheyTravel:
    def test_slice_encodes_only_its_own_elements(self) -> None:
        main, [buffer] = encode(PICKLE, torch.zeros(10_000_000)[5:10])
        assert buffer.nbytes == 20
        assert len(main) < 200

    @pytest.mark.parametrize("source", [torch.zeros(LARGE), torch.zeros(64, 64).T, torch.zeros(LARGE).bfloat16()])
    def test_contiguous_memory_is_not_copied(self, source: torch.Tensor) -> None:
        _, [buffer] = encode(PICKLE, source)
        source.fill_(1)
        assert any(buffer)
