"""What arrives, and what will (pure).

Measured over the longest time in which it has not changed, so that few requests do not look like
many by chance, and many are noticed at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log, sqrt

from services.planner.observation import Window

SURPRISE = 3.0  # standard deviations by which what came lately must differ to be another load
UNSURE = 0.1  # share of the load by which chance may bend a trend that is looked at
GROWS = 1.05  # times the load of now, from which on a load grows
AT_MOST = 2.0  # times the load of now: as much as a trend is believed
LEAST_S = 10.0  # what came in a shorter time counts as if it had come in this one


@dataclass(frozen=True)
class Arriving:
    """What comes per second, in tokens or requests."""

    now: float
    later: float  # when workers that are started now will be there
    window: Window  # over which it was measured

    @property
    def grows(self) -> bool:
        return self.later > GROWS * self.now


def arriving(
    windows: tuple[Window, ...], ahead_s: float, amount: Callable[[Window], float], grain: float
) -> Arriving:
    """``windows`` end now and each is twice as long as the one before. ``amount``: what of a window
    is counted; it comes in portions of ``grain``, by a Poisson process as far as chance goes.
    """
    known: list[Window] = []
    for window in windows:
        if window.seconds > (known[-1].seconds if known else 0.0):
            known.append(window)
    if not known:
        return Arriving(0.0, 0.0, Window())
    counts = [amount(window) / grain if grain > 0 else 0.0 for window in known]
    lengths = [window.seconds for window in known]
    place = _steady(counts, lengths)
    now = counts[place] / max(lengths[place], LEAST_S)
    ahead_s += lengths[place] / 2  # from the middle of the window on
    later = min(now + _growth(counts, lengths, ahead_s), AT_MOST * now)
    return Arriving(now * grain, later * grain, known[place])


def _growth(counts: list[float], lengths: list[float], ahead_s: float) -> float:
    """By how much the rate will have grown after ``ahead_s``. A trend shows at all scales, from the
    halves of the longest window to those of the shortest in which it can be told from chance; after
    a sudden change it does not.
    """
    found = []
    for place in range(1, len(counts)):
        half = lengths[place - 1]
        new = counts[place - 1]
        old = (counts[place] - new) * half / (lengths[place] - half)
        by = ahead_s / half**2  # from counts to rates, and from one middle to the moment looked at
        if sqrt(new + old) * by <= UNSURE * counts[place] / lengths[place]:
            found.append((new - old) * by)
    return max(0.0, min(found, default=0.0))


def _steady(counts: list[float], lengths: list[float]) -> int:
    """Which of the windows is the longest within which nothing has changed."""
    place = len(counts) - 1
    while place:
        surprises = [
            _surprise(counts[part], lengths[part], counts[place], lengths[place])
            for part in range(place)
        ]
        largest = max(surprises)
        if largest <= SURPRISE:
            break
        place = surprises.index(largest)
    return place


def _surprise(part: float, part_s: float, whole: float, whole_s: float) -> float:
    """By how many standard deviations the end of a time differs from the rest of it: the square
    root of twice the logarithm of the likelihood ratio of Poisson processes, corrected by half a
    portion, as portions are whole.
    """
    if whole <= 0 or part_s >= whole_s:
        return 0.0
    mean = whole / whole_s
    usual = mean * part_s
    part = min(part + 0.5, usual) if part < usual else max(part - 0.5, usual)
    rest, rest_s = max(0.0, whole - part), whole_s - part_s
    ratio = sum(n * log(n / s / mean) for n, s in ((part, part_s), (rest, rest_s)) if n > 0)
    return sqrt(max(0.0, 2 * ratio))
