"""Messages that are one tensor arrive as the tensor that was sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import attached

from aioshm import MessageQueue
from aioshm.codec.frames import parts_of
from aioshm.codec.pickle5 import PickleCodec

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float16, torch.bool, torch.int64, torch.complex64]
SIZES = {"copied": 6000, "seen": 600_000}


class Named(torch.Tensor):
    """A tensor of somebody else's type."""


def of(dtype: torch.dtype, nbytes: int) -> torch.Tensor:
    """Return a matrix of so many bytes."""
    memory = (torch.arange(nbytes) % 2).to(torch.uint8)
    return memory.view(dtype).reshape(2, -1) if dtype is not torch.bool else memory.bool().reshape(2, -1)


def with_attribute(tensor: Any) -> torch.Tensor:
    tensor.origin = "of the sender"
    return torch.as_tensor(tensor)


def special(nbytes: int) -> list[torch.Tensor]:
    """Return tensors that are more than their type, shape and numbers."""
    matrix = of(torch.float32, nbytes)
    return [
        matrix.t(),
        matrix.clone().requires_grad_(),
        torch.nn.Parameter(matrix.clone()),
        torch.nn.Parameter(matrix.clone(), requires_grad=False),
        with_attribute(matrix.clone()),
        matrix.clone().as_subclass(Named),
        matrix[:, ::2],  # this and the next one are plain when they arrive
        torch.complex(matrix, matrix).conj(),
    ]


def same(received: torch.Tensor, sent: torch.Tensor) -> None:
    """Assert that a tensor arrived as the codec by itself makes it."""
    codec = PickleCodec()
    parts, buffers = parts_of(codec.encode(sent))
    decoded = codec.decode(b"".join(parts), buffers)
    assert (type(received), received.dtype, received.shape) == (type(sent), sent.dtype, sent.shape)
    for attribute in ("requires_grad", "__dict__"):
        assert getattr(received, attribute) == getattr(sent, attribute)
    assert received.stride() == decoded.stride()
    assert received.is_contiguous() == decoded.is_contiguous()
    assert torch.equal(numbers(received), numbers(sent))


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return what can be compared, of types that cannot."""
    tensor = tensor.detach().resolve_conj()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor.float()).nan_to_num()


async def receive(reader: MessageQueue[Any], how: str) -> torch.Tensor:
    if how == "dequeue":
        received: torch.Tensor = await reader.dequeue(5)
    elif how == "many":
        [received] = await reader.dequeue_many(1, 5)
    else:
        async with reader.lease() as received:
            pass
    return received


@pytest.mark.slow_on_uvloop
@pytest.mark.parametrize("how", ["dequeue", "many", "lease"])
@pytest.mark.parametrize("nbytes", SIZES.values(), ids=SIZES)
async def test_each_tensor_arrives_as_it_was(nbytes: int, how: str) -> None:
    sent = [each for dtype in DTYPES for each in [of(dtype, nbytes)] * 2] + [
        each for one in special(nbytes) for each in [one] * 2
    ]
    async with attached(chunk=2**21) as (writer, (reader,)):
        for each in sent:
            await writer.enqueue(each, 5)
            same(await receive(reader, how), each)
