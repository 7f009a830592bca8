"""Sequence tracking and gap filling, step by step.

`tools.simulate` tries publishers, networks and replays at random, and plants the bugs that were found.
"""

from __future__ import annotations

from collections import defaultdict, deque

import pytest

from aioshm.errors import CodecError
from aioshm.events import Delivery, KVEventBatch, Lost, PublisherGone, Received
from aioshm.events.protocol import tracker as tracker_module
from aioshm.events.protocol.tracker import REMEMBERED, Connection, Message, SourceTracker, Start


def message(seq: int, body: str = "", rank: int = 0, topic: bytes | None = b"") -> Message:
    return Message(topic, seq, KVEventBatch(float(seq), [], rank), f"{seq} {body}".encode())


class Play:
    """A tracker that is driven step by step; each step returns the play."""

    def __init__(
        self, start: Start = None, *, replay: bool = True, begun: bool = True, gone_after_s: float | None = None
    ) -> None:
        self.out: deque[Delivery] = deque()
        self.now = 0.0
        self.tracker = SourceTracker(
            "tcp://x:1", start, self.out.append, can_replay=replay, gone_after_s=gone_after_s, clock=lambda: self.now
        )
        self.stats = self.tracker.stats
        self._connections: dict[object, Connection] = defaultdict(Connection)
        if begun and replay and start != "live":
            self.asks(start or 0).answer()
        if begun:
            self.asks(None)

    def live(
        self, *seqs: int, body: str = "", rank: int = 0, topic: bytes | None = b"", over: object = 0, arrival: int = 0
    ) -> Play:
        """Take live batches that come over a connection."""
        for seq in seqs:
            self.tracker.live(message(seq, body, rank, topic), self._connections[over], arrival)
        return self

    def end(self, connection: object) -> Play:
        """End a connection."""
        self.tracker.disconnected(self._connections[connection])
        return self

    def back(self, connection: object = None) -> Play:
        """End a connection and let it come back."""
        if connection is not None:
            self.end(connection)
        self.tracker.reconnected()
        return self

    def asks(self, start: int | None) -> Play:
        assert self.tracker.asking == start
        return self

    def answer(self, *seqs: int, body: str = "", topic: bytes | None = b"", arrivals: int = 0) -> Play:
        """Answer the replay request at hand, to its end."""
        return self.answer_with([message(seq, body, topic=topic) for seq in seqs], arrivals)

    def answer_with(self, messages: list[Message], arrivals: int = 0) -> Play:
        """Answer the replay request at hand with the messages from its number on."""
        start = self.tracker.asking or 0
        self.tracker.asked(arrivals)
        for one in messages:
            if one.seq >= start and not self.tracker.replayed(one):
                return self
        self.tracker.replay_ended()
        return self

    def cut(self, *seqs: int) -> Play:
        """Begin an answer that has no end."""
        self.tracker.asked(0)
        for seq in seqs:
            self.tracker.replayed(message(seq))
        self.tracker.replay_failed("silence")
        return self

    def check(self) -> Play:
        self.tracker.check()
        return self

    def at(self, now: float) -> Play:
        """Forget publishers that are gone at this time."""
        self.now = now
        self.tracker.forget_gone()
        return self

    def got(self, *expected: object) -> Play:
        """Compare the deliveries: numbers, (first, last) of a loss, "restarted", "gone"."""
        found: list[object] = []
        while self.out:
            item = self.out.popleft()
            if isinstance(item, Received):
                found.append(item.seq)
            elif isinstance(item, Lost):
                found.append((item.first, item.last))
            else:
                found.append("gone" if isinstance(item, PublisherGone) else "restarted")
        assert found == [*expected]
        return self


class TestManyPublishers:
    @pytest.fixture(autouse=True)
    def few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tracker_module, "MAX_STREAMS", 10)

    def test_publisher_above_the_limit_is_refused_and_known_ones_stay(self) -> None:
        play = Play(replay=False)
        for pod in range(10):
            play.live(0, topic=b"%d" % pod)
        with pytest.raises(CodecError, match="this endpoint has 10 publishers"):
            play.live(0, topic=b"10")
        play.live(1, topic=b"9").got(*[0] * 10, 1)

    def test_silent_ones_of_many_at_a_connection_that_never_ends_are_gone(self) -> None:
        play = Play(replay=False, gone_after_s=10)
        for pod in range(100):
            play.now = 20 * pod
            play.live(0, topic=b"%d" % pod)
            if pod:
                play.live(pod, topic=b"0")
            play.at(20 * pod + 10)
        assert play.stats.gone >= 90
        play.out.clear()
        play.live(100, topic=b"0").got(100)  # the one that speaks was never forgotten


