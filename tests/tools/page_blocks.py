"""Runs the code blocks of a page, in their order: ``python tests/tools/page_blocks.py PAGE`` in an empty directory.

* ``python`` blocks go on from each other, as in ``python -m asyncio``; one with a ``title="name.py"`` is a file.
* ``console`` blocks are commands (lines with ``$``) for bash, which must succeed; other lines are what they print.
* Other blocks with a title are files, too; JSON, TOML and YAML are parsed.
* ``<!-- prints -->`` before a ``text`` block: the block before it prints that; ``...`` stands for anything.
* ``<!-- not run: REASON -->`` before a block: it is parsed, and not run.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import yaml

COMMAND_TIMEOUT_S = 80
STOP_TIMEOUT_S = 20
PLAIN = {"text", "mermaid"}
"""Languages of blocks that are no code."""

PARSED = {"json": json.loads, "toml": tomllib.loads, "yaml": lambda text: list(yaml.safe_load_all(text))}

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<info>.*)$")
_MARK = re.compile(r"^<!-- (?P<mark>not run: .+|prints) -->$")


class BlockError(Exception):
    """A block that is neither run nor marked, or that has failed."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; ``mark``: the comment before it, ``title``: the name of the file that it is."""

    where: str
    language: str
    title: str
    mark: str
    text: str
    line: int

    @property
    def is_run(self) -> bool:
        return not self.mark.startswith("not run")

    def commands(self) -> tuple[str, list[str]]:
        """Return the commands of a console block, and the lines that they print."""
        script, printed, goes_on = [], [], False
        for line in self.text.splitlines():
            if goes_on or line.startswith("$ "):
                script.append(line if goes_on else line[2:])
                goes_on = line.endswith("\\")
            elif line:
                printed.append(line)
        return "\n".join(script), printed


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    mark, fence, info, indent, start = "", "", "", 0, 0
    lines: list[str] = []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        found = _FENCE.match(line)
        if not fence and found:
            fence, indent, start = found["fence"], len(found["indent"]), number + 1
            info, lines = found["info"], []
        elif fence and line.strip() == fence:
            language, _, attributes = info.partition(" ")
            title = re.search(r'title="([^"]+)"', attributes)
            text = "\n".join(lines) + "\n"
            yield Block(f"{page}:{start}", language, title[1] if title else "", mark, text, start)
            fence = mark = ""
        elif fence:
            lines.append(line[indent:] if not line[:indent].strip() else line)
        elif comment := _MARK.match(line.strip()):
            mark = comment["mark"]
        elif line.strip():
            mark = ""
    if fence:
        raise BlockError(f"{page}: the block of line {start} does not end")


def check(block: Block) -> None:
    """Raise unless a block can be run, or is no code, or says why it is not run; parse it."""
    if block.language in PARSED:
        PARSED[block.language](block.text)
    elif block.language == "python":
        compile(block.text, block.where, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    elif block.language == "console":
        script, _ = block.commands()
        if not script:
            raise BlockError(f"{block.where}: a console block without a command ($ ...)")
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
        if done.returncode:
            raise BlockError(f"{block.where}: {done.stderr}")
    elif block.language not in PLAIN and block.is_run and not block.title:
        raise BlockError(f"{block.where}: {block.language or 'a block without a language'} is neither run nor marked")


def matches(printed: str, expected: list[str]) -> bool:
    """Tell whether these lines were printed, one right after the other; ``...`` stands for anything."""
    pattern = "\n".join(re.escape(line.rstrip()).replace(r"\.\.\.", ".*?") for line in expected)
    lines = "\n".join(line.rstrip() for line in printed.splitlines())
    return re.search(f"^{pattern}$", lines, re.MULTILINE | re.DOTALL) is not None


class Page:
    """Runs the blocks of a page."""

    def __init__(self) -> None:
        main = ModuleType("__main__")  # where classes of the page are looked for
        sys.modules["__main__"] = main
        self._names: dict[str, Any] = vars(main)
        self._printed = ""

    async def run(self, block: Block) -> None:
        """Run a block."""
        check(block)
        if block.mark == "prints":
            if not matches(self._printed, block.text.splitlines()):
                raise BlockError(f"{block.where}: what was printed is\n{self._printed}")
        elif not block.is_run:
            return
        elif block.title:
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(block.text)
        elif block.language == "python":
            await self._run_python(block)
        elif block.language == "console":
            await asyncio.to_thread(self._run_commands, block)

    async def _run_python(self, block: Block) -> None:
        code = compile("\n" * (block.line - 1) + block.text, block.where, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            result = eval(code, self._names)
            if inspect.isawaitable(result):
                await result
        self._printed = output.getvalue()

    def _run_commands(self, block: Block) -> None:
        script, expected = block.commands()
        with tempfile.TemporaryFile("w+") as output:  # no pipe: what is left in the background would keep it open
            shell = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", script], stdout=output, stderr=subprocess.STDOUT, process_group=0
            )
            _GROUPS.append(shell.pid)
            code = shell.wait(COMMAND_TIMEOUT_S)
            output.seek(0)
            self._printed = output.read()
        if code:
            raise BlockError(f"{block.where}: exit code {code}\n{self._printed}")
        if expected and not matches(self._printed, expected):
            raise BlockError(f"{block.where}: what was printed is\n{self._printed}")


_GROUPS: list[int] = []
"""Process groups of the commands that were run; some may have left servers in the background."""


def _stop_all() -> None:
    for group in _GROUPS:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGTERM)
    _, left = psutil.wait_procs([each for group in _GROUPS for each in _members(group)], STOP_TIMEOUT_S)
    if left:
        raise BlockError(f"after {STOP_TIMEOUT_S} s SIGTERM has not ended {left}")


def _members(group: int) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def main(path: str) -> None:
    """Run a page."""
    page, blocks = Page(), list(blocks_of(Path(path)))
    sys.path.insert(0, os.getcwd())  # of files that are blocks
    with asyncio.Runner() as runner:
        try:
            for block in blocks:
                runner.run(page.run(block))
        finally:
            _stop_all()


if __name__ == "__main__":
    main(sys.argv[1])
