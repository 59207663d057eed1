"""Watch how slow every rank is, and tell when another cut pays for sure.

    step          1     2     3     4     5     6     7        how many times as long as its layers were timed
    rank 0       1.00  1.02  0.99  1.01  1.00  1.00  0.98
    rank 1       1.01  0.99  1.00  1.00  1.52  1.49  1.51      slow for 3 steps: what would 19 | 13 have saved?

The speeds of the last steps are kept through moves: they say what any cut would have taken. The last 3, 6, 12, 24 and
48 steps each have a level per rank. If even a division of fractions of layers would not have gained for sure, nothing
more happens. Else the best cut for that level is simulated with every step that is known, and `evidence` decides.

A speed that changes steadily is followed: steps count as they will be a few steps from now.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from drumline.adapt.evidence import SURE, SURE_OF_HOME, Worth, middle, noise_of, surely, weighed
from drumline.adapt.rebalance import Layers
from drumline.adapt.settings import Adapt
from drumline.core.graph import Floats
from drumline.plan.cut.cuts import Counts

_KNOWN = 128  # steps that are kept
_WINDOWS = (3, 6, 12, 24, 48)
_RAMPS = (24, 12, 6)  # steps in which a speed may change steadily
_TIMES: dict[int, Floats] = {count: np.arange(count, dtype=np.float64) - (count - 1) / 2 for count in _RAMPS}
_LENGTHS = np.array([math.sqrt(times @ times) for times in _TIMES.values()])
_SLOPES = np.array([np.append(np.zeros(_RAMPS[0] - len(times)), times / (times @ times)) for times in _TIMES.values()])
_LEAD = 3  # steps by which a steady change is anticipated
_ALIKE = 0.01  # speeds that differ by less have the same best cut

Choose = Callable[[Sequence[float]], Counts | None]


@dataclass(frozen=True, slots=True)
class BetterCut:
    """A cut that pays, why, and the ranks' speeds for which it was chosen."""

    counts: Counts
    why: str
    verdict: Worth
    slowness: tuple[float, ...]


