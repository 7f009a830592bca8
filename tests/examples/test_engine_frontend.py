"""The front end with engines and workers: the same text as the whole model writes, and errors that name who died."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import eventually

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path += [str(EXAMPLES), str(Path(__file__).parents[1] / "engine")]

from engine_frontend.batch import Chunk, Config  # noqa: E402
from engine_frontend.http import Completions  # noqa: E402
from engine_frontend.messages import Generation, Progress  # noqa: E402
from engine_frontend.model import Model, alone  # noqa: E402
from engine_frontend.text import END, decode, encode  # noqa: E402
from served_engine import Engine, served  # noqa: E402

PROMPTS = ("hello", "The quick brown fox", "x", "1 + 1 = ", "What? " * 20)


class Server:
    """The front end as a process of its own; it writes its log to a file."""

    def __init__(self, log: Path) -> None:
        self._log = log
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "engine_frontend", "--port", "0"],
                cwd=EXAMPLES,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    "AIOSHM_STALL_WARNING_S": "1",
                },
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def wait_until_it_serves(self) -> None:
        assert self.process.stdout is not None
        started = next((line for line in self.process.stdout if line.startswith("serving on")), "")
        assert started, self.log()
        self.port = int(started.rpartition(":")[2])

    def log(self) -> str:
        return self._log.read_text()

    @contextmanager
    def request(self, method: str, path: str, body: str | None = None) -> Iterator[HTTPResponse]:
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=120)) as connection:
            connection.request(method, path, body)
            with connection.getresponse() as response:
                yield response

    def post(self, body: str) -> tuple[int, Any]:
        with self.request("POST", "/v1/completions", body) as response:
            return response.status, json.load(response)

    def complete(self, prompt: str, max_tokens: int) -> tuple[int, Any]:
        return self.post(json.dumps({"prompt": prompt, "max_tokens": max_tokens}))

    def stream(self, prompt: str, max_tokens: int) -> AbstractContextManager[HTTPResponse]:
        body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "stream": True})
        return self.request("POST", "/v1/completions", body)

    def health(self) -> tuple[int, Any]:
        with self.request("GET", "/health") as response:
            return response.status, json.load(response)

    def total(self, what: str) -> int:
        return sum(engine[what] for engine in self.engines())

    def engines(self) -> list[Any]:
        engines: list[Any] = self.health()[1]["engines"]
        return engines

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def events(response: HTTPResponse) -> Iterator[Any]:
    for line in response:
        if line.startswith(b"data: "):
            yield line[6:].strip().decode()


def written_by_the_whole_model(prompt: str, count: int) -> tuple[str, str]:
    """Return the text, and why it ends; nothing is kept between the steps."""

    async def write() -> tuple[str, str]:
        tokens, text = encode(prompt), []
        for _ in range(count):
            with torch.inference_mode():
                logits = await Model(Config()).forward([Chunk("", 0, tokens + text)], alone)
            text.append(int(logits.argmax()))
            if text[-1] == END:
                return decode(text), "stop"
        return decode(text), "length"

    return asyncio.run(write())


class SilentEngine(Engine):
    """Lets a client wait for each output."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = asyncio.Event()

    def add_request(self, request: Generation) -> None:
        super().add_request({"request_id": request.request_id, "tokens": request.max_tokens})

    async def step(self) -> list[Any]:
        await self.may_go_on.wait()
        self.may_go_on.clear()
        return [Progress(output["request_id"], encode("x"), output.get("finish_reason")) for output in super()._step()]


