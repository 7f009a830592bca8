"""One rank of process groups in a process of its own: ``python group_child.py ROLE ARGUMENTS...``."""

from __future__ import annotations

import sys


def store(port: str) -> None:
    """Be rank 0 of three, until somebody ends it."""
    from aioshm.queue.stateless_group import StatelessProcessGroup

    with StatelessProcessGroup.create("127.0.0.1", int(port), 0, 3, timeout=20):
        sys.stdin.read()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
