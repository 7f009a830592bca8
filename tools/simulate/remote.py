"""A queue with remote readers: who connects, is cut off, stops, dies, leaves, is replaced, and is too slow.

Real: `RemoteReaders` with registry, admission and windows; `NetworkSource` with its window; both ends' messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from aioshm.codec.frames import INLINE
from aioshm.codec.registry import RawCodec
from aioshm.config import Options
from aioshm.errors import AioshmError, PeerClosed
from aioshm.lifeline.protocol import ANY_RANK
from aioshm.queue.handle import Handle
from aioshm.queue.membership import Change, ReaderDied, ReaderJoined, ReaderLeft
from aioshm.queue.registry import ReaderRegistry
from aioshm.queue.remote import readers, source
from aioshm.queue.remote.window import Missing
from aioshm.queue.stats import Rates
from aioshm.ring.layout import VERSION
from tools.simulate.network import Network, ReaderSockets, WriterSockets
from tools.simulate.world import Process, World

_BODY = 8
_CALM_S = 0.3
"""Cuts that last no longer cost nobody its place: the shortest timeout is 2 s."""


def _now() -> float:
    return Network.current.world.now


def stand_in() -> None:
    """Have the modules use this clock and these sockets, in this process, for good."""
    patched: Any
    for patched in (readers, source):
        patched.monotonic = _now
    patched = readers
    patched.WriterSockets = WriterSockets
    patched = source
    patched.ReaderSockets = ReaderSockets
    patched.Poller = lambda *_: None
    patched.shortage = lambda *_: None


class EndState:
    """Stands for a reader's `EndState`."""

    def __init__(self, process: Process, options: Options) -> None:
        self.name, self.options, self.loop = process.name, options, process.loop
        self.ready, self.refusal, self.poller = False, None, None
        self.core = SimpleNamespace(spin=None)
        self.rates = Rates(process.loop.time())
        self.interrupt_reader: Callable[[], None] = lambda: None
        self.wake: Callable[[], None] = lambda: None

    def reopen(self) -> None:
        """Do nothing, as above."""

    count_turn = reopen
    raw_message = bytearray

    def interrupt(self) -> None:
        self.interrupt_reader()

    def __repr__(self) -> str:
        return self.name


class Reader:
    """A reader, which takes what comes in a pace of its own, and checks it."""

    def __init__(self, queue: Queue, rank: int, slow: Any, history: int, pace_s: float) -> None:
        world = queue.world
        queue.count += 1
        self.queue, self.world, self.wanted, self.slow, self.history = queue, world, rank, slow, history
        self.process = Process(world, f"reader {queue.count}")
        self.pace_s = pace_s
        self.state = EndState(self.process, queue.options)
        remote: Any = queue.handle.remote
        state: Any = self.state
        self.source = source.NetworkSource(state, queue.handle, remote, rank, RawCodec(), slow, history)
        self.troubled = rank == ANY_RANK
        self.taken: int | None = None  # what comes next
        self.lost = self.received = 0
        self.left = False
        self.given_up: Callable[[], AioshmError] | None = None  # before it has left; afterwards nobody is told
        self._looking = False
        self.state.wake = self._look_soon
        self.state.interrupt_reader = self._interrupted
        self.refused = False
        self.source.start(self.process.loop)

    @property
    def sockets(self) -> ReaderSockets:
        return self.source.sockets  # type: ignore[return-value]

    @property
    def reads(self) -> bool:
        """Whether it is there, as far as it knows."""
        return self.process.alive and not self.left and self.source.gone is None and self.source.welcome is not None

    @property
    def at(self) -> int:
        """The message that it takes next."""
        return self.source.welcome.first if self.taken is None else self.taken  # type: ignore[union-attr]

    def _interrupted(self) -> None:
        if self.source.gone is not None and self.source.welcome is None and not self.refused:
            self.refused = True
            self.loop_soon(self.leave)  # what its user does who gets the error

    def loop_soon(self, what: Callable[[], object]) -> None:
        """Do something in the next turn of its loop."""
        self.process.loop.call_soon(what)

    def _look_soon(self) -> None:
        if self._looking:
            return
        self._looking = True
        delay = self.world.between(0.2, 1.8) * self.pace_s
        self.world.loop.call_later(delay, self.process.does, self._look)

    def _look(self) -> None:
        self._looking = False
        if self.left:
            return
        window = self.source.window
        for _ in range(self.world.chance.randint(1, 4)):
            if not window.ready:
                break
            self._take(window.ready[0][0])
        if window.ready:
            self._look_soon()

    def _take(self, message: Any) -> None:
        check, window = self.world.check, self.source.window
        welcome = self.source.welcome
        check(welcome is not None, f"{self.process.name} has a message before it was welcomed")
        if self.taken is None:
            self.taken = welcome.first  # type: ignore[union-attr]
            self.queue.check_first(self, welcome)
        check(window.taken == self.taken, f"{self.process.name}: {window.taken} is in line instead of {self.taken}")
        if isinstance(message, Missing):
            check(self.slow == "skip", f"{self.process.name} has lost {message}, and is waited for")
            check(message.first == self.taken <= message.last, f"{self.process.name}: {message} after {self.taken}")
            self.lost += message.last - message.first + 1
            self.taken = message.last + 1
        else:
            found = int.from_bytes(bytes(message.body[:_BODY]), "little")
            check(found == self.taken, f"{self.process.name} gets message {found} instead of {self.taken}")
            self.taken += 1
            self.received += 1
        self.source.remove_first()
        check(window.taken == self.taken, f"{self.process.name} counts wrong")

    def leave(self) -> None:
        """Close it as its user does."""
        self.left, self.given_up = True, self.source.gone
        self.source.announce_close()
        self.source.close()
        self.world.loop.call_later(source.GOODBYE_S, self.sockets.close)

    def crash(self) -> None:
        """Let its process die."""
        self.process.die()
        self.sockets.cut()
        self.died_at = self.world.now


