"""The main function of an engine's process."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from aioshm.config import Options
from aioshm.engine.core.core import EngineCore
from aioshm.engine.core.joining import HandshakeOptions, shake_hands
from aioshm.engine.core.sockets import MAX_PENDING_BYTES
from aioshm.engine.protocol.addresses import EngineHandshakeMetadata
from aioshm.process.stopping import Termination


async def run_engine_core(
    engine: Any,
    handshake_address: str,
    index: int,
    *,
    request_type: Any = None,
    options: Options | None = None,
    max_pending_bytes: int = MAX_PENDING_BYTES,
    handshake: HandshakeOptions | None = None,
) -> None:
    """Shake hands with the front end, and serve requests until the process ends.

    ``engine`` is the user's own object. Each of its methods may be async, and those marked * may be missing:

    * ``initialize(metadata) -> dict | None``: prepare; returns the fields of READY, such as ``num_gpu_blocks``.
    * ``add_request(request)``: accept a request; an exception refuses it.
    * ``abort_requests(ids)``: drop unfinished requests.
    * ``step() -> outputs``: compute, while there are requests; returns an iterable of outputs, or None. An output has a
      ``request_id``; its request's last one has a ``finish_reason``, or is ``finished``.
    * ``has_work() -> bool``*: whether to step although no request is open; never async.
    * ``request_counts() -> (waiting, running)``*: for the coordinator; never async.
    * ``kv_cache_usage() -> float``*: how much of the KV cache is in use, 0 to 1, for the coordinator; never async.
    * ``error_output(request_id, message) -> output``*: the form of a refused request's output, for clients of other
      makers; never async. Without, it is a map ``{request_id, finish_reason: "error", error: message}``. aioshm's
      clients raise `RequestFailed` for that, and for an object with these two attributes.
    * ``has_unfinished_dp(unfinished) -> bool``*: whether any engine has work, agreed with the others. An engine that
      has this works in lockstep with them: it steps while one of them has work, if it has none itself by calling
      ``execute_dummy_batch()``*.
    * ``shutdown()``*: give back what it holds, at the end.
    * whatever a client may ``call``: any other method whose name does not begin with an underscore.

    The methods run one after the other, except for async methods that a client calls, which run beside everything
    else. So the engine needs no locks. A step that is not async blocks the loop; ZeroMQ's own thread receives messages
    meanwhile.

    After a failed step, SIGTERM, or a cancellation, every client is notified that the engine is dead. SIGTERM also ends
    an async ``initialize``, and calls ``shutdown``: a `WorkerGroup` that the engine has entered closes its workers. An
    ``initialize`` that is not async ends with the process. After SIGTERM this returns; otherwise it raises.

    Args:
        engine: The engine.
        handshake_address: Where the front end listens.
        index: The engine's rank.
        request_type: The type that requests are decoded to: any type that msgspec knows; None for plain data.
        options: ``max_message_bytes``, ``remote_timeout`` and ``secure`` apply; None: `Options.from_env`.
        max_pending_bytes: Bytes of outputs that may wait for one front end of this host, besides the last 8 messages,
            which ZeroMQ holds. With more than that the front end has stopped reading, and the engine drops it: it logs
            a warning that names the front end, and aborts its requests. A front end that runs again raises `EngineDead`
            for them, and the engine registers with it anew. Answers to calls do not count. Over TCP a front end is
            dropped after ``options.remote_timeout`` seconds of silence instead.
        handshake: See `HandshakeOptions`; None: the defaults.

    Raises:
        HandshakeError: The front end's answer is invalid.
        RoleError: There are no keys for this engine.
        TimeoutError: The front end did not answer.
        TypeError: The engine has not all methods that it needs; nothing is started then.
        Exception: An exception of the engine in ``initialize`` or ``step``.
    """
    options = options or Options.from_env()
    chosen = handshake or HandshakeOptions()
    chosen = replace(chosen, secure=chosen.secure and options.secure)
    core = EngineCore(
        engine,
        index,
        request_type=request_type,
        options=options,
        keys=chosen.keys,
        secure=chosen.secure,
        max_pending_bytes=max_pending_bytes,
    )
    termination = Termination()

    async def initialize(metadata: EngineHandshakeMetadata) -> dict[str, Any]:
        # A method that is not async, and may take minutes, is ended by the signal itself.
        fields = await core.initialize(metadata, termination.arm)
        termination.arm()
        await core.connect(metadata.addresses, fields)
        return fields

    try:
        try:
            await shake_hands(handshake_address, index, initialize=initialize, handshake=chosen)
            await core.run()
        finally:
            await core.aclose()
    except (asyncio.CancelledError, SystemExit):
        if not termination.take_back():
            raise
    finally:
        termination.disarm()
