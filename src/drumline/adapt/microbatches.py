"""How many microbatches a step should have, from what actions take at the sizes that were tried.

    fixed batch     8 microbatches of 4 rows, or 16 of 2, ...     seconds of an action = a + b * rows, fitted
    fixed size      16 microbatches at once, or 2 groups of 8     as many as memory allows: fewer groups fill and drain

At a fixed batch, with one size known, the fixed part of an action is a guess, so a neighbouring size is tried first.
With two or more, the simulator times every number of microbatches by its own program, and the best is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from drumline.core.costs import Costs
from drumline.core.program import Program
from drumline.core.simulate.simulate import makespans, simulate
from drumline.core.simulate.steps import in_groups
from drumline.plan.device.overheads import MessageTime, fitted

_FIXED = 0.15  # share of an action that a smaller microbatch does not save, until it is measured
_MOST = 128  # microbatches: more gain little, and take long to simulate
_OPS = ("forward", "backward_input", "backward_weight")

Build = Callable[[int], Program | None]


def numbers(rows: int) -> list[int]:
    """Return the numbers of microbatches that divide a batch's rows, up to 128.

    >>> numbers(12), numbers(512)[-1]
    ([1, 2, 3, 4, 6, 12], 128)
    """
    return [number for number in range(1, min(rows, _MOST) + 1) if rows % number == 0]


@dataclass
class Sizing:
    """What is known of a batch of `rows` rows at several numbers of microbatches.

    `build` returns the program of a number, None where there is none. `most_rows` is what a rank may hold: pairs of
    stage and microbatch, times the rows of a microbatch.

    >>> from drumline.schedules import generate
    >>> sizing = Sizing(64, lambda number: generate("1f1b", num_ranks=2, num_microbatches=number), most_rows=64)
    >>> at = lambda rows: Costs(forward=[0.1 + rows] * 2, backward_input=[0.1 + 2 * rows] * 2, backward_weight=0)
    >>> sizing.see(4, at(16)); sizing.next(4, least_gain=0.02)
    8
    >>> sizing.see(8, at(8)); sizing.next(8, least_gain=0.02)
    32
    """

    rows: int
    build: Build
    most_rows: float
    known: dict[int, Costs] = field(default_factory=dict)
    _programs: dict[int, Program | None] = field(default_factory=dict)

    def see(self, number: int, costs: Costs) -> None:
        """Add what was measured at a number of microbatches; earlier figures of it are replaced."""
        self.known[number] = costs

    def forget(self, number: int) -> None:
        """Keep what was measured at one number alone: the others are of before a change."""
        self.known = {number: self.known[number]} if number in self.known else {}

    def program(self, number: int) -> Program | None:
        """Return the program of a number of microbatches, if it has one that fits the memory."""
        if number not in self._programs:
            program = self.build(number)
            held_microbatches = 0 if program is None else max(simulate(program).peak_activations) * (self.rows / number)
            self._programs[number] = None if held_microbatches > self.most_rows * (1 + 1e-9) else program
        return self._programs[number]

    def seconds(self, number: int) -> float | None:
        """Return the simulated step at a number of microbatches; None if it has no program that fits."""
        program = self.program(number)
        return None if program is None else simulate(program, self._costs(number)).makespan

    def _costs(self, number: int) -> Costs:
        if number in self.known:
            return self.known[number]
        nearest = self.known[min(self.known, key=lambda index: abs(index - number))]
        program = self.program(number)
        assert program is not None, "only numbers with a program are timed"
        return replace(nearest, **self._fitted(self.rows / number, program.num_stages))

    def _fitted(self, rows: float, num_stages: int) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name in _OPS:
            points = {self.rows / number: costs.per_stage(name, num_stages) for number, costs in self.known.items()}
            each = ({size: seconds[stage] for size, seconds in points.items()} for stage in range(num_stages))
            fields[name] = [_line(entry).at(rows) for entry in each]
        return fields

    def next(self, now: int, *, least_gain: float) -> int:
        """Return the number to take next: a neighbour while only one is known, else the best; `now` to stay."""
        timed = {number: seconds for number in numbers(self.rows) if (seconds := self.seconds(number)) is not None}
        if now not in timed:
            return now
        others = [number for number in timed if number != now]
        if len(self.known) == 1:
            beside = [
                *(number for number in others if number < now and not any(number < other < now for other in others)),
                *(number for number in others if number > now and not any(now < other < number for other in others)),
            ]
            return min(beside, key=timed.__getitem__, default=now)
        best = min(timed, key=lambda number: (timed[number], number))
        return best if timed[best] < timed[now] * (1 - least_gain) else now


def _line(points: Mapping[float, float]) -> MessageTime:
    """Return the seconds of an action by its rows; with one size known, part of them is taken as fixed."""
    if len(points) > 1:
        measured_points = [(size, seconds) for size, seconds in points.items() if seconds > 0]
        return fitted(measured_points) if len(measured_points) > 1 else MessageTime()
    ((size, seconds),) = points.items()
    return MessageTime(_FIXED * seconds, (1 - _FIXED) * seconds / size)


@dataclass
class Groups:
    """What is known of a step of `total` microbatches whose size is fixed: it may run in several groups.

    Gradients accumulate over the groups, so the update is the same. Fewer groups fill and drain the pipeline less
    often, and may hold more: at most `most_pairs` pairs of stage and microbatch on a rank.

    >>> from drumline.schedules import generate
    >>> build = lambda number: generate("gpipe", num_ranks=2, num_microbatches=number)
    >>> Groups(16, build, most_pairs=8).best(Costs()).name
    'gpipe in groups of 8'
    """

    total: int
    build: Build
    most_pairs: float
    _fitting: list[Program] | None = None

    def best(self, costs: Costs) -> Program | None:
        """Return the program that takes least, the one with fewest groups among equals; None if none fits."""
        if self._fitting is None:
            each = [self._program(number) for number in reversed(numbers(self.total))]
            self._fitting = [program for program in each if program is not None]
        return self._fitting[int(makespans(self._fitting, costs).argmin())] if self._fitting else None

    def _program(self, number: int) -> Program | None:
        program = self.build(number)
        if program is None or max(simulate(program).peak_activations) > self.most_pairs:
            return None
        return in_groups(program, self.total // number)
