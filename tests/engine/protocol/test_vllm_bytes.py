"""A client against captured bytes of a vLLM engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import torch
import zmq
from peers import BareEngine, pack
from served_engine import clients_of, collected, here_and_there
from test_messages import HALVES, FieldOutput, FieldRequest, field

from aioshm.engine import EngineClient
from aioshm.errors import CallFailed, EngineDead

pytestmark = pytest.mark.usefixtures("runtime_dir")


@asynccontextmanager
async def vllm_engine(output_type: Any) -> AsyncIterator[tuple[EngineClient, BareEngine]]:
    async with clients_of(here_and_there(), 1, 1, output_type=output_type) as serving:
        ready = {"max_model_len": 4096, "num_gpu_blocks": 7, "vllm_version": "0.33.0"}
        with zmq.Context() as context, BareEngine(context, serving.client, **ready) as engine:
            await serving.client.wait_until_ready(10)
            yield serving.client, engine


@pytest.mark.parametrize("output_type", [FieldOutput, None])
async def test_requests_and_outputs(output_type: Any) -> None:
    async with vllm_engine(output_type) as (client, engine):
        assert client.ready[0]["max_model_len"] == 4096
        one = client.submit(FieldRequest("req-1", [1, 2, 300], prompt_embeds=torch.ones(100), client_index=9))
        kind, main, tensor = await engine.hears()
        assert kind == b"\x00"
        assert msgspec.msgpack.decode(main)[9:12] == [["float32", [100], 1], None, 0]
        assert tensor == torch.ones(100).numpy().tobytes()
        two = client.submit(FieldRequest("req-2", [1]))
        await engine.hears()
        engine.push.send_multipart(field("outputs"))
        [last] = await collected(two)
        tokens = last[1] if output_type is None else last.new_token_ids
        assert tokens == [6, 7]
        assert await anext(one)
        engine.push.send_multipart(field("outputs with tensors"))
        [last] = await collected(one)
        halves = last[4] if output_type is None else last.pooling_output
        assert torch.equal(halves, HALVES)
        await collected(two)


async def test_short_envelopes_are_envelopes() -> None:
    async with vllm_engine(FieldOutput) as (client, engine):
        stream = client.submit(FieldRequest("a", [1]))
        engine.push.send(pack([0, [["a", [1]]]]))
        engine.push.send(pack([0, [], None, 1.5, None, ["a"]]))
        assert len(await collected(stream)) == 1


async def test_a_refused_request() -> None:
    async with vllm_engine(FieldOutput) as (client, engine):
        stream = client.submit(FieldRequest("req-1", [1]))
        engine.push.send_multipart(field("refused request"))
        [last] = await collected(stream)
        assert last.finish_reason == 3


async def test_aborts_and_calls() -> None:
    async with vllm_engine(None) as (client, engine):
        for number in (1, 2):
            client.submit(FieldRequest(f"req-{number}", [1]))
            await engine.hears()
            assert await engine.hears() == [b"\x01", pack([f"req-{number}"])]
        calling = asyncio.create_task(client.call("collective_rpc", "echo", 1.5, None, ("x",), {"k": True}, engine=0))
        kind, payload = await engine.hears()
        client_index, call_id, *call = msgspec.msgpack.decode(payload)
        assert (kind, client_index) == (b"\x03", 0)
        assert call == ["collective_rpc", ["echo", 1.5, None, ["x"], {"k": True}]]
        engine.push.send(pack([0, [], None, 1.0, [call_id, None, [None, [1]]]]))
        assert await calling == [1]
        calling = asyncio.create_task(client.call("x", engine=0))
        call_id = msgspec.msgpack.decode((await engine.hears())[1])[1]
        engine.push.send(pack([0, [], None, 1.0, [call_id, "Call to x method failed: no", None]]))
        with pytest.raises(CallFailed, match="Call to x method failed: no"):
            await calling


@pytest.mark.slow_on_uvloop
@pytest.mark.parametrize("ends", [True, False], ids=["and ends", "and lives on"])
async def test_its_death(ends: bool) -> None:
    async with vllm_engine(None) as (client, engine):
        stream = client.submit(FieldRequest("a", [1]))
        engine.push.send(b"ENGINE_CORE_DEAD")
        if ends:
            engine.push.close(linger=1000)
            engine.dealer.close(linger=0)
        with pytest.raises(EngineDead) as caught:
            await anext(stream)
        assert caught.value.engine == 0
