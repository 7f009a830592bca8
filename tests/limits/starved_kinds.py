"""What is done in the subjects and the peers of ``starving.py``: one object for each kind of end.

Each subject does its work once while it is starving. If that fails, it is done again with enough of everything, by the
same ends where they are there and by new ones where they are not; so the peer sees the work done in any case.
"""

from __future__ import annotations

import functools
from typing import Any

from starved_queues import Blocking, Grouping, Merging, Reading, Writing, come_back, read_blocking, write_blocking
from starved_services import (
    Alone,
    EngineCore,
    FrontEnd,
    Publishing,
    PublishingFromThreads,
    Subscribing,
    coordinate,
    manage,
    work_in_group,
)

KINDS: dict[str, Any] = {
    "local-writer": Writing(remote=False),
    "local-reader": Reading(remote=False),
    "overflow-writer": Writing(overflow="zmq"),
    "overflow-reader": Reading(overflow="zmq"),
    "remote-writer": Writing(remote=True),
    "remote-reader": Reading(remote=True),
    "blocking-local-writer": Blocking(lambda subject: write_blocking(subject, False), Writing(remote=False)),
    "blocking-remote-writer": Blocking(lambda subject: write_blocking(subject, True), Writing(remote=True)),
    "blocking-local-reader": Blocking(read_blocking, Reading(remote=False)),
    "blocking-remote-reader": Blocking(read_blocking, Reading(remote=True)),
    "merge": Merging(),
    "group-writer": Grouping(0),
    "group-reader": Grouping(1),
    "publisher": Publishing(),
    "threaded-publisher": PublishingFromThreads(),
    "subscriber": Subscribing(),
    "front-end": FrontEnd(),
    "engine-core": EngineCore(),
    "coordinator": Alone(coordinate),
    "manager": Alone(manage),
    "worker-group": Alone(work_in_group),
    "name": Alone(functools.partial(come_back, remote=False)),
    "identity": Alone(functools.partial(come_back, remote=True)),
}
