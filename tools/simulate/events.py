"""Publishers of events that restart and drop, subscribers whose connections break, replays that are cut off.

Real: `Outbox`, `ReplayBuffer`, `SourceTracker` with its numbering, `BlockIndex`.
"""

from __future__ import annotations

import asyncio
from collections import deque

from aioshm.events.protocol.index import BlockIndex, follow
from aioshm.events.protocol.messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Delivery,
    KVEventBatch,
    Lost,
    Received,
    Restarted,
)
from aioshm.events.protocol.outbox import Outbox, ReplayBuffer
from aioshm.events.protocol.tracker import Connection, Message, SourceTracker
from tools.simulate.world import World

TOPIC = b"topic"
LARGE = 1 << 20
"""Batches in a replay buffer that is never full."""


class Publisher:
    """A publisher's process, which may begin again."""

    def __init__(self, world: World, buffer: int, room: int) -> None:
        self.world, self.buffer, self.room = world, buffer, room
        self.incarnation = -1
        self.sent: dict[int, dict[int, bytes]] = {}  # by incarnation, by number
        self.subscribers: list[Subscriber] = []
        self.complete = buffer == LARGE  # whether replays have all there ever was
        self.begin()

    def begin(self) -> None:
        """Begin again, with an empty cache."""
        self.incarnation += 1
        self.world.note(f"publisher {self.incarnation} begins")
        self.outbox = Outbox(self.room, "drop")
        self.replay = ReplayBuffer(self.buffer)
        self.sent[self.incarnation] = {}
        self.held: set[int] = set()
        self.awake = False
        for subscriber in self.subscribers:
            subscriber.cut()

    def publish(self) -> None:
        """Publish a batch, which may find no room."""
        chance, number = self.world.chance, self.outbox.published
        if chance.random() < 0.1:
            made: BlockStored | BlockRemoved | AllBlocksCleared = AllBlocksCleared()
        elif chance.random() < 0.3:
            made = BlockRemoved([chance.randint(0, 9)], "GPU")
        else:
            made = BlockStored([chance.randint(0, 9)], None, [1], 1, None, "GPU")
        wake = self.outbox.put(KVEventBatch(float(number), [made], 0))
        self.world.check(self.outbox.published == number + 1, f"batch {number} has no number of its own")
        if wake and not self.awake:
            self.awake = True
            self.world.loop.call_later(self.world.between(0, 0.02), self.send, self.incarnation)

    def send(self, incarnation: int) -> None:
        """Send what waits, some of it at a time."""
        if incarnation != self.incarnation:
            return
        for _ in range(self.world.chance.randint(1, 6)):
            taken = self.outbox.take()
            if taken is None:
                self.awake = False
                return
            number, batch = taken
            self.outbox.last_sent = number
            made = KVEventBatch(0.0, [] if batch is None else batch.events, 0)
            payload = b"%d/%d/%r" % (self.incarnation, number, batch is None) + repr(made.events).encode()
            sent = self.sent[self.incarnation]
            self.complete = self.complete and not self.outbox.dropped
            self.world.check(number not in sent, f"number {number} goes out twice")
            self.world.check(not sent or number > max(sent), f"number {number} goes out after {max(sent, default=-1)}")
            sent[number] = payload
            self.replay.append(number, payload)
            self.world.check(len(self.replay) <= self.buffer, "the replay buffer is larger than it may be")
            for subscriber in self.subscribers:
                subscriber.publish(Message(TOPIC, number, made, payload))
        self.world.loop.call_later(self.world.between(0, 0.01), self.send, incarnation)


