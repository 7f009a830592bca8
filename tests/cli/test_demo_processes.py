from __future__ import annotations

import asyncio
import os

import msgspec
import psutil
import pytest

from aioshm.cli.demo import processes
from aioshm.cli.demo.processes import Job, Part, run_processes
from aioshm.cli.demo.script import Mismatch
from aioshm.cli.outcome import CommandFailed
from aioshm.errors import PeerDied, QueueClosed, RemoteFailure, WorkerError


def job_on(path, readers=1):
    return Job(input=os.fsencode(path), repeat=50, readers=readers, arrays="bytes")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"one\n\ntwo\n")
    return path


async def run(job):
    return await run_processes(job, "asyncio", lambda _: None)


async def test_reader_compares_with_its_own_reading(text, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(b"one\n\ntwO\n")
    writer, reader = Part(job_on(text), 0), Part(job_on(other), 1)
    assert reader.open() is None
    handle, _ = writer.open()
    try:
        written, read = await asyncio.gather(writer.run(handle), reader.run(handle), return_exceptions=True)
    finally:
        await writer.close()
        await reader.close()
    assert isinstance(read, Mismatch)
    assert str(read) == r"message 2 (lines) is b'two\n', not b'twO\n'"
    assert isinstance(written, (PeerDied, QueueClosed))
    assert "every reader has left" in str(written)


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
async def test_the_reader_for_which_the_writer_failed_is_named():
    with pytest.raises(CommandFailed, match=r"^reader 0: message 0 \(lines\) is b'") as caught:
        await run(job_on("/proc/self/stat"))  # which says something else in every process
    assert caught.value.exit_code == 1


@pytest.mark.slow_on_uvloop
async def test_file_that_vanished_is_named(tmp_path):
    with pytest.raises(CommandFailed, match=r"^cannot read .*gone: No such file") as caught:
        await run(job_on(tmp_path / "gone"))
    assert caught.value.exit_code == 2


@pytest.mark.slow_on_uvloop
async def test_queue_that_cannot_be_made_is_an_unusable_machine(text, monkeypatch):
    monkeypatch.setenv("AIOSHM_LIFELINE", "directory")
    monkeypatch.setenv("AIOSHM_RUNTIME_DIR", str(text))  # a file
    with pytest.raises(CommandFailed) as caught:
        await run(job_on(text))
    assert caught.value.exit_code == 2
    assert str(text) in str(caught.value)


@pytest.mark.slow_on_uvloop
async def test_broken_torch_is_named(text, tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('half installed')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CommandFailed, match=r"^cannot import torch: half installed") as caught:
        await run(msgspec.structs.replace(job_on(text), arrays="torch"))
    assert caught.value.exit_code == 2


@pytest.mark.slow_on_uvloop
async def test_a_bug_in_a_process_is_told_with_its_traceback(text):
    with pytest.raises(WorkerError, match=r"(?s)ValueError: .*traceback.*in _prepare"):
        await run(msgspec.structs.replace(job_on(text), input=b"zero\0byte"))


@pytest.mark.parametrize(
    ("errors", "text", "code"),
    [
        ({0: "aioshm.errors.PeerDied", 2: "aioshm.cli.demo.script.Mismatch"}, "reader 1: 2", 1),
        ({0: "TimeoutError", 1: "aioshm.errors.OutOfDescriptors"}, "reader 0: 1", 1),
        ({0: "aioshm.errors.PeerDied", 1: "aioshm.errors.PeerClosed"}, "the writer: 0", 1),
        ({0: "aioshm.cli.demo.processes.CannotStart", 1: "aioshm.errors.PeerDied"}, "0", 2),
    ],
)
def test_the_failure_is_told_for_which_the_others_failed(errors, text, code):
    failure = processes._failure({rank: RemoteFailure(kind, str(rank)) for rank, kind in errors.items()})
    assert (str(failure), failure.exit_code) == (text, code)


@pytest.mark.slow_on_uvloop
async def test_cancelling_leaves_no_process(text):
    before = set(psutil.Process().children())
    running = asyncio.Event()
    progress = []

    def progressed(done):
        progress.append(done)
        if done:
            running.set()

    task = asyncio.create_task(run_processes(job_on(text, 2), "asyncio", progressed))
    await running.wait()
    started = [
        each for each in psutil.Process().children() if each not in before and "spawn_main" in str(each.cmdline())
    ]
    assert len(started) == 3
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not any(each.is_running() for each in started)
    assert progress == sorted(progress)
