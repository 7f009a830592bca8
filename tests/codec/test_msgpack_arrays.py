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
from tensor_helpers import check_equal as check_tensor

from aioshm.codec import Codec, MsgpackCodec, get_codec

Carry = Callable[[Codec, Any], Any]
MSGPACK = get_codec("msgpack")
SMALL, LARGE = 24, 9600  # elements


class Typed(msgspec.Struct):
    array: np.ndarray
    tensor: torch.Tensor | None = None
    data: bytes = b""


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_typed_message_has_its_arrays(carry: Carry, size: int) -> None:
    source = Typed(np.arange(size), torch.arange(size), b"x" * size)
    result = carry(MsgpackCodec(type=Typed), source)
    assert result.array.tolist() == source.array.tolist()
    check_tensor(result.tensor, source.tensor)
    assert result.data == source.data
    assert carry(MsgpackCodec(type=np.ndarray), source.array).tolist() == source.array.tolist()


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
