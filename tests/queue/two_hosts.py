"""Two network namespaces with a cable between them, where the machine allows it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CHILD = Path(__file__).with_name("network_child.py")


class TwoHosts:
    """Two namespaces; each has an address that the other one reaches."""

    def __init__(self) -> None:
        self._names = [f"aioshm-{os.getpid()}-{end}" for end in "ab"]
        self.addresses = ["192.0.2.1", "192.0.2.2"]  # for documentation: nobody's

    def set_up(self, netem: str | None) -> None:
        for name in self._names:
            _run("ip", "netns", "add", name)
        one, other = self._names
        _run("ip", "link", "add", "eth0", "netns", one, "type", "veth", "peer", "name", "eth0", "netns", other)
        for name, address in zip(self._names, self.addresses, strict=True):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            if netem is not None:
                _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "netem", *netem.split())
        self.plug(True)

    def tear_down(self) -> None:
        for name in self._names:  # and with them the cable
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def plug(self, there: bool) -> None:
        """Plug the cable in, or pull it out: nothing arrives any more, and nobody is told."""
        _run("ip", "-n", self._names[0], "link", "set", "eth0", "up" if there else "down")
        if there:
            _run("ip", "-n", self._names[1], "link", "set", "eth0", "up")

    def enter(self, host: int) -> list[str]:
        """Return what runs the command that follows it on one of the hosts."""
        return ["nsenter", f"--net=/run/netns/{self._names[host]}", "--"]

    @contextmanager
    def child(self, host: int, *arguments: str, script: Path = CHILD) -> Iterator[subprocess.Popen[str]]:
        """Run a script on one of the hosts."""
        inside = [*self.enter(host), sys.executable, "-W", "error", str(script)]
        process = subprocess.Popen([*inside, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        with process:
            try:
                yield process
            finally:
                process.kill()


@contextmanager
def two_hosts(netem: str | None = None) -> Iterator[TwoHosts]:
    """Give two hosts to the block; skip the test, and say why, where they cannot be had.

    Args:
        netem: How bad the network is, as ``tc-netem(8)`` has it; None: as good as can be.
    """
    hosts = TwoHosts()
    try:
        hosts.set_up(netem)
        yield hosts
    finally:
        hosts.tear_down()


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"no network of one's own: {error}")
    if done.returncode:
        pytest.skip(f"no network of one's own: {' '.join(command)}: {done.stderr.strip()}")
