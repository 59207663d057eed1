"""Idle time as data: an interval, its cause, and the limit that may have caused it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from drumline.core.action import TRANSFER_OPS, Action, Op
from drumline.core.errors import CostsError
from drumline.core.units import number

if TYPE_CHECKING:
    from drumline.core.costs import Costs


class Cause(StrEnum):
    """Why a rank was idle."""

    FILL = "fill"
    DRAIN = "drain"
    WAIT = "wait"
    TRANSFER = "transfer"
    IMBALANCE = "imbalance"
    MEMORY = "memory"
    OVERHEAD = "overhead"
    OUTSIDE = "outside"
    UNEXPLAINED = "unexplained"


@dataclass(frozen=True, slots=True)
class Idle:
    """One idle interval: its cause, the action that ended it, and what that action waited for on which rank."""

    rank: int
    start: float
    end: float
    cause: Cause
    before: Action | None = None
    waits_for: Action | None = None
    on_rank: int | None = None
    kind: str = field(default="", repr=False)  # the kind of overhead

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.end - self.start

    def __str__(self) -> str:
        return f"rank {self.rank} idle {number(self.seconds)} from {number(self.start)}: {self.why}"

    @property
    def why(self) -> str:
        """The cause in words."""
        needed = f"{self.waits_for} of rank {self.on_rank}" if self.waits_for is not None else "nothing"
        before = self.before or "the end"
        if self.cause is Cause.OVERHEAD:
            return _OVERHEAD.get(self.kind, "the rank is busy with work that is not an action")
        if self.cause is Cause.OUTSIDE and self.kind:
            return "the service waits for requests, or holds them back until the pipe has room"
        if self.cause is Cause.TRANSFER:
            if self.waits_for is not None and self.waits_for.op in TRANSFER_OPS:
                return f"the rank itself is busy with {self.waits_for}"
            if self.before is None or (self.waits_for and self.waits_for.op is Op.REDUCE_GRAD):
                return "its gradients are being exchanged"
        return SENTENCES[self.cause].format(before=before, needed=needed)


# `needed` is what the action after the interval waits for.
SENTENCES = {
    Cause.FILL: "the pipeline fills; {before} waits for {needed}",
    Cause.DRAIN: "the pipeline drains; {needed} ends last",
    Cause.WAIT: "{before} waits for {needed}",
    Cause.TRANSFER: "{needed} has finished and its output is on its way to {before}",
    Cause.IMBALANCE: "{before} waits for {needed}, which unequal costs delay",
    Cause.MEMORY: "{before} waits for {needed}, and the memory limit does not allow running ahead",
    Cause.OUTSIDE: "the rank had not begun its step",
    Cause.UNEXPLAINED: "no measurement says what the rank did",
}
_OVERHEAD = {
    "begin": "the step begins: it splits the batch and checks the previous step",
    "post": "the rank posts receives",
    "note": "the rank writes its measurements",
    "end": "the step ends: it checks the gradients",
}


# Relative tolerance: every addition rounds a sum of sizes, so exceeding a limit by less than this is not an excess.
_ROUNDING = 1e-11


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that a rank may hold: pairs, bytes, or both.

    >>> Limit(max_bytes=0.3).admits_bytes(0.1 + 0.1 + 0.1)
    True
    """

    max_activations: float | None = None
    max_bytes: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("max_activations", self.max_activations), ("max_bytes", self.max_bytes)):
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
            if value is not None and not is_number:
                raise CostsError(f"{name} is {value!r:.60}", expected="a number, or None for no limit")

    def __bool__(self) -> bool:
        return self.max_activations is not None or self.max_bytes is not None

    @property
    def most_pairs(self) -> float:
        """How many whole pairs the limit allows; infinite if it does not limit pairs."""
        most = math.inf if self.max_activations is None else self.max_activations * (1 + _ROUNDING)
        return most if math.isinf(most) else math.floor(most)

    @property
    def most_bytes(self) -> float:
        """The largest sum of sizes that the limit allows; infinite if it does not limit bytes."""
        return math.inf if self.max_bytes is None else self.max_bytes * (1 + _ROUNDING)

    def admits_pairs(self, pairs: float) -> bool:
        """Whether a rank may hold this many pairs."""
        return pairs <= self.most_pairs

    def admits_bytes(self, size: float) -> bool:
        """Whether a rank may hold this many bytes."""
        return size <= self.most_bytes

    def check(self, costs: Costs) -> None:
        """Raise an error for a limit in bytes if the costs have no activation bytes: it would prove nothing."""
        if self.max_bytes is not None and costs.activation_bytes is None:
            raise CostsError(
                f"max_bytes is {number(self.max_bytes)}, but the costs do not say how large activations are",
                expected="activation_bytes in the costs",
                fix="set activation_bytes, or limit pairs with max_activations",
            )
