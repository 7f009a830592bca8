"""The decisions of a merge, without I/O: open queues, order, reports of silence."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle
from typing import Literal

from aioshm.errors import AioshmError, EndClosed
from aioshm.queue.ends.reader import Reader
from aioshm.queue.merge.places import Place
from aioshm.wait.limits import MIN_PAUSE_S, answer_within

Errors = Literal["raise", "yield"]
"""What becomes of a queue's error: it comes out of the iteration, or is an item of it."""


def check_errors(errors: Errors) -> None:
    """Raise `ValueError` for any other value."""
    if errors not in ("raise", "yield"):
        raise ValueError(f'errors must be "raise" or "yield", not {errors!r}')


def ranked(error: AioshmError, rank: int) -> AioshmError:
    """Return an error that is to be raised, with the rank of the queue that it is about."""
    error.rank = rank
    note = f"this is about the queue that the merge has as rank {rank}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
    return error


class Round:
    """The queues of a merge: each has its turn before any has another."""

    def __init__(self, places: Iterable[Place], after_s: float, now: float) -> None:
        # The queues that have not ended; replaced, never changed.
        self.running: list[Place] = list(places)
        # The same in turn, endlessly; its position is the beginning of the next round.
        self.order: cycle[Place] = cycle(self.running)
        # The errors of ended queues, by rank.
        self.failed: dict[int, AioshmError] = {}
        self.closed: bool = False
        self._places = {place.rank: place for place in self.running}  # also those that have ended
        self._after_s = after_s
        self.watch_silence(now)

    # Whose turn it is

    def in_turn(self) -> list[Place]:
        """Return the open queues in order, the next one first."""
        return [next(self.order) for _ in self.running]

    def behind(self, place: Place) -> list[Place]:
        """Return the open queues, beginning behind one of them."""
        running = self.running
        at = running.index(place) + 1 if place in running else 0
        return running[at:] + running[:at]

    def begin_behind(self, place: Place) -> None:
        """Begin the next round behind this queue, which has had its turn."""
        self.order = cycle(self.behind(place))

    def drop(self, place: Place) -> None:
        """Leave out a queue that has ended; the next round begins behind it."""
        place.running = False
        self._go_round([other for other in self.behind(place) if other is not place])

    def fail(self, place: Place, error: AioshmError) -> None:
        """Leave out a queue that has ended with an error."""
        self.drop(place)
        self.failed[place.rank] = error

    def check_addition(self, rank: int, reader: Reader) -> None:
        """Refuse a taken rank, a reader that is there already, or any after closing."""
        if self.closed:
            raise EndClosed("this merge was closed: merge the readers anew")
        for place in self.running:
            if place.rank == rank:
                raise ValueError(f"rank {rank} is taken by {place.reader!r}: take another one, or remove({rank}) first")
            if place.reader is reader:
                raise ValueError(f"{reader!r} is there already, as rank {place.rank}")

    def add(self, place: Place, now: float) -> None:
        """Add a queue behind all others; it may replace an ended one."""
        self._places[place.rank] = place
        self.failed.pop(place.rank, None)
        self._heard[place.rank] = (place.reader.source.progress, now)
        self._go_round([*self.in_turn(), place])

    def remove(self, rank: int) -> Place | None:
        """Remove a queue and its error; return its place, unless it has ended."""
        place = self._places.pop(rank, None)
        if place is None:
            known = sorted(self._places) or "none at all"
            raise ValueError(f"rank {rank!r} is not in this merge: there is {known}")
        self.failed.pop(rank, None)
        if not place.running:
            return None
        place.running = False
        self._go_round([other for other in self.in_turn() if other is not place])
        return place

    def close(self) -> None:
        """Leave out every queue."""
        self.closed = True
        self._go_round([])

    def _go_round(self, running: list[Place]) -> None:
        self.running = running
        self.order = cycle(running)

    # Reporting, queue by queue: that others have messages does not keep the silence of one from being told

    def watch_silence(self, now: float) -> None:
        """Count from here how long each queue is silent."""
        self.look_at: float = now + self._after_s
        self.asked: list[Place] = []
        self._heard = {place.rank: (place.reader.source.progress, now) for place in self.running}

    def silence_due(self, now: float) -> bool:
        """Return whether `tell_silence` is due; the time in which nobody iterated counts for no silence."""
        if now - self.look_at > self._after_s:
            self.watch_silence(now)
        return now >= self.look_at

    def tell_silence(self, now: float) -> float:
        """Ask silent queues' writers, or report them; return the seconds until the next call."""
        asked, self.asked = self.asked, []
        answer_s = answer_within(self._after_s)
        again_s = max(MIN_PAUSE_S, self._after_s - answer_s) if asked else self._after_s
        for place in asked or self.running:
            source = place.reader.source
            if not place.running or self._moved(place, now) or not place.entered:
                continue
            if not asked and source.ask_writer():
                self.asked.append(place)
                again_s = answer_s
            else:
                source.report_waiting(now - self._heard[place.rank][1])
        self.look_at = now + again_s
        return again_s

    def _moved(self, place: Place, now: float) -> bool:
        """Return whether the reader has finished with messages since this was asked last."""
        progress = place.reader.source.progress
        if progress == self._heard[place.rank][0]:
            return False
        self._heard[place.rank] = progress, now
        return True
