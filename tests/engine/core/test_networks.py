"""Engines whose front end's host loses power."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from two_hosts import two_hosts

CHILD = Path(__file__).parent.parent / "network_child.py"
ENGINE = 0
FRONT_END = 1


def wait_for_answer(front_end: subprocess.Popen[str]) -> None:
    assert front_end.stdout is not None
    assert any(line == "answered\n" for line in front_end.stdout), "the front end ended"


@pytest.mark.slow
def test_idle_engine_whose_front_ends_host_lost_power_serves_the_next_front_end_there() -> None:
    with two_hosts() as hosts:
        address = hosts.addresses[FRONT_END]
        with hosts.child(ENGINE, "engine", address, script=CHILD) as engine:
            with hosts.child(FRONT_END, "launch", address, script=CHILD) as front_end:
                wait_for_answer(front_end)
                hosts.plug(False, FRONT_END)
            hosts.power_off_and_on(FRONT_END)
            with hosts.child(FRONT_END, "return", address, script=CHILD) as front_end:
                wait_for_answer(front_end)
            assert engine.poll() is None
