"""Subscribers and publishers after the peer's host lost power."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import pytest
import zmq
from two_hosts import two_hosts

from aioshm.events import SubscriberStats
from aioshm.events.config import SubscriberSettings
from aioshm.events.subscribe.ports import LivePort
from aioshm.zeromq.endpoint import BOUND_SUBSCRIBER_SILENCE_S, SILENCE_S

CHILD = Path(__file__).parent.parent / "network_child.py"
SUBSCRIBER, PUBLISHER = 0, 1
RESTARTED = 1_000_000
PATIENCE_S = 60


def wait_for(subscriber: subprocess.Popen[str], what: str, first: int) -> None:
    assert subscriber.stdout is not None
    overdue = threading.Timer(PATIENCE_S, subscriber.kill)
    overdue.start()
    try:
        for line in subscriber.stdout:
            how, number = line.split()
            if how == what and int(number) >= first:
                return
    finally:
        overdue.cancel()
    pytest.fail(f"the subscriber ended, or did not print {what} within {PATIENCE_S} s")


@pytest.mark.slow
def test_subscriber_whose_publishers_host_lost_power_gets_live_batches_again() -> None:
    with two_hosts() as hosts:
        endpoints = [f"tcp://{hosts.addresses[PUBLISHER]}:{port}" for port in (5557, 5558)]
        with hosts.child(SUBSCRIBER, "subscribe", *endpoints, "0", script=CHILD) as subscriber:
            with hosts.child(PUBLISHER, "publish", *endpoints, "0", script=CHILD):
                wait_for(subscriber, "live", 10)
                hosts.plug(False, PUBLISHER)
            hosts.power_off_and_on(PUBLISHER)
            with hosts.child(PUBLISHER, "publish", *endpoints, str(RESTARTED), script=CHILD):
                wait_for(subscriber, "live", RESTARTED)


@pytest.mark.slow
def test_subscriber_that_binds_drops_the_connection_of_a_host_that_lost_power() -> None:
    with two_hosts() as hosts:
        place = f"tcp://{hosts.addresses[SUBSCRIBER]}:5557"
        with hosts.child(SUBSCRIBER, "bind", place, "", "0", script=CHILD) as subscriber:
            with hosts.child(PUBLISHER, "connect", place, "", "0", script=CHILD):
                wait_for(subscriber, "live", 0)
                hosts.plug(False, PUBLISHER)
            wait_for(subscriber, "gone", 0)
            hosts.power_off_and_on(PUBLISHER)
            with hosts.child(PUBLISHER, "connect", place, "", str(RESTARTED), script=CHILD):
                wait_for(subscriber, "live", RESTARTED)


def test_subscriber_that_binds_gives_a_silent_publisher_up_after_a_minute() -> None:
    """The sockets are private: no public call shows how long a connection may be silent."""
    found = []
    with zmq.Context() as context:
        for bind in (True, False):
            settings = SubscriberSettings(topic="", bind=bind)
            port = LivePort(context, "tcp://127.0.0.1:*" if bind else "tcp://127.0.0.1:1", settings, SubscriberStats())
            found += [port._sub.getsockopt(option) for option in (zmq.TCP_MAXRT, zmq.TCP_KEEPALIVE_IDLE)]
            port.close()
    bound = BOUND_SUBSCRIBER_SILENCE_S
    assert bound <= 60
    assert found == [int(1000 * bound), int(bound / 3), int(1000 * SILENCE_S), int(SILENCE_S / 3)]
