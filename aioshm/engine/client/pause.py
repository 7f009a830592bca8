"""The pause of a client's engines: the newest order, and the engines that have not answered it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from aioshm.engine.client.engines import Engine
from aioshm.engine.client.requests import PendingCall
from aioshm.engine.protocol.messages import (
    NO_ORDER,
    PAUSE,
    EngineCoreRequestType,
    PauseMode,
    PauseOrder,
    describe_unpaused,
    encode,
    order_or_none,
)
from aioshm.errors import CallFailed, EngineDead, RequestFailed, RoleError, copy_error

if TYPE_CHECKING:
    from aioshm.engine.client.link import EngineLink

_UTILITY = EngineCoreRequestType.UTILITY.value


class PauseOfEngines:
    """Passes the newest order on to all engines, and waits until they have obeyed."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self.order: PauseOrder = NO_ORDER
        self._changed = asyncio.Event()

    @property
    def unanswered(self) -> list[int]:
        """The ranks of the engines that have not answered the order."""
        return [engine.rank for engine in self._link.engines if engine.order is not None]

    async def pause(self, mode: PauseMode, timeout: float | None) -> None:
        # Also with the same mode: a client that has resumed since may not be known yet.
        self.obey(self.order.next(self._link.index, mode))
        try:
            async with asyncio.timeout(timeout):
                while self.order.mode and not self._settled():
                    await self._changed.wait()
        except TimeoutError:
            if not self._settled():  # else the last engine has answered in the iteration of the timeout
                raise TimeoutError(describe_unpaused(self.unanswered, timeout)) from None
        if not self.order.mode:
            raise RoleError("the engines were resumed before pause() has returned")

    async def resume(self) -> None:
        order = self.order.next(self._link.index, "")
        self.obey(order)
        while self.order == order and not self._settled():
            await self._changed.wait()

    def _settled(self) -> bool:
        """Return whether all engines have answered the order; raise if one never will."""
        self._link.check_open()
        for engine in self._link.engines:
            if engine.refusal is not None:
                raise copy_error(engine.refusal)
        self._changed.clear()
        return not self.unanswered

    # Orders

    def obey(self, order: PauseOrder) -> None:
        """Pause or resume, and pass the order on, unless it is not newer than the known one."""
        if order <= self.order:
            return
        link = self._link
        self.order = order
        if order.mode == "abort":
            sent = [request_id for request_id, inbox in link.pending.inboxes.items() if inbox.engine is not None]
            link.end_and_abort(sent, ": the engines were paused")
        for engine in link.engines:
            engine.refusal = None
            if engine.registration is not None:
                self._give(engine)
        if not order.mode:
            self._send_waiting()
        self._change()

    def notice(self, fields: Any) -> None:
        """Obey an order that an engine has reported."""
        self.obey(order_or_none(fields))

    def meet(self, engine: Engine, order: PauseOrder) -> None:
        """Give an engine that has registered the order, unless the engine knows a newer one."""
        engine.refusal = None
        if order > self.order:
            self.obey(order)
        elif self.order.mode or (order.mode and order != self.order):
            self._give(engine)

    def _give(self, engine: Engine) -> None:
        link = self._link
        engine.order = None
        if engine.of_vllm and self.order.client != link.index:
            return  # vLLM's calls are not idempotent: one client makes them
        method, args = self.order.call(of_vllm=engine.of_vllm)
        call = engine.order = link.pending.call(method, engine)
        call.answer.add_done_callback(lambda _: self._answered(call))
        try:
            link.send(engine, _UTILITY, [encode((link.index, call.call_id, method, args))])
        except EngineDead as error:  # its death will be reported
            call.answer.set_exception(error)

    def _answered(self, call: PendingCall) -> None:
        """Note the answer of an engine, or its death."""
        error = call.answer.exception()
        if call.engine.order is call:
            call.engine.order = None
            if isinstance(error, CallFailed):
                call.engine.refusal = error
        self._link.pending.forget([call])
        if error is None and call.method == PAUSE:
            self.notice(call.answer.result())
        self._change()

    def _send_waiting(self) -> None:
        """Send the requests that waited for the end of the pause; one without an engine fails."""
        link = self._link
        for request_id, inbox in list(link.pending.inboxes.items()):
            if inbox.engine is not None or inbox.ended:
                continue
            try:
                link.send_request(inbox, link.engines.choose(inbox.wanted), inbox.request or [])
            except EngineDead as error:
                link.pending.finish(request_id, error)
            except ValueError as error:
                failure = RequestFailed(str(error), engine=inbox.wanted, request_id=request_id)
                link.pending.finish(request_id, failure)

    def _change(self) -> None:
        self._changed.set()
        self._link.report_progress()
