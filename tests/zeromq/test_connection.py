"""Looks at descriptors of ZeroMQ's, which may be those of something else by then."""

from __future__ import annotations

import socket

from aioshm.zeromq.connection import Look


def test_the_port_of_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, Look(listening.fileno()) as look:
        assert look.port == str(listening.getsockname()[1])


def test_a_number_that_is_a_local_socket_s_by_now_has_no_port() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, Look(ours.fileno()) as look:
        assert look.port == ""
