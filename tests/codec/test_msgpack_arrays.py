"""Arrays and tensors inside MessagePack."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from codec_helpers import encode
from hypothesis import given
from hypothesis import strategies as st
from tensor_helpers import check_equal as check_tensor
from tensor_helpers import filled

from aioshm.codec import Codec, MsgpackCodec, get_codec

Carry = Callable[[Codec, Any], Any]
MSGPACK = get_codec("msgpack")
SMALL, LARGE = 24, 9600  # elements
QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)} - QUANTIZED, key=str)


class Typed(msgspec.Struct):
    array: np.ndarray
    tensor: torch.Tensor | None = None
    data: bytes = b""


def check_array(result: Any, source: Any) -> None:
    assert (type(result), result.dtype, result.shape) == (np.ndarray, source.dtype, source.shape)
    assert result.tobytes() == source.tobytes() or (result == source).all()  # padding may differ
    assert result.flags.writeable


@pytest.mark.parametrize("size", [SMALL, LARGE])
class TestValues:
    @pytest.mark.parametrize(
        "dtype",
        [
            *("?", "i1", "u2", "i8", "f2", "f8", "g", "c16", ">f4", "S5", "U3", "V6", "M8[ns]", "m8[us]", "M8[25s]"),
            np.dtype([("a", "i4"), ("b", "f8")]),
            np.dtype([("a", "u1"), ("b", ">f8")], align=True),
            np.dtype([("when", "M8[s]"), ("inner", [("x", "f4", (2, 3)), ("name", "U4")])]),
            np.dtype([(("a title", "a"), "i4")]),
        ],
        ids=str,
    )
    def test_arrays(self, carry: Carry, dtype: Any, size: int) -> None:
        source = np.zeros(size, dtype)
        source.view("u1")[::7] = 1
        for view in (source, source.reshape(4, -1).T, source[::2], source[::-1], np.broadcast_to(source, (2, size))):
            check_array(carry(MSGPACK, {"k": view})["k"], view)
        assert len(encode(MSGPACK, [source])[1]) == (source.nbytes >= 4096)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
    def test_tensors(self, carry: Carry, dtype: torch.dtype, size: int) -> None:
        source = filled(size, dtype)
        for view in (source, source.view(4, -1).T, source[::3], torch.nn.Parameter(source, False)):
            check_tensor(carry(MSGPACK, [view])[0], view)

    def test_gradients_and_conjugates(self, carry: Carry, size: int) -> None:
        numbers = torch.complex(torch.arange(size, dtype=torch.float32), torch.ones(size))
        leaf = torch.ones(size, requires_grad=True)
        for source in (numbers.conj(), numbers.conj().imag, leaf, leaf * 2, torch.nn.Parameter(torch.ones(size))):
            result = carry(MSGPACK, source)
            check_tensor(result, source)
            assert result.is_leaf

    def test_typed(self, carry: Carry, size: int) -> None:
        source = Typed(np.arange(size), torch.arange(size), b"x" * size)
        result = carry(MsgpackCodec(type=Typed), source)
        check_array(result.array, source.array)
        check_tensor(result.tensor, source.tensor)
        assert result.data == source.data
        assert carry(MsgpackCodec(type=np.ndarray), source.array).tolist() == source.array.tolist()


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0, 2), (1, 1)])
def test_shapes(carry: Carry, shape: tuple[int, ...]) -> None:
    check_array(carry(MSGPACK, np.zeros(shape, "f4")), np.zeros(shape, "f4"))
    check_tensor(carry(MSGPACK, torch.zeros(shape)), torch.zeros(shape))


@given(st.sampled_from(["i1", "f4", ">u2"]), st.lists(st.integers(0, 9), max_size=4), st.randoms())
def test_any_shape_and_order(dtype: str, shape: list[int], random: Any) -> None:
    axes = list(range(len(shape)))
    random.shuffle(axes)
    source = np.zeros(shape, dtype).transpose(axes)[tuple(slice(None, None, random.choice((1, 2, -1))) for _ in shape)]
    source = np.asarray(source)
    main, buffers = encode(MSGPACK, source)
    check_array(MSGPACK.decode(memoryview(main), buffers), source)


def test_scalars_are_numbers(carry: Carry) -> None:
    source = [np.float32(1.5), np.int64(3), np.bool_(True), np.float64(0.5), np.uint64(2**64 - 1)]
    assert carry(MSGPACK, source) == [1.5, 3, True, 0.5, 2**64 - 1]


def test_other_devices_travel_through_the_cpu(carry: Carry) -> None:
    device = "cuda" if torch.cuda.is_available() else None
    if device is None:
        pytest.skip("needs CUDA")
    for source in (torch.arange(LARGE, device=device), torch.nn.Parameter(torch.ones(3, device=device))):
        check_tensor(carry(MSGPACK, source).cpu(), source.cpu())
        assert carry(MSGPACK, source).device == source.device


def test_neither_numpy_nor_torch_is_imported_for_plain_data() -> None:
    program = (
        "import sys\n"
        "from aioshm.codec import get_codec\n"
        "codec = get_codec('msgpack')\n"
        "for source in ({'a': 1}, b'x' * 9000, {'a': [b'x' * 9000]}):\n"
        "    encoded = codec.encode(source)\n"
        "    parts, buffers = ([encoded], ()) if type(encoded) is bytes else encoded\n"
        "    assert codec.decode(b''.join(parts), buffers) == source\n"
        "try: codec.encode(1j)\n"
        "except ValueError: pass\n"
        "assert not {'numpy', 'torch'} & set(sys.modules)\n"
        "import numpy\n"
        "assert len(codec.encode(numpy.zeros(1000))[1]) == 1 and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=100)