@pytest.mark.slow_on_uvloop
async def test_stream_of_a_silent_engine_gets_comments_that_keep_it_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_frontend.http.KEEP_ALIVE_S", 0.01)
    engine = SilentEngine()
    sent: asyncio.Queue[Any] = asyncio.Queue()
    asked: asyncio.Queue[Any] = asyncio.Queue()
    body = json.dumps({"prompt": "hello", "max_tokens": 2, "stream": True}).encode()
    asked.put_nowait({"type": "http.request", "body": body, "more_body": False})
    async with served(engine, request_type=Generation, output_type=Progress) as serving:
        scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        answering = asyncio.create_task(Completions(serving.client)(scope, asked.get, sent.put))
        async with asyncio.timeout(30):
            assert (await sent.get())["status"] == 200
            for expected in ("x", "x"):
                for _ in range(2):
                    assert (await sent.get())["body"] == b": the engine is silent\n\n"
                engine.may_go_on.set()
                while (event := (await sent.get())["body"]).startswith(b":"):
                    pass
                assert json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] == expected
            assert (await sent.get())["body"] == b"data: [DONE]\n\n"
            await answering
        assert engine.aborted == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_front_end_serves_and_outlives_its_engines(tmp_path: Path) -> None:
    """One test, because each server, and each of its engines, takes ten seconds to start."""
    server = Server(tmp_path / "log")
    try:
        server.wait_until_it_serves()
        _texts_are_those_of_the_whole_model_token_for_token(server)
        _streams_bring_one_token_after_the_other(server)
        for stream in (True, False):
            _whoever_hangs_up_has_the_request_aborted(server, stream)
        _bad_requests_are_refused(server)
        # On a busy machine the log says now and then what the server waits for.
        lines = server.log().splitlines()
        assert all("engines connected" in line or "no progress for" in line for line in lines), lines
        _fewer_engines_and_more(server)
        _engines_that_make_no_progress_are_named(server)
        _a_killed_engine_fails_its_own_requests_only(server)
        _a_killed_worker_ends_its_engine(server)
        pids = [child.pid for child in psutil.Process(server.process.pid).children(recursive=True)]
        assert len(pids) >= 6  # two engines with two workers each
        assert server.end() == 0
        eventually(lambda: not any(map(psutil.pid_exists, pids)), f"the end of {pids}")
    finally:
        server.close()


def _texts_are_those_of_the_whole_model_token_for_token(server: Server) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda prompt: server.complete(prompt, 40), PROMPTS))
    for prompt, (status, answer) in zip(PROMPTS, answers, strict=True):
        text, reason = written_by_the_whole_model(prompt, 40)
        assert status == 200
        assert answer["choices"] == [{"index": 0, "text": text, "finish_reason": reason}]
        assert answer["object"] == "text_completion"
        assert answer["usage"] == {"prompt_tokens": len(prompt), "completion_tokens": len(text) + (reason == "stop")}
    assert {engine["finished"] > 0 for engine in server.engines()} == {True}


def _streams_bring_one_token_after_the_other(server: Server) -> None:
    with server.stream("hello", 12) as response:
        assert response.getheader("content-type") == "text/event-stream; charset=utf-8"
        *chunks, done = events(response)
    assert done == "[DONE]"
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert len({json.loads(chunk)["id"] for chunk in chunks}) == 1
    text, reason = written_by_the_whole_model("hello", 12)
    assert "".join(choice["text"] for choice in choices) == text
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [reason]


def _whoever_hangs_up_has_the_request_aborted(server: Server, stream: bool) -> None:
    before = server.total("aborted")
    pids = [engine["pid"] for engine in server.engines()]
    connection = HTTPConnection("127.0.0.1", server.port, timeout=30)
    for pid in pids:  # so that no request can be finished before
        psutil.Process(pid).suspend()
    try:
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "x", "max_tokens": 200, "stream": stream}))
        connection.close()
    finally:
        for pid in pids:
            psutil.Process(pid).resume()
    eventually(lambda: server.total("aborted") == before + 1, "the abortion")
    assert server.total("requests") == 0


def _bad_requests_are_refused(server: Server) -> None:
    for body, complaint in (
        ("{", "truncated"),
        ('{"max_tokens": 3}', "prompt"),
        ('{"prompt": ""}', "length >= 1"),
        ('{"prompt": "x", "max_tokens": 0}', "max_tokens"),
        ('{"prompt": "x", "max_tokens": 300}', "more than 256 tokens"),
        ('{"prompt": "x", "stream": true, "max_tokens": 300}', "more than 256 tokens"),
    ):
        status, answer = server.post(body)
        assert status == 400
        assert complaint in answer["error"]["message"]
    assert server.complete("x" * 2_000_000, 1)[0] == 413
    assert server.health()[0] == 200


