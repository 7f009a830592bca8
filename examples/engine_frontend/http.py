"""The HTTP side: completions in the form of OpenAI's interface, whole or as server-sent events, and health."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Annotated, Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from aioshm.engine import EngineClient, OutputStream
from aioshm.errors import EngineDead, RequestFailed
from engine_frontend.messages import Generation, Progress
from engine_frontend.text import decode, encode

MODEL = "nonsense"
MAX_BODY_BYTES = 1 << 20

KEEP_ALIVE_S = 15.0
"""A stream gets a comment after each 15 s without an output: proxies close silent connections."""


class Completion(msgspec.Struct):
    """The body of a request for a completion; what else it has is ignored."""

    prompt: Annotated[str, msgspec.Meta(min_length=1)]
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 16
    stream: bool = False


class Refused(Exception):
    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.content = {"error": {"message": message, "type": kind}}


class Scale(msgspec.Struct):
    """The body of a request for another number of engines."""

    engines: Annotated[int, msgspec.Meta(ge=1, le=64)]


def make_app(
    client: EngineClient,
    health: Callable[[], Awaitable[dict[str, Any]]],
    scale: Callable[[int], Awaitable[None]],
) -> Starlette:
    """Return the application.

    Args:
        client: Of engines that are ready.
        health: Says how they are; ``status`` is ``"ok"``, ``"degraded"`` while some are not there, or ``"failed"``.
        scale: Has more engines, or fewer.
    """

    async def tell_health(_: Request) -> Response:
        state = await health()
        return JSONResponse(state, 503 if state["status"] == "failed" else 200)

    async def tell_metrics(_: Request) -> Response:
        return Response(_metrics(await health()), media_type="text/plain; version=0.0.4")

    async def have_engines(request: Request) -> Response:
        try:
            wanted = msgspec.json.decode(await request.body(), type=Scale)
            await scale(wanted.engines)
        except msgspec.MsgspecError as error:
            return JSONResponse({"error": {"message": str(error), "type": "invalid_request_error"}}, 400)
        except EngineDead as error:
            return JSONResponse({"error": {"message": str(error), "type": "engine_dead"}}, 503)
        return JSONResponse(await health())

    return Starlette(
        routes=[
            Route("/v1/completions", Completions(client), methods=["POST"]),
            Route("/health", tell_health),
            Route("/metrics", tell_metrics),
            Route("/scale", have_engines, methods=["POST"]),
        ]
    )


class Completions:
    """``POST /v1/completions``. Whoever hangs up has the request aborted at its engine."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            wanted = await _read(Request(scope, receive))
            await until_gone(receive, self._answer(wanted, send))
        except ClientDisconnect:
            return
        except Refused as refused:
            await JSONResponse(refused.content, refused.status)(scope, receive, send)

    async def _answer(self, wanted: Completion, send: Send) -> None:
        request = Generation(f"cmpl-{uuid.uuid4().hex}", encode(wanted.prompt), wanted.max_tokens)
        tokens: list[int] = []
        reason = None
        with refusing():
            async with aclosing(self._client.submit(request)) as outputs:
                if wanted.stream:
                    await _stream(request, outputs, send)
                    return
                async for output in outputs:
                    tokens += output.tokens
                    reason = output.finish_reason
        content = _choice(request, decode(tokens), reason)
        content["usage"] = {"prompt_tokens": len(request.tokens), "completion_tokens": len(tokens)}
        await _send_json(content, send)


@contextmanager
def refusing() -> Iterator[None]:
    """Turn the errors of engines into answers."""
    try:
        yield
    except EngineDead as error:
        raise Refused(503, "engine_dead", str(error)) from None
    except RequestFailed as error:
        raise Refused(400, "invalid_request_error", str(error)) from None


def _metrics(state: dict[str, Any]) -> str:
    """Return the state of the engines in Prometheus' text format."""
    lines = ["# TYPE requests_in_flight gauge", f"requests_in_flight {state['in_flight']}"]
    for name, kind, value in (
        ("engine_up", "gauge", lambda engine: int(engine["state"] == "running")),
        ("engine_restarts_total", "counter", lambda engine: engine["restarts"]),
    ):
        lines.append(f"# TYPE {name} {kind}")
        lines += [f'{name}{{engine="{engine["engine"]}"}} {value(engine)}' for engine in state["engines"]]
    return "\n".join(lines) + "\n"


async def until_gone(receive: Receive, work: Awaitable[None]) -> None:
    """Do the work, but no longer than the client is there."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(watch())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
    if not working.cancelled():
        working.result()


async def _read(request: Request) -> Completion:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise Refused(413, "invalid_request_error", f"the body has more than {MAX_BODY_BYTES} bytes")
    try:
        return msgspec.json.decode(body, type=Completion)
    except msgspec.MsgspecError as error:
        raise Refused(400, "invalid_request_error", str(error)) from None


async def _stream(request: Generation, outputs: OutputStream[Progress], send: Send) -> None:
    events = _events(request, outputs)
    first = await anext(events)  # what is wrong from the beginning has a status of its own
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": first, "more_body": True})
    try:
        async for event in events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
    except Refused as refused:  # the status has been sent: this is all that can still be said
        await send({"type": "http.response.body", "body": _event(refused.content), "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def _events(request: Generation, outputs: OutputStream[Progress]) -> AsyncIterator[bytes]:
    """Iterate over the events of a request's outputs, and a comment after each silence of the engine."""
    while True:
        try:
            with refusing():
                output = await outputs.next(timeout=KEEP_ALIVE_S)
        except TimeoutError:
            yield b": the engine is silent\n\n"
        except StopAsyncIteration:
            return
        else:
            yield _event(_choice(request, decode(output.tokens), output.finish_reason))


def _event(content: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(content)


async def _send_json(content: dict[str, Any], send: Send) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": msgspec.json.encode(content)})


def _choice(request: Generation, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {
        "id": request.request_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, "text": text, "finish_reason": finish_reason}],
    }
