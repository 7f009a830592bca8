"""One publisher's numbers: which comes next, and whether an old one is a copy or a restarted publisher's. No I/O."""

from __future__ import annotations

from array import array
from enum import Enum, auto

# Old numbers of which the payload's fingerprint is remembered.
REMEMBERED = 2**14
_FINGERPRINT_MASK = 2**64 - 1


class Verdict(Enum):
    """What a number means."""

    NEXT = auto()  # the one that was expected
    GAP = auto()  # some before it are missing
    COPY = auto()  # delivered before
    BACK = auto()  # an old number with new content: the publisher began again
    UNSURE = auto()  # an old number, too old to remember its content


def fingerprint(payload: bytes) -> int:
    """Return a number that tells payloads apart within this process."""
    return hash(payload) & _FINGERPRINT_MASK


class Numbering:
    """Where a consumer stands in one publisher's numbers."""

    def __init__(self, expected: int) -> None:
        self.expected: int = expected  # the number that comes next
        # The number delivered last, and its fingerprint; None before the first.
        self.last: tuple[int, int] | None = None
        # Of the numbers just before ``expected``, without a hole: 128 KiB for each publisher, as a deque of int 700.
        self._fingerprints: array[int] = array("Q")
        self._oldest = 0

    def judge(self, seq: int, mark: int) -> Verdict:
        """Say what number ``seq`` with fingerprint ``mark`` means; changes nothing."""
        if seq == self.expected:
            return Verdict.NEXT
        if seq > self.expected:
            return Verdict.GAP
        if self.last is None:
            return Verdict.BACK
        age = self.expected - seq
        if age > len(self._fingerprints):
            return Verdict.UNSURE
        known = self._fingerprints[(self._oldest - age) % len(self._fingerprints)]
        return Verdict.COPY if known == mark else Verdict.BACK

    def accept(self, seq: int, mark: int) -> None:
        """Note that ``seq``, which was expected, has been delivered."""
        assert seq == self.expected
        if len(self._fingerprints) < REMEMBERED:
            self._fingerprints.append(mark)
        else:
            self._fingerprints[self._oldest] = mark
            self._oldest = (self._oldest + 1) % REMEMBERED
        self.last = (seq, mark)
        self.expected = seq + 1

    def skip_to(self, seq: int) -> tuple[int, int]:
        """Give up the numbers before ``seq``; return the first and the last of them."""
        first = self.expected
        assert seq > first
        self._forget_fingerprints()  # older numbers are UNSURE from now on, never wrongly a copy
        self.expected = seq
        return first, seq - 1

    def begin_again(self) -> int:
        """Expect 0, from a new publisher; return what was expected before."""
        expected, self.expected = self.expected, 0
        self.last = None
        self._forget_fingerprints()
        return expected

    def _forget_fingerprints(self) -> None:
        del self._fingerprints[:]
        self._oldest = 0