class TestWithoutReplay:
    def test_every_gap_is_lost_from_the_first_message_on(self) -> None:
        play = Play(replay=False).live(2, 3, 7).got((0, 1), 2, 3, (4, 6), 7)
        assert (play.stats.gaps, play.stats.lost) == (2, 5)

    def test_numbers_that_go_back_are_a_restart(self) -> None:
        Play(replay=False).live(0, 1, 2, 1, 2).got(0, 1, 2, "restarted", (0, 0), 1, 2)

    @pytest.mark.parametrize("seq", [0, 3, 2**64 - 4])
    def test_live_start_begins_with_the_first_number(self, seq: int) -> None:
        Play("live", replay=False).live(seq, seq + 2).got(seq, (seq + 1, seq + 1), seq + 2)

    def test_every_rank_and_topic_counts_for_itself(self) -> None:
        play = Play(replay=False).live(0, topic=b"a").live(0, rank=1, topic=b"a").live(0, topic=b"b")
        play.live(1, topic=b"a").got(0, 0, 0, 1)


class TestWithReplay:
    def test_a_gap_is_filled_in_order_and_copies_are_dropped(self) -> None:
        play = Play().live(0, 3).asks(0)  # the last delivered number identifies the publisher
        play.answer(0, 1, 2, 3, 4).live(4, 5).got(0, 1, 2, 3, 4, 5)
        assert play.stats.duplicates == 2  # 3 and 4, live and replayed

    def test_content_is_remembered_of_a_bounded_number_of_batches(self) -> None:
        play = Play().live(*range(2 * REMEMBERED), 2 * REMEMBERED - 1).asks(None)
        play.live(0).asks(2 * REMEMBERED - 1)  # a copy, or another publisher's

    def test_answer_that_begins_behind_the_message_that_waits_goes_after_the_live_ones(self) -> None:
        play = Play().live(0, 5).asks(0)
        assert not play.tracker.replayed(message(8))  # of a buffer that has only the newest
        play.asks(None).live(6, 7, 8).got(0, (1, 4), 5, 6, 7, 8).asks(None)

    def test_answer_that_begins_behind_the_message_that_waits_counts_where_a_connection_came_back(self) -> None:
        play = Play().live(0).back().answer().answer().live(5)
        play.answer(8, body="new").got(0, (1, 7), 8)
        assert play.stats.garbage + play.stats.duplicates == 1

    def test_messages_that_came_before_an_answered_question_are_not_asked_for_again(self) -> None:
        play = Play().live(0, arrival=0).live(5, arrival=1)  # and 6 to 9 have come, too
        while play.tracker.asking is not None:
            play.answer(0, 1, body="new", arrivals=6)  # its publisher has begun again
        play.got(0, "restarted", 0, 1)
        for arrival in range(2, 6):
            play.live(4 + arrival, arrival=arrival).asks(None)
        play.got().live(2, body="new", arrival=6).asks(1).answer(1, 2, body="new").got(2)

    def test_a_restart_behind_a_gap_is_found_out(self) -> None:
        play = Play().live(0, 1, 2, body="old").live(5, body="new").asks(2).answer(*range(2, 7), body="new").asks(0)
        play.answer(*range(7), body="new").asks(None).got(0, 1, 2, "restarted", 0, 1, 2, 3, 4, 5, 6)

    def test_a_restarted_publisher_with_fewer_batches_is_found_out_by_checking(self) -> None:
        play = Play().live(0, 1, 2, body="old").check().answer().asks(0)
        play.answer(0, body="new").got(0, 1, 2, "restarted", 0)

    def test_a_stranger_with_a_wild_number_moves_nothing(self) -> None:
        play = Play().live(0, 2**60).answer(0, 1).live(2).got(0, 1, 2)
        assert play.stats.garbage == 1

    def test_a_publisher_that_keeps_nothing_still_gets_through(self) -> None:
        Play().live(0, 2).answer().answer().live(3).got(0, (1, 1), 2, 3)

    def test_old_replay_ports_send_no_topic(self) -> None:
        play = Play(begun=False).answer(0, 1, topic=None).live(3, topic=b"kv")
        play.answer(1, 2, 3, topic=None).got(0, 1, 2, 3)


