"""Whether another arrangement pays, by what it would have saved in every step that was seen.

    gains      what the other cut would have saved in each step, as a share of a step
    ────╱╲────╱╲────╱       their sum goes up and down: ups and downs beyond the noise are spells
        4     4     3       the present one has lasted 3 steps; earlier ones lasted 4

A change costs the pause, the pause to go back, and what is lost until the end of the spell has been noticed. It pays if
the lower confidence bound of the gain exceeds that, over the time that the present spell should still last. A spell
without earlier ones lasts as long again as it has lasted. Where earlier ones lasted longer than the present one by now,
or are about to end, their mean counts as much as their number. So nothing pays in spells that end as soon as they are
noticed, and nothing is blocked for good: a spell that outlasts all others counts for itself.

Nothing here knows ranks, layers or a clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import numpy as np

from drumline.core.graph import Floats

SURE = 4.0  # standard errors between a mean and its bound
SURE_OF_HOME = 3.0  # the same for the way home: ranks that were even before are likely to be so again
_LEAST_NOISE = 0.005  # gains are never assumed to be steadier than this
_FEW = 6.0  # differences of few steps say little about noise
_OUTLASTS = 1.5  # a spell that has lasted so many times an earlier one is of another kind
_TO_SIGMA = 1.0 / (np.sqrt(2.0) * 0.6745)  # of a median absolute difference of two normal values


def noise_of(values: Floats) -> Floats:
    """Return the standard deviation of the noise along the last axis, whatever levels change: by differences.

    >>> steady = np.array([1.0, 1.1, 1.0, 1.1, 2.0, 2.1, 2.0, 2.1, 2.0])
    >>> round(float(noise_of(steady)), 3)
    0.183
    """
    count = values.shape[-1] - 1
    if count < 1:
        return np.full(values.shape[:-1], np.inf)
    sigma = _TO_SIGMA * middle(np.abs(values[..., 1:] - values[..., :-1]))
    result: Floats = np.maximum(sigma, _LEAST_NOISE) * (1.0 + _FEW / count)
    return result


def middle(values: Floats) -> Floats:
    """Return the median along the last axis, as `numpy.median` does, which takes several times as long for few values.

    >>> float(middle(np.array([3.0, 1.0, 2.0]))), float(middle(np.array([4.0, 1.0, 2.0, 3.0])))
    (2.0, 2.5)
    """
    order, half = np.sort(values, axis=-1), values.shape[-1] // 2
    result: Floats = order[..., half] if values.shape[-1] % 2 else (order[..., half - 1] + order[..., half]) / 2
    return result


def surely(total: Floats, largest: Floats, count: Floats, noise: Floats, *, sure: float = SURE) -> Floats:
    """Return the lower bound of a sum of `count` gains; the largest one counts as much as the others do on average.

    `sure` is how many standard errors are between the sum and its bound.
    """
    rest: Floats = (total - np.maximum(largest, 0.0)) * count / np.maximum(count - 1.0, 1.0)
    result: Floats = np.minimum(rest, total) - sure * noise * np.sqrt(count)
    return result


@dataclass(frozen=True, slots=True)
class Spell:
    """Steps in a row in which another arrangement would have gained, or lost; `gain` is their sum."""

    start: int
    end: int
    gain: float

    @property
    def length(self) -> int:
        """How many steps it lasted."""
        return self.end - self.start


def spells(gains: Floats, least: float) -> list[Spell]:
    """Return the ups and downs of the gains' sum that exceed `least`, in order; the last one still goes on.

    >>> for spell in spells(np.array([-1.0, -1, 2, 2, -1, 2, -1, -1, -1, -1]), 2.5): print(spell)
    Spell(start=0, end=2, gain=-2.0)
    Spell(start=2, end=6, gain=5.0)
    Spell(start=6, end=10, gain=-4.0)
    """
    sums = [0.0, *np.cumsum(gains).tolist()]
    turns, low, high, going = [0], 0, 0, 0
    for at, value in enumerate(sums):
        if going >= 0 and value > sums[high]:
            high = at
        if going <= 0 and value < sums[low]:
            low = at
        if going >= 0 and sums[high] - value > least:
            if high > turns[-1]:
                turns.append(high)
            low, going = at, -1
        elif going <= 0 and value - sums[low] > least:
            if low > turns[-1]:
                turns.append(low)
            high, going = at, 1
    turns.append(len(sums) - 1)
    return [Spell(start, end, sums[end] - sums[start]) for start, end in pairwise(turns) if end > start]


@dataclass(frozen=True, slots=True)
class Worth:
    """What a change is worth, in steps: the surely gained share of a step for `lasts` steps, against its costs."""

    age: int  # steps of the present spell
    gain: float  # a step, as measured
    surely: float  # a step, at least
    lasts: float  # steps that the spell should still last
    costs: float  # of going, coming back, and noticing late

    @property
    def pays(self) -> bool:
        """Whether it gains more than it costs."""
        return self.surely * self.lasts > self.costs


def weighed(gains: Floats, *, pause: float, patience: int, within: int, sure: float = SURE) -> Worth | None:
    """Return what a change is worth after these steps' gains; None unless each of the last few steps says that it pays.

    `pause` is the share of a step that it takes.

    >>> weighed(np.array([-0.1] * 20 + [0.2] * 3), pause=0.05, patience=3, within=100).pays
    True
    >>> weighed(np.array(([-0.2] * 4 + [0.2] * 4) * 3 + [-0.2] * 4 + [0.2] * 3), pause=0.05, patience=3, within=99).pays
    False
    """
    if len(gains) < patience:
        return None
    noise = float(noise_of(gains))
    if (gains[-patience:] <= 0).any():
        return None
    *earlier, present = spells(gains, max(2.0 * pause, sure * noise))
    age = max(present.length if present.gain > 0 else 0, patience)
    last = gains[-age:]
    total = float(last.sum())
    bound = float(surely(*map(np.asarray, (total, last.max(), float(age), noise)), sure=sure))
    ups = [spell.length for spell in earlier if spell.gain > 0 and _OUTLASTS * spell.length > age]
    downs = [-spell.gain / spell.length for spell in earlier if spell.gain < 0]
    lasts = (sum(max(length - age, 0) for length in ups) + age) / (len(ups) + 1)
    risk = len(ups) / (len(ups) + 1) * (fmean(downs) if downs else 0.0) * patience
    verdict = Worth(age, total / age, bound / age, min(lasts, float(within)), 2.0 * pause + risk)
    if verdict.pays or len(ups) < 2:
        return verdict
    # In the long run, ups and downs together may pay although each is too short.
    whole = float(surely(*map(np.asarray, (gains.sum(), gains.max(), float(len(gains)), noise)), sure=sure))
    return Worth(len(gains), float(gains.mean()), whole / len(gains), float(min(len(gains), within)), 2.0 * pause)
