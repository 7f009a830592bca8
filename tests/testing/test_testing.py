"""The fixtures for users, in separate runs of pytest, with pytest-asyncio and with anyio."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aioshm.testing import Leftovers, pair, readers

TESTS = """
import asyncio, gc, os, subprocess, sys
import pytest
from aioshm import MessageQueue, Options
from aioshm.ring import segment

segment.NAME_PREFIX = f"private-{os.getpid()}-"  # nothing beside these tests removes its orphans

MARK

async def test_a_pair(aioshm_pair, aioshm_clean):
    async with aioshm_pair(codec="msgpack", type=int) as (writer, reader):
        await writer.enqueue(7)
        assert await reader.dequeue() == 7

async def test_readers(aioshm_readers, aioshm_clean):
    async with aioshm_readers(3) as (writer, readers):
        await writer.enqueue("all")
        assert [await reader.dequeue() for reader in readers] == ["all"] * 3

async def test_names_are_the_tests_own(aioshm_runtime_dir, aioshm_clean):
    async with MessageQueue(0, 0, name="steps"):
        assert list(aioshm_runtime_dir.iterdir())

def test_a_plain_function(aioshm_clean):
    pass

kept = []

async def test_leaves_a_queue(aioshm_clean):
    kept.append(MessageQueue(0, 0))

async def test_leaves_a_task(aioshm_clean):
    kept.append(asyncio.create_task(asyncio.sleep(100)))

def test_leaves_a_process(aioshm_clean):
    kept.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))

def test_leaves_a_segment(aioshm_clean):
    code = "import os, sys; from aioshm.ring import segment; segment.NAME_PREFIX = sys.argv[1]; "
    code += "s = segment.Segment.create(4096, 'named'); os._exit(0)"
    subprocess.run([sys.executable, "-c", code, segment.NAME_PREFIX])

def test_ends_what_was_left():
    kept[-1].communicate()
    for name in segment.orphans():
        segment.remove_orphan(name)
"""
LOOPS = {
    "asyncio": ("", ["-p", "pytest_asyncio.plugin", "-o", "asyncio_mode=auto"]),
    "anyio": (
        "pytestmark = pytest.mark.anyio\n@pytest.fixture\ndef anyio_backend(): return 'asyncio'",
        ["-p", "anyio"],
    ),
}


@pytest.mark.parametrize("loop", ["asyncio", pytest.param("anyio", marks=pytest.mark.slow)])
def test_in_a_run_of_its_own(loop: str, tmp_path: Path) -> None:
    mark, options = LOOPS[loop]
    (tmp_path / "test_users.py").write_text(TESTS.replace("MARK", mark))
    (tmp_path / "pytest.ini").write_text("[pytest]\naioshm_clean_timeout = 0.3\n")
    plugin = ["-p", "aioshm.testing.plugin"]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *plugin, *options]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    outcomes = {
        line.split()[0].rpartition("::")[2]: line.split()[1]
        for line in reversed(done.stdout.splitlines())  # what comes first counts: the call, then its teardown
        if line.startswith("test_users.py::")
    }
    assert outcomes == {
        "test_a_pair": "PASSED",
        "test_readers": "PASSED",
        "test_names_are_the_tests_own": "PASSED",
        "test_a_plain_function": "PASSED",
        "test_leaves_a_queue": "PASSED",
        "test_leaves_a_task": "FAILED",
        "test_leaves_a_process": "PASSED",
        "test_leaves_a_segment": "PASSED",
        "test_ends_what_was_left": "PASSED",
    }, done.stdout
    assert "the test left tasks behind" in done.stdout
    for name, what in {
        "test_leaves_a_queue": "shared memory (inode",
        "test_leaves_a_process": "process ",
        "test_leaves_a_segment": "segment private-",
    }.items():
        assert f"ERROR test_users.py::{name}" in done.stdout, done.stdout
        assert f"the test left behind: {what}" in done.stdout, done.stdout
    assert "1 failed, 8 passed, 3 errors" in done.stdout


def test_the_plugin_alone_imports_no_queue() -> None:
    code = "import aioshm.testing.plugin, sys; print({'asyncio', 'zmq', 'msgspec'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


async def test_leftovers_of_an_open_pair_are_found() -> None:
    leftovers = Leftovers()
    async with pair() as (writer, reader):
        await writer.enqueue(1)
        assert await reader.dequeue() == 1
        found = leftovers.find()
        assert any(line.startswith("shared memory") for line in found)
        assert any(line.startswith("socket") for line in found)
    assert await asyncio.to_thread(leftovers.wait) == []


async def test_process_is_a_leftover_until_it_ends() -> None:
    leftovers = Leftovers()
    process = await asyncio.create_subprocess_exec("sleep", "100")
    assert leftovers.wait(0) == [f"process {process.pid} (sleep 100)"] or leftovers.find()  # or not execed yet
    process.kill()
    await process.wait()
    assert await asyncio.to_thread(leftovers.wait) == []


async def test_readers_refuses_arguments_that_it_sets() -> None:
    with pytest.raises(TypeError, match="n_reader must not be given"):
        async with readers(2, n_reader=2):
            pass
    with pytest.raises(ValueError, match="count"):
        async with readers(0):
            pass
