"""What `verify` finds: how far a pipeline's losses, gradients and weights are from those of one process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from drumline.channel.devices.rank_devices import RankDevices
from drumline.engine.unsplit.comparing import difference
from drumline.verification.one_process import Named


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of a comparison.

    A difference is ||pipeline - one process|| / ||one process||, the largest over all steps; `gradient_differences` has
    one per parameter. `tolerance` is the largest allowed difference: 0 if all bits must agree. `loss` and `bubble` are
    those of the last step. The bubble is measured; if ranks take turns in one process, it says little.
    """

    schedule: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    num_steps: int
    devices: RankDevices
    loss: float
    loss_difference: float
    gradient_differences: dict[str, float]
    weight_difference: float
    tolerance: float
    bubble: float
    mesh: str = ""  # such as "pp2 x dp2"; empty without one
    zero: int = 0
    batches_differ: bool = False  # whether each step had another batch
    num_slices: int = 1  # of every sequence

    @property
    def gradient_difference(self) -> float:
        """The largest difference of any parameter's gradient."""
        return max(self.gradient_differences.values(), default=0.0)

    @property
    def worst_parameter(self) -> str:
        """The parameter with the largest difference; empty if none differs."""
        name = max(self.gradient_differences, key=self.gradient_differences.__getitem__, default="")
        return name if self.gradient_difference else ""

    @property
    def first_wrong_parameter(self) -> str:
        """The first parameter, in the model's order, whose gradient differs by more than allowed; empty if none."""
        return next((name for name, value in self.gradient_differences.items() if value > self.tolerance), "")

    @property
    def last_wrong_parameter(self) -> str:
        """The last such parameter: gradients flow from the model's end to its start, so the cause is next to it."""
        return next((name for name, value in reversed(self.gradient_differences.items()) if value > self.tolerance), "")

    @property
    def first_right_parameter(self) -> str:
        """The parameter behind the last wrong one; empty if the model ends there."""
        names = list(self.gradient_differences)
        at = names.index(self.last_wrong_parameter) + 1 if self.last_wrong_parameter else len(names)
        return names[at] if at < len(names) else ""

    @property
    def transport(self) -> str:
        """What carried messages between ranks."""
        return self.devices.transport

    @property
    def _largest(self) -> float:
        return max(self.loss_difference, self.gradient_difference, self.weight_difference)

    @property
    def identical(self) -> bool:
        """Whether all bits agree."""
        return self._largest == 0

    @property
    def passes(self) -> bool:
        """Whether the pipeline computes what one process computes."""
        return self._largest <= self.tolerance

    def summary(self) -> dict[str, Any]:
        """Return the result as plain values; a difference that is not finite becomes None."""
        names = ("loss", "loss_difference", "gradient_difference", "weight_difference")
        numbers = {name: getattr(self, name) for name in names}
        return {
            "schedule": self.schedule,
            "ranks": self.num_ranks,
            "stages": self.num_stages,
            "microbatches": self.num_microbatches,
            "steps": self.num_steps,
            "batches_differ": self.batches_differ,
            "transport": self.transport,
            "devices": self.devices.to_json(),
            **({"mesh": self.mesh, "zero": self.zero} if self.mesh else {}),
            **({"slices": self.num_slices} if self.num_slices > 1 else {}),
            **{name: number if math.isfinite(number) else None for name, number in numbers.items()},
            "worst_parameter": self.worst_parameter,
            "first_wrong_parameter": self.first_wrong_parameter,
            "last_wrong_parameter": self.last_wrong_parameter,
            "parameters": len(self.gradient_differences),
            "tolerance": self.tolerance,
            "identical": self.identical,
            "passes": self.passes,
            "bubble": self.bubble,
        }


def differences(named_tensors: Sequence[Named], wanted: Named, least: float = 0.0) -> dict[str, float]:
    """Return each tensor's difference, the largest of its copies; 1 if only one side has it."""
    copies: dict[str, list[Tensor | None]] = {}
    for name, tensor in (pair for named in named_tensors for pair in named):
        copies.setdefault(name, []).append(tensor)
    each = {name: max(difference(part, value, least) for part in copies.get(name, [None])) for name, value in wanted}
    return each | {name: 1.0 for name, ones in copies.items() if name not in each and ones != [None]}