class TestNewConnections:
    @pytest.mark.parametrize("is_back", [True, False])
    @pytest.mark.parametrize("seq", [0, 1, 3, 7])
    def test_batch_over_a_new_connection_without_replay_counts_as_one_restart(self, seq: int, is_back: bool) -> None:
        play = Play(replay=False).live(0, 1, 2, over=1)
        if is_back:
            play.back(1)
        play.live(seq, seq + 1, body="new", over=2)
        play.got(0, 1, 2, "restarted", *([(0, seq - 1)] if seq else []), seq, seq + 1)
        assert play.stats.restarts == 1

    def test_new_connection_of_one_publisher_does_not_affect_further_publishers(self) -> None:
        play = Play(replay=False)
        for rank in range(3):
            play.live(0, rank=rank, over=rank)
        play.back(1)
        for rank, connection in ((0, 0), (1, 7), (2, 2)):
            play.live(1, rank=rank, over=connection)
        play.got(0, 0, 0, 1, "restarted", (0, 0), 1, 1)

    @pytest.mark.parametrize("silent", [True, False])
    def test_batch_over_a_new_connection_that_no_replay_confirms_counts_as_a_restart(self, silent: bool) -> None:
        play = Play().live(0, 1, 2, over=1).live(3, over=2)
        while play.tracker.asking is not None:
            play.cut() if silent else play.answer()
        play.live(4, over=2).asks(None).got(0, 1, 2, "restarted", (0, 2), 3, 4)

    @pytest.mark.parametrize("is_back", [True, False])
    def test_answer_without_the_last_batch_counts_as_a_restart(self, is_back: bool) -> None:
        play = Play().live(0, 1, 2, over=1)
        play.back(1) if is_back else play.live(31, body="new", over=2)
        while play.tracker.asking is not None:
            play.answer(*range(20, 32), body="new")
        play.got(0, 1, 2, "restarted", (0, 19), *range(20, 32))

    def test_batch_over_a_new_connection_that_a_replay_confirms_is_the_next(self) -> None:
        Play().live(0, 1, 2, over=1).live(3, over=2).answer(2, 3).live(4, over=2).got(0, 1, 2, 3, 4)


class TestGonePublishers:
    def test_publisher_that_comes_back_after_the_time_is_a_new_one(self) -> None:
        play = Play(replay=False, gone_after_s=10).live(0, over=1).end(1).at(9).got(0).at(10).got("gone")
        play.at(100).live(0, over=2).got(0)
        assert play.tracker.gone_at is None

    def test_publisher_that_comes_back_in_time_is_not_gone(self) -> None:
        play = Play(replay=False, gone_after_s=10).live(0, over=1).end(1).live(1, over=2)
        play.at(20).got(0, "restarted", (0, 0), 1)

    def test_batch_of_a_connection_that_has_ended_postpones_the_end_of_its_publisher(self) -> None:
        play = Play(replay=False, gone_after_s=10).live(0, over=1)
        connection = play._connections[1]
        play.end(1).now = 5
        play.tracker.live(message(1), connection)  # it waited in the backlog
        play.at(14).got(0, 1).at(15).got("gone")

    def test_publisher_known_by_replay_alone_is_gone_with_its_connection(self) -> None:
        Play(begun=False, gone_after_s=10).answer(0).end(1).at(10).got(0, "gone")

    def test_stream_that_the_replay_port_does_not_have_is_not_asked_for_again(self) -> None:
        play = Play(gone_after_s=10).live(7, topic=b"old").answer(0, topic=b"old")
        while play.tracker.asking is not None:
            play.answer(*range(8), topic=b"old")
        play.live(0, topic=b"new")
        asked = 0
        for _ in range(20):
            play.check()
            while play.tracker.asking is not None:
                asked += 1
                play.answer(0, topic=b"new")
        assert asked == 20 + 2  # the old stream's last number, and once more from the first one on
        play.out.clear()
        play.at(10).got("gone")

    def test_answer_about_another_stream_does_not_make_earlier_batches_lost(self) -> None:
        play = Play().live(*range(6), topic=b"old").check()
        new = [message(seq, topic=topic) for topic in (b"new", b"newer") for seq in range(8)]
        while play.tracker.asking is not None:  # at first from the last number of the old publisher on
            play.answer_with(new)
        received = [(item.source.topic, item.seq) for item in play.out if isinstance(item, Received)]
        assert received[:6] == [(b"old", seq) for seq in range(6)]
        assert sorted(received[6:]) == [(one.topic, one.seq) for one in new]
        assert play.stats.lost == 0

    def test_stream_that_the_replay_port_has_again_is_not_gone(self) -> None:
        play = Play(gone_after_s=10).live(0, 1, 2).check().answer().answer()  # of another publisher, which has nothing
        play.check().answer(*range(4)).at(20).got(0, 1, 2, 3)

    def test_answer_to_a_question_about_a_forgotten_publisher_is_a_new_one(self) -> None:
        play = Play(gone_after_s=10).live(0, over=1).check().end(1).at(10)
        play.answer(0, body="new").asks(None).got(0, "gone", 0)

    def test_batch_that_waits_for_an_answer_keeps_its_publisher(self) -> None:
        play = Play(gone_after_s=10).live(0, 2, over=1).end(1).at(10)
        play.answer(0, 1, 2).at(19).got(0, 1, 2).at(20).got("gone")
