"""Choose the number of microbatches of a running pipeline: which to try, and after how many steps that can be said.

    steps since the last change or drift ──► costs ──► best number, or one to try ──► is that sure in this noise?

A few steps say little in noise: the costs of two numbers then differ by chance, and a line through them leads far away.
So a number is taken once its gain is twice the error of the steps' mean, or once that error is below the least gain.
That takes up to 24 steps. The first try waits for nine at most: nothing is known yet.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from drumline.adapt.evidence import noise_of
from drumline.adapt.microbatches import Build, Groups, Sizing
from drumline.adapt.proposal import NUMBER, Arrangement, Proposal
from drumline.adapt.settings import KEEP, SIZE, Adapt
from drumline.adapt.tries import Tries
from drumline.core.costs import Costs
from drumline.core.measured.costs import costs_of
from drumline.core.measured.measured import Measured
from drumline.core.simulate.simulate import simulate

_FEWEST = 3  # steps by which costs are judged
_MOST = 24
_MOST_TRIED = 9  # steps of a number that is tried, and before the first one is
_SURE = 2.0  # errors by which a gain is sure
_LEAST = 0.005  # of an error: a smaller gain asks for no more steps


class NumberChoice:
    """What is known of other numbers of microbatches; None is proposed while they are kept.

    `build` makes the program of a number, `most_pairs` is how many pairs of stage and microbatch a rank may hold.
    """

    def __init__(self, settings: Adapt, build: Build | None, most_pairs: float, now: Arrangement) -> None:
        self._settings, self._build, self._most_pairs = settings, build, most_pairs
        self._sizing: Sizing | None = None
        self._groups: Groups | None = None
        self._tries = Tries(settings.cooldown, first=now.program)
        self._steps: deque[Measured] = deque(maxlen=_MOST)  # since the last change of the pipeline, or of what it costs
        self._noise = np.inf  # of steps, as a share
        self.has_untried = False  # whether the number may change, and no other was tried

    # ---- what is seen ------------------------------------------------------------------------------------------------

    def see(self, value: Measured, seconds: Sequence[float]) -> None:
        """Look at a step, and at what all since the last change took."""
        self._steps.append(value)
        self._tries.see(seconds)

    def begin(self, rows: int | None, now: Arrangement) -> None:
        """If the number may change, get ready for that at the first look."""
        how, number = self._settings.microbatches, now.program.num_microbatches
        if how == KEEP or self._build is None or self._sizing is not None or self._groups is not None:
            return
        if how == SIZE:
            self._groups = Groups(number, self._build, self._most_pairs)
        elif rows:
            self._sizing = Sizing(rows, self._build, self._most_pairs * rows / number)
        else:
            return  # the batch is not known yet
        self.has_untried = True

    def begin_again(self) -> None:
        """Hear that the pipeline has changed: what follows are other steps, probably as noisy."""
        self._noise = self._noise_now()
        self._steps.clear()

    def drifted(self, since: int) -> None:
        """Hear that costs have changed since a step: what was measured before does not count."""
        while self._steps and self._steps[0].records[0].step < since:
            self._steps.popleft()
        if self._sizing is not None:
            self._sizing.forget(0)

    def settled(self, now: Arrangement, step: int) -> None:
        """Hear which number runs after a change, or after one was tried."""
        self._tries.settled(now.program, step=step)

    # ---- what follows ------------------------------------------------------------------------------------------------

    @property
    def are_kept(self) -> bool:
        """Whether no other number may be taken."""
        return self._sizing is None and self._groups is None

    def are_early(self, step: int) -> bool:
        """Return whether another number is not due yet, or more steps are needed before costs can be compared."""
        if self.are_kept:
            return False
        return not self._tries.are_due(step) or len(self._steps) < max(_FEWEST, self._enough())

    def _noise_now(self) -> float:
        seconds = np.array([step.makespan for step in self._steps])
        return float(noise_of(seconds / np.median(seconds))) if len(seconds) >= _FEWEST else self._noise

    def _enough(self) -> int:
        """Return after how many steps the error of their mean is below the least gain."""
        return math.ceil(min((self._noise_now() / max(self._settings.least_gain, _LEAST)) ** 2, _MOST))

    def _is_sure(self, proposal: Proposal) -> bool:
        return proposal.gain >= _SURE * self._noise_now() / math.sqrt(len(self._steps))

    def proposed(self, step: int, now: Arrangement, seconds: float) -> Proposal | None:
        """Return another number that takes less, or that is worth a try, if one is due and enough is known."""
        if self.are_kept or not self._tries.are_due(step) or len(self._steps) < _FEWEST:
            return None
        proposal = self.best(step, now, seconds)
        if proposal is None or not self.are_early(step):
            return proposal
        is_first = self.has_untried and len(self._steps) >= _MOST_TRIED
        is_known = is_first if proposal.is_trial else self._is_sure(proposal)
        return proposal if is_known else None

    def after_trial(self, step: int, now: Arrangement, seconds: float) -> tuple[bool, Proposal | None]:
        """Return whether a number was tried for long enough, and the one that takes less."""
        proposal, num_steps = self.best(step, now, seconds), len(self._steps)
        is_over = num_steps >= min(self._enough(), _MOST_TRIED)
        if proposal is not None and not is_over:
            is_over = not proposal.is_trial and self._is_sure(proposal)
        return is_over, proposal if is_over else None

    def best(self, step: int, now: Arrangement, seconds: float) -> Proposal | None:
        """Return the number that takes least, or one to try; `seconds` is what a step takes now."""
        if self._groups is not None:
            return self._grouped(step, now, seconds, self._groups)
        if self._sizing is None:
            return None
        number_now = now.program.num_microbatches
        self._sizing.see(number_now, self._costs)
        is_trial = len(self._sizing.known) == 1
        number = self._sizing.next(number_now, least_gain=self._settings.least_gain)
        program, times = self._sizing.program(number), [self._sizing.seconds(index) for index in (number_now, number)]
        if number == number_now or program is None or None in times:
            return None
        scale = seconds / (times[0] or 1.0)
        after = Arrangement(program, now.counts)
        predicted = scale * (times[1] or 0.0)
        return Proposal(step, NUMBER, "", now, after, seconds, predicted, is_trial=is_trial, scale=scale)

    def _grouped(self, step: int, now: Arrangement, seconds: float, groups: Groups) -> Proposal | None:
        """Return the step in other groups, if they take less."""
        costs = self._costs
        program = groups.best(costs)
        if program is None or program == now.program:
            return None
        scale = seconds / max(simulate(now.program, costs).makespan, 1e-12)
        predicted = scale * simulate(program, costs).makespan
        return Proposal(step, NUMBER, "", now, Arrangement(program, now.counts), seconds, predicted, scale=scale)

    def without(self, trial: Proposal, now: Arrangement) -> float | None:
        """Return what a step would take by now with the number before a change; None where groups changed."""
        if self._sizing is None:
            return None
        self._sizing.see(now.program.num_microbatches, self._costs)
        return trial.scale * (self._sizing.seconds(trial.before.program.num_microbatches) or 0.0)

    @property
    def _costs(self) -> Costs:
        return costs_of(list(self._steps)[-max(_FEWEST, self._enough()) :], quickest=True)