class Subscriber:
    """A subscriber: its connection, its requests, and what it is told."""

    def __init__(self, publisher: Publisher, *, can_replay: bool) -> None:
        self.world, self.publisher, self.can_replay = publisher.world, publisher, can_replay
        self.out: deque[Delivery] = deque()
        self.tracker = SourceTracker("tcp://p", None, self.out.append, can_replay=can_replay)
        chance = self.world.chance
        self._cut_off = chance.choice([0, 0.15, 0.15, 0.5])  # so many answers, before they have ended
        self._unheard = chance.choice([0, 0.5])  # so many questions, of those to a publisher that is gone meanwhile
        self._patience = chance.choice([1, 3])  # so often it asks
        self._slowest_s = chance.choice([0.05, 0.05, 0.2])
        self._attempts = 0
        self.restarts = 0
        self.up = True
        self._epoch = self._same = Connection()
        self._last = 0.0
        self._live: list[tuple[Message, Connection, int]] = []  # has come, and is not read while there is a question
        self._arrivals = 0
        self._answering = False
        self.next = self.failed = 0
        self.blind = False  # whether a question was not answered at all
        self.incarnations: set[int] = set()
        self.incarnation = -1
        self.delivered = self.lost = 0
        self.index: BlockIndex[object] = BlockIndex()
        publisher.subscribers.append(self)
        self._work()

    # The live connection

    def publish(self, message: Message) -> None:
        """Be sent a message, which goes where all messages go that nobody is connected for, if it is not."""
        if not self.up or self.world.likely(0.01):  # or above the high-water mark
            return
        epoch = self._epoch
        self._last = at = max(self._last + 1e-6, self.world.now + self.world.between(0.0005, 0.03))
        self.world.loop.call_at(at, lambda: self._arrive(message, epoch) if epoch is self._epoch else None)

    def _arrive(self, message: Message, epoch: Connection) -> None:
        self._live.append((message, epoch, self._arrivals))
        self._arrivals += 1
        self._work()

    def cut(self) -> None:
        """Lose the connection."""
        self._epoch = Connection()
        if self.up:
            self.up = False
            self.world.loop.call_later(self.world.between(0.01, 0.5), self._come_back)

    def _come_back(self) -> None:
        self.up = True
        self.tracker.reconnected()
        self._work()

    # What it does

    def _work(self) -> None:
        tracker = self.tracker
        while not self._answering:
            self._take()
            start = tracker.asking
            if start is not None:
                self._ask(start)
            elif self._live:
                message, epoch, arrival = self._live.pop(0)
                # Where replay answers, a connection that came back raises the same doubt as a batch over a new one.
                tracker.live(message, self._same if self.can_replay else epoch, arrival)
            else:
                return

    def _ask(self, start: int) -> None:
        world = self.world
        world.check(self.can_replay, "a replay is wanted, and there is none")
        world.check(start >= 0, f"a replay from {start} on is wanted")
        self._answering = True
        self.tracker.asked(self._arrivals)
        asked = self.publisher.incarnation
        world.loop.call_later(world.between(0.0005, self._slowest_s), self._answer, start, asked)

    def _answer(self, start: int, asked: int) -> None:
        """Let the publisher answer, if the question has come so far; what it sends takes a while."""
        world, publisher = self.world, self.publisher
        if asked != publisher.incarnation and world.likely(self._unheard):
            self._end(failed=True, blind=True)
            return
        entries = list(publisher.replay.since(start))
        numbers = [number for number, _ in entries]
        world.check(numbers == sorted(set(numbers)), "the replay buffer is out of order")
        kept = list(publisher.sent[publisher.incarnation])[-publisher.buffer :]
        world.check(numbers == [number for number in kept if number >= start], "the replay buffer lacks something")
        answered = publisher.incarnation

        def arrives() -> None:
            # What a publisher has sent may come whole after it is gone.
            fails = world.likely(0.5 if answered != publisher.incarnation else self._cut_off)
            come = entries[: world.chance.randint(0, len(entries))] if fails else entries
            what = f"{len(come)} of {len(entries)} of {answered}"
            world.note(f"a subscriber is answered from {start} on: {what}, cut off: {fails}")
            for number, payload in come:
                if not self.tracker.replayed(Message(TOPIC, number, KVEventBatch(0.0, [], 0), payload)):
                    self._attempts = 0
                    self._answering = False
                    self._work()
                    return
            if not (fails or start or entries):  # of none that has said anything: what waits may be anybody's
                self.blind = True
            self._end(failed=fails, blind=not come or publisher.incarnation > 0)

        world.loop.call_later(world.between(0.0005, self._slowest_s), arrives)

    def _end(self, *, failed: bool, blind: bool = False) -> None:
        if not failed:
            self._attempts = 0
            self.tracker.replay_ended()
        elif self._attempts + 1 < self._patience:
            self._attempts += 1
        else:
            self._attempts = 0
            self.blind = self.blind or blind
            self.failed += 1
            self.tracker.replay_failed("it was cut off")
        self._answering = False
        self._work()

    def _take(self) -> None:
        """Check what is delivered."""
        check = self.world.check
        while self.out:
            each = self.out.popleft()
            follow(self.index, each)  # type: ignore[arg-type]
            self.world.note(f"a subscriber gets {type(each).__name__}, {self.next} is next")
            if isinstance(each, Restarted):
                check(each.expected == self.next, f"a restart after {each.expected} instead of {self.next}")
                self.next = 0
                self.incarnation = -1
                self.restarts += 1
                began = self.publisher.incarnation
                if self.can_replay and not self.blind and (self.publisher.complete or not began):
                    check(self.restarts <= began, f"restart {self.restarts} of {began} is told")
            elif isinstance(each, Lost):
                check(
                    each.first == self.next <= each.last, f"lost are {each.first} to {each.last}, {self.next} is next"
                )
                self.lost += each.last - each.first + 1
                self.next = each.last + 1
            elif isinstance(each, Received):
                self._received(each)

    def _received(self, each: Received) -> None:
        check = self.world.check
        check(each.seq == self.next, f"batch {each.seq} is delivered instead of {self.next}")
        incarnation = int(each.payload.partition(b"/")[0])
        check(self.publisher.sent[incarnation].get(each.seq) == each.payload, f"batch {each.seq} has another's content")
        if not self.can_replay:
            check(
                self.incarnation in (-1, incarnation), f"batch {each.seq} is of a publisher of which nothing was said"
            )
        # Where a replay lacks what came last, nothing tells a publisher from the one before it.
        if self.can_replay and not self.blind and self.publisher.complete:
            same = self.incarnation in (-1, incarnation)
            check(same, f"batch {each.seq} is of another publisher than the one before it")
            check(incarnation not in self.incarnations or self.incarnation == incarnation, "a publisher comes twice")
        self.incarnation = incarnation
        self.incarnations.add(incarnation)
        self.next += 1
        self.delivered += 1


