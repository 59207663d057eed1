"""Propose another cut: what the ranks' speeds say, which cut suits them, what a move costs, and what came of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from drumline.adapt.proposal import CUT, Arrangement, Proposal
from drumline.adapt.rebalance import Layers
from drumline.adapt.settings import HALF, Adapt
from drumline.adapt.slowness import RankSlowness, neighbours
from drumline.core.errors import DrumlineError
from drumline.core.graph import Floats
from drumline.core.measured.costs import latencies
from drumline.core.measured.measured import Measured
from drumline.plan.cut.cuts import Counts

_BYTES_PER_SECOND = 5e8  # of a move, until one was measured, and of what it moves beyond that one


class Recut:
    """Sees what every stage takes, and proposes moves of layers."""

    def __init__(self, settings: Adapt, layers: Layers) -> None:
        self._settings, self._layers = settings, layers
        self._slowness = RankSlowness(settings, layers)
        self._home: Counts = ()  # the cut before the last move: the way back is never blocked
        self._paused = (0.0, 0)  # seconds and bytes of the last move
        self._now: Counts = ()
        self._steps: Sequence[Measured] = ()  # the last few

    @property
    def count(self) -> int:
        """How many steps were seen."""
        return self._slowness.count

    def begin(self, now: Arrangement) -> None:
        """Forget what was seen: something else than the cut has changed."""
        self._layers = replace(self._layers, program=now.program)
        self._slowness.begin(self._layers)

    def see(self, now: Arrangement, stage_seconds: Sequence[float]) -> None:
        """Add a step: what a microbatch took in every stage."""
        self._now = now.counts
        self._slowness.see(now.counts, stage_seconds)

    def took(self, move: Proposal, *, seconds: float, num_bytes: int) -> None:
        """Hear that layers have moved, and what that took."""
        self._paused, self._home = (seconds, num_bytes), move.before.counts

    def proposed(
        self,
        step: int,
        now: Arrangement,
        last: Collection[Measured],
        *,
        has_changed: bool,
        only_back: bool,
        home: Counts,
    ) -> tuple[Proposal, int] | None:
        """Return a move that pays, and the step from which its sign has lasted; with `only_back` to the cut before.

        `last` are the last few steps, `has_changed` says whether anything else shows that ranks have changed, and
        `home` is the cut at the start.
        """
        if only_back and not self._home:
            return None
        self._steps = list(last)
        only = self._home if only_back else ()
        better = self._slowness.look(
            now.counts, self._chosen, pause=self._pause, has_changed=has_changed, only=only, home=home
        )
        if better is None:
            return None
        simulated = self._slowness.seconds(now.counts, len(self._steps)).tolist()
        scale = median(measured.makespan / each for measured, each in zip(self._steps, simulated, strict=True))
        layers = self._on(better.slowness)
        before, then = (scale * layers.seconds(counts) for counts in (now.counts, better.counts))
        proposal = Proposal(step, CUT, better.why, now, replace(now, counts=better.counts), before, then, scale=scale)
        return proposal, self.count - better.verdict.age

    def _pause(self, counts: Counts) -> float:
        """Return the share of a step that a move to a cut takes: as long as the last one, and more for more bytes."""
        seconds, num_bytes = self._paused
        more = max(self._layers.moved_bytes(self._now, counts) - num_bytes, 0)
        return (seconds + more / _BYTES_PER_SECOND) / median(measured.makespan for measured in self._steps)

    def _on(self, slowness: Sequence[float]) -> Layers:
        """Return the layers on ranks that take so many times as long as when layers were timed."""
        latency = max((edge.latency for edge in latencies(self._steps, quickest=True).values()), default=0.0)
        return replace(self._layers, speeds=tuple(1.0 / value for value in slowness), latency=latency)

    def _chosen(self, slowness: Sequence[float]) -> Counts | None:
        """Return the cut to take for the ranks' slowness; None if there is none."""
        layers = self._on(slowness)
        if self._settings.rebalance != HALF:
            try:
                return layers.best().counts
            except DrumlineError:
                return None  # nothing fits the memory: stay
        planned = layers.rank_seconds(self._now)
        _, slow, beside = max(neighbours([a * b for a, b in zip(planned, slowness, strict=True)]))
        counts = layers.half(self._now, slow=slow, beside=beside)
        return counts if counts is not None and layers.fits(counts) else None

    # ---- what came of a move -----------------------------------------------------------------------------------------

    def without(self, move: Proposal, count: int) -> Floats:
        """Return what the last steps would have taken without a move: at the speeds of now, by the scale of before."""
        return move.scale * self._slowness.seconds(move.before.counts, count)

    def is_better_back(self, move: Proposal, real: Floats) -> bool:
        """Whether the cut before a move pays by now, if the steps since then took `real` seconds."""
        simulated = move.scale * self._slowness.seconds(self._now, len(real))
        verdict = self._slowness.verdict(
            self._now,
            move.before.counts,
            pause=self._pause(move.before.counts),
            longer=float(np.median(real / simulated)),
        )
        return verdict is not None and verdict.pays
