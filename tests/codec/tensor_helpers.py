from __future__ import annotations

from typing import Any

import torch

CARRIER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def filled(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Every element a valid bit pattern, none of them NaN."""
    if dtype is torch.bool:
        return torch.arange(size) % 3 == 0
    return (torch.arange(size * dtype.itemsize) % 50).to(torch.uint8).view(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor.view(CARRIER[tensor.dtype.itemsize])


def check_equal(result: Any, source: torch.Tensor) -> None:
    assert type(result) is type(source)
    assert result.dtype == source.dtype
    assert result.shape == source.shape
    assert result.device == source.device
    assert result.requires_grad == source.requires_grad
    assert torch.equal(bits(result), bits(source))
