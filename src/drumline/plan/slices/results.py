"""What a search of slices returns: the best program, its lengths, and the bound for all of them."""

from __future__ import annotations

from dataclasses import dataclass

from drumline.core.program import Program
from drumline.core.simulate.simulate import Simulation
from drumline.core.units import number
from drumline.plan.search.bounds.instance import Rows
from drumline.plan.search.search_run import SAME
from drumline.plan.slices.dispatch import DispatchRules


@dataclass(frozen=True, slots=True)
class SliceOrder:
    """Lengths and rows in one order, their makespan, and how the order was made."""

    value: float
    lengths: tuple[int, ...]
    name: str
    rows: Rows
    rules: DispatchRules | None = None


@dataclass(frozen=True, slots=True)
class SliceResult:
    """A proven program over units, the lengths of its slices, its timeline, and the bound for all of them.

    `reference` is 1f1b, interleaved where ranks hold several stages, in as many equal slices; `equal` the best order of
    equal slices, and `same` the best lengths in the reference's order. They are None where none fits the limit.
    """

    program: Program
    lengths: tuple[int, ...]
    timeline: Simulation
    value: float
    bound: float
    name: str
    reference: SliceOrder | None
    equal: SliceOrder | None
    same: SliceOrder | None
    split: bool
    seconds: float
    num_tried: int
    is_interrupted: bool = False

    @property
    def num_slices(self) -> int:
        """The number of slices."""
        return len(self.lengths)

    @property
    def gain(self) -> float | None:
        """The share of the reference's step that is saved."""
        return None if self.reference is None else 1.0 - self.value / self.reference.value

    @property
    def gap(self) -> float:
        """The share of the value above the bound; 0 means that no lengths and no order are better."""
        return max(0.0, 1.0 - self.bound / self.value) if self.value > 0 else 0.0

    @property
    def verdict(self) -> str:
        """How far from the optimum it is, in words."""
        of = "any lengths and order" if self.split else "any lengths and order with whole backwards"
        if self.gap <= SAME:
            return f"proven optimal: it equals the bound of {of}"
        return f"at most {self.gap:.2%} from optimal: {of} need {number(self.bound)} or more"
