"""Codecs import NumPy and torch only after the program has."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
from codec_helpers import encode

from aioshm.codec import get_codec


def in_new_process(program: str) -> None:
    program = "from __future__ import annotations\n" + inspect.getsource(encode) + program
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=100)


class TestImports:
    def test_plain_objects_load_neither_numpy_nor_torch(self) -> None:
        in_new_process(
            "import sys\n"
            "from aioshm.codec import get_codec\n"
            "for name in ('pickle', 'raw', 'msgpack'):\n"
            "    codec = get_codec(name)\n"
            "    for _ in range(3):\n"
            "        main, buffers = encode(codec, b'x' * 8_000_000)\n"
            "        codec.decode(memoryview(main), buffers)\n"
            "import decimal\n"  # a module more: the codec looks again
            "main, buffers = encode(get_codec('pickle'), bytearray(8_000_000))\n"
            "assert not {'numpy', 'torch', 'aioshm.codec.arrays', 'aioshm.codec.tensors'} & set(sys.modules)\n"
            "codec = get_codec('pickle')\n"
            "codec.encode(1)\n"
            "import numpy\n"
            "main, buffers = encode(codec, numpy.zeros(10_000))\n"
            "assert len(main) < 1000 and len(buffers) == 1 and 'torch' not in sys.modules\n"
        )

    @pytest.mark.slow
    def test_a_reader_need_not_have_imported_them_and_half_imported_ones_are_left_alone(self) -> None:
        codec = get_codec("pickle")
        import numpy as np
        import torch

        main, buffers = encode(codec, [np.arange(2000), torch.arange(2000), np.arange(3), torch.arange(3)])
        in_new_process(
            "import importlib.util, sys, types\n"
            "from aioshm.codec import get_codec\n"
            "from aioshm.codec.base import is_loaded\n"
            "half = types.ModuleType('torch')\n"
            "half.__spec__ = importlib.util.spec_from_loader('torch', None)\n"
            "half.__spec__._initializing = True\n"
            "sys.modules['torch'] = half\n"
            "codec = get_codec('pickle')\n"
            "codec.encode(1)\n"
            "assert not is_loaded('torch') and 'aioshm.codec.tensors' not in sys.modules\n"
            "del sys.modules['torch']\n"
            f"main, buffers = {bytes(main)!r}, {[bytes(buffer) for buffer in buffers]!r}\n"
            "a, b, c, d = codec.decode(memoryview(main), [memoryview(buffer) for buffer in buffers])\n"
            "assert a.tolist() == b.tolist() == list(range(2000)) and c.tolist() == d.tolist() == [0, 1, 2]\n"
            "assert is_loaded('torch') and len(encode(codec, b)[1]) == 1\n"
        )

    @pytest.mark.slow
    def test_torch_without_numpy_pickles_in_its_own_way(self) -> None:
        pytest.importorskip("torch")
        in_new_process(
            "import sys, warnings\n"
            "sys.modules['numpy'] = None\n"
            "with warnings.catch_warnings():\n"
            "    warnings.simplefilter('ignore')\n"
            "    import torch\n"
            "from aioshm.codec import get_codec\n"
            "codec = get_codec('pickle')\n"
            "main, buffers = encode(codec, torch.arange(10_000))\n"
            "assert torch.equal(codec.decode(memoryview(main), buffers), torch.arange(10_000))\n"
        )
