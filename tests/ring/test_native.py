"""Which core runs, and that the package says so."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from rings import NATIVE

PASSES = """
import aioshm, sys
from aioshm.ring import ShmRingBuffer, cores
ring = ShmRingBuffer(1, 100, 2)
writer, reader = ring.writer(), ring.reader(0)
writer.bind(bytes, 1, True, None)
reader.bind(bytes, 1, True, None)
assert writer.put(b"message") and reader.take() == b"message"
cores.memory_fence()
writer.close(), reader.close(), ring.close()
print(aioshm.native_core, cores.WriterBase.__module__, cores.memory_fence.__module__)
"""
NOT_BUILT = """
import sys
sys.modules["aioshm.ring._native"] = None  # importing it raises ImportError, as without a compiler at the build
"""
AWAITS = """
import aioshm, asyncio
async def main():
    async with aioshm.MessageQueue(1) as writer:
        async with aioshm.MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            await writer.enqueue(1)
            assert await reader.dequeue() == 1
asyncio.run(main())
"""
CORES_ON = """
import platform
platform.machine = lambda: {machine!r}
from aioshm.ring import cores
print(cores.WriterBase.reorders, cores.ReaderBase.reorders, cores.FULL_FENCE)
"""


def run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "AIOSHM_NATIVE"}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**inherited, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.skipif(
    shutil.which("cc") is None or not Path(sysconfig.get_path("include"), "Python.h").exists(), reason="no compiler"
)
@pytest.mark.parametrize("name", ["aioshm.ring._native", "aioshm.events.protocol._encoder"])
def test_where_there_is_a_compiler_it_was_built(name: str) -> None:
    """Otherwise nearly two hundred tests of native code would be skipped, and nobody would notice."""
    assert importlib.util.find_spec(name) is not None


@pytest.mark.parametrize(
    ("prelude", "value", "native"),
    [
        pytest.param("", "1", True, marks=pytest.mark.skipif(NATIVE is None, reason="the native core was not built")),
        ("", "0", False),
        (NOT_BUILT, "1", False),
    ],
    ids=["native", "not wanted", "not built"],
)
def test_core_that_is_there_and_wanted_runs(prelude: str, value: str, native: bool) -> None:
    done = run(prelude + PASSES, AIOSHM_NATIVE=value)
    module = "aioshm.ring._native" if native else "aioshm.ring.reference"
    assert (done.stdout.split(), done.stderr) == ([str(native), module, module], "")


def test_a_bad_value_is_refused_by_name() -> None:
    done = run("from aioshm import MessageQueue", AIOSHM_NATIVE=" 1")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == "ValueError: AIOSHM_NATIVE=' 1': it must be 0 or 1"


@pytest.mark.skipif("PYTHONMALLOC" in os.environ, reason="the address sanitizer has its own allocator")
def test_native_core_frees_its_memory_once_at_the_end_of_python() -> None:
    done = run(AWAITS, PYTHONMALLOC="debug")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("machine", "answer"), [("AMD64", "False False True\n"), ("aarch64", "True True False\n")])
def test_a_machine_not_known_to_keep_order_gets_the_fenced_cores(machine: str, answer: str) -> None:
    done = run(CORES_ON.format(machine=machine), AIOSHM_NATIVE="0")
    assert (done.stdout, done.stderr) == (answer, "")
