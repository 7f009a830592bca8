"""ZeroMQ contexts whose threads run, and whose sockets can be had, before anything is promised."""

from __future__ import annotations

import weakref

import zmq

from aioshm.process.limits import SIGNAL_DESCRIPTORS, check_descriptors, check_threads, naming_limits


def new_context(
    what: str, *, io_threads: int = 1, sockets: int, connections: int, threads: int = 0
) -> zmq.Context[zmq.Socket[bytes]]:
    """Make a context whose threads run already.

    What its sockets need as well is asked for before: where libzmq lacks something later, it ends the process, or tries
    again for ever without a word.
    """
    check_threads(what, io_threads + 1 + threads)
    check_descriptors(what, SIGNAL_DESCRIPTORS * (io_threads + 2 + sockets) + io_threads + 1 + connections)
    with naming_limits(what):
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads)
        _start_threads(context)
    return context


def shared_context(what: str, *, sockets: int, connections: int) -> zmq.Context[zmq.Socket[bytes]]:
    """Return the process's own context, see `new_context`, whose threads run already."""
    with naming_limits(what):
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    running = context in _shared
    if not running:
        check_threads(what, 2)
    check_descriptors(what, SIGNAL_DESCRIPTORS * (2 * (not running) + sockets) + 2 * (not running) + connections)
    if not running:
        with naming_limits(what):
            context.socket(zmq.PAIR).close()
        _shared.add(context)
    return context


_shared: weakref.WeakSet[zmq.Context[zmq.Socket[bytes]]] = weakref.WeakSet()


def _start_threads(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    try:
        context.socket(zmq.PAIR).close()
    except BaseException:
        context.term()
        raise


def context_for(
    *endpoints: str | None, what: str, io_threads: int = 1, sockets: int, connections: int, threads: int = 0
) -> tuple[zmq.Context[zmq.Socket[bytes]], bool]:
    """Return a context for these endpoints, see `new_context`, and whether it is the caller's own.

    inproc endpoints meet only inside one context, so they share the process's.
    """
    if any(endpoint is not None and endpoint.startswith("inproc://") for endpoint in endpoints):
        return shared_context(what, sockets=sockets, connections=connections), False
    context = new_context(what, io_threads=io_threads, sockets=sockets, connections=connections, threads=threads)
    return context, True
