"""The coordinator without sockets: vLLM's bytes, garbage, stale reports, and the times of publications."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support import examples

from aioshm.engine.protocol.messages import SchedulerStats, StartWave, encode
from aioshm.engine.protocol.waves import (
    INTERVAL_S,
    MAX_REPORT_BYTES,
    QUIET_INTERVAL_S,
    STEP_S,
    Lockstep,
    Published,
    Waves,
    decode_from_front_end,
    decode_report,
    encode_start,
)

# Reports of engines to the coordinator, written by the encoder of vLLM 0.33.0.
STATS = bytes.fromhex(
    "990190de0012b06e756d5f72756e6e696e675f7265717303b06e756d5f77616974696e675f7265717304b86e756d5f736b6970706564"
    "5f77616974696e675f7265717300ba6e756d5f6b765f66657463685f726571735f62795f737461676580ac737465705f636f756e7465"
    "7207ac63757272656e745f7761766502ae6b765f63616368655f7573616765cb3fd0000000000000b1697465726174696f6e5f646574"
    "61696c73c0b27072656669785f63616368655f737461747388a57265736574c2a8726571756573747300a77175657269657300a46869"
    "747300b2707265656d707465645f726571756573747300b1707265656d707465645f7175657269657300ae707265656d707465645f68"
    "69747300ae686974735f62795f736f7572636580bc636f6e6e6563746f725f7072656669785f63616368655f7374617473c0b86b765f"
    "63616368655f6576696374696f6e5f6576656e747390b3737065635f6465636f64696e675f7374617473c0b26b765f636f6e6e656374"
    "6f725f7374617473c0b265635f636f6e6e6563746f725f7374617473c0b577616974696e675f6c6f72615f616461707465727380b572"
    "756e6e696e675f6c6f72615f616461707465727380af6375646167726170685f7374617473c0aa706572665f7374617473c0cb402900"
    "0000000000c0c0c0c0c0"
)
COMPLETE = bytes.fromhex("990090c0cb4029000000000000c0c005c0c0")
START = bytes.fromhex("990190c0cb4029000000000000c0c0c006c0")


def pack(value: Any) -> list[bytes]:
    return [msgspec.msgpack.encode(value)]


class TestReports:
    @pytest.mark.parametrize(
        ("frame", "report"),
        [
            (STATS, (1, SchedulerStats(3, 4, 7, 2, 0.25), None, None)),
            (COMPLETE, (0, None, 5, None)),
            (START, (1, None, None, 6)),
        ],
        ids=["counts", "complete", "start"],
    )
    def test_of_vllm(self, frame: bytes, report: Any) -> None:
        found = decode_report([frame])
        assert (found.engine_index, found.scheduler_stats, found.wave_complete, found.start_wave) == report

    def test_missing_fields_have_defaults(self) -> None:
        report = decode_report(pack([3, [], {"num_running_reqs": 1}]))
        assert report.scheduler_stats == SchedulerStats(num_running_reqs=1)

    @pytest.mark.parametrize(
        ("frames", "reason"),
        [
            ([STATS, b""], "payload frames"),
            ([b"\xc1"], "undecodable"),
            ([b"\x91" * 50_000], "undecodable"),
            ([STATS[:-30]], "undecodable"),
            ([bytes(MAX_REPORT_BYTES + 1)], "bytes, more than"),
            (pack({"engine_index": 0}), "undecodable"),
            (pack([-1]), "undecodable"),
            (pack([65536]), "undecodable"),
            (pack([0, [], {"num_running_reqs": -1}]), "undecodable"),
            (pack([0, [], {"kv_cache_usage": float("nan")}]), "engine 0 uses nan"),
            (pack([0, [], None, 0.0, None, None, -1]), "undecodable"),
            (pack([0, [], None, 0.0, None, None, None, 1 << 63]), "undecodable"),
            (pack([7, [["request", [1]]]]), "engine 7 has sent outputs"),
            (pack([7, [], None, 0.0, [1, None, None]]), "engine 7 has sent outputs"),
        ],
    )
    def test_others_are_refused(self, frames: list[bytes], reason: str) -> None:
        with pytest.raises(ValueError, match=reason):
            decode_report(frames)


class TestMessagesOfFrontEnds:
    def test_new_number_of_engines_and_request_to_paused_engines(self) -> None:
        assert decode_from_front_end(pack(("SCALE_ELASTIC_EP", 4))) == 4
        for exclude in (None, 3):
            assert decode_from_front_end(pack((exclude, 7))) == StartWave(7, exclude)

    @pytest.mark.parametrize(
        "message", [("SCALE_ELASTIC_EP", 0), ("SCALE_ELASTIC_EP", 65537), ("SCALE", 3), (-1, 0), (1, -1), (1,)]
    )
    def test_others_are_refused(self, message: Any) -> None:
        with pytest.raises(ValueError, match=r"engines|undecodable"):
            decode_from_front_end(pack(message))


class TestBytesOfTheCoordinator:
    def test_to_engines(self) -> None:
        assert encode_start(StartWave(5, exclude=1)) == [b"\x02", b"\x92\x05\x01"]
        assert encode_start(StartWave(5, exclude=None)) == [b"\x02", b"\x92\x05\xc0"]

    def test_to_front_ends(self) -> None:
        published = Published([[1, 2, 0.5], [0, 0, 0.0]], 3, True)
        assert encode(published).hex() == "9392930102cb3fe0000000000000930000cb000000000000000003c3"
        assert encode(Published(None, 4, False)) == b"\x93\xc0\x04\xc2"


def waves(n_engines: int = 2, **options: bool) -> Waves:
    made = Waves(n_engines, **options)
    for _ in range(n_engines):
        made.subscribe()
    return made


def load(waiting: int = 0, running: int = 0, usage: float = 0.0, wave: int = 0, step: int = 0) -> SchedulerStats:
    return SchedulerStats(running, waiting, step, wave, usage)


def test_ready_when_all_engines_are_subscribed_at_once() -> None:
    made = Waves(2)
    made.unsubscribe()  # of no engine: changes nothing
    assert not made.subscribe()
    made.unsubscribe()
    assert not made.subscribe(), "one engine that lost its connection counts once"
    assert (made.subscribed, made.ready) == (1, False)
    assert made.subscribe()
    assert made.ready
    made.unsubscribe()
    assert made.subscribe(), "an engine that comes back gets READY again"


class TestUnknownEngines:
    def test_are_refused(self) -> None:
        made = waves(2)
        for call in (lambda: made.load(2, load(1, 1), 0), lambda: made.start(2, 0), lambda: made.complete(2, 0)):
            with pytest.raises(ValueError, match="there is no engine 2: there are 2"):
                call()
        assert made.publish(0) == ([[0, 0, 0.0]] * 2, 0, False)

    def test_new_engine_starts_a_wave_before_the_scaling_is_known(self) -> None:
        made = waves(2)
        made.subscribe()
        assert made.start(2, 0) == StartWave(0, exclude=2)


def test_wave_far_ahead_is_believed_after_a_restart_only() -> None:
    waves = Waves(2)
    with pytest.raises(ValueError, match="wave 5000, and the current wave is 0"):
        waves.start(0, 5000)
    waves.restarted = True
    assert waves.start(0, 5000) == StartWave(5000, 0)
    assert waves.wave == 5000
    for report in (waves.start, waves.complete):
        with pytest.raises(ValueError, match="wave 9000, and the current wave is 5000"):
            report(1, 9000)


class TestPublishing:
    def test_older_front_ends_get_pairs(self) -> None:
        made = waves(1, kv_cache_usage=False)
        made.load(0, load(1, 2, 0.5), 0)
        assert made.publish(0).counts == [[1, 2]]

    def test_publication_waits_for_the_other_engines_of_a_step(self) -> None:
        made = waves()
        made.publish(10)
        made.load(0, load(1, 1, step=1), 12)
        assert made.due() == 12 + STEP_S
        made.load(1, load(2, 2, step=1), 12.02)
        assert made.due() == 12.02 + STEP_S
        assert made.publish(12.07).counts == [[1, 1, 0.0], [2, 2, 0.0]]
        assert made.due() == 12.07 + QUIET_INTERVAL_S

    def test_publication_has_counts_of_one_step(self) -> None:
        made = waves()
        made.publish(10)
        made.load(0, load(1, 1, step=1), 12)
        made.load(1, load(1, 1, step=1), 12.01)
        made.load(0, load(9, 9, step=2), 12.02)  # of the next step; the other engine has not reported yet
        assert made.due() == 10 + INTERVAL_S
        assert made.publish(12.02).counts == [[1, 1, 0.0], [1, 1, 0.0]]
        made.load(1, load(9, 9, step=2), 12.03)
        assert made.due() <= 12.02 + INTERVAL_S
        assert made.publish(12.12).counts == [[9, 9, 0.0], [9, 9, 0.0]]

    def test_a_new_wave_begins_with_new_steps(self) -> None:
        made = waves()
        made.publish(10)
        made.load(0, load(1, wave=0, step=7), 12)
        made.load(0, load(2, wave=1, step=0), 12)
        assert made.publish(12).counts == [[1, 0, 0.0], [0, 0, 0.0]]


class TestLockstep:
    def test_a_wave(self) -> None:
        engine = Lockstep(0)
        assert Lockstep(1).add(5) == 5, "a request may know of a later wave"
        assert engine.add(0) == 0
        assert engine.running
        assert engine.add(0) is None
        assert engine.stepped(unfinished=True) is None
        assert engine.step == 1
        assert engine.stepped(unfinished=False) == 0
        assert (engine.wave, engine.running, engine.step) == (1, False, 0)
        assert engine.add(0) == 1

    def test_being_woken(self) -> None:
        engine = Lockstep(1)
        engine.start(StartWave(3, 1))
        assert not engine.running
        engine.start(StartWave(3, 0))
        assert (engine.running, engine.wave) == (True, 3)
        assert engine.stepped(unfinished=False) is None, "only rank 0 reports the end"
        engine.start(StartWave(3, None))
        assert not engine.running, "that wave is over"
        engine.start(StartWave(4, None))
        assert engine.running


class Model(RuleBasedStateMachine):
    """What holds whatever comes, in whatever order."""

    @initialize(n_engines=st.integers(1, 4), lockstep=st.booleans())
    def begin(self, n_engines: int, lockstep: bool) -> None:
        self.now = 100.0
        self.lockstep = lockstep
        self.waves = Waves(n_engines, lockstep=lockstep)
        for _ in range(n_engines):
            self.waves.subscribe()
        self.last = self.waves.publish(self.now)
        self.last_at = self.now
        self.changed_at: float | None = None
        self.last_was_news = False
        self.loads: list[SchedulerStats] = [load()] * n_engines
        self.most = n_engines
        self.before: tuple[int, bool] = (0, False)

    def changed(self) -> None:
        self.changed_at = self.now if self.changed_at is None else self.changed_at

    @rule(seconds=st.floats(0, 0.3))
    def time_goes_by(self, seconds: float) -> None:
        end = self.now + seconds
        while self.waves.due() <= end:
            self.now = max(self.now, self.waves.due())
            self.publish()
        self.now = end

    def publish(self) -> None:
        since = self.now - self.last_at
        assert since >= INTERVAL_S - 1e-9
        # What is published is news, unless it has not been for long; but two steps may happen to have the same counts.
        assert self.changed_at is not None or self.last_was_news or since >= QUIET_INTERVAL_S - 1e-9
        self.last_was_news = self.changed_at is not None
        self.last = self.waves.publish(self.now)
        self.last_at = self.now
        assert self.last.counts is not None
        assert len(self.last.counts) == len(self.loads)
        if self.last.counts == self.current():
            self.changed_at = None

    def current(self) -> list[list[int | float]]:
        return [[each.num_waiting_reqs, each.num_running_reqs, each.kv_cache_usage] for each in self.loads]

    @rule(index=st.integers(0, 5), waiting=st.integers(0, 3), wave=st.integers(0, 2), step=st.integers(0, 3))
    def report(self, index: int, waiting: int, wave: int, step: int) -> None:
        stats = load(waiting, 1, 0.5, wave, step)
        if len(self.loads) <= index < self.most:
            self.waves.load(index, stats, self.now)  # taken out, and nothing changes
            return
        if index >= self.most:
            with pytest.raises(ValueError, match="there is no engine"):
                self.waves.load(index, stats, self.now)
            return
        self.waves.load(index, stats, self.now)
        self.loads[index] = stats
        self.changed()

    @rule(n_engines=st.integers(1, 5))
    def scale(self, n_engines: int) -> None:
        self.waves.scale(n_engines, self.now)
        self.most = max(self.most, n_engines)
        self.loads = (self.loads + [load()] * n_engines)[:n_engines]
        self.changed()

    @rule()
    def greet(self) -> None:
        self.waves.greet(self.now)
        self.changed()

    @rule(index=st.integers(0, 0), back=st.integers(-2, 2))
    def start(self, index: int, back: int) -> None:
        wave = max(0, self.waves.wave + back)
        start = self.waves.start(index, wave)
        fresh = wave > self.before[0] or (wave == self.before[0] and not self.before[1])
        if self.lockstep and fresh:
            assert start == (wave, index)
            assert (self.waves.wave, self.waves.running) == (wave, True)
        else:
            assert start is None

    @rule(exclude=st.none() | st.integers(0, 3), back=st.integers(-2, 2))
    def wake(self, exclude: int | None, back: int) -> None:
        wave = max(0, self.waves.wave + back)
        start = self.waves.wake(exclude, wave)
        if self.lockstep and not self.before[1]:
            assert start == (self.before[0], exclude if wave >= self.before[0] else None)
            assert self.waves.running
        else:
            assert start is None

    @rule(back=st.integers(-2, 2))
    def complete(self, back: int) -> None:
        wave = max(0, self.waves.wave + back)
        complete = self.waves.complete(0, wave)
        assert complete == (self.lockstep and wave >= self.before[0])  # a stale report changes nothing
        if complete:
            assert (self.waves.wave, self.waves.running) == (wave + 1, False)

    @invariant()
    def waves_only_go_on(self) -> None:
        state = self.waves.wave, self.waves.running
        assert state[0] >= self.before[0]
        self.before = state

    @invariant()
    def no_change_waits_for_long(self) -> None:
        if self.changed_at is not None:
            # An interval for the step before, an interval for this step, and the remainder of the running interval.
            assert self.waves.due() <= max(self.last_at, self.changed_at) + INTERVAL_S + STEP_S + 1e-9
            assert self.now - self.changed_at <= 3 * INTERVAL_S + STEP_S or self.steps_go_on()
        assert self.waves.due() <= self.last_at + QUIET_INTERVAL_S + 1e-9

    def steps_go_on(self) -> bool:
        """Whether each publication since was of a step that was followed by another."""
        return self.now - self.last_at <= INTERVAL_S + STEP_S


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)
