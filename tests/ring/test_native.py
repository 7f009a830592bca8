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
from rings import NATIVE, python

import aioshm
from aioshm.ring import cores

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
import os, platform, sys
os.environ["AIOSHM_NATIVE"] = "0"
platform.machine = lambda: sys.argv[1]
from aioshm.ring import ShmRingBuffer, cores
ring = ShmRingBuffer(1, 64, 1)
print(cores.WriterBase.reorders, cores.ReaderBase.reorders, cores.FULL_FENCE)
ring.close()
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


def test_this_process() -> None:
    for part in (cores.WriterBase, cores.ReaderBase, cores.memory_fence):
        assert part.__module__ == ("aioshm.ring._native" if aioshm.native_core else "aioshm.ring.reference")


@pytest.mark.skipif(
    shutil.which("cc") is None or not Path(sysconfig.get_path("include"), "Python.h").exists(), reason="no compiler"
)
@pytest.mark.parametrize("name", ["aioshm.ring._native", "aioshm.events.protocol._encoder"])
def test_where_there_is_a_compiler_it_was_built(name: str) -> None:
    """Otherwise nearly two hundred tests of native code would be skipped, and nobody would notice."""
    assert importlib.util.find_spec(name) is not None


@pytest.mark.skipif(NATIVE is None, reason="the native core was not built")
def test_where_it_was_built_it_runs() -> None:
    done = run(PASSES, AIOSHM_NATIVE="1")
    assert (done.stdout.split(), done.stderr) == (["True", "aioshm.ring._native", "aioshm.ring._native"], "")


@pytest.mark.parametrize(("prelude", "value"), [("", "0"), (NOT_BUILT, "1")])
def test_without_it_everything_works(prelude: str, value: str) -> None:
    done = run(prelude + PASSES, AIOSHM_NATIVE=value)
    assert (done.stdout.split(), done.stderr) == (["False", "aioshm.ring.reference", "aioshm.ring.reference"], "")


@pytest.mark.parametrize("value", ["yes", " 1"])
def test_a_bad_value_is_refused_by_name(value: str) -> None:
    done = run("from aioshm import MessageQueue", AIOSHM_NATIVE=value)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == f"ValueError: AIOSHM_NATIVE={value!r}: it must be 0 or 1"


@pytest.mark.skipif("PYTHONMALLOC" in os.environ, reason="the address sanitizer has its own allocator")
def test_native_core_frees_its_memory_once_at_the_end_of_python() -> None:
    done = run(AWAITS, PYTHONMALLOC="debug")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("machine", ["AMD64", "aarch64", ""])
def test_a_machine_not_known_to_keep_order_gets_the_fenced_cores(machine: str) -> None:
    out, err = python(CORES_ON, machine).communicate()
    assert out == ("False False True\n" if machine == "AMD64" else "True True False\n")
    assert err == ""
