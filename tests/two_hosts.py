"""Two network namespaces with a switch between them, where the machine allows it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import eventually

CHILD = Path(__file__).parent / "helpers" / "network_child.py"


class TwoHosts:
    """Two hosts at a switch, each a namespace with an address that the other one reaches."""

    def __init__(self) -> None:
        self._names = [f"aioshm-{os.getpid()}-{end}" for end in "ab"]
        self._switch = f"aioshm-{os.getpid()}-s"
        self._netem: str | None = None
        self.addresses = ["192.0.2.1", "192.0.2.2"]  # for documentation: nobody's

    def set_up(self, netem: str | None) -> None:
        self._netem = netem
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for host in range(2):
            self._switch_on(host)

    def tear_down(self) -> None:
        for name in [*self._names, self._switch]:  # and with them the cables
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def plug(self, there: bool, host: int = 0) -> None:
        """Plug a host's cable in at the switch, or pull it out: the hosts are not notified."""
        _run("ip", "-n", self._switch, "link", "set", f"port{host}", "up" if there else "down")

    def power_off_and_on(self, host: int) -> None:
        """Forget the host's connections without a packet; the test has killed its processes, its cable unplugged."""
        _run("ip", "netns", "del", self._names[host])
        subprocess.run(["ip", "-n", self._switch, "link", "del", f"port{host}"], capture_output=True, check=False)
        eventually(lambda: f"port{host}" not in self._ports(), "the end of the host's cable")
        self._switch_on(host)

    def _switch_on(self, host: int) -> None:
        name, port = self._names[host], f"port{host}"
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", self._switch)
        # The address of the card stays the same when the host comes back: the other one remembers it.
        _run("ip", "-n", name, "link", "set", "eth0", "address", f"02:00:00:00:00:{host:02}")
        _run("ip", "-n", name, "addr", "add", f"{self.addresses[host]}/24", "dev", "eth0")
        _run("ip", "-n", name, "link", "set", "lo", "up")
        if self._netem is not None:
            _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "netem", *self._netem.split())
        _run("ip", "-n", name, "link", "set", "eth0", "up")
        _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge")
        self.plug(True, host)

    def _ports(self) -> str:
        return subprocess.run(
            ["ip", "-n", self._switch, "link", "show"], capture_output=True, text=True, check=True
        ).stdout

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
