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
from engine_frontend.workers import ModelWorker  # noqa: E402
from served_engine import Engine, served  # noqa: E402

PROMPTS = ("hello", "The quick brown fox", "x", "1 + 1 = ", "What? " * 20)


class Server:
    """The front end as a process of its own, ready."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engine_frontend", "--port", "0", *arguments],
            cwd=EXAMPLES,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.started = []
        for line in self.process.stdout:
            self.started.append(line.strip())
            if line.startswith("serving on"):
                break
        else:
            raise AssertionError(self.process.communicate())
        self.port = int(self.started[-1].rpartition(":")[2])

    @contextmanager
    def request(self, method: str, path: str, body: str | None = None) -> Iterator[HTTPResponse]:
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
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
        return sum(engine[what] for engine in self.health()[1]["engines"])

    def end(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGTERM)
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Return one that serves every test; ended, it leaves nothing, and has said nothing."""
    server = Server()
    try:
        yield server
        pids = [child.pid for child in psutil.Process(server.process.pid).children(recursive=True)]
        assert len(pids) >= 6  # two engines with two workers each
        code, errors = server.end()
        # On a busy machine it says now and then what it waits for.
        said = [line for line in errors.splitlines() if "engines connected" not in line]
        assert (code, said) == (0, [])
        eventually(lambda: not any(map(psutil.pid_exists, pids)), f"the end of {pids}")
    finally:
        server.close()


@pytest.fixture
def changing_server() -> Iterator[Server]:
    """Return one for a test that changes its processes, which are to end with the test."""
    server = Server()
    yield server
    if server.process.poll() is None:
        server.end()
    server.close()


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


@pytest.fixture
def inferring() -> Iterator[None]:
    """Leave torch as it was: workers in one thread, whose blocks are not one within the other, would not."""
    with torch.inference_mode():
        yield


@pytest.mark.usefixtures("inferring")
async def test_the_ranks_logits_are_those_of_the_whole_model() -> None:
    config = Config()
    workers = [ModelWorker(config, 2, rank) for rank in range(2)]
    try:
        handles = [worker.open() for worker in workers]
        await asyncio.gather(*(worker.connect(handles) for worker in workers))
        batch = [Chunk(prompt, 0, encode(prompt)) for prompt in PROMPTS]
        after = [Chunk(prompt, len(encode(prompt)), [number]) for number, prompt in enumerate(PROMPTS)]
        whole = Model(config)
        for step in (batch, after, after[1:2]):  # the last one's second token again: what follows three
            with torch.inference_mode():
                wanted = await whole.forward(step, alone)
            parts = await asyncio.gather(*(worker.logits(step) for worker in workers))
            torch.testing.assert_close(torch.cat(parts, 1), wanted, rtol=1e-4, atol=1e-5)
        await asyncio.gather(*(worker.step(batch[:1], PROMPTS) for worker in workers))
        assert [worker.kept() for worker in workers] == [[PROMPTS[0]]] * 2
    finally:
        for worker in workers:
            await worker.close()


@pytest.mark.slow
def test_texts_are_those_of_the_whole_model_token_for_token(server: Server) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda prompt: server.complete(prompt, 40), PROMPTS))
    for prompt, (status, answer) in zip(PROMPTS, answers, strict=True):
        text, reason = written_by_the_whole_model(prompt, 40)
        assert status == 200
        assert answer["choices"] == [{"index": 0, "text": text, "finish_reason": reason}]
        assert answer["object"] == "text_completion"
        assert answer["usage"] == {"prompt_tokens": len(prompt), "completion_tokens": len(text) + (reason == "stop")}
    assert {engine["finished"] > 0 for engine in server.health()[1]["engines"]} == {True}


@pytest.mark.slow
def test_streams_bring_one_token_after_the_other(server: Server) -> None:
    with server.stream("hello", 12) as response:
        assert response.getheader("content-type") == "text/event-stream; charset=utf-8"
        *chunks, done = events(response)
    assert done == "[DONE]"
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert len({json.loads(chunk)["id"] for chunk in chunks}) == 1
    text, reason = written_by_the_whole_model("hello", 12)
    assert "".join(choice["text"] for choice in choices) == text
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [reason]


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
@pytest.mark.parametrize("stream", [True, False])
def test_whoever_hangs_up_has_the_request_aborted(server: Server, stream: bool) -> None:
    before = server.total("aborted")
    pids = [engine["pid"] for engine in server.health()[1]["engines"]]
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


@pytest.mark.slow
def test_bad_requests_are_refused(server: Server) -> None:
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


