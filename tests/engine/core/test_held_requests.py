"""A paused engine: requests that it holds, orders that come late, and clients of other makers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from served_engine import Engine, Serving, ask, collected, served, until

from aioshm.engine.core.sockets import FrontEnd
from aioshm.engine.protocol.messages import PAUSE
from aioshm.errors import RequestAborted

pytestmark = pytest.mark.usefixtures("runtime_dir")

encode = msgspec.msgpack.encode


class Parts(Engine):
    """Takes a request in parts: the last one has ``tokens``."""

    def add_request(self, request: Any) -> None:
        former = self.requests.get(request["request_id"])
        if former is None:
            super().add_request(request)
        else:
            former["tokens"] = request["tokens"]
            self.given[request["request_id"]] = 0


def send(serving: Serving, kind: bytes, payload: Any, client: int = 1) -> None:
    """Send a message as a front end of another maker does."""
    serving.clients[client]._link.sockets.send(b"\0\0", kind, [encode(payload)])


async def handled(serving: Serving, client: int = 1) -> None:
    """Wait until the engine has handled all messages of a client."""
    await serving.clients[client].call("report")


class TestHeld:
    async def test_aborted_requests_are_dropped(self) -> None:
        engine = Engine()
        async with served(engine, n_clients=3) as serving:
            one, other, third = serving.clients
            await one.pause("keep")
            streams = [other.submit(ask(each, 2)) for each in "abc"]  # this client does not know of the pause
            await streams[1].aclose()
            await handled(serving)
            await one.resume()
            assert len(await collected(streams[0])) == len(await collected(streams[2])) == 2
            await one.pause("keep")
            stream = third.submit(ask("d"))
            await handled(serving, 2)
            await one.pause("abort")
            with pytest.raises(RequestAborted, match="paused"):
                await collected(stream)
            await handled(serving, 2)
            await one.resume()
            assert len(await collected(one.submit(ask("e")))) == 3
            assert engine.seen == ["a", "c", "e"]

    async def test_request_of_a_client_that_is_gone_is_dropped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = Engine()
        gone: list[int] = []
        # Nothing else shows that the engine has noticed.
        monkeypatch.setattr(FrontEnd, "connect_again", lambda front_end, _: gone.append(front_end.client))
        async with served(engine, n_clients=2) as serving:
            one, other = serving.clients
            await one.pause()
            send(serving, b"\x00", ask("a"))
            send(serving, b"\x00", ask("b"), client=0)
            await handled(serving)
            await handled(serving, 0)
            await other.aclose()
            await until(lambda: gone == [1])
            await one.resume()
            assert len(await collected(one.submit(ask("c")))) == 3
            assert engine.seen == ["b", "c"]

    async def test_part_of_an_open_request_is_not_held(self) -> None:
        engine = Parts()
        async with served(engine, n_clients=2) as serving:
            one = serving.client
            await collected(one.submit(ask("first")))
            send(serving, b"\x00", ask("a", None))
            await until(lambda: "a" in engine.seen)
            await one.pause("keep")
            send(serving, b"\x00", ask("a", 2))
            await handled(serving)
            assert engine.seen == ["first", "a"]
            await one.pause("finish")  # the request ends
            assert not engine.requests
            await one.resume()

    async def test_request_of_another_client_with_the_same_id_is_refused_after_the_pause(self) -> None:
        engine = Engine()
        async with served(engine, n_clients=2) as serving:
            one, other = serving.clients
            stream = one.submit(ask("a", None))  # without an end: the request is open during the pause
            assert await anext(stream)
            await one.pause("keep")
            send(serving, b"\x00", ask("a"))
            await handled(serving)
            late = other.late_outputs
            await one.resume()
            await until(lambda: other.late_outputs == late + 1)
            assert engine.seen == [*engine.requests] == ["a"]


class TestOrders:
    async def test_old_order_changes_nothing_and_is_answered_with_the_newest(self) -> None:
        engine = Engine()
        async with served(engine) as serving:
            await serving.client.pause()
            newest = serving.client.pause_order()
            assert await serving.client.call(PAUSE, 1, 0, "", engine=0) == [*newest]
            stream = serving.client.submit(ask("a"))
            assert await serving.client.call("report") == [{**(await serving.client.call("report"))[0], "seen": 0}]
            await serving.client.resume()
            assert len(await collected(stream)) == 3

    async def test_invalid_order_is_ignored(self, caplog: pytest.LogCaptureFixture) -> None:
        async with served(Engine()) as serving:
            for args in ([], [1, 0, "sleep"], ["1", 0, ""], [-1, 0, ""]):
                send(serving, b"\x03", [0, 5, PAUSE, args], client=0)
            assert len(await collected(serving.client.submit(ask("a")))) == 3
            assert "no PauseOrder" in caplog.text

    async def test_requests_of_a_front_end_of_vllm_end_with_an_error_output(self) -> None:
        engine = Engine()
        async with served(engine, n_clients=2) as serving:
            one, other = serving.clients
            send(serving, b"\x00", ask("a", None))
            await until(lambda: other.late_outputs == 1)
            outputs = []
            take = other._link.pending.take

            def taken(frames: list[Any], sender: int | None = None) -> list[Any]:
                outputs.extend(msgspec.msgpack.decode(frames[0])[1])
                return take(frames, sender)

            other._link.pending.take = taken  # type: ignore[method-assign]
            await one.pause("abort")
            await until(lambda: outputs)
            assert outputs == [
                {"request_id": "a", "finish_reason": "error", "error": "aborted: the engines were paused"}
            ]
            assert engine.aborted == ["a"]
            send(serving, b"\x00", ask("b", 1))
            await handled(serving)
            assert engine.seen == ["a"]
            await one.resume()
            await until(lambda: engine.seen == ["a", "b"])
            assert other.paused is None
