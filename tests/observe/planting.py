"""Starts the ends of ``planted.py`` in processes of their own."""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path

PLANTED = Path(__file__).with_name("planted.py")


class Planted:
    """Processes with the ends of one queue."""

    def __init__(self) -> None:
        self.name = f"planted-{secrets.token_hex(4)}"
        self.processes: list[subprocess.Popen[str]] = []

    def queue(self, *readers: str) -> list[subprocess.Popen[str]]:
        """Start a writer and readers with roles, and wait until all have begun."""
        for role, number in [("write", len(readers)), *zip(readers, range(len(readers)), strict=True)]:
            command = [sys.executable, str(PLANTED), role, self.name, str(number)]
            self.processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        return self.processes
