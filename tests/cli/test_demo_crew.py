from __future__ import annotations

import asyncio
import os

import msgspec
import psutil
import pytest

from aioshm.cli.demo.crew import Crew, Worker, WorkerFailed
from aioshm.cli.demo.orders import Job, Opened
from aioshm.cli.outcome import CommandFailed


def job_on(path, readers=1):
    return Job(input=os.fsencode(path), repeat=50, readers=readers, arrays="bytes")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"one\n\ntwo\n")
    return path


@pytest.mark.slow_on_uvloop
async def test_reader_compares_with_its_own_reading(text, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(b"one\n\ntwO\n")
    workers = []

    def heard(report):
        if isinstance(report, Opened):
            workers[1].tell(report.handle.encode())

    workers += [Worker("the writer", "writer", heard), Worker("reader 0", "reader-0", lambda _: None)]
    workers[0].start(job_on(text), "asyncio")
    workers[1].start(job_on(other), "asyncio")
    with pytest.raises(WorkerFailed, match=r"reader 0: message 2 \(lines\) is \(2, b'two\\n'\), not \(2, b'twO\\n'\)"):
        await workers[1].result
    with pytest.raises(WorkerFailed, match="every reader has left") as caught:
        await workers[0].result
    assert caught.value.kind == "peer"
    for worker in workers:
        worker.dismiss()


async def test_file_that_vanished_is_named(tmp_path):
    with pytest.raises(CommandFailed, match=r"cannot read .*gone: No such file") as caught:
        await Crew(1, lambda _: None).run(job_on(tmp_path / "gone"), "asyncio")
    assert caught.value.exit_code == 2


async def test_queue_that_cannot_be_made_is_an_unusable_machine(text, tmp_path, monkeypatch):
    monkeypatch.setenv("AIOSHM_LIFELINE", "directory")
    monkeypatch.setenv("AIOSHM_RUNTIME_DIR", str(text))  # a file
    with pytest.raises(CommandFailed) as caught:
        await Crew(1, lambda _: None).run(job_on(text), "asyncio")
    assert caught.value.exit_code == 2
    assert str(text) in str(caught.value)


async def test_broken_torch_is_named(text, tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('half installed')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    job = msgspec.structs.replace(job_on(text), arrays="torch")
    with pytest.raises(CommandFailed, match="cannot import torch: half installed") as caught:
        await Crew(1, lambda _: None).run(job, "asyncio")
    assert caught.value.exit_code == 2


@pytest.mark.slow_on_uvloop
async def test_cancelling_leaves_no_process(text):
    before = psutil.Process().children()
    running = asyncio.Event()
    progress = []

    def progressed(done):
        progress.append(done)
        if done:
            running.set()

    crew = Crew(2, progressed)
    task = asyncio.create_task(crew.run(job_on(text, 2), "asyncio"))
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert psutil.Process().children() == before
    assert progress == sorted(progress)
