from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

WAIT_S = 30


class Demo:
    """A demo that runs in a session of its own, as under a terminal: its process and those it starts."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.workers: list[psutil.Process] = []

    def wait_for_line(self, beginning: str) -> None:
        """Wait until the demo has printed such a line; list its processes."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(beginning):
                break
        else:
            raise AssertionError(f"no line {beginning!r}: {self.process.communicate()[1]}")
        below = psutil.Process(self.process.pid).children(recursive=True)
        # multiprocessing's resource tracker, which outlives them by a moment, is none of them.
        found = [process for process in below if "spawn_main" in " ".join(process.cmdline())]
        self.workers = sorted(found, key=psutil.Process.create_time)  # the order in which they were started

    def end(self) -> tuple[str, str, int]:
        """Wait for the end; return the rest of the output, the errors and the exit code."""
        output, errors = self.process.communicate(timeout=WAIT_S)
        return output, errors, self.process.returncode

    def wait_until_none_is_left(self) -> None:
        _, left = psutil.wait_procs(self.workers, timeout=WAIT_S)
        assert not left

    def kill(self) -> None:
        for worker in self.workers:
            try:
                worker.kill()
            except psutil.NoSuchProcess:
                pass
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture
def start_demo(tmp_path: Path) -> Iterator[Callable[..., Demo]]:
    started = []

    def start(*args: str, without: Sequence[str] = (), stdout: int = subprocess.PIPE) -> Demo:
        (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules.update(dict.fromkeys({[*without]}))")
        path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
        process = subprocess.Popen(
            [sys.executable, "-m", "aioshm", "demo", *args],
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        started.append(Demo(process))
        return started[-1]

    yield start
    for demo in started:
        demo.kill()
        with demo.process:
            pass
