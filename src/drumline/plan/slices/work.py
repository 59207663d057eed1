"""The seconds of every slice on every stage, for lengths of slices, and the costs that a simulation of them takes.

Attention has no weights. Its backward belongs to I, and the seconds of W grow with tokens alone::

    F   1-a per token, a per pair        B   the same parts of I + W
                                         I   attention of both halves        W   the rest
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from drumline.core.costs import Costs
from drumline.core.errors import CostsError, PlanError
from drumline.core.graph import Floats
from drumline.core.program import Program
from drumline.core.simulate.simulate import Simulation, simulate
from drumline.core.slices.curve import SliceCurve, check_attention
from drumline.plan.search.bounds import entries

F, I, W, B = range(4)  # noqa: E741 - the letters the papers use
_FIELDS = ("forward", "backward_input", "backward_weight", "backward")


@dataclass(frozen=True)
class SlicedWork:
    """Costs of whole sequences of `tokens`, and for every stage the curves of F, I, W and B.

    >>> work = SlicedWork.of(Costs(), 2, tokens=64, attention=0.25)
    >>> work.table((32, 32))[0, :, W].tolist(), work.table((32, 32)).shape
    ([0.5, 0.5], (2, 2, 4))
    """

    costs: Costs
    curves: tuple[tuple[SliceCurve, ...], ...]
    tokens: int

    @staticmethod
    def of(
        costs: Costs,
        num_stages: int,
        *,
        tokens: int,
        attention: float | Sequence[float] | None = None,
        overhead: float = 0.0,
    ) -> SlicedWork:
        """Return the work whose attention takes a part of the time: of all stages, of each, or as the costs say."""
        attention = costs.attention if attention is None else attention
        if isinstance(costs.microbatch_factor, Sequence):
            raise CostsError("microbatch_factor has values for microbatches", expected="one number, with slices")
        parts = [attention] * num_stages if isinstance(attention, int | float) else list(attention)
        if len(parts) != num_stages:
            raise CostsError(f"attention has {len(parts)} values", expected=f"one, or one for each of {num_stages}")
        for part in parts:
            check_attention(part)
        again = costs.recomputes(num_stages)
        curves = []
        for stage, seconds in enumerate(zip(*(costs.per_stage(name, num_stages) for name in _FIELDS), strict=True)):
            forward, first, second, whole = (each * float(costs.microbatch_factor) for each in seconds)
            part = parts[stage]
            in_first = min(first, part * (first + second))
            shares = (
                part,
                in_first / first if first else 0.0,
                (part * (first + second) - in_first) / second if second else 0.0,
                part,
            )
            own_curves = [
                SliceCurve.of(each, tokens, attention=min(share, 1.0), overhead=overhead)
                for each, share in zip((forward, first, second, whole), shares, strict=True)
            ]
            if again[stage]:
                own_curves[I], own_curves[B] = own_curves[I] + own_curves[F], own_curves[B] + own_curves[F]
            curves.append(tuple(own_curves))
        return SlicedWork(costs, tuple(curves), tokens)

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.curves)

    @cached_property
    def _parts(self) -> Floats:
        """The parts of every curve: (parts, stages, ops)."""
        parts = [[(c.fixed, c.per_token, c.per_pair) for c in stage] for stage in self.curves]
        return np.moveaxis(np.array(parts), 2, 0)

    def table(self, lengths: Sequence[int]) -> Floats:
        """Return the seconds of every slice: (stages, slices, ops)."""
        ends = np.cumsum([0, *lengths]).astype(float)
        tokens, pairs = np.diff(ends), np.diff(ends * ends) / 2.0
        fixed, per_token, per_pair = self._parts[:, :, None, :]
        seconds: Floats = fixed + per_token * tokens[None, :, None] + per_pair * pairs[None, :, None]
        return seconds

    def costs_of(self, lengths: Sequence[int], num_microbatches: int) -> Costs:
        """Return the costs of units as microbatches of their own: bytes and messages of each grow with its tokens."""
        shares = tuple(length / self.tokens for length in lengths) * num_microbatches
        return replace(self.costs, microbatch_factor=shares, slice_lengths=1.0, slice_factor=None, attention=0.0)

    def simulate(self, program: Program, lengths: Sequence[int]) -> Simulation:
        """Return the timeline of a program over units of these lengths.

        >>> from drumline.schedules import generate
        >>> from drumline.schedules.slices import sliced
        >>> work = SlicedWork.of(Costs(), 2, tokens=64, attention=0.5)
        >>> work.simulate(sliced(generate("1f1b", num_ranks=2, num_microbatches=2), 2), (40, 24)).makespan
        4.5234375
        """
        columns, count = program.timed_columns, program.num_units
        costs = replace(self.costs, slice_lengths=tuple(map(float, lengths)), slice_factor=None, attention=0.0)
        table = np.tile(self.table(lengths), (1, program.num_microbatches, 1))
        op = entries.NUMBER[columns.code]
        wanted = table[columns.stage, columns.microbatch, op]
        base = np.array([costs.per_stage(name, self.num_stages) for name in _FIELDS])
        again = np.array(costs.recomputes(self.num_stages)) * base[F]
        base[I], base[B] = base[I] + again, base[B] + again
        plain = base[op, columns.stage] * np.array(costs.factors(count, len(lengths)))[columns.microbatch]
        factors = np.divide(wanted, plain, out=np.ones_like(wanted), where=plain > 0)
        return simulate(program, costs, factors=factors)


def check_lengths(lengths: Sequence[int], tokens: int) -> tuple[int, ...]:
    """Return the lengths, or raise an error if they are not those of a sequence's slices.

    >>> check_lengths((32, 0), 32)
    Traceback (most recent call last):
    drumline.core.errors.PlanError: slices have 32, 0 tokens; expected 1 or more each, 32 in total
    """
    if sum(lengths) != tokens or min(lengths, default=0) < 1:
        raise PlanError(
            f"slices have {', '.join(map(str, lengths))} tokens", expected=f"1 or more each, {tokens} in total"
        )
    return tuple(lengths)


def bounds_of(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return where every slice begins and ends.

    >>> bounds_of((3, 2))
    [(0, 3), (3, 5)]
    """
    return list(pairwise([0, *accumulate(lengths)]))