class Queue:
    """The writer, and all of its readers."""

    def __init__(self, world: World) -> None:
        chance = world.chance
        self.world, self.network = world, Network(world)
        self.timeout = chance.choice([2.0, 3.0, 5.0])
        self.options = Options(
            remote_timeout=self.timeout,
            remote_window=chance.choice([2, 5, 16, 64]),
            remote_window_bytes=chance.choice([300, 2000, 1 << 20]),
            remote_history=chance.choice([0, 0, 3, 20]),
            on_reader_death=chance.choice(["raise", "evict", "hold"]),
            secure=False,
        )
        self.count = 0
        self.ranks = tuple(range(chance.randint(1, 3)))
        self.extra = tuple(range(len(self.ranks), len(self.ranks) + chance.randint(0, 2)))
        self.process = self.network.process = Process(world, "writer")
        self.registry = ReaderRegistry("q", self.options.on_reader_death)
        self.transport = readers.RemoteReaders(
            self.registry,
            b"q" * 16,
            b"t" * 32,
            self.ranks + self.extra,
            None,
            self.options,
            None,
            frozenset(self.extra),
        )
        self.handle = Handle(
            version=VERSION,
            queue_id=b"q" * 16,
            token=b"t" * 32,
            host="elsewhere",
            uid=0,
            n_reader=len(self.ranks),
            local_reader_ranks=(),
            max_chunk_bytes=1 << 20,
            max_chunks=10,
            slots=16,
            inline_bytes=64,
            lifeline="@",
            segment=None,
            codec="msgpack",
            connect_ip=None,
            remote=self.transport.address,
            options=self.options,
        )
        self.readers: list[Reader] = []
        self.there: dict[int, int] = {}  # whose reader is attached, as changes tell: its first message
        self.held: dict[int, int] = {}
        self.seq = 0
        self.joins = 0
        self.registry.report = self._changed  # type: ignore[method-assign]
        self.transport.start(self.process.loop)
        late = world.likely(0.3)  # before all are ready a reader may make way, and come back
        for rank in self.ranks:
            if late and rank == self.ranks[-1]:
                world.loop.call_later(world.between(0.5, 2.5), self.come, rank)
            else:
                self.come(rank)

    # Who comes, and goes

    def come(self, rank: int) -> Reader:
        """Let a reader come."""
        chance = self.world.chance
        slow = chance.choice(["block", "block", "block", "skip", "evict"])
        pace = chance.choice([0.002, 0.01, 0.01, 0.05])
        reader = Reader(self, rank, slow, chance.choice([0, 0, 2, 30]), pace)
        self.world.note(f"{reader.process.name} comes for rank {rank}, {slow}")
        for other in self.readers:  # it may cost them their place
            other.troubled = other.troubled or other.wanted in (rank, ANY_RANK) or rank == ANY_RANK
        self.readers.append(reader)
        return reader

    def _changed(self, change: Change) -> None:
        check, rank = self.world.check, getattr(change, "rank", -1)
        self.world.note(f"{change}")
        if isinstance(change, ReaderJoined):
            check(rank not in self.there, f"rank {rank} is joined twice")
            check(0 <= change.first <= self.seq, f"rank {rank} begins with message {change.first} of {self.seq}")
            held = self.held.pop(rank, None)
            check(held is None or change.first == held, f"rank {rank} was held from {held} on: {change.first}")
            check(
                held is not None or self.seq - change.first <= self.options.remote_history + self.options.remote_window,
                f"rank {rank} gets more history than is kept",
            )
            self.there[rank] = change.first
            self.joins += 1
        elif isinstance(change, ReaderLeft | ReaderDied):
            check(rank in self.there, f"rank {rank} goes, and was not there")
            check(change.read >= self.there.pop(rank), f"rank {rank} has read {change.read}, less than nothing")
            if self.registry.slots[rank].held:
                self.held[rank] = change.read

    def check_first(self, reader: Reader, welcome: Any) -> None:
        """Check what a reader was told when it was welcomed."""
        check = self.world.check
        check(reader.wanted in (welcome.rank, ANY_RANK), f"{reader.process.name} has another's rank {welcome.rank}")
        check(welcome.first <= self.seq, f"{reader.process.name} begins with a message that is still to come")

    # The writer

    async def write(self, until: float) -> None:
        """Publish until then."""
        world, chance = self.world, self.world.chance
        deadline, again = world.now + 100, world.now + 10
        while not self.registry.complete:
            world.check(world.now < deadline, f"the readers are not there: {self.registry.missing()}")
            self.process.does(self.transport.poll)
            self.registry.pop_death()
            await asyncio.sleep(0.02)
            if world.now > again:  # one that was taken for dead while it was stopped does not come back by itself
                again = world.now + 10
                for rank, slot in self.registry.slots.items():
                    if not slot.settled and slot.reader is None:
                        self.come(rank)
        self.registry.going = True
        self.transport.go()
        pause = chance.choice([0.002, 0.01, 0.03])
        while world.now < until:
            self.process.does(self._publish)
            await asyncio.sleep(world.between(0, 2 * pause))

    def _publish(self) -> None:
        trouble = self.registry.trouble
        if trouble is not None:
            error: Any = trouble()
            if self.world.likely(0.05):
                self.world.note(f"rank {error.rank} is dismissed: {error}")
                self.dismiss(error.rank)
            return
        transport, size = self.transport, self.world.chance.choice([8, 8, 60, 290])
        if not transport.window.room(1, transport.window_bytes(size)):
            blamed = transport.window.laggards()
            self.world.check(blamed, "there is no room, and nobody is to blame")
            if self.transport.evicts:
                self.transport.evict_slow()  # also one whose place is held
                self.held = {rank: first for rank, first in self.held.items() if self.registry.slots[rank].held}
            if self.held and self.world.likely(0.01):
                self.dismiss(next(iter(self.held)))
            return
        body = self.seq.to_bytes(_BODY, "little") + bytes(size - _BODY)
        transport.publish(transport.pack(INLINE, 1, self.seq, [body], [], size))
        self.seq += 1
        window = transport.window
        self.world.check(window.seq == self.seq, "the window counts wrong")
        self.world.check(len(window) <= self.options.remote_window, f"the window holds {len(window)} messages")
        self.world.check(window.nbytes >= 0 and window._past_bytes >= 0, "the window holds less than nothing")
        for rank, consumed in window.readers.items():
            self.world.check(rank in self.there or rank in self.held, f"rank {rank} is waited for, and is not there")
            self.world.check(consumed >= window.first, f"message {consumed}, which rank {rank} has not read, is gone")

    def dismiss(self, rank: int) -> None:
        """Wait for a rank no more."""
        self.held.pop(rank, None)
        for reader in self.readers:
            reader.troubled = reader.troubled or reader.wanted in (rank, ANY_RANK)
        self.registry.dismiss(rank)
        slot = self.registry.slots[rank]
        self.world.check(slot.trouble is None, f"rank {rank} is dismissed, and its death is still raised")
        self.world.check(rank not in self.transport.window.readers, f"rank {rank} is dismissed, and waited for")

    # What goes wrong

    async def trouble(self, until: float) -> None:
        """Let things go wrong until then."""
        world, chance = self.world, self.world.chance
        kinds = [
            self._cut,
            self._cut,
            self._part,
            self._stop,
            self._crash,
            self._leave,
            self._newcomer,
            self._stop_writer,
        ]
        wanted = [each for each in kinds if world.likely(0.6)] or [self._cut]
        pause = chance.choice([0.1, 0.4, 1.0])
        while world.now < until:
            await asyncio.sleep(world.between(0, 2 * pause))
            living = [reader for reader in self.readers if reader.process.alive and not reader.left]
            if living:
                chance.choice(wanted)(chance.choice(living))

    def _cut(self, reader: Reader) -> None:
        kinds = self.world.chance.choice([["data"], ["control"], ["data", "control"]])
        self.world.note(f"{reader.process.name}: {kinds} cut")
        reader.sockets.cut(kinds)

    def _part(self, reader: Reader) -> None:
        seconds = self.world.between(0, 2 * self.timeout)
        kinds = self.world.chance.choice([["data"], ["control"], ["data", "control"], ["data", "control"]])
        self.world.note(f"{reader.process.name} is cut off for {seconds:.2f} s: {kinds}")
        reader.troubled = reader.troubled or seconds > _CALM_S
        reader.sockets.apart.update(kinds)
        reader.sockets.cut(kinds)

        def heal() -> None:
            reader.sockets.apart.difference_update(kinds)

        self.world.loop.call_later(seconds, heal)

    def _stop(self, reader: Reader) -> None:
        if reader.process.stopped:
            return
        seconds = self.world.between(0, 2 * self.timeout)
        self.world.note(f"{reader.process.name} is stopped for {seconds:.2f} s")
        reader.troubled = True
        reader.process.stop()
        self.world.loop.call_later(seconds, reader.process.go_on)
        if seconds > self.timeout / 2:  # heartbeats fail
            self.world.loop.call_later(self.timeout / 2, reader.sockets.cut)

    def _stop_writer(self, _: Reader) -> None:
        if self.process.stopped:
            return
        seconds = self.world.between(0, self.timeout)
        self.world.note(f"the writer is stopped for {seconds:.2f} s")
        for reader in self.readers:
            reader.troubled = True
        self.process.stop()
        self.world.loop.call_later(seconds, self.process.go_on)

    def _crash(self, reader: Reader) -> None:
        if self.world.likely(0.5):
            return
        self.world.note(f"{reader.process.name} dies")
        reader.crash()
        self._replace(reader)

    def _leave(self, reader: Reader) -> None:
        if self.world.likely(0.5):
            return
        self.world.note(f"{reader.process.name} leaves")
        reader.leave()
        self._replace(reader)

    def _replace(self, reader: Reader) -> None:
        welcome = reader.source.welcome
        rank = reader.wanted if welcome is None else welcome.rank
        if rank in self.ranks and (not self.registry.going or self.world.likely(0.8)):
            self.world.loop.call_later(self.world.between(0, self.timeout), self.come, rank)

    def _newcomer(self, _: Reader) -> None:
        if self.count < 12:
            self.come(self.world.chance.choice([ANY_RANK, *self.ranks, *self.extra]))

    # The end

    async def end(self) -> None:
        """Let all faults end, and check that everything arrives, and that nobody is waited for who is not there."""
        world, writer = self.world, self.transport
        await asyncio.sleep(5 * self.timeout)  # the longest fault, and the time to notice
        reading = [reader for reader in self.readers if reader.reads]
        attached = set(writer.attached)
        for reader in self.readers:
            if not reader.process.alive:
                there = writer.attached.get(reader.sockets.identity)
                world.check(there is None, f"{reader.process.name} is dead, and still counted on")
                continue
            gone = reader.given_up if reader.left else reader.source.gone
            if gone is not None and not (reader.troubled or reader.refused):
                world.check(reader.slow == "evict", f"{reader.process.name} was given up for nothing: {gone()}")
        for reader in reading:
            known = reader.sockets.identity in attached
            world.check(known, f"{reader.process.name} believes that it reads, and the writer does not know it")
        for rank in list(self.held):
            self.dismiss(rank)
        await world.until(
            lambda: all(reader.taken == self.seq or (reader.taken is None) for reader in reading if reader.reads),
            20 * self.timeout,
            "what was published arrives",
        )
        for reader in reading:
            at = reader.at
            world.check(not reader.reads or at == self.seq, f"{reader.process.name} is at {at} of {self.seq}")
        if world.likely(0.7):  # it closes while its last messages are on their way
            for _ in range(world.chance.randint(1, 6)):
                self._publish()
            for reader in reading:
                if reader.reads and world.likely(0.3):
                    self._cut(reader)
        writer.announce_close()
        await world.until(lambda: not writer.delivering, 4 * self.timeout, "the writer is closed")
        for reader in reading:
            error: AioshmError | None = None if reader.source.gone is None else reader.source.gone()
            known = isinstance(error, PeerClosed) or (reader.troubled and error is not None)
            world.check(known or reader.slow == "evict", f"{reader.process.name} ends with {error!r}")
            if isinstance(error, PeerClosed) and not reader.source.left_behind:
                name = reader.process.name
                await world.until(lambda r=reader: not r.source.window.ready, 100, f"{name} takes what it has")  # type: ignore[misc]
                told = f"{name} is told that the queue is closed, and is at {reader.at} of {self.seq}"
                world.check(reader.at == self.seq, told)
        for reader in self.readers:
            reader.source.close()
            reader.sockets.close()
            reader.left = True
        self.process.die()


async def run(world: World) -> dict[str, int]:
    """Run a queue from its first reader to its end; return what there was."""
    queue = Queue(world)
    began = world.now
    writing = asyncio.ensure_future(queue.write(began + 4))
    await queue.trouble(began + 4)
    await writing
    await queue.end()
    return {"messages": queue.seq, "readers": queue.count, "resent": queue.transport.resent}
