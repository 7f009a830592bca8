"""Front ends on an engine's host that read slowly, or not at all: their waiting outputs are bounded, and in order."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import zmq
from peers import BareClient, received
from served_engine import Engine, Serving, ask, collected, here_and_there, served, until

from aioshm.engine import run_engine_core
from aioshm.engine.core.sockets import CoreSockets
from aioshm.engine.protocol.messages import EnvelopeDecoder
from aioshm.errors import OutOfDescriptors

pytestmark = pytest.mark.usefixtures("runtime_dir")

CHUNK = 1 << 16
WITHIN_S = 30.0


class Streaming(Engine):
    """Gives each request an array in each step: always the same one, or its first item if a little is enough."""

    def __init__(self, pause_s: float = 0.0) -> None:
        super().__init__()
        self.pause_s = pause_s
        self.array = np.zeros(CHUNK, np.uint8)
        self.steps = 0

    async def step(self) -> list[dict[str, Any]]:
        await asyncio.sleep(self.pause_s)
        self.steps += 1
        self.array[:] = self.steps % 256
        ended = [each for each, request in self.requests.items() if request["tokens"] == self.steps]
        for each in ended:
            del self.requests[each]
        outputs = [
            {"request_id": each, "array": self.array[: 1 if each.startswith("little") else CHUNK]}
            for each in self.requests
        ]
        return outputs + [{"request_id": each, "finish_reason": "length"} for each in ended]


async def outputs(front_end: BareClient) -> list[Any]:
    """Return the outputs of the next message; the text of a message that is no envelope."""
    frames = await received(front_end.pull)
    return [frames[0].decode()] if len(frames[0]) == 16 else EnvelopeDecoder(None).decode(frames).outputs


@asynccontextmanager
async def beside_unread(engine: Engine, **options: Any) -> AsyncIterator[tuple[Serving, BareClient]]:
    """Let an engine serve a client, and a front end whose sockets have hardly any buffers, and that reads nothing."""
    addresses = here_and_there(2)
    with zmq.Context() as context:
        unread = BareClient(context, addresses, 1)
        unread.pull.setsockopt(zmq.RCVHWM, 1)
        unread.pull.setsockopt(zmq.RCVBUF, 1 << 16)
        with unread:
            async with served(engine, addresses=addresses, **options) as serving:
                yield serving, unread


async def test_front_end_that_reads_nothing_is_dropped_by_name_and_can_come_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[Exception] = []
    opened = CoreSockets.open

    def open_or_fail(sockets: CoreSockets, kind: int, address: str, **options: Any) -> Any:
        if kind == zmq.PUSH and failures:
            raise failures.pop()
        return opened(sockets, kind, address, **options)

    monkeypatch.setattr(CoreSockets, "open", open_or_fail)
    monkeypatch.setattr("aioshm.engine.core.sockets.RECONNECT_WITHOUT_KEYS_S", 0.05)
    engine = Streaming(0.001)  # without a pause an engine outruns its readers, where processors are scarce
    async with beside_unread(engine, max_pending_bytes=1 << 20) as (serving, unread):
        await unread.hears()
        failures += [OutOfDescriptors(errno.EMFILE, "no descriptor")] * 2
        stream = serving.client.submit(ask("little", None))
        await anext(stream)
        unread.submit(ask("stuck", None))
        with caplog.at_level(logging.WARNING, "aioshm.engine"):
            async with asyncio.timeout(WITHIN_S):
                while not engine.aborted:
                    await anext(stream)
        assert engine.aborted == ["stuck"]
        assert list(engine.requests) == ["little"]
        (text,) = [each for each in caplog.messages if "dropped" in each]
        assert text.startswith(f"engine 0 dropped front end 1 ({serving.client.addresses.outputs[1]}), ")
        waiting = int(text.split(": ")[1].split()[0])
        assert 1 << 20 < waiting < (1 << 20) + 3 * CHUNK
        await unread.hears()
        assert not failures
        assert [("tries later" in each) for each in caplog.messages].count(True) == 2
        unread.submit(ask("little and late", None))
        async with asyncio.timeout(WITHIN_S):
            while not any(each["request_id"] == "little and late" for each in await outputs(unread)):
                pass
        await anext(stream)


async def test_front_end_that_reads_after_the_end_gets_every_output_as_it_was_in_its_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aioshm.engine.core.sockets.LINGER_MS", 1000 * int(WITHIN_S))  # a slow machine reads slowly
    engine = Streaming()
    async with beside_unread(engine) as (serving, unread):
        await unread.hears()
        unread.submit(ask("late", 200))
        await until(lambda: engine.seen and not engine.requests)
        for task in serving.running:
            task.cancel()
        steps = []
        while "finish_reason" not in (output := (await outputs(unread))[0]):
            assert len(set(output["array"].tobytes())) == 1
            steps.append(int(output["array"][0]))
        assert steps == [number % 256 for number in range(steps[0], 200)]
        while (await outputs(unread)) != ["ENGINE_CORE_DEAD"]:
            pass


async def test_answers_and_large_outputs_beyond_the_bound_arrive() -> None:
    async with served(Engine(), max_pending_bytes=1) as serving:
        arrays = [np.full(1 << 18, number, np.uint8) for number in range(40)]
        answers = await asyncio.gather(*(serving.client.call("give", array, engine=0) for array in arrays))
        for array, answer in zip(arrays, answers, strict=True):
            np.testing.assert_array_equal(answer, array)
        large = "x" * (4 << 20)
        requests = [ask(name, output={"request_id": name, "text": large, "finish_reason": "length"}) for name in "abc"]
        for outputs in await asyncio.gather(*(collected(serving.client.submit(each)) for each in requests)):
            assert [output["text"] for output in outputs] == [large]


@pytest.mark.parametrize(("value", "kind"), [(0, ValueError), (1.5, TypeError)])
async def test_bound_that_makes_no_sense_is_refused_by_name(value: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="max_pending_bytes must be"):
        await run_engine_core(Engine(), "ipc:///nowhere", 0, max_pending_bytes=value)
