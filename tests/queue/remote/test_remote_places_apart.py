"""Readers on another host that are killed and replaced, where the machine allows network namespaces."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import groupby, pairwise
from pathlib import Path

import pytest
from remote_storm import storm
from support import HELPERS, eventually
from two_hosts import two_hosts

SCRIPT = HELPERS / "places_child.py"
KILLS = 3
STORM = 30


def lines(journal: Path) -> list[tuple[int, int]]:
    whole = journal.read_text().rpartition("\n")[0] if journal.exists() else ""
    return [(int(pid), int(number)) for pid, number in (line.split() for line in whole.splitlines())]


@pytest.mark.parametrize("policy", ["hold", pytest.param("evict", marks=pytest.mark.slow)])
def test_killed_and_replaced(policy: str, tmp_path: Path) -> None:
    journal, stop = tmp_path / "journal", tmp_path / "stop"
    with two_hosts() as hosts, ExitStack() as stack:
        writer = stack.enter_context(
            hosts.child(0, "write", hosts.addresses[0], "2.0", policy, str(stop), script=SCRIPT)
        )
        assert writer.stdout is not None
        handle = writer.stdout.readline()
        for kill in range(KILLS + 1):
            before = len(lines(journal))
            reader = stack.enter_context(hosts.child(1, "read", handle, str(journal), script=SCRIPT))
            eventually(lambda before=before: len(lines(journal)) > before + 100, f"traffic to reader {kill}")
            if kill < KILLS:
                reader.kill()  # and the next one comes before anybody can have noticed
        stop.touch()
        complaints = reader.communicate(timeout=30)[1]
        assert (reader.returncode, complaints) == (0, "")
        sent = int(writer.communicate(timeout=30)[0])
    runs = [[number for _, number in run] for _, run in groupby(lines(journal), lambda line: line[0])]
    assert len(runs) == KILLS + 1, "one after the other"
    for run in runs:
        assert run == list(range(run[0], run[-1] + 1)), "no hole within what one has received"
    assert runs[-1][-1] == sent - 1
    for one, following in pairwise(runs):
        if policy == "hold":
            # What it had read last the writer may not have heard of: that comes again; nothing is lost but what it had.
            assert following[0] <= one[-1] + 2
        else:
            assert following[0] > one[-1], "from the present on"


@pytest.mark.slow
def test_killed_again_and_again(tmp_path: Path) -> None:
    """Nothing is lost but what each had taken, and nothing comes again but what the writer had not been told of."""
    with two_hosts() as hosts:
        came = storm(STORM, tmp_path, hosts.addresses[0], (hosts.enter(0), hosts.enter(1)))
    assert came.received > STORM // 2, "under traffic"
