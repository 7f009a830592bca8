"""Subscribers whose publisher's host goes away without a packet."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from two_hosts import two_hosts

CHILD = Path(__file__).parent.parent / "network_child.py"
SUBSCRIBER, PUBLISHER = 0, 1
RESTARTED = 1_000_000


def wait_for_live_batch(subscriber: subprocess.Popen[str], first: int) -> None:
    assert subscriber.stdout is not None
    for line in subscriber.stdout:
        how, number = line.split()
        if how == "live" and int(number) >= first:
            return
    pytest.fail("the subscriber ended")


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("replay", [True, False], ids=["with replay", "without replay"])
def test_subscriber_whose_publishers_host_lost_power_gets_live_batches_again(replay: bool, loop: str) -> None:
    with two_hosts() as hosts:
        address = hosts.addresses[PUBLISHER]
        endpoints = f"tcp://{address}:5557", f"tcp://{address}:5558" if replay else ""
        with hosts.child(SUBSCRIBER, "subscribe", loop, *endpoints, "0", script=CHILD) as subscriber:
            with hosts.child(PUBLISHER, "publish", loop, *endpoints, "0", script=CHILD):
                wait_for_live_batch(subscriber, 10)
                hosts.plug(False, PUBLISHER)
            hosts.power_off_and_on(PUBLISHER)
            with hosts.child(PUBLISHER, "publish", loop, *endpoints, str(RESTARTED), script=CHILD):
                wait_for_live_batch(subscriber, RESTARTED)
