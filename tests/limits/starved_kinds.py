"""What is done in the subjects and the peers of ``starving.py``: one object for each kind of end.

Each subject does its work once while it is starving. If that fails, it is done again with enough of everything, by the
same ends where they are there and by new ones where they are not; so the peer sees the work done in any case.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from scenes import SCENES
from starved_queues import Reading, Writing, keep_identity, meet_in_group
from starved_services import (
    Alone,
    Publishing,
    PublishingFromThreads,
    Subscribing,
    coordinate,
    play,
)

KINDS: dict[str, Any] = {
    "local-writer": Writing(),
    "local-reader": Reading(),
    "overflow-writer": Writing(overflow="zmq"),
    "overflow-reader": Reading(overflow="zmq"),
    "remote-writer": Writing(remote=True),
    "remote-reader": Reading(remote=True),
    "blocking-local-reader": Reading(blocking=True),
    "blocking-remote-writer": Writing(remote=True, blocking=True),
    "identity": Alone(keep_identity),
    "group": Alone(meet_in_group),
    "publisher": Publishing(),
    "threaded-publisher": PublishingFromThreads(),
    "subscriber": Subscribing(),
    "engine": Alone(partial(play, SCENES["engine"])),
    "coordinator": Alone(coordinate),
    "workers": Alone(partial(play, SCENES["workers"])),
}
