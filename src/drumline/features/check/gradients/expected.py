"""Gradients that are compared by sketches, and in full where these leave a doubt.

::

    sketches closer than 1/32 of what is allowed    the gradients are the same
    farther                                         the witness has kept the pieces' gradient: all of it is compared
                                                    with the model's, which runs once more to give it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from drumline.engine.unsplit.comparing import off
from drumline.features.check.gradients.sketch import distances, norms, sketch
from drumline.features.check.gradients.witness import WatchedRank, Witness

FLOOR = 1e-6  # of all gradients' norm: what is smaller is rounding
# What a pipeline may be off, of what a nudged run is: it rounds at several places where one process has one.
TIMES = 4.0
_NEAR = 1 / 32  # of what is allowed

Sketches = Mapping[nn.Parameter, Tensor]


@dataclass(frozen=True, slots=True)
class ExpectedSketches:
    """The sketches of what the model by itself gave, and how far the pieces' may be from each."""

    sketches: Sketches
    sizes: Mapping[nn.Parameter, float]  # their norms
    allowed: float
    rounding: Mapping[nn.Parameter, float] = field(default_factory=dict)  # how far each was measured to be off by it

    @staticmethod
    def of(
        sketches: Sketches, allowed: float, rounding: Mapping[nn.Parameter, float] | None = None
    ) -> ExpectedSketches:
        """Return what is expected of gradients with these sketches."""
        sizes = dict(zip(sketches, norms(list(sketches.values())), strict=True))
        return ExpectedSketches(sketches, sizes, allowed, rounding or {})

    @property
    def whole(self) -> float:
        """The norm of all gradients together."""
        return float(sum(size * size for size in self.sizes.values()) ** 0.5)

    def limits(self) -> dict[nn.Parameter, float]:
        """Return how far each sketch may be off before all of the gradient is looked at."""
        floors = self.floors()
        return {param: _NEAR * max(self.allowed * size, floors[param]) for param, size in self.sizes.items()}

    def floors(self) -> dict[nn.Parameter, float]:
        """Return how far each gradient may be off whatever its size: that is rounding."""
        least = FLOOR * self.whole
        return {size: max(least, TIMES * self.rounding.get(size, 0.0)) for size in self.sizes}

    def rescaled(self, ratio: float) -> ExpectedSketches:
        """Return what is expected of gradients so many times as large."""
        rounding = {param: each * abs(ratio) for param, each in self.rounding.items()}
        return ExpectedSketches.of(
            {param: each * ratio for param, each in self.sketches.items()}, self.allowed, rounding
        )

    def near(self, sketches: Sketches) -> set[nn.Parameter]:
        """Return the parameters of which a sketch is as expected."""
        limits = self.limits()
        known = [param for param in sketches if param in limits]
        far = distances([sketches[param] for param in known], [self.sketches[param] for param in known])
        return {param for param, distance in zip(known, far, strict=True) if distance <= limits[param]}


@dataclass(frozen=True, slots=True)
class PieceGradient:
    """What the pieces' gradient of a parameter was: its sketch, and all of it if that is not as expected."""

    sketched: Tensor
    full: Tensor | None = None
    is_near: bool = False  # whether a witness found it as expected

    def __add__(self, other: PieceGradient) -> PieceGradient:
        both = None if self.full is None or other.full is None else self.full + other.full
        return PieceGradient(self.sketched + other.sketched.to(self.sketched.device), both)


def found_by(ranks: Sequence[WatchedRank], at: int) -> dict[str, PieceGradient]:
    """Return what the witnesses of a microbatch saw, by name; what several ranks of this process hold is added up."""
    gradients: dict[str, PieceGradient] = {}
    for rank in ranks:
        witness = rank.witnesses[at]
        for name, param in rank.named.items():
            gradient = _sighting(witness, param)
            if gradient is None:
                continue
            for other in ranks:  # a loss adds to the gradients of other stages' weights that it uses
                more = _sighting(other.witnesses[at], param)
                if other is not rank and name not in other.named and more is not None and not more.is_near:
                    gradient = gradient + more
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
    return gradients


def _sighting(witness: Witness, param: nn.Parameter) -> PieceGradient | None:
    if param in witness.near:
        return PieceGradient(witness.expected[param][0], is_near=True)
    if param in witness.gradients:
        full = witness.gradients[param]
        return PieceGradient(sketch(full), full)
    return PieceGradient(witness.sketched[param]) if param in witness.sketched else None


def differences(
    gradients: Mapping[nn.Parameter, PieceGradient | None],
    expected: ExpectedSketches,
    in_full: Callable[[Iterable[nn.Parameter]], Sketches],
) -> dict[nn.Parameter, float]:
    """Return how far gradients are off, of those that are too far.

    `in_full` returns the model's own gradients of those that are in doubt, as far as it can; of others the sketches
    tell.
    """
    left = {param: each for param, each in gradients.items() if each is None or not each.is_near}
    if not left:
        return {}
    near = expected.near({param: each.sketched for param, each in left.items() if each is not None})
    left = {param: each for param, each in left.items() if param not in near}
    doubted = [param for param, each in left.items() if each and each.full is not None and param in expected.sketches]
    exact = in_full(doubted) if doubted else {}
    floors, least, fars = expected.floors(), FLOOR * expected.whole, {}
    for param, each in left.items():
        sketched, wanted = None if each is None else each.sketched, expected.sketches.get(param)
        if each is not None and each.full is not None and param in exact:
            sketched, wanted = each.full, exact[param]
        far = off(sketched, wanted, floor=floors.get(param, least))
        if far > expected.allowed:
            fars[param] = far
    return fars


def unsettled(gradients: Mapping[str, PieceGradient]) -> dict[str, PieceGradient]:
    """Return what was found, to be compared with something else than what the witnesses expected."""
    return {name: replace(gradient, is_near=False) for name, gradient in gradients.items()}
