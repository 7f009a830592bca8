"""KV caches on both sides of a model runner, and copied slices."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aioshm.engine import bind_kv_cache, copy_slice


def layers(*names: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    caches = {name: torch.full((2, 3), float(number)) for number, name in enumerate(names)}
    return caches, {name: SimpleNamespace(kv_cache=None) for name in names}


class TestBinding:
    def test_both_sides_in_the_order_of_the_layers(self) -> None:
        names = ["model.layers.10.self_attn", "model.layers.2.self_attn", "model.layers.0.self_attn"]
        caches, context = layers(*names)
        runner: list[torch.Tensor] = []
        bind_kv_cache(caches, context, runner)
        for cache, name in zip(runner, reversed(names), strict=True):
            [bound] = context[name].kv_cache
            assert cache is bound is caches[name]

    def test_layers_may_be_missing_in_between(self) -> None:
        caches, context = layers("layers.7.attn", "layers.3.attn")
        runner: list[torch.Tensor] = []
        bind_kv_cache(caches, {**context, "layers.5.mlp": SimpleNamespace()}, runner)
        assert [cache[0, 0].item() for cache in runner] == [1, 0]

    @pytest.mark.parametrize(
        ("names", "error", "text"),
        [
            (["encoder.layers.1.attn", "decoder.layers.1.attn"], NotImplementedError, "one index, 1"),
            (["model.layers.self_attn"], ValueError, "exactly one number between dots, not 'model.layers.self_attn'"),
            (["model.0.layers.1.attn"], ValueError, "exactly one number"),
            (["model.layers1.attn"], ValueError, "exactly one number"),
        ],
    )
    def test_what_is_refused(self, names: list[str], error: type[Exception], text: str) -> None:
        caches, context = layers("first.layers.0.attn", *names)
        runner: list[torch.Tensor] = []
        with pytest.raises(error, match=text):
            bind_kv_cache(caches, context, runner)
        assert runner == []
        assert all(layer.kv_cache is None for layer in context.values())

    def test_missing_layer_or_filled_runner_is_refused(self) -> None:
        caches, context = layers("layers.0.attn", "layers.1.attn")
        with pytest.raises(ValueError, match="runner_kv_caches must be empty, not of 1"):
            bind_kv_cache(caches, context, [torch.zeros(1)])
        del context["layers.1.attn"]
        with pytest.raises(ValueError, match=r"forward_context must have every layer.*'layers\.1\.attn' is missing"):
            bind_kv_cache(caches, context, [])


class TestCopying:
    @pytest.mark.parametrize("length", [0, 1, 3])
    def test_the_first_elements(self, length: int) -> None:
        source, target = torch.arange(5), torch.full((3,), -1)
        part = copy_slice(source, target, length)
        assert part.tolist() == list(range(length))
        assert target.tolist() == [*range(length), *[-1] * (3 - length)]
        part.fill_(9)  # it is a part of the target
        assert target.tolist() == [*[9] * length, *[-1] * (3 - length)]
        assert source.tolist() == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize("length", [-1, 3])
    def test_more_than_there_is(self, length: int) -> None:
        for source, target in ((2, 4), (4, 2), (1, 4)):
            with pytest.raises(ValueError, match=f"length must be between 0 and {min(source, target)}, not {length}"):
                copy_slice(torch.zeros(source), torch.zeros(target), length)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_to_a_device(self) -> None:
        source, target = torch.arange(1000).pin_memory(), torch.zeros(1000, dtype=torch.int64, device="cuda")
        part = copy_slice(source, target, 500)
        torch.cuda.synchronize()
        assert part.tolist() == list(range(500))
        assert target[500:].count_nonzero() == 0


def test_torch_is_not_imported_for_it() -> None:
    program = "import sys; import aioshm.engine; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
