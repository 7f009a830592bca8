"""``python -m tools.campaign --minutes N``: the whole system under faults; fails if anything is lost, or left."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from tools.campaign import queues, sandbox, services, strangers
from tools.campaign.faults import Faults
from tools.campaign.sandbox import Sandbox
from tools.campaign.stage import Actor, Journal, Stage
from tools.campaign.verdict import Verdict, judge, moved_at

PARTS = {
    "queues": queues.actors,
    "engines": services.engine_actors,
    "events": services.event_actors,
    "links": services.link_actors,
    "strangers": strangers.actors,
}
TELL_S, STEP_S = 10.0, 0.02
SETTLE_S, END_S, TREE_S = 150.0, 60.0, 15.0
WORDS = ("lost", "doubled", "reordered", "wrong", "hung", "nameless", "odd", "leaked", "crashed")
SHOWN = 8
EXITS = {0, 1, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGUSR2}
"""How a process may end: by itself, with an error that is in its journal, killed; told to end before it could hear."""
ABORTED = {-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, 127}
"""How libzmq ends a process that has no descriptor or no memory left, and glibc one that has none for a thread's data;
so where there was a limit, nothing else."""


class Campaign:
    """All of it, from the first process to the last."""

    def __init__(self, given: argparse.Namespace, work: Path, console: Console) -> None:
        chance = random.Random(given.seed)
        self._given, self._work, self._console = given, work, console
        self.sandbox = Sandbox(work)
        self.stage = Stage(work, self.sandbox, random.Random(chance.random()))
        self.faults = Faults(self.stage, self.sandbox, random.Random(chance.random()))
        parts = list(given.part or PARTS)
        if {"queues", "events"} & set(parts):
            parts = [*parts, *({"queues", "events", "links"} - set(parts))]  # the links are to all of them
        if not self.sandbox.whole and "strangers" in parts:
            parts.remove("strangers")
            self.sandbox.lacks.append("no network of its own: no strangers, who would come to everybody's sockets")
        self.stage.actors += [actor for name in parts for actor in PARTS[name]()]
        self.hung: list[str] = []
        self.left: list[str] = []
        self.figures: Counter[str] = Counter()
        self._clock = Journal(work / "campaign")
        self._told = time.monotonic()

    def run(self) -> None:
        """Strike, calm down, end all."""
        until = time.monotonic() + 60 * self._given.minutes
        try:
            while time.monotonic() < until:
                self._step()
                self.faults.work()
            self._say("calming down")
            self.faults.calm()
            (self._work / "calm").touch()
            self._await_movement()
            self._say("ending")
            self._end()
        finally:
            for actor in self.stage.actors:
                if actor.pid:
                    os.kill(actor.pid, signal.SIGKILL)
        self._look_for_leftovers()

    def _step(self) -> None:
        self.stage.look()
        time.sleep(STEP_S)
        if time.monotonic() > self._told + TELL_S:
            self._say(", ".join(f"{count} {what}" for what, count in self.faults.done.items()))

    def _say(self, text: str) -> None:
        self._told = time.monotonic()
        starts = sum(actor.starts for actor in self.stage.actors)
        self._console.print(f"{time.strftime('%X')}  {starts} processes; {text}", highlight=False)

    def _journal(self, actor: Actor) -> Path | None:
        return next((self._work / "journals").glob(f"{actor.name}.*.{actor.pid}"), None)

    def _await_movement(self) -> None:
        """Wait until every part moves again, now that nothing is done to it."""
        calm, deadline = self._clock.now(), time.monotonic() + SETTLE_S
        waiting = [actor for actor in self.stage.actors if actor.name not in ("links", "strangers")]
        while waiting and time.monotonic() < deadline:
            for _ in range(50):
                self._step()
            waiting = [
                actor
                for actor in waiting
                if not actor.pid or (path := self._journal(actor)) is None or moved_at(path) < calm + 1.0
            ]
        for actor in waiting:
            self.hung.append(f"{actor.name} ({actor.pid or 'none lives'}) does not move after {SETTLE_S:.0f} s of calm")
            if actor.pid:
                os.kill(actor.pid, signal.SIGUSR2)  # its stacks go to its log
        time.sleep(1.0 if waiting else 0.0)

    def _end(self) -> None:
        """Have each kind end: writers and publishers first, so that readers are told of the end."""
        self.stage.closing = True
        first = [actor for actor in self.stage.actors if actor.name.endswith(("writer", "publisher"))]
        for group in (first, [actor for actor in self.stage.actors if actor not in first and actor.name != "links"]):
            self._await_ends(group)
            if group is first:
                for _ in range(100):  # those that do not come again end by themselves
                    self._step()
        self._await_ends(self.stage.actors)

    def _await_ends(self, group: list[Actor]) -> None:
        for actor in group:
            if actor.pid:
                os.kill(actor.pid, signal.SIGTERM)
        deadline = time.monotonic() + END_S
        while any(actor.pid for actor in group) and time.monotonic() < deadline:
            self._step()
        for actor in group:
            if actor.pid:
                self.hung.append(f"{actor.name} ({actor.pid}) does not end within {END_S:.0f} s")
                os.kill(actor.pid, signal.SIGUSR2)
                time.sleep(1.0)
                os.kill(actor.pid, signal.SIGKILL)

    def _look_for_leftovers(self) -> None:
        deadline = time.monotonic() + TREE_S
        while (left := self._processes() + self.sandbox.left()) and time.monotonic() < deadline:
            self._step()
        self.left = left

    def _processes(self) -> list[str]:
        """Return the processes that are left: in a namespace of one's own, all."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                is_ours = process.environ().get("XDG_RUNTIME_DIR") == str(self.sandbox.disk)
                line = " ".join(process.cmdline())
                if process.pid != os.getpid() and (is_ours or (line and self.sandbox.whole)):
                    found.append(f"process {process.pid}: {line[:100]}")
        return found

    def verdict(self) -> Verdict:
        """Return what came of it."""
        verdict = judge(self._work / "journals", self.faults.limited)
        verdict.figures.update(self.faults.done)
        verdict.wrong["hung"] += self.hung
        verdict.wrong["leaked"] += self.left
        for name, pid, code in self.stage.ended:
            if code in ABORTED and pid in self.faults.limited:
                verdict.figures["aborted by a library under a limit"] += 1
            elif code not in EXITS:
                verdict.wrong["crashed"].append(f"{name} ({pid}) ended with {code}")
        return verdict