async def run(world: World) -> dict[str, int]:
    """Run a publisher and its subscribers; return what there was."""
    chance = world.chance
    publisher = Publisher(world, chance.choice([3, 20, LARGE]), chance.choice([1, 4, 50]))
    subscribers = [Subscriber(publisher, can_replay=True) for _ in range(chance.randint(1, 2))]
    if chance.random() < 0.3:
        subscribers.append(Subscriber(publisher, can_replay=False))
    end = world.now + 2.5
    pause = chance.choice([0.01, 0.03])
    restarts, cuts = chance.choice([0, 0.005, 0.02, 0.15]), chance.choice([0, 0.01, 0.05])
    while world.now < end:
        await asyncio.sleep(world.between(0, 2 * pause))
        for _ in range(chance.choice([1, 1, 1, 8])):
            publisher.publish()
        if world.likely(restarts):
            publisher.begin()
        for subscriber in subscribers:
            if world.likely(cuts):
                world.note("a subscriber loses its connection")
                subscriber.cut()
        if len(subscribers) < 3 and world.likely(0.01):
            world.note("a subscriber comes later")
            subscribers.append(Subscriber(publisher, can_replay=True))
    await asyncio.sleep(2)
    quiet = publisher.outbox
    world.check(quiet.last_sent == quiet.published - 1, "the sender sleeps, and nobody is told of the last batches")
    publisher.publish()
    await asyncio.sleep(1)
    # Each subscriber looks once more, with no fault any more but that a replay may be cut off again.
    for subscriber in subscribers:
        await _settled(world, subscriber)
    total = publisher.outbox
    world.check(total.last_sent == total.published - 1, "the sender sleeps, and something waits")
    return {
        "batches": sum(map(len, publisher.sent.values())),
        "delivered": sum(subscriber.delivered for subscriber in subscribers),
        "lost batches": sum(subscriber.lost for subscriber in subscribers),
        "publishers": publisher.incarnation + 1,
    }


async def _settled(world: World, subscriber: Subscriber) -> None:
    publisher, tracker = subscriber.publisher, subscriber.tracker
    for _ in range(30):
        await world.until(lambda: not subscriber._answering, 500, "a replay comes to an end")
        last = publisher.outbox.last_sent
        if not subscriber.can_replay or (subscriber.incarnation, subscriber.next) == (publisher.incarnation, last + 1):
            break
        tracker.check()
        subscriber._work()
    else:
        at = subscriber.incarnation, subscriber.next
        world.check(False, f"a subscriber is at {at}, the publisher at {(publisher.incarnation, last + 1)}")
    world.check(not subscriber.out, "something was not taken")
    if subscriber.can_replay and publisher.buffer == LARGE and not subscriber.failed and publisher.incarnation == 0:
        sent = publisher.sent[0]
        missing = [number for number in range(publisher.outbox.published) if number not in sent]
        world.check(subscriber.lost == len(missing), f"{subscriber.lost} are lost, and {len(missing)} were dropped")