class RankSlowness:
    """Knows the ranks' speeds in the last steps; `look` returns a cut that pays."""

    def __init__(self, settings: Adapt, layers: Layers) -> None:
        self._settings, self._layers = settings, layers
        self._rows = _no_rows(layers)
        self._planned: dict[Counts, list[float]] = {}
        self._due = dict.fromkeys(_WINDOWS, 0)  # the count of steps at which a window is looked at next
        self.count = 0  # of steps that were seen
        self._answers: list[tuple[Floats, Counts | None]] = []

    def begin(self, layers: Layers) -> None:
        """Forget all steps: another program runs, or ranks are not what they were."""
        self._layers = layers
        self._rows, self._planned, self._answers = _no_rows(layers), {}, []

    def see(self, counts: Counts, stage_seconds: Sequence[float]) -> None:
        """Add a step: what a microbatch took in every stage of the cut."""
        now = self._layers.rank_seconds(counts, stage_seconds)
        planned = self._of(counts)
        row = [b / a if a > 0 and b > 0 else 1.0 for a, b in zip(planned, now, strict=True)]
        self._rows = np.concatenate([self._rows[1 - _KNOWN :], [row]])
        self.count += 1

    def _of(self, counts: Counts) -> list[float]:
        if counts not in self._planned:
            self._planned[counts] = self._layers.rank_seconds(counts)
        return self._planned[counts]

    def last(self, count: int) -> Floats:
        """Return the ranks' slowness in the last steps."""
        return self._rows[-count:].copy()

    def seconds(self, counts: Counts, count: int) -> Floats:
        """Return what each of the last steps would have taken with a cut, in the simulator."""
        return self._layers.steps(counts, self.last(count))

    def look(
        self,
        counts: Counts,
        choose: Choose,
        *,
        pause: Callable[[Counts], float],
        has_changed: bool,
        only: Counts = (),
        home: Counts = (),
    ) -> BetterCut | None:
        """Return a cut that pays, of those that `choose` returns for the ranks' slowness; `only` that one, if given.

        If none does, `home` may pay, the cut at the start: it needs less evidence.

        `pause` returns the share of a step that a move takes. Unless something `has_changed`, a rank must be slower
        than its neighbour by the threshold.
        """
        due = [window for window in _WINDOWS if window <= len(self._rows) and self._due[window] <= self.count]
        known = np.log(self.last(_WINDOWS[-1]))
        ramp = self._ramp(known)
        if ramp is not None:
            due = [len(ramp), *due]
        for at, window in enumerate(due):
            ahead = ramp if ramp is not None and not at else None
            logs = known if ahead is None else np.concatenate([known[: len(known) - window], ahead])
            better = self._judged(counts, logs, window, choose, pause, has_changed or ahead is not None, only, ahead)
            if better is not None:
                return better
            if ahead is None:
                self._due[window] = self.count + max(window // 3, 1)
        return self._homeward(counts, home, pause) if home and only in ((), home) and home != counts else None

    def _homeward(self, counts: Counts, home: Counts, pause: Callable[[Counts], float]) -> BetterCut | None:
        """Return the cut at the start if it pays."""
        rows, seconds = self.last(_KNOWN), pause(home)
        loads, even = (np.array(self._of(each)) for each in (counts, home))
        # The largest ranks alone cost little to compare, and say the same unless it is close.
        if self._worth_of_home(_saved((rows * loads).max(axis=1), (rows * even).max(axis=1)), seconds) is None:
            return None
        verdict = self._worth_of_home(_saved(self._layers.steps(counts, rows), self._layers.steps(home, rows)), seconds)
        if verdict is None:
            return None
        level = np.exp(np.log(rows[-verdict.age :]).mean(axis=0))
        longer, slow, beside = max(neighbours((loads * level).tolist()))
        return BetterCut(home, _reason(longer, slow, beside), verdict, tuple(level.tolist()))

    def _worth_of_home(self, gains: Floats, pause: float) -> Worth | None:
        """Return what these gains are worth if they pay for the way home."""
        settings = self._settings
        how = {"patience": settings.patience, "within": settings.within}
        verdict = weighed(gains, pause=pause, sure=SURE_OF_HOME, **how)
        return verdict if verdict is not None and verdict.pays and verdict.gain >= settings.least_gain else None

    def _judged(
        self,
        counts: Counts,
        logs: Floats,
        window: int,
        choose: Choose,
        pause: Callable[[Counts], float],
        has_sign: bool,
        only: Counts,
        ahead: Floats | None,
    ) -> BetterCut | None:
        window_logs = logs[-window:]
        level = np.exp(middle(window_logs.T) if window == _WINDOWS[0] else window_logs.mean(axis=0))
        planned = np.array(self._of(counts))
        loads = planned * level
        even = planned.sum() / (1.0 / level).sum()
        settings = self._settings
        if even >= loads.max() * (1.0 - settings.least_gain):
            return None
        longer, slow, beside = max(neighbours(loads.tolist()))
        if not has_sign and longer < settings.threshold:
            return None
        divided = even / level  # each rank's share, if fractions of layers could move
        recent = np.exp(logs[-settings.patience :])
        if ((recent * planned).max(axis=1) <= (recent * divided).max(axis=1)).any():
            return None
        slowness = np.exp(logs)
        gains = _saved((slowness * planned).max(axis=1), (slowness * divided).max(axis=1))
        last, noise = gains[-window:], noise_of(gains)
        if surely(last.sum(), last.max(), np.asarray(float(window)), noise) <= max(2.0 * pause(counts), 0.0):
            return None
        better = self._best(level, choose)
        if better is None or better == counts or (only and better != only):
            return None
        verdict = self.verdict(counts, better, pause=pause(better), ahead=ahead)
        if verdict is None or not verdict.pays or verdict.gain < settings.least_gain:
            return None
        return BetterCut(better, _reason(longer, slow, beside), verdict, tuple(level.tolist()))

    def verdict(
        self, counts: Counts, other: Counts, *, pause: float, longer: float = 1.0, ahead: Floats | None = None
    ) -> Worth | None:
        """Return what another cut is worth by all steps that are known, the last of them as they are to be expected.

        `longer` is how many times as long as simulated the steps of this cut take.
        """
        rows = self.last(_KNOWN)
        if ahead is not None:
            rows[-len(ahead) :] = np.exp(ahead)
        gains = _saved(self._layers.steps(counts, rows) * longer, self._layers.steps(other, rows))
        return weighed(gains, pause=pause, patience=self._settings.patience, within=self._settings.within)

    def _best(self, level: Floats, choose: Choose) -> Counts | None:
        """Return the best cut for the ranks' slowness, which is the same for almost the same slowness."""
        logs = np.log(level / level.min())
        for known, answer in self._answers:
            if np.abs(known - logs).max() < _ALIKE:
                return answer
        self._answers = [(logs, choose(level.tolist())), *self._answers[:7]]
        return self._answers[0][1]

    def _ramp(self, logs: Floats) -> Floats | None:
        """Return the last steps as they will be, if a rank's speed changes steadily; None if none does."""
        if len(logs) < _RAMPS[-1]:
            return None
        every: Floats = logs[-_RAMPS[0] :]
        slopes: Floats = _SLOPES[:, -len(every) :] @ every
        certain = np.abs(slopes) * _LENGTHS[:, None] > SURE * noise_of(logs.T)
        for count, slope, sure in zip(_RAMPS, slopes, certain, strict=True):
            if count > len(logs) or not sure.any():
                continue
            logs_of_ramp: Floats = logs[-count:]
            times = _TIMES[count]
            for rank in np.flatnonzero(sure):
                sure[rank] = _is_straight(logs_of_ramp[:, rank], slope[rank] * times)
            if sure.any():
                away: Floats = (count - 1) / 2 + _LEAD - times
                expected: Floats = logs_of_ramp + np.where(sure, slope, 0.0) * away[:, None]
                return expected
        return None


def _no_rows(layers: Layers) -> Floats:
    return np.empty((0, layers.program.num_ranks))


def _reason(longer: float, slow: int, beside: int) -> str:
    return f"rank {slow} computes {longer:.0%} longer than rank {beside}"


def _saved(now: Floats, other: Floats) -> Floats:
    """Return what each step would have saved, as a share of the last ones: seconds of long steps count as others."""
    result: Floats = (now - other) / now[-_WINDOWS[0] :].mean()
    return result


def _is_straight(values: Floats, line: Floats) -> bool:
    """Whether values follow a line rather than one step up or down."""
    off = values - values.mean()
    before = np.arange(1, len(off))
    levels = off.cumsum()[:-1] ** 2 * (1.0 / before + 1.0 / (len(off) - before))  # explained by one step at each place
    return bool(((off - line) ** 2).sum() < (off**2).sum() - levels.max())


def neighbours(loads: Sequence[float]) -> list[tuple[float, int, int]]:
    """Return by which share a rank takes longer than its neighbour, for all pairs of them: (share, slow, beside).

    >>> max(neighbours([1.0, 1.5, 1.0]))
    (0.5, 1, 2)
    """
    pairs = [pair for at in range(len(loads) - 1) for pair in ((at, at + 1), (at + 1, at))]
    return [(loads[slow] / max(loads[beside], 1e-12) - 1.0, slow, beside) for slow, beside in pairs]
