"""The end that holds a queue up, decided from two snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from aioshm.observe.queues import QueueSnapshot, snapshot_of
from aioshm.observe.suspects import Suspect, suspects
from aioshm.process.proc import ProcessInfo
from aioshm.ring import layout as at
from aioshm.ring.header import read_header
from aioshm.ring.layout import Layout

WRITER, FIRST, SECOND = 7, 8, 9
LOOP = "do_epoll_wait"
SLEEP = "hrtimer_nanosleep"
BUSY = ""


def look(
    written: int, *read: int, ns: int = 0, states: dict[int, str] | None = None, members: tuple[int, ...] = (1, 1),
    closed: bool = False, parked: bool = False, slots: int = 10,
) -> QueueSnapshot:  # fmt: skip
    layout = Layout.of(2, 100, 1, slots)
    memory = bytearray(layout.header_bytes)
    memory[: at.PREAMBLE.size] = layout.preamble(bytes(16))

    def word(begin: int, value: int) -> None:
        memory[begin : begin + 8] = value.to_bytes(8, "little")

    word(at.WRITER_LINE + at.COUNT, written)
    memory[at.WRITER_LINE + at.PID] = WRITER
    memory[at.WRITER_LINE + at.STATE] = closed
    memory[at.WRITER_PARKED] = parked
    for place, (number, member) in enumerate(zip(read, members, strict=True)):
        word(layout.reader_line(place) + at.COUNT, number)
        memory[layout.reader_line(place) + at.STATE] = member
        memory[layout.reader_line(place) + at.RANK] = place
        memory[layout.reader_line(place) + at.PID] = FIRST + place if member else 0
    there = {
        pid: ProcessInfo(pid=pid, inner_pid=pid, state=state, command="x", cpu_s=0)
        for pid, state in ({WRITER: "sleeping", FIRST: "sleeping", SECOND: "sleeping"} | (states or {})).items()
        if state != "gone"
    }
    return snapshot_of(read_header(memory, 0), there, 0, (0, 0), ns)


def judged(before: Any, now: Any, keeping: Any = (), awaited: Any = (), **channels: str) -> Sequence[Suspect]:
    pids = {"writer": WRITER, "first": FIRST, "second": SECOND}
    waits = dict.fromkeys(pids.values(), LOOP) | {pids[name]: value for name, value in channels.items()}
    return suspects(before, now, keeping, awaited, waits)


def found(*args: Any, **options: Any) -> list[tuple[str, int]]:
    return [(each.kind, each.rank) for each in judged(*args, **options)]


def text_of(before: Any, now: Any, **channels: str) -> str:
    return judged(before, now, **channels)[0].text


class TestVerdict:
    def test_moving_queue_has_no_suspect(self) -> None:
        assert found(look(5, 4, 5), look(9, 9, 8)) == []

    def test_stopped_end_is_named_before_it_holds_up_anything(self) -> None:
        assert found(look(5, 5, 5), look(5, 5, 5, states={SECOND: "stopped"})) == [("stopped", 1)]
        assert found(look(5, 5, 5), look(5, 5, 5, states={WRITER: "stopped"})) == [("stopped", -1)]
        for state in ("tracing-stop", "frozen"):
            assert found(look(5, 5, 5), look(5, 5, 5, states={FIRST: state})) == [("stopped", 0)]

    def test_gone(self) -> None:
        now = look(5, 5, 5, states={FIRST: "gone", SECOND: "zombie"})
        assert found(look(5, 5, 5), now) == [("gone", 0), ("gone", 1)]

    @pytest.mark.parametrize("member", [at.LEFT, at.DIED, at.EVICTED, at.DISMISSED])
    def test_reader_that_left_is_no_suspect(self, member: int) -> None:
        now = look(9, 9, 3, members=(1, member), states={SECOND: "gone"})
        assert found(look(5, 5, 3, members=(1, member)), now) == []

    def test_a_held_place(self) -> None:
        members = (1, at.HELD)
        before, now = (look(9, 9, 3, members=members, states={SECOND: "gone"}) for _ in range(2))
        [suspect] = judged(before, now, [1])
        assert (suspect.kind, suspect.rank) == ("gone", 1)
        assert "held for another" in suspect.text

    def test_blocked(self) -> None:
        before = look(5, 5, 3)
        now = look(6, 6, 3, ns=250_000_000)
        assert found(before, now) == [("blocked", 1)]
        assert text_of(before, now) == (
            "took nothing in the last 0.2 s, 3 messages behind: its event loop waits for something else"
        )
        assert text_of(before, now, second=SLEEP).endswith("it is blocked in hrtimer_nanosleep")
        assert text_of(before, now, second=BUSY).endswith("it is blocked")
        running = look(6, 6, 5, ns=250_000_000, states={SECOND: "running"})
        text = text_of(look(6, 6, 5), running, second=BUSY)
        assert text == "took nothing in the last 0.2 s, 1 message behind: its code keeps the CPU"

    def test_lag_of_new_messages_is_no_blockade(self) -> None:
        assert found(look(5, 5, 5), look(7, 7, 5)) == []

    def test_slow(self) -> None:
        assert found(look(50, 50, 41), look(53, 53, 43)) == [("slow", 1)]
        assert found(look(50, 50, 41), look(53, 53, 49)) == [], "it catches up"
        assert found(look(50, 50, 48), look(53, 53, 50)) == [], "it is not far behind"

    def test_reader_that_keeps_a_parked_writer_waiting_is_slow(self) -> None:
        before = look(50, 49, 48, parked=True)
        now = look(53, 52, 51, parked=True)
        assert found(before, now, keeping=[1]) == [("slow", 1)]
        assert found(before, now, keeping=[0, 1]) == [("slow", 0), ("slow", 1)]

    def test_absent(self) -> None:
        before, now = (look(0, 0, 0, members=(1, 0)) for _ in range(2))
        assert found(before, now, awaited=[1]) == [("absent", 1)]

    def test_an_idle_writer_is_no_culprit(self) -> None:
        before = look(5, 5, 5)
        now = look(5, 5, 5, ns=1_000_000_000)
        assert found(before, now) == [("writer idle", -1)]
        assert not judged(before, now)[0].grave
        assert found(before, now, writer=SLEEP) == [("writer blocked", -1)]
        blocked = text_of(before, now, writer=SLEEP)
        assert blocked.startswith("has published nothing for 1.0 s: it is blocked in hrtimer")
        assert text_of(before, now, writer="") == "has nothing to publish"  # it is not known where it sleeps
        busy = look(5, 5, 5, states={WRITER: "running"})
        assert found(before, busy, writer=BUSY) == [("writer blocked", -1)]

    def test_a_writer_that_has_closed(self) -> None:
        assert found(look(5, 5, 5, closed=True), look(5, 5, 5, closed=True, states={WRITER: "gone"})) == []
        assert found(look(5, 5, 3, closed=True), look(5, 5, 3, closed=True)) == [("blocked", 1)]

    def test_the_gravest_first(self) -> None:
        now = look(60, 41, 30, states={WRITER: "disk-sleep", SECOND: "stopped"})
        assert found(look(50, 40, 30), now) == [("stopped", 1), ("slow", 0), ("writer blocked", -1)]