def _fewer_engines_and_more(server: Server) -> None:
    with server.stream("hello", 100) as response:
        with server.request("POST", "/scale", '{"engines": 1}') as scaled:
            assert [engine["engine"] for engine in json.load(scaled)["engines"]] == [0]
        *_, last, _done = events(response)
        assert "choices" in json.loads(last)
    for body in ("{", '{"engines": 0}'):
        with server.request("POST", "/scale", body) as response:
            assert response.status == 400
    with server.request("POST", "/scale", '{"engines": 2}') as response:
        assert response.status == 200
        assert [engine["state"] for engine in json.load(response)["engines"]] == ["running"] * 2


def _engines_that_make_no_progress_are_named(server: Server) -> None:
    engines = [psutil.Process(engine["pid"]) for engine in server.engines()]

    def states() -> tuple[int, str, list[str]]:
        code, state = server.health()
        return code, state["status"], [engine["state"] for engine in state["engines"]]

    engines[1].suspend()
    eventually(lambda: states() == (200, "degraded", ["running", "stopped"]), "the state of engine 1")
    assert server.complete("hello", 3)[0] == 200
    engines[0].suspend()
    eventually(lambda: states() == (503, "failed", ["stopped", "stopped"]), "the state of engine 0")
    eventually(lambda: all(engine["where"] for engine in server.engines()), "the lines")
    assert all("no progress for" in engine["where"] for engine in server.engines())
    for engine in engines:
        engine.resume()
    eventually(lambda: states() == (200, "ok", ["running", "running"]), "progress")
    assert [engine["where"] for engine in server.engines()] == ["", ""]
    for number, engine in enumerate(engines):
        assert f"engine {number} (pid {engine.pid}) is stopped: no progress for" in server.log()


def _a_killed_engine_fails_its_own_requests_only(server: Server) -> None:
    engines = server.engines()
    culprit = f"engine 1 (pid {engines[1]['pid']}) was killed by SIGKILL"
    with ExitStack() as stack:
        streams = [stack.enter_context(server.stream("hello", 200)) for _ in range(4)]
        for engine in engines:
            psutil.Process(engine["pid"]).suspend()  # what is in flight stays there
        psutil.Process(engines[1]["pid"]).kill()
        eventually(lambda: server.engines()[1]["restarts"] == 1, "the restart")
        psutil.Process(engines[0]["pid"]).resume()
        endings = []
        for stream in streams:
            *_, last, done = events(stream)
            assert done == "[DONE]"
            endings.append(json.loads(last))
    failed = [ending for ending in endings if "error" in ending]
    assert failed == [{"error": {"message": culprit, "type": "engine_dead"}}] * 2
    finished = [ending["choices"][0]["finish_reason"] for ending in endings if "choices" in ending]
    assert len(finished) == 2
    assert None not in finished
    for pid in (engines[1]["pid"], *engines[1]["workers"]):
        eventually(lambda pid=pid: not psutil.pid_exists(pid), f"the end of {pid}")


def _a_killed_worker_ends_its_engine(server: Server) -> None:
    engine = server.engines()[0]
    psutil.Process(engine["workers"][0]).kill()
    eventually(lambda: server.engines()[0]["restarts"] == 1, "the engine's restart")
    eventually(lambda: server.health()[1]["status"] == "ok", "two successors", within_s=60)
    successor, other = server.engines()
    assert (successor["restarts"], other["restarts"]) == (1, 1)
    assert successor["pid"] != engine["pid"]
    assert successor["workers"] != engine["workers"]
    assert f"engine 0 (pid {engine['pid']}) exited with code 1" in successor["cause"]
    assert f"Worker_0 (pid {engine['workers'][0]}) was killed by SIGKILL" in server.log()
    assert server.complete("hello", 3)[0] == 200
    with server.request("GET", "/metrics") as response:
        lines = response.read().decode().splitlines()
    assert {'engine_up{engine="0"} 1', 'engine_restarts_total{engine="0"} 1', "requests_in_flight 0"} <= {*lines}
