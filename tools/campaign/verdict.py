"""What the journals say, held against each other."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.campaign.queues import MOST_AT_ONCE, QUEUES
from tools.campaign.stage import Record, read

NAMED = {"AioshmError", "MemoryError"}
SHORTAGES = {23, 24, 11, 12, 28}  # ENFILE, EMFILE, EAGAIN, ENOMEM, ENOSPC
NO_ROOM = (
    "can't start new thread",
    "failed to map segment",
    "cannot allocate memory",
    "shared object file: Too many open files",
)
"""What Python and the linker say where the part itself, not the library, finds no room for something."""
NO_FRAME = "error return without exception set"
"""What CPython 3.11 says, as a `SystemError`, where there is no memory for the frame of a function."""
UNCAUGHT = ("Exception in callback", "Task exception was never retrieved", "Exception ignored in", "Fatal Python error")
GROWTH_MIB, GROWTH_AFTER_S, MORE_DESCRIPTORS = 48, 15.0, 64


@dataclass
class Life:
    """One process, as its journal has it."""

    actor: str
    start: int
    pid: int
    records: list[Record]

    @property
    def began(self) -> float:
        """When it wrote its first record."""
        return self.records[0].at

    def of(self, *kinds: str) -> Iterator[Record]:
        """Yield the records of some kinds."""
        return (record for record in self.records if record.kind in kinds)


@dataclass
class Verdict:
    """What there was, and what must not be."""

    figures: Counter[str] = field(default_factory=Counter)
    wrong: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


def lives(journals: Path) -> list[Life]:
    """Return what all processes have written down, in the order in which they began."""
    found = []
    for path in journals.iterdir():
        actor, start, pid = path.name.rsplit(".", 2)
        records = list(read(path))
        if records:
            found.append(Life(actor, int(start), int(pid), records))
    return sorted(found, key=lambda life: life.began)


def judge(journals: Path, limited: set[int]) -> Verdict:
    """Return what the journals say, and the logs beside them."""
    verdict, found = Verdict(), lives(journals)
    verdict.figures["processes"] = len(found)
    for life in found:
        _judge_life(verdict, life, life.pid in limited)
        _judge_log(verdict, life, _log_of(life, journals), life.pid in limited)
    for name, spec in QUEUES.items():
        members = [life for life in found if life.actor.startswith(f"{name}.")]
        _Queue(verdict, name, spec, members).judge()
    for life in found:
        if "subscriber" in life.actor:
            _judge_subscriber(verdict, life, found)
    return verdict


def _log_of(life: Life, journals: Path) -> str:
    log = journals.with_name("logs") / f"{life.actor}.{life.start}"
    return log.read_text(errors="replace") if log.exists() else ""


def _judge_log(verdict: Verdict, life: Life, log: str, limited: bool) -> None:
    """Look for what nobody has caught: an event loop goes on after it, and maybe waits for ever."""
    for line in log.splitlines():
        if line.startswith(UNCAUGHT):
            if limited:
                verdict.figures["uncaught under a limit"] += 1
            else:
                verdict.wrong["odd"].append(f"{life.actor} ({life.pid}), in {life.actor}.{life.start}: {line[:200]}")


def _judge_life(verdict: Verdict, life: Life, limited: bool) -> None:
    for record in life.of("wrong", "hung", "nameless", "odd"):
        verdict.wrong[record.kind].append(f"{life.actor} ({life.pid}): {record.rest[0]}")
    for record in life.of("error"):
        kinds, text, number = record.rest
        verdict.figures[f"error {kinds[0]}"] += 1
        if kinds[0] == "TimeoutError":
            verdict.wrong["hung"].append(f"{life.actor} ({life.pid}): {kinds[0]}: {text}")
        elif limited and kinds[0] == "SystemError" and text == NO_FRAME:
            verdict.figures["no memory for a frame"] += 1
        elif not NAMED & set(kinds) and number not in SHORTAGES and not any(each in text for each in NO_ROOM):
            verdict.wrong["nameless"].append(f"{life.actor} ({life.pid}): {kinds[0]}: {text}")
    for kind in ("strangers", "links"):
        verdict.figures[kind] += max((record.rest[0] for record in life.of(kind)), default=0)
    counts = [record.rest[0] for record in life.of("counts")]
    for key, value in (counts[-1] if counts else {}).items():
        verdict.figures[key] += value
    health = [record for record in life.of("health") if record.at - life.began > GROWTH_AFTER_S]
    if health:
        grown, more = (health[-1].rest[0] - health[0].rest[0]) / 1024, health[-1].rest[1] - health[0].rest[1]
        verdict.figures["MiB grown, most"] = max(verdict.figures["MiB grown, most"], int(grown))
        if grown > GROWTH_MIB or more > MORE_DESCRIPTORS:
            verdict.wrong["leaked"].append(f"{life.actor} ({life.pid}): {grown:.0f} MiB, {more} descriptors")


class _Queue:
    """One queue: its writers one after the other, and all its readers."""

    def __init__(self, verdict: Verdict, name: str, spec: dict[str, Any], members: list[Life]) -> None:
        self._verdict, self._name, self._spec = verdict, name, spec
        self._remote = bool(spec.get("remote"))
        self._held = spec["options"]["on_reader_death"] == "hold"
        self._readers = [life for life in members if ".reader." in life.actor]
        self._writers = {
            record.rest[0]: life for life in members if ".writer" in life.actor for record in life.of("epoch")
        }

    def judge(self) -> None:
        """Hold what the readers have seen against what the writers say."""
        for writer in self._writers.values():
            self._verdict.figures["messages sent"] += max((each.rest[0] for each in writer.of("sent")), default=0)
            if self._held:
                self._judge_heirs(writer)
        for reader in self._readers:
            self._judge_reader(reader)

    def _complain(self, word: str, reader: Life, text: str) -> None:
        self._verdict.wrong[word].append(f"{reader.actor} ({reader.pid}): {text}")

    def _judge_reader(self, reader: Life) -> None:
        sessions: list[list[Record]] = [[]]
        for record in reader.of("got", "restarted"):
            if record.kind == "restarted" or (sessions[-1] and sessions[-1][-1].rest[0] != record.rest[0]):
                sessions.append([])
            if record.kind == "got":
                sessions[-1].append(record)
        ends = [record.rest[0] for record in reader.of("end")]
        told: dict[int, list[int]] = {}
        after: dict[int, int] = {}
        for number, session in enumerate(sessions):
            if not session:
                continue
            epoch, first, _ = session[0].rest
            writer = self._writers.get(epoch)
            if writer is None:
                self._complain("wrong", reader, f"messages of {epoch}, which nobody is")
                continue
            following = self._in_order(reader, session)
            if first < after.get(epoch, 0):
                self._complain("doubled", reader, f"{first} again, {after[epoch]} was next")
            after[epoch] = following
            if epoch not in told:
                told[epoch] = self._told(writer, reader)
            if told[epoch] and first not in told[epoch]:
                self._complain("lost", reader, f"begins at {first} of {epoch}, the writer says {told[epoch]}")
            last = number == len(sessions) - 1
            self._judge_end(reader, writer, following, ends[-1] if last and ends else "", last=last)

    def _in_order(self, reader: Life, session: list[Record]) -> int:
        following = session[0].rest[1]
        skipped: set[int] = set()
        for record in session:
            _, first, count = record.rest
            if first != following:
                word = "lost" if first > following else "reordered" if first in skipped else "doubled"
                self._complain(word, reader, f"{first} came, {following} was next")
                skipped.update(range(following, first))
            following = max(following, first + count)
            self._verdict.figures["messages received"] += count
        return int(following)

    def _told(self, writer: Life, reader: Life) -> list[int]:
        """Return where this reader began, as the writer says."""
        until = self._next_of_pid(reader)
        joins = [r for r in writer.of("joined") if r.rest[1] == reader.pid and reader.began - 1 <= r.at < until]
        return [record.rest[2] for record in joins]

    def _next_of_pid(self, reader: Life) -> float:
        return min((r.began for r in self._readers if r.pid == reader.pid and r.began > reader.began), default=1e18)

    def _judge_end(self, reader: Life, writer: Life, following: int, end: str, *, last: bool) -> None:
        sent = max((record.rest[0] for record in writer.of("sent")), default=0)
        closed = any(True for _ in writer.of("closing"))
        failed = any(True for _ in writer.of("error"))  # then it has closed the queue, and not noted all that it sent
        if following > sent + MOST_AT_ONCE:
            self._complain("wrong", reader, f"read up to {following}, and {sent} were sent")
        if end == "closed" and (following < sent or (not failed and (not closed or following != sent))):
            self._complain("lost", reader, f"was told of the end at {following}, after {sent}; closed: {closed}")
        elif end == "PeerDied" and not self._remote and following < sent:
            self._complain("lost", reader, f"was told of the writer's death at {following}, after {sent}")
        elif not last and not self._remote and following < sent:
            self._complain("lost", reader, f"went on to the next writer at {following}, after {sent}")
        for record in writer.of("left", "died") if last and not self._remote else ():
            rank, pid, read, _ = record.rest
            its = pid == reader.pid and reader.began <= record.at < self._next_of_pid(reader)
            if its and not following <= read <= following + MOST_AT_ONCE:
                word = "lost" if read > following else "doubled"
                self._complain(word, reader, f"read up to {following}; {record.kind} at {read} of rank {rank}")

    def _judge_heirs(self, writer: Life) -> None:
        kept: dict[int, int] = {}
        for record in writer.of("joined", "died"):
            if record.kind == "joined":
                rank, _, first = record.rest
                if kept.pop(rank, first) != first:
                    self._complain("lost", writer, f"rank {rank} goes on at {first}, and not where it was kept")
                self._verdict.figures["places inherited"] += 1
            elif record.rest[3]:
                kept[record.rest[0]] = record.rest[2]


def _judge_subscriber(verdict: Verdict, life: Life, found: Iterable[Life]) -> None:
    publishers = {record.rest[0]: each for each in found if "publisher" in each.actor for record in each.of("epoch")}
    following, current = 0, 0
    seen: set[int] = set()

    def complain(word: str, text: str) -> None:
        verdict.wrong[word].append(f"{life.actor} ({life.pid}): {text}")

    for record in life.of("batch", "lost", "again"):
        first = record.rest[0]
        if record.kind == "again":
            verdict.figures["restarts of publishers told"] += 1
            if first != following:
                complain("wrong", f"a restart after {first}, {following} was next")
            following = current = 0
            continue
        if first != following:
            word = "lost" if first > following else "doubled"
            complain(word, f"{record.kind} {record.rest}, {following} was next")
        if record.kind == "lost":
            verdict.figures["batches told to be lost"] += record.rest[1] - first + 1
            following = record.rest[1] + 1
            continue
        epoch = record.rest[1]
        if epoch not in publishers:
            complain("wrong", f"batch {first} of {epoch}, which nobody is")
        elif current and epoch != current:
            complain("wrong", f"batch {first} of {epoch} after those of {current}")
        elif not current and epoch in seen:
            complain("doubled", f"batch {first} of {epoch}, whose batches came before")
        seen.add(epoch)
        current = epoch
        following = first + 1
        verdict.figures["batches received"] += 1


MOVES = {"got", "batch", "sent", "published", "counts"}
"""Records of those who move."""


def moved_at(journal: Path) -> float:
    """Return when a process has moved last, as its journal says; 0: never."""
    return max((record.at for record in read(journal) if record.kind in MOVES), default=0.0)
