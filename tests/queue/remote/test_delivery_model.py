"""The windows of a writer and of its remote readers, and a network between them that does its worst."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support import examples

from aioshm.queue.remote import wire
from aioshm.queue.remote.window import ReceiveWindow, SendWindow

WHO = st.integers(0, 2)


@dataclass(frozen=True)
class Message:
    seq: int
    nbytes: int


@dataclass(frozen=True)
class Mark:
    seq: int


class Way:
    """One direction of one reader's connections, one after the other: in order, but what is on its way may be lost."""

    def __init__(self) -> None:
        self.items: deque[tuple[int, object]] = deque()  # with the number of the connection
        self.connection = 0

    def put(self, item: object) -> None:
        self.items.append((self.connection, item))

    def on_its_way(self) -> int:
        return sum(connection == self.connection for connection, _ in self.items)

    def cut(self, arrived: int, unsent: int = 0) -> None:
        """Lose all but the first, which had arrived, and the last, which wait at the sender for the next connection."""
        items = list(self.items)
        self.items = deque(items[:arrived] + items[max(arrived, len(items) - unsent) :])
        self.connection += 1


class Reader:
    """One reader, its ways from and to the writer, and what it has read."""

    def __init__(self, rank: int, max_messages: int, max_bytes: int) -> None:
        self.rank = rank
        self.window = ReceiveWindow(max_messages, max_bytes)
        self.data, self.up, self.down = Way(), Way(), Way()
        self.connected = self.subscribed = self.controlled = False
        self.read = self.acknowledged = 0

    def hear_data(self, item: object) -> None:
        if isinstance(item, Mark):
            self.window.marked(item.seq)
        else:
            assert isinstance(item, Message)
            if self.window.expects(item.seq):
                self.window.arrived(item, item.nbytes)  # type: ignore[arg-type]
        self.ask()

    def hear(self, message: object) -> None:
        if isinstance(message, wire.Closing):
            self.window.end = message.end

    def introduce(self) -> None:
        self.window.ask_again()
        self.acknowledge()
        self.ask()

    def ask(self) -> None:
        first = self.window.to_ask_for()
        if first is not None:
            self.up.put(wire.Resend(first))

    def acknowledge(self) -> None:
        self.up.put(wire.Acknowledge(self.window.taken))
        self.window.acknowledged()
        self.acknowledged = self.window.taken

    def take(self) -> None:
        message, _ = self.window.ready[0]
        assert isinstance(message, Message)
        assert message.seq == self.read, "nothing lost, nothing twice, in order"
        self.read += 1
        self.window.finished()
        assert self.window.taken == self.read
        if self.window.must_acknowledge():
            self.acknowledge()


