"""What noisy repetitions show: a mean that stragglers do not decide, and how far it may be off."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

TRIM = 0.2
RESAMPLES = 2000
CONFIDENCE = 0.95


class Interval(NamedTuple):
    """An estimate, and where the truth is with 95% confidence."""

    estimate: float
    low: float
    high: float


def trimmed_mean(values: Sequence[float], trim: float = TRIM) -> float:
    """Return the mean without this share of the values at either end.

    Raises:
        ValueError: There are none.
    """
    if not values:
        raise ValueError("a mean needs values")
    cut = int(len(values) * trim)
    return fmean(sorted(values)[cut : len(values) - cut])


def interval_of(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Return the trimmed mean of repetitions, and its interval by the percentile bootstrap.

    Args:
        values: One for each repetition, which are independent of each other.
        seed: Of the resampling, so that the same values have the same interval.
    """
    pick = random.Random(seed)
    means = sorted(trimmed_mean(pick.choices(values, k=len(values))) for _ in range(RESAMPLES))
    outside = int(RESAMPLES * (1 - CONFIDENCE) / 2)
    return Interval(trimmed_mean(values), means[outside], means[-1 - outside])
