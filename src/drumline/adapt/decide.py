"""Decide what to change about a running pipeline, one step after another; rank 0 asks, and all ranks do the same.

    a step is seen ──► has anything changed? is a rank too slow? ──► candidates, simulated ──► the best, if it pays
          ▲                                                                                          │
          └───────── a few steps later: has the gain come? if not, take it back ◄────────────────────┘

The cheapest fix comes first. Switching to another program costs nothing, but no program makes a rank compute less. So
if another cut beats what any program of this cut could reach, layers move; else a program is searched first.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from drumline.adapt.drift import Change, Drift
from drumline.adapt.evidence import noise_of
from drumline.adapt.measured_step import NAMED_QUEUE, series_of, stage_seconds
from drumline.adapt.microbatches import Build
from drumline.adapt.number_choice import NumberChoice
from drumline.adapt.proposal import CUT, NUMBER, PROGRAM, Arrangement, ChangeResult, Proposal
from drumline.adapt.rebalance import Layers
from drumline.adapt.recut import Recut
from drumline.adapt.repair import Aside, is_split, least_seconds
from drumline.adapt.settings import KEEP, Adapt
from drumline.adapt.shortfall import Shortfall
from drumline.core.costs import Costs
from drumline.core.graph import Floats
from drumline.core.measured.costs import costs_of
from drumline.core.measured.measured import Measured
from drumline.core.program import Program
from drumline.core.simulate.simulate import simulate
from drumline.core.timeline.idle import Limit

_WARM_UPS = 2  # steps after the start that are not looked at
_SETTLING = 1  # the same after a change
_RECENT = 3  # steps by which costs are judged
_TRIAL = 9  # steps after which a move stays that does not gain
_SURE = 2.0  # standard errors by which a change surely loses
_DOUBLINGS = 3  # of the least gain, once for every time that a change was taken back
_SECONDS_TO_CHANGE = 0.02  # of taking up a program
_UNTRIED = "no other number was tried yet"


SearchAside = Callable[..., Any]


class Decider:
    """Sees every step of a pipeline and proposes changes.

    `layers` are the model's layers, if cuts may change. `build` makes the program of a number of microbatches, and
    `rows` is how many rows a batch has, if that number may change. `search` is replaced by tests.
    """

    def __init__(
        self,
        settings: Adapt,
        now: Arrangement,
        *,
        layers: Layers | None = None,
        build: Build | None = None,
        search: SearchAside = Aside,
    ) -> None:
        self.settings, self.now = settings, now
        self.judged: list[ChangeResult] = []
        self._search = search
        self._drift = Drift(threshold=settings.threshold)
        movable = layers is not None and settings.rebalance != KEEP and now.counts
        self._recut = Recut(settings, layers) if movable and layers is not None else None
        self._has_changed = False  # whether anything has drifted since the last change of the pipeline
        self._since: deque[Measured] = deque(maxlen=_TRIAL)  # steps since the last change of the pipeline
        self._skip = _WARM_UPS
        self._rest = 0  # steps until another change may come
        self._why: list[str] = []  # what has changed since the last decision
        self._has_drifted = False  # since the last search
        self._aside: Any = None
        self._instead: Proposal | None = None  # the cut to take if the search finds nothing as good
        self._trial: Proposal | None = None  # the change that is being judged
        self._home = now.counts  # the cut at the start
        self._refused: dict[tuple[str, Any], int] = {}  # how often a change was taken back
        self._barred: dict[tuple[str, Any], int] = {}  # those taken back since anything drifted, and after which step
        self._shortfall = Shortfall(settings.cooldown)  # of programs
        self._most_pairs = settings.max_activations or max(simulate(now.program).peak_activations)
        self._numbers = NumberChoice(settings, build, self._most_pairs, now)

    # ---- what is seen ------------------------------------------------------------------------------------------------

    def see(self, value: Measured, rows: int | None = None) -> Proposal | None:
        """Look at a step, with so many rows in its batch; return what to change before the next one."""
        if value.program.num_microbatches != self.now.program.num_microbatches or self._skip > 0:
            self._skip -= 1
            return None
        self._since.append(value)
        self._numbers.see(value, self._taken)
        self._rest -= 1
        step = value.records[0].step
        self._notice(step, value)
        if self._trial is not None:
            return self._judge(step)
        if self._aside is not None:
            return self._search_result(step)
        if len(self._recent) < _RECENT:
            return None
        if self._rest > 0:
            return self._cut(step)
        self._numbers.begin(rows, self.now)
        return self._propose(step)

    def took(self, proposal: Proposal, now: Arrangement, *, seconds: float = 0.0, num_bytes: int = 0) -> None:
        """Hear that all ranks have taken up a proposal, how they run now, and what that took."""
        self.now = now
        if proposal.kind == CUT and self._recut is not None:
            self._recut.took(proposal, seconds=seconds, num_bytes=num_bytes)
        # Another program changes queues, but not what actions and messages take.
        levels = self._drift.levels if proposal.kind == PROGRAM else {}
        planned = {name: level for name, level in levels.items() if not name.startswith(NAMED_QUEUE)}
        self._begin_again(planned, keep_speeds=proposal.kind == CUT)
        self._skip, self._rest = _SETTLING, self.settings.cooldown
        self._trial = None if proposal.is_back else proposal
        if proposal.is_trial:
            self._rest = 0
        elif proposal.kind == NUMBER:
            self._numbers.settled(now, proposal.step)

    def changed(self, now: Arrangement) -> None:
        """Hear that something was changed by hand, and begin again."""
        self.now, self._trial, self._skip = now, None, _SETTLING
        self._home = now.counts
        self.stop()
        self._begin_again()

    def stay(self) -> None:
        """Hear that layers cannot move."""
        self._recut = None

    def stop(self) -> None:
        """End a search that is under way."""
        if self._aside is not None:
            self._aside.stop()
            self._aside = None

    def _begin_again(self, planned: Mapping[str, float] | None = None, *, keep_speeds: bool = False) -> None:
        self._since.clear()
        self._numbers.begin_again()
        self._drift.begin(planned)
        self._why, self._has_changed = [], False
        if self._recut is not None and not keep_speeds:
            self._recut.begin(self.now)

    def _notice(self, step: int, value: Measured) -> None:
        changes: Sequence[Change] = self._drift.see(step, series_of(value))
        if changes:
            self._has_drifted = self._has_changed = True
            self._why += [str(max(changes, key=lambda change: max(change.ratio, 1 / change.ratio)))]
            self._barred.clear()
            self._numbers.drifted(max(change.since for change in changes))
        if self._recut is not None:
            self._recut.see(self.now, stage_seconds(value))

    # ---- candidates --------------------------------------------------------------------------------------------------

    @property
    def _recent(self) -> list[Measured]:
        return list(self._since)[-_RECENT:]

    @property
    def _taken(self) -> list[float]:
        return [step.makespan for step in self._since]

    @property
    def _costs(self) -> Costs:
        return costs_of(self._recent, quickest=True)

    @property
    def _seconds(self) -> float:
        return median(step.makespan for step in self._recent)

    def _propose(self, step: int) -> Proposal | None:
        """Return the best change that pays at once, or begin to search a program."""
        # A move of layers leaves the trial of another number to later.
        moved, has_sign = self._cut(step), bool(self._why or self._numbers.has_untried)
        if moved is None and not has_sign:
            return None
        number = self._number(step) if has_sign else None
        best = min((p for p in (moved, number) if p is not None), key=lambda proposal: proposal.predicted, default=None)
        if self.settings.program and self._search_pays(step, best):
            self._instead, self._has_drifted = best, False
            self._aside = self._search(self._costs, self.now.program, self._limit, seconds=self.settings.seconds)
            return None
        if best is None and self._numbers.are_early(step):
            return None  # the sign is kept
        why, self._why = self._why, []
        if best is number:
            why += [_UNTRIED] if self._numbers.has_untried else []
            self._numbers.has_untried = False
        if best is None:
            self._rest = self.settings.cooldown // 2  # the same would be found again
            return None
        return best if best.why else replace(best, why=why[-1])

    @property
    def _limit(self) -> Limit:
        return Limit(max_activations=self._most_pairs)

    def _search_pays(self, step: int, other: Proposal | None) -> bool:
        """Whether a program could save enough, and more than the other change would."""
        if not self._has_drifted or any(action.parts for row in self.now.program.rows for action in row):
            return False  # overlapped pairs are not timed apart
        costs = self._costs
        least = least_seconds(costs, self.now.program, self._limit) * self._scale(costs) * self._shortfall.factor(step)
        if other is not None and other.predicted <= least:
            return False
        return 1.0 - least / self._seconds >= self.settings.least_gain

    def _scale(self, costs: Costs) -> float:
        """Return what a measured step takes for each second of a simulated one."""
        return self._seconds / max(simulate(self.now.program, costs).makespan, 1e-12)

    def _search_result(self, step: int) -> Proposal | None:
        """Return what the search has found, if it pays more than the other change; None while it continues."""
        result = self._aside.result()
        if result is None or len(self._recent) < _RECENT:
            return None
        self._aside = None
        why, self._why = (self._why or ["costs have changed"])[-1], []
        other = None if self._instead is None else self._cut(step) or self._number(step)
        self._instead = None
        offer = None
        if isinstance(result, Program):
            costs = self._costs
            scale = self._scale(costs)
            predicted = simulate(result, costs).makespan * scale * self._shortfall.factor(step)
            after = replace(self.now, program=result)
            offer = Proposal(step, PROGRAM, why, self.now, after, self._seconds, predicted, scale=scale)
            offer = self._paying(offer)
        if offer is None or (other is not None and other.predicted < offer.predicted * (1 - self.settings.least_gain)):
            return None if other is None else replace(other, why=why)
        return offer

    def _cut(self, step: int) -> Proposal | None:
        """Return another cut that pays; soon after a change, only the one before it."""
        if self._recut is None:
            return None
        move = self._recut.proposed(
            step, self.now, self._recent, has_changed=self._has_changed, only_back=self._rest > 0, home=self._home
        )
        return move[0] if move is not None and self._admits(*move) else None

    def _number(self, step: int) -> Proposal | None:
        """Return another number of microbatches that pays, or that is worth a try, if one is due."""
        proposal = self._numbers.proposed(step, self.now, self._seconds)
        return proposal if proposal is None or proposal.is_trial else self._paying(proposal)

    def _paying(self, proposal: Proposal) -> Proposal | None:
        """Return a proposal that costs almost nothing if it gains enough."""
        saved = (proposal.seconds - proposal.predicted) * self.settings.within
        return proposal if saved > _SECONDS_TO_CHANGE and self._admits(proposal) else None

    def _admits(self, proposal: Proposal, begun: int = 0) -> bool:
        """Whether a change gains enough, and was not taken back since its sign begun; each time asks for more.

        The way home, to the cut at the start, never asks for more.
        """
        target = _target(proposal)
        times = 0 if target == (CUT, self._home) else min(self._refused.get(target, 0), _DOUBLINGS)
        return begun > self._barred.get(target, -1) and proposal.gain >= self.settings.least_gain * 2**times

    # ---- what came of it ---------------------------------------------------------------------------------------------

    def _judge(self, step: int) -> Proposal | None:
        """Compare a change with what its steps would have taken without it; propose to undo one that surely loses."""
        trial = self._trial
        assert trial is not None
        if trial.is_trial:
            return self._tried(step, trial)
        if len(self._recent) < _RECENT:
            return None
        real, onward = np.array(self._taken), None
        if trial.kind == CUT and self._recut is not None:
            without = self._recut.without(trial, len(real))
            is_kept = not self._recut.is_better_back(trial, real)
            if is_kept and real.mean() > without.mean() and len(real) < _TRIAL:
                onward = self._cut(step)  # nothing is certain yet; but speeds may have changed
                if onward is None:
                    return None
        else:
            without = self._without(trial)
            gains = 1.0 - real / without
            error = _SURE * float(noise_of(gains)) / math.sqrt(len(gains))
            if abs(gains.mean()) < error and len(real) < _TRIAL:
                return None  # nothing is certain yet
            is_kept = bool(gains.mean() + min(error, self.settings.least_gain) >= self.settings.least_gain / 2)
        self._trial = None
        measured, alone = float(np.median(real)), float(np.median(without))
        self.judged.append(ChangeResult(step, trial, measured, alone, is_kept))
        if trial.kind == PROGRAM and is_kept:
            self._shortfall.forget()
        elif trial.kind == PROGRAM:
            self._shortfall.note(step=step, share=measured / (trial.predicted * alone / trial.seconds) - 1.0)
        if is_kept:
            return onward
        target = _target(trial)
        self._refused[target] = self._refused.get(target, 0) + 1
        self._barred[target] = 0 if self._recut is None else self._recut.count
        why = f"a step takes {measured * 1e3:.1f} ms, predicted were {trial.predicted * 1e3:.1f} ms"
        return Proposal(step, trial.kind, why, self.now, trial.before, measured, alone, is_back=True)

    def _tried(self, step: int, trial: Proposal) -> Proposal | None:
        """Take the best number once another one was tried for long enough; the one before it is always admitted."""
        is_over, proposal = self._numbers.after_trial(step, self.now, self._seconds)
        if not is_over:
            return None
        self._trial = None
        is_free = proposal is not None and (proposal.is_trial or proposal.after == trial.before)
        if proposal is not None and (is_free or self._paying(proposal) is not None):
            return replace(proposal, why=f"{self.now.words} was tried")
        self._numbers.settled(self.now, step)
        return None

    def _without(self, trial: Proposal) -> Floats:
        """Return what the last steps would have taken without a change: by the times of now, the scale of before."""
        number = self._numbers.without(trial, self.now) if trial.kind == NUMBER else None
        if number is None and is_split(trial.before.program) == is_split(self.now.program):
            each = [simulate(trial.before.program, costs_of([step], quickest=True)).makespan for step in self._since]
            return trial.scale * np.array(each)
        return np.full(len(self._since), trial.seconds if number is None else number)


def _target(proposal: Proposal) -> tuple[str, Any]:
    return proposal.kind, proposal.after.counts if proposal.kind == CUT else proposal.after.program