class Network(RuleBasedStateMachine):
    @initialize(number=st.integers(1, 3), max_messages=st.integers(1, 9), max_bytes=st.integers(1, 120))
    def begin(self, number: int, max_messages: int, max_bytes: int) -> None:
        self.max_messages, self.max_bytes = max_messages, max_bytes
        self.closed = False
        self.window = SendWindow(max_messages, max_bytes)
        self.readers = [Reader(rank, max_messages, max_bytes) for rank in range(number)]
        for reader in self.readers:
            self.window.join(reader.rank)
            self.connect_data(reader)
            self.subscribe(reader)
            self.connect_control(reader)

    def some(self, who: int) -> Reader:
        return self.readers[who % len(self.readers)]

    # The writer

    @precondition(lambda self: not self.closed)
    @rule(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=6))
    def send(self, sizes: list[int]) -> None:
        while sizes:
            count = self.window.part(sizes)
            part, sizes = sizes[:count], sizes[count:]
            if not self.window.room(len(part), sum(part)):
                assert self.window.laggards(), "somebody is waited for"
                return
            for size in part:
                message = Message(self.window.seq, size)
                self.window.sent(message)  # type: ignore[arg-type]
                for reader in self.readers:
                    self.publish(reader, message)

    def publish(self, reader: Reader, item: object) -> None:
        if reader.subscribed:
            reader.data.put(item)
            # Beyond some number, a socket drops without a word what its peer is too slow for.
            assert reader.data.on_its_way() <= 2 * self.max_messages + 1, "what is on its way is bounded"

    def close(self) -> None:
        self.closed = True
        for reader in self.readers:
            reader.down.put(wire.Closing(self.window.seq))

    def hear(self, reader: Reader, message: object) -> None:
        if isinstance(message, wire.Acknowledge):
            self.window.acknowledged(reader.rank, message.consumed)
        elif isinstance(message, wire.Resend):
            for kept in self.window.resend(reader.rank, message.first):
                self.publish(reader, kept)

    # The network

    def deliver_data(self, reader: Reader) -> None:
        if reader.data.items:
            reader.hear_data(reader.data.items.popleft()[1])

    def deliver_up(self, reader: Reader) -> None:
        if reader.controlled and reader.up.items:
            self.hear(reader, reader.up.items.popleft()[1])

    def deliver_down(self, reader: Reader) -> None:
        if reader.down.items:
            reader.hear(reader.down.items.popleft()[1])

    def connect_data(self, reader: Reader) -> None:
        reader.connected = True

    def subscribe(self, reader: Reader) -> None:
        if reader.connected and not reader.subscribed:
            reader.subscribed = True
            self.window.connected(reader.rank)
            self.publish(reader, Mark(self.window.seq))

    def connect_control(self, reader: Reader) -> None:
        if not reader.controlled:
            reader.controlled = True
            reader.introduce()
            if self.closed:
                reader.down.put(wire.Closing(self.window.seq))

    @rule(who=WHO, number=st.integers(1, 10))
    def some_data_arrives(self, who: int, number: int) -> None:
        for _ in range(number):
            self.deliver_data(self.some(who))

    @rule(who=WHO, number=st.integers(1, 4))
    def the_writer_hears_something(self, who: int, number: int) -> None:
        for _ in range(number):
            self.deliver_up(self.some(who))

    @rule(who=WHO, number=st.integers(1, 4))
    def a_reader_hears_something(self, who: int, number: int) -> None:
        for _ in range(number):
            self.deliver_down(self.some(who))

    @rule(who=WHO, arrived=st.integers(0, 10), subscribed=st.booleans())
    def a_data_connection_is_cut_and_comes_back(self, who: int, arrived: int, subscribed: bool) -> None:
        reader = self.some(who)
        reader.data.cut(arrived)
        reader.subscribed = False
        if subscribed:
            self.subscribe(reader)

    @rule(who=WHO, arrived=st.integers(0, 3), unsent=st.integers(0, 2), back=st.booleans())
    def a_control_connection_is_cut(self, who: int, arrived: int, unsent: int, back: bool) -> None:
        reader = self.some(who)
        reader.controlled = False
        reader.up.cut(arrived, unsent)
        reader.down.cut(arrived)
        if back:
            self.connect_control(reader)

    @rule(who=WHO, times=st.integers(1, 3))
    def a_control_connection_flaps(self, who: int, times: int) -> None:
        reader = self.some(who)
        for _ in range(times):
            self.a_control_connection_is_cut(who, 0, 0, True)
            while reader.up.items:
                self.deliver_up(reader)

    @rule(who=WHO, data=st.booleans(), control=st.booleans())
    def a_connection_comes_back(self, who: int, data: bool, control: bool) -> None:
        if data:
            self.subscribe(self.some(who))
        if control:
            self.connect_control(self.some(who))

    # The readers

    @rule(who=WHO, number=st.integers(1, 10))
    def some_messages_are_taken(self, who: int, number: int) -> None:
        reader = self.some(who)
        for _ in range(min(number, len(reader.window.ready))):
            reader.take()

    @rule(who=WHO)
    def a_reader_acknowledges(self, who: int) -> None:
        self.some(who).acknowledge()

    def leave(self, reader: Reader) -> None:
        self.window.leave(reader.rank)
        self.readers.remove(reader)

    # Seldom, or in the end

    @rule(who=WHO, what=st.sampled_from(["nothing"] * 7 + ["somebody leaves", "the writer closes", "all is well"]))
    def seldom(self, who: int, what: str) -> None:
        if what == "somebody leaves" and len(self.readers) > 1:
            self.leave(self.some(who))
        elif what == "the writer closes" and not self.closed:
            self.close()
        elif what == "all is well":
            self.heal()

    def heal(self) -> None:
        for reader in self.readers:
            self.connect_data(reader)
            self.subscribe(reader)
            self.connect_control(reader)
        while any(map(self.something_moves, self.readers)):
            for reader in self.readers:
                self.deliver_data(reader)
                self.deliver_up(reader)
                self.deliver_down(reader)
                if reader.window.ready:
                    reader.take()
                elif reader.acknowledged < reader.read:
                    reader.acknowledge()
        for reader in self.readers:
            assert reader.read == self.window.seq, "everything was delivered"
            assert reader.window.to_ask_for() is None
            assert reader.window.complete == self.closed
        assert (len(self.window), self.window.nbytes) == (0, 0), "nothing is kept"
        assert self.window.laggards() == []

    def something_moves(self, reader: Reader) -> bool:
        ways = any(way.items for way in (reader.data, reader.up, reader.down))
        return bool(ways or reader.window.ready or reader.acknowledged < reader.read)

    def teardown(self) -> None:
        if hasattr(self, "window"):
            self.heal()

    @invariant()
    def the_window_holds(self) -> None:
        kept = len(self.window)
        assert kept <= self.max_messages
        assert self.window.nbytes <= self.max_bytes or kept == 1
        behind = [self.window.seq - consumed for consumed in self.window.readers.values()]
        assert kept == max(behind, default=0), "nothing is kept that all have finished with"
        for reader in self.readers:
            assert reader.window.taken <= reader.window.next <= self.window.seq
            assert reader.window.next - reader.window.taken <= self.max_messages


def test_whatever_the_network_does_nothing_is_lost_nothing_twice_nothing_out_of_order() -> None:
    run_state_machine_as_test(
        Network,
        settings=settings(
            max_examples=examples(150),
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
