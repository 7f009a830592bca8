"""Starts the ends of ``planted.py`` in processes of their own."""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path

PLANTED = Path(__file__).with_name("planted.py")


class Planted:
    """Processes with the ends of one queue.

    Attributes:
        name: The queue's.
    """

    def __init__(self) -> None:
        self.name = f"planted-{secrets.token_hex(4)}"
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, role: str, number: int) -> subprocess.Popen[str]:
        command = [sys.executable, str(PLANTED), role, self.name, str(number)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.processes.append(process)
        return process

    def ready(self) -> None:
        """Wait until every process is ready."""
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"

    def queue(self, writer: str, *readers: str) -> list[subprocess.Popen[str]]:
        """Start a writer and readers with roles, and wait until all are ready."""
        started = [self.start(writer, len(readers))]
        started += [self.start(role, rank) for rank, role in enumerate(readers)]
        self.ready()
        return started

    def go_wrong(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "wrong\n"