def _show(console: Console, verdict: Verdict, campaign: Campaign) -> None:
    table = Table("figure", "count", title="campaign")
    for what, count in sorted(verdict.figures.items()):
        table.add_row(what, f"{count:,}")
    table.add_section()
    for word in WORDS:
        table.add_row(word, str(len(verdict.wrong[word])), style="bold red" if verdict.wrong[word] else "green")
    console.print(table)
    for word in WORDS:
        for text in verdict.wrong[word][:SHOWN]:
            console.print(f"{word}: {text}", style="red", highlight=False, markup=False)
    for text in campaign.sandbox.lacks:
        console.print(f"not done here: {text}", highlight=False)


def main() -> int:
    """Run the campaign; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.campaign", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long processes are struck (default: 10)")
    parser.add_argument("--seed", type=int, default=1, help="of the choice of strikes and victims (default: 1)")
    parser.add_argument("--json", type=Path, help="a file that the figures are written to")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this one; may be given again")
    parser.add_argument("--keep", type=Path, help="a new directory for journals and logs, which stays")
    given = parser.parse_args()
    if given.minutes <= 0:
        parser.error(f"--minutes must be more than 0, not {given.minutes}")
    if given.keep is not None and len(str(given.keep.resolve())) > sandbox.LONGEST:
        parser.error(f"--keep: {given.keep} is too long a path for sockets under it: {sandbox.LONGEST} bytes at most")
    if (status := sandbox.enter()) is not None:
        return status
    console = Console()
    work = given.keep or Path(tempfile.mkdtemp(prefix="aioshm-campaign-"))
    work.mkdir(exist_ok=True, mode=0o700)
    campaign = Campaign(given, work.resolve(), console)
    campaign.run()
    verdict = campaign.verdict()
    _show(console, verdict, campaign)
    bad = {word: verdict.wrong[word] for word in WORDS}
    if given.json is not None:
        document = {"seed": given.seed, "minutes": given.minutes, "figures": verdict.figures, "wrong": bad}
        given.json.write_text(json.dumps(document | {"lacks": campaign.sandbox.lacks}, indent=1))
    if any(bad.values()):
        console.print(f"journals and logs: {work}", highlight=False)
        return 1
    campaign.sandbox.leave()
    if given.keep is None:
        shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
