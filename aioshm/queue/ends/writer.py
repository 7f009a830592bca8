"""The writer of a queue: admits readers, and sends to local and remote readers."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from pickle import PickleBuffer
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

import msgspec

from aioshm.arguments import check_int
from aioshm.codec import Codec, Encoded, PickleCodec
from aioshm.errors import AioshmError, PeerClosed, QueueFull
from aioshm.process.limits import shortage
from aioshm.queue.closing import Closable
from aioshm.queue.ends.blocks import Loan, Message, itself, room_for
from aioshm.queue.ends.sender import Sender, encode_all
from aioshm.queue.handle import Answers, Handle, host_id
from aioshm.queue.local.loans import ArraySpec
from aioshm.queue.local.readers import LocalReaders
from aioshm.queue.membership import Change, ReaderInfo
from aioshm.queue.names.files import OwnFile
from aioshm.queue.names.registry import register
from aioshm.queue.registry import ReaderRegistry
from aioshm.queue.state import EndState
from aioshm.queue.stats import QueueStats
from aioshm.ring.cores import Calls
from aioshm.ring.layout import VERSION
from aioshm.wait.limits import deadline_after, seconds, settle

if TYPE_CHECKING:  # a queue that has only local readers does not import ZeroMQ
    from aioshm.queue.remote.readers import RemoteReaders

logger: logging.Logger = logging.getLogger("aioshm.queue")


class Writer(Closable):
    """Admits readers, sends to them, and handles their deaths."""

    def __init__(
        self,
        state: EndState,
        n_reader: int,
        ring: LocalReaders,
        network: RemoteReaders | None,
        codec: Codec,
        connect_ip: str | None,
        name: str | None = None,
    ) -> None:
        self.state = state
        state.name = name or ring.queue_id.hex()[:8]
        self._name = name
        self._registration: OwnFile | None = None
        self.ring = ring
        self.network = network
        # The readers by rank, local and remote.
        self.registry: ReaderRegistry = ring.registry
        self.registry.name = state.name
        self._transports: list[LocalReaders | RemoteReaders] = [ring]
        self._n_reader = n_reader
        self._codec = codec
        self._connect_ip = connect_ip
        self._listening = False
        self._close_announced = False
        # The error of every call, because of readers that are gone.
        self._refused: Callable[[], AioshmError] | None = None
        self.sender: Sender = Sender(state, ring, network, codec)
        self.send: Callable[[Any], Any] = self.sender.send
        state.core = ring.ring
        # The coroutines of the async API; None with remote readers.
        self.calls: Calls | None = None
        n_remote = 0
        if network is None:
            self.calls = Calls(self.enqueue)
            self.calls.core = state.core
        else:
            self._transports.append(network)
            n_remote = len(set(network.ranks).difference(ring.ranks))
        ring.ring.describe(name, codec.code, ring.ranks, n_remote)
        state.set_end(self)

    def label(self, name: str) -> None:
        """Name the queue in commands, logs and errors; no reader can search for this name."""
        self.state.name = self.registry.name = name
        self.ring.ring.write_name(name)

    def export_handle(self) -> Handle:
        """Return the handle for readers."""
        ring = self.ring
        sizes = ring.ring.layout
        answers: Answers = "always"
        if self.state.blocks:
            answers = "by a thread"
        remote = None
        if self.network is not None:
            remote = self.network.address
        return Handle(
            version=VERSION,
            queue_id=ring.queue_id,
            token=ring.token,
            host=host_id(),
            uid=os.geteuid(),
            n_reader=self._n_reader,
            local_reader_ranks=ring.ranks,
            max_chunk_bytes=sizes.max_chunk_bytes,
            max_chunks=sizes.max_chunks,
            slots=sizes.slots,
            inline_bytes=sizes.inline_bytes,
            lifeline=ring.listener.address,
            segment=ring.segment_name,
            codec=self._codec.name,
            connect_ip=self._connect_ip,
            remote=remote,
            options=self.state.options,
            answers=answers,
            name=self._name,
        )

    def register(self) -> None:
        """Register the queue's name; close this end if that fails."""
        if self._name is None:
            return
        try:
            self._registration = register(self._name, self.state.options.runtime_dir, self.export_handle())
        except BaseException:
            self.state.discard()
            raise

    # Attaching

    async def wait_until_ready(self, deadline: float | None, *, replaceable: bool = True) -> None:
        """Wait until every reader is attached; ``replaceable``: a reader that left early may be replaced."""
        state = self.state
        state.bind()
        self.listen()
        stall = state.stall(self._report_missing)
        try:
            while not (self.registry.complete and self._is_complete()):
                if self.registry.departed():
                    self._check_left(replaceable)
                    if self.registry.complete:
                        continue
                await settle(state.news(), deadline=deadline, stall=stall)
                state.check_usable()
        except TimeoutError:
            missing = f"{state!r}: not attached yet: {', '.join(self.registry.missing())}"
            raise self.ring.listener.lacking or shortage(missing) or TimeoutError(missing) from None
        if not state.ready:
            state.ready = True
            state.new_poller(self.ring.ring, self.ring.pids(), self.ring.listener.doorbell)
            self.registry.going = True
            for transport in self._transports:
                transport.go()
            logger.debug("%r: %d readers", state, self.registry.alive)
            state.reopen()

    def listen(self) -> None:
        """Belong to the running loop and start to admit readers. Idempotent."""
        loop = self.state.loop or self.state.bind()
        self.state.check_owner()
        if not self._listening:
            self._listening = True
            self.registry.changed = self._changed
            for transport in self._transports:
                transport.start(loop)

    def _changed(self) -> None:
        """Check the readers and the ring again."""
        state, registry = self.state, self.registry
        trouble = registry.trouble
        if trouble is None and self._n_reader and self._listening and registry.complete and not registry.in_use:
            trouble = functools.partial(PeerClosed, f"queue {state.name}: every reader has left")
        if self._refused is not None and trouble is not self._refused:
            state.accept_again(self._refused)
            self._refused = None
        if trouble is not None and state.refusal is None:
            self._refused = trouble
            state.refuse(trouble)
        else:
            state.interrupt()

    def _poll(self) -> None:
        """Handle arrivals and departures of readers that the loop has not handled yet."""
        for transport in reversed(self._transports):
            transport.poll()

    def _check_usable(self) -> None:
        """Raise this end's error, unless a replacement for a dead reader has just arrived."""
        if self._refused is not None and self.state.refusal is self._refused:
            self._poll()
        self.state.check_usable()

    def _is_complete(self) -> bool:
        """Return whether no reader is missing, after handling the latest arrivals and departures."""
        self._poll()
        return self.registry.complete

    def _check_left(self, replaceable: bool) -> None:
        """Raise, once, for a reader that died early, or left and cannot be replaced."""
        self.ring.poll()  # a replacement may have arrived
        died = self.registry.pop_death()
        if died is not None:
            raise died
        left = self.registry.departed()
        if left and not replaceable:
            raise PeerClosed(f"{self.state!r}: not all readers will attach: {', '.join(left)}")

    # Membership

    def readers(self) -> tuple[ReaderInfo, ...]:
        """See `aioshm.MessageQueue.readers`."""
        if self.state.closed:
            return ()
        self.state.check_owner()
        if self._listening:
            self._poll()
        return self.registry.readers()

    def dismiss(self, rank: int) -> None:
        """Continue without a reader, as `aioshm.MessageQueue.dismiss`."""
        check_int("rank", rank, minimum=0)
        self.state.check_owner()
        self.registry.dismiss(rank)

    # Sending

    async def enqueue(self, outcome: Any, obj: Any, timeout: float | None) -> None:
        """Send an object after `send` did not; ``outcome``: the answer or exception of `send`, or None."""
        if isinstance(outcome, Exception):
            raise outcome
        deadline = deadline_after(timeout)
        if outcome is None or outcome is False:
            await self.prepare(deadline)
            outcome = self.sender.encode(obj)
        await self.send_one(outcome, deadline)

    async def send_one(self, message: Encoded, deadline: float | None) -> None:
        """Send an encoded object; this end is ready."""
        core = self.state.core
        if not (core.open and self.sender.put(message)):
            await self._put_waiting([message], deadline)

    async def wait_for_room(self, message: Encoded, deadline: float | None) -> bool:
        """Wait for room in the ring, or for news, on the poller only; return False if there is room already."""
        sender = self.sender
        need = sender.need([message])
        if sender.has(need):
            return False
        await sender.wait(need, deadline)
        return True

    async def enqueue_many(self, objs: Iterable[Any], timeout: float | None) -> None:
        """Send objects, as `aioshm.MessageQueue.enqueue_many`."""
        deadline = deadline_after(timeout)
        if not self.state.core.passes():
            await self.prepare(deadline)
        await self.send_many(encode_all(self.sender.encode, objs), deadline)

    async def send_many(self, messages: list[Encoded], deadline: float | None) -> None:
        """Send encoded objects; this end is ready."""
        sender = self.sender
        need = sender.need(messages)
        parts = sender.parts(messages, need)
        if self.state.core.passes() and len(parts) == 1 and sender.has(need):
            sender.put_all(messages)
            return
        for part in parts:
            await self._put_waiting(part, deadline)

    def enqueue_nowait(self, obj: Any) -> None:
        """Send an object now, as `aioshm.MessageQueue.enqueue_nowait`."""
        self.check_sending()
        self.send_now(self.sender.encode(obj))

    def check_sending(self) -> None:
        """Raise whatever forbids to send an object now."""
        if self.state.ready:
            self._check_usable()
        self.state.check_ready()

    def send_now(self, message: Encoded) -> None:
        """Send an encoded object of a ready end, or raise `QueueFull`."""
        if self.state.lock.calls or not self.sender.put(message):
            raise QueueFull(f"{self.state!r}: {self.sender.why_full(message)}")

    @asynccontextmanager
    async def acquire_write(self, timeout: float | None, nbytes: int | None) -> AsyncIterator[memoryview]:
        """Give room in the ring to the block to fill, as `aioshm.MessageQueue.acquire_write`."""
        deadline = deadline_after(timeout)
        state = self.state
        most = self.ring.ring.layout.max_chunk_bytes
        if nbytes is None:
            nbytes = most
        check_int("nbytes", nbytes, minimum=0, maximum=most)
        await self.prepare(deadline)
        await state.enter(deadline)
        try:
            slot = await self.sender.claim(nbytes, deadline)
            room = slot.body[:nbytes]
            state.hold()
            try:
                yield room
            finally:
                room.release()
            state.check_usable()
            self.sender.put_raw(slot, nbytes)
        finally:
            state.leave()

    def loan(self, spec: ArraySpec, timeout: float | None) -> Loan[Any]:
        """Lend an array, as `aioshm.MessageQueue.loan`."""
        room = room_for(spec.nbytes, self.state.options.max_message_bytes)
        return Loan(self, room, lambda extent: extent.lend(spec), itself, timeout)

    def loan_bytes(self, nbytes: int, timeout: float | None) -> Loan[memoryview]:
        """Lend bytes, as `aioshm.MessageQueue.loan_bytes`."""
        room = room_for(check_int("nbytes", nbytes, minimum=0), self.state.options.max_message_bytes)
        as_sent: Callable[[memoryview], Any] = itself
        if isinstance(self._codec, PickleCodec):
            as_sent = PickleBuffer
        return Loan(self, room, lambda extent: extent.lend_bytes(nbytes), as_sent, timeout)

    def build(self, nbytes: int | None, timeout: float | None) -> Loan[Message]:
        """Lend arrays inside of an object, as `aioshm.MessageQueue.build`."""
        if nbytes is None:
            room = self.ring.ring.layout.max_chunk_bytes
        else:
            room = room_for(check_int("nbytes", nbytes, minimum=0), self.state.options.max_message_bytes)
        return Loan(self, room, Message, Message.take, timeout)

    async def prepare(self, deadline: float | None) -> None:
        """Prepare to send: wait until ready, yield to the loop if the budget is spent, raise this end's error."""
        state = self.state
        if not state.ready:
            await self.wait_until_ready(deadline)
        self._check_usable()
        await state.yield_turn()
        self._check_usable()

    async def _put_waiting(self, messages: list[Encoded], deadline: float | None) -> None:
        """Send messages, which can fit all at once, as soon as there is room."""
        if not messages:
            return
        await self.state.enter(deadline)
        try:
            self.state.check_usable()
            await self.sender.put_waiting(messages, deadline)
        finally:
            self.state.leave()

    def wake_peers(self) -> None:
        """Wake parked readers that can continue; call it again after an interruption."""
        self.ring.wake_readers()

    # Reporting

    def _report_missing(self, waited_s: float) -> None:
        waited = seconds(waited_s)
        missing = ", ".join(self.registry.missing())
        hint = "a reader attaches by its first call, or when its `async with` or `with` begins"
        logger.warning("%r: waited %s for readers to attach: %s (%s)", self.state, waited, missing, hint)

    def stats(self) -> QueueStats:
        ring, network = self.ring, self.network
        stats = self.state.new_stats(
            "writer",
            -1,
            messages=ring.ring.seq,
            max_chunks=ring.ring.layout.max_chunks,
            slots=ring.ring.layout.slots,
            overflows=ring.ring.overflows_written(),
            backlog=self.registry.backlog(),
            readers=self.registry.alive,
            bytes=ring.ring.bytes_written() + self.sender.network_bytes,
            per_reader=self.registry.stats(),
        )
        if network is None:
            return stats
        window = network.window
        return msgspec.structs.replace(stats, kept=len(window), kept_bytes=window.nbytes, resent=network.resent)

    # Closing

    def lingers(self) -> bool:
        """Return whether messages are kept for a replacement of a dead reader."""
        return self._listening and bool(self.registry.unread())

    async def linger(self) -> None:
        """Wait for the replacement, for ``options.linger_s`` at most."""
        state = self.state
        deadline = monotonic() + state.options.linger_s
        for slot, first in self.registry.unread():
            text = "%r: closing: waiting for a replacement of reader %d (pid %d), which had read %d messages"
            logger.warning(text, state, slot.rank, slot.pid, first)
        with suppress(TimeoutError):
            while not self._close_announced and self.registry.unread():
                await settle(state.news(), deadline=deadline)

    def announce_close(self) -> None:
        for slot, first in self.registry.unread():
            text = "%r: closed, and no replacement of reader %d (pid %d) has attached: messages %d to %d are lost"
            logger.warning(text, self.state, slot.rank, slot.pid, first, self.ring.ring.seq - 1)
        for transport in self._transports:
            transport.announce_close()
        self._close_announced = True
        if self.state.loop is not None and not self.state.loop.is_closed():
            self.state.interrupt()  # another call of aclose() may linger

    def close(self) -> None:
        if self._registration is not None:
            self._registration.release(remove=True)
        self.ring.close()
        if self.network is not None and not self.network.delivering:
            self.network.close()

    def finished(self) -> bool:
        return self.ring.overflow.finished() and (self.network is None or not self.network.delivering)

    async def finish(self) -> None:
        """Wait until the readers have received everything that is sent through sockets, or are gone."""
        await self.ring.finish()
        if self.network is not None:
            await self.network.wait_closed()

    def detach_after_fork(self) -> None:
        self.ring.listener.detach_after_fork()

    def __repr__(self) -> str:
        return repr(self.state)


class Membership:
    """The changes among a writer's readers from now on; see `aioshm.MessageQueue.membership`."""

    def __init__(self, writer: Writer, timeout: float | None) -> None:
        deadline_after(timeout)  # checks the timeout
        self._writer = writer
        self._timeout = timeout
        self._log = writer.registry.new_log()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change:
        change = await self.next()
        if change is None:
            raise StopAsyncIteration
        return change

    async def aclose(self) -> None:
        """End the iteration; the writer stays open."""

    async def next(self) -> Change | None:
        """Wait for the next change; return None if the queue was closed."""
        state = self._writer.state
        deadline = deadline_after(self._timeout)
        while (change := self._log.take()) is None and not state.closed:
            self._writer.listen()
            try:
                await settle(state.news(), deadline=deadline)
            except TimeoutError:
                raise TimeoutError(f"{state!r}: no reader has attached, left or died in time") from None
        return change