@pytest.mark.slow
def test_health_names_engines_that_make_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOSHM_STALL_WARNING_S", "1")
    server = Server("--engines", "2", "--workers", "1")
    try:
        engines = [psutil.Process(engine["pid"]) for engine in server.health()[1]["engines"]]

        def states() -> tuple[int, str, list[str]]:
            code, state = server.health()
            return code, state["status"], [engine["state"] for engine in state["engines"]]

        engines[1].suspend()
        eventually(lambda: states() == (200, "degraded", ["running", "stopped"]), "the state of engine 1")
        assert server.complete("hello", 3)[0] == 200
        engines[0].suspend()
        eventually(lambda: states() == (503, "failed", ["stopped", "stopped"]), "the state of engine 0")
        eventually(lambda: all(engine["where"] for engine in server.health()[1]["engines"]), "the lines")
        assert all("no progress for" in engine["where"] for engine in server.health()[1]["engines"])
        for engine in engines:
            engine.resume()
        eventually(lambda: states() == (200, "ok", ["running", "running"]), "progress")
        assert [engine["where"] for engine in server.health()[1]["engines"]] == ["", ""]
        code, errors = server.end()
        assert code == 0
        for number, engine in enumerate(engines):
            assert f"engine {number} (pid {engine.pid}) is stopped: no progress for" in errors
    finally:
        server.close()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_engines_die_come_back_become_more_and_fewer(changing_server: Server) -> None:
    """In one test: such a server takes ten seconds to start, and its processes are to end with the test."""
    _a_killed_engine_fails_its_own_requests_only(changing_server)
    killed = _a_killed_worker_ends_its_engine_which_comes_back(changing_server)
    _more_engines_and_fewer(changing_server)
    code, errors = changing_server.end()
    assert code == 0
    assert f"Worker_0 (pid {killed}) was killed by SIGKILL" in errors


def _a_killed_worker_ends_its_engine_which_comes_back(server: Server) -> int:
    [engine, _] = server.health()[1]["engines"]
    psutil.Process(engine["workers"][0]).kill()
    eventually(lambda: server.health()[1]["engines"][0]["restarts"] == 1, "the engine's restart")
    eventually(lambda: server.health()[1]["status"] == "ok", "its successor")
    [successor, _] = server.health()[1]["engines"]
    assert successor["pid"] != engine["pid"]
    assert successor["workers"] != engine["workers"]
    assert f"engine 0 (pid {engine['pid']}) exited with code 1" in successor["cause"]
    assert server.complete("hello", 3)[0] == 200
    with server.request("GET", "/metrics") as response:
        lines = response.read().decode().splitlines()
    assert {'engine_up{engine="0"} 1', 'engine_restarts_total{engine="0"} 1', "requests_in_flight 0"} <= {*lines}
    return int(engine["workers"][0])


def _a_killed_engine_fails_its_own_requests_only(server: Server) -> None:
    engines = server.health()[1]["engines"]
    culprit = f"engine 1 (pid {engines[1]['pid']}) was killed by SIGKILL"
    with ExitStack() as stack:
        streams = [stack.enter_context(server.stream("hello", 200)) for _ in range(4)]
        for engine in engines:
            psutil.Process(engine["pid"]).suspend()  # what is in flight stays there
        psutil.Process(engines[1]["pid"]).kill()
        eventually(lambda: server.health()[1]["engines"][1]["restarts"] == 1, "the restart")
        psutil.Process(engines[0]["pid"]).resume()
        endings = []
        for stream in streams:
            *_, last, done = events(stream)
            assert done == "[DONE]"
            endings.append(json.loads(last))
    failed = [ending for ending in endings if "error" in ending]
    assert failed == [{"error": {"message": culprit, "type": "engine_dead"}}] * 2
    assert [ending["choices"][0]["finish_reason"] is not None for ending in endings if "choices" in ending] == [
        True
    ] * 2
    eventually(lambda: server.health()[1]["status"] == "ok", "two engines again")
    status, health = server.health()
    assert (status, [engine["restarts"] for engine in health["engines"]]) == (200, [0, 1])
    for pid in (engines[1]["pid"], *engines[1]["workers"]):
        eventually(lambda pid=pid: not psutil.pid_exists(pid), f"the end of {pid}")


def _more_engines_and_fewer(server: Server) -> None:
    with server.request("POST", "/scale", '{"engines": 3}') as response:
        assert response.status == 200
        assert [engine["state"] for engine in json.load(response)["engines"]] == ["running"] * 3
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
