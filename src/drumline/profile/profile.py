"""What the blocks of a model take, as numbers: a table, JSON, the costs of any cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate, pairwise

from drumline.core.costs import Costs
from drumline.core.errors import ModelError
from drumline.core.placement import Placement
from drumline.plan.chain import BlockCosts
from drumline.report.table import table


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of F, of the whole B, and of its halves I and W."""

    forward: float
    backward: float
    backward_input: float
    backward_weight: float

    def total(self, *, split: bool) -> float:
        """Return the seconds of a microbatch, with the backward as a whole or in halves."""
        return self.forward + (self.backward_input + self.backward_weight if split else self.backward)


@dataclass(frozen=True, slots=True)
class Layer:
    """One block: seconds and bytes of one microbatch.

    `activation_bytes` are kept from F on, beyond what the blocks before it keep; `held_until_weight_bytes` from I to W.
    A stage that begins here holds `start_bytes` more: what it received. `weight_bytes` include buffers;
    `gradient_bytes` are those of parameters that are trained; `output_bytes` is what the block hands on. What other
    blocks hold too is in `tied`, as (name, bytes of weight, bytes of gradient): a rank has it once.
    """

    name: str
    times: Times
    activation_bytes: int
    held_until_weight_bytes: int
    start_bytes: int
    weight_bytes: int
    gradient_bytes: int
    output_bytes: int
    tied: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Profile:
    """What every block takes, and what calling any stage costs in itself. Times are medians over `num_runs`."""

    layers: tuple[Layer, ...]
    overhead: Times
    device: str
    num_runs: int

    def costs(self, counts: Sequence[int], *, optimizer_states: int = 2, placement: Placement | None = None) -> Costs:
        """Return the costs of the stages that a cut makes; what a stage receives counts as held, the batch does not.

        The optimizer keeps `optimizer_states` tensors of every weight's size: 2 for Adam, 0 for plain SGD. With a
        `placement` a tied weight counts in the first of the stages of a rank that hold it, without one in all of them.
        """
        ends = list(accumulate(counts, initial=0))
        if ends[-1] != len(self.layers) or min(counts) < 1:
            raise ModelError(f"counts are {list(counts)}", expected=f"1 or more each, {len(self.layers)} in all")
        stages = [self.layers[i:j] for i, j in pairwise(ends)]

        def seconds(op: str) -> list[float]:
            return [getattr(self.overhead, op) + sum(getattr(one.times, op) for one in stage) for stage in stages]

        def size(what: str) -> list[float]:
            return [sum(getattr(one, what) for one in stage) for stage in stages]

        weights, gradients = _static(stages, placement)
        return Costs(
            forward=seconds("forward"),
            backward=seconds("backward"),
            backward_input=seconds("backward_input"),
            backward_weight=seconds("backward_weight"),
            message_bytes=[*(float(stage[-1].output_bytes) for stage in stages[:-1]), 0.0],
            activation_bytes=[
                held + stage[0].start_bytes for held, stage in zip(size("activation_bytes"), stages, strict=True)
            ],
            held_until_weight_bytes=size("held_until_weight_bytes"),
            weight_bytes=weights,
            gradient_bytes=gradients,
            optimizer_bytes=[optimizer_states * one for one in gradients],
        )

    def blocks(self, *, split: bool, optimizer_states: int = 2) -> list[BlockCosts]:
        """Return the blocks as `partition` takes them, their backwards whole or split."""
        return [
            BlockCosts(
                one.times.total(split=split),
                one.activation_bytes,
                one.held_until_weight_bytes,
                one.start_bytes,
                one.weight_bytes + (1 + optimizer_states) * one.gradient_bytes,
                tuple((name, weight + (1 + optimizer_states) * gradient) for name, weight, gradient in one.tied),
            )
            for one in self.layers
        ]

    def table(self, *, width: int = 120) -> str:
        """Return a table: microseconds and KiB per block."""
        header = ["block", "F us", "B us", "I us", "W us", "held KiB", "until W KiB", "weights KiB", "output KiB"]
        rows = [[one.name, *_micro(one.times), *_kibi(one)] for one in self.layers]
        return table(header, [*rows, ["(any stage)", *_micro(self.overhead), "", "", "", ""]], width=width)

    def to_json(self) -> str:
        """Return it as a JSON object.

        >>> profile = Profile((), Times(1, 2, 1, 1), "cpu", 5)
        >>> Profile.from_json(profile.to_json()) == profile
        True
        """
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Profile:
        """Return the profile that `to_json` wrote."""
        read = json.loads(text)
        layers = tuple(
            Layer(**{**one, "times": Times(**one["times"]), "tied": tuple(map(tuple, one.get("tied", ())))})
            for one in read.pop("layers")
        )
        return Profile(layers, Times(**read.pop("overhead")), **read)


def _static(stages: Sequence[Sequence[Layer]], placement: Placement | None) -> tuple[list[float], list[float]]:
    """Return every stage's bytes of weights and of gradients, what is tied once for each rank."""
    weights, gradients = [], []
    ranks = [{stage} if placement is None else set(placement.ranks_of(stage)) for stage in range(len(stages))]
    for stage, layers in enumerate(stages):
        before = (stages[one] for one in range(stage) if ranks[one] & ranks[stage])
        seen = {name for other in before for layer in other for name, _, _ in layer.tied}
        weight, gradient = sum(one.weight_bytes for one in layers), sum(one.gradient_bytes for one in layers)
        for name, again, trained in (tied for layer in layers for tied in layer.tied):
            if name in seen:
                weight, gradient = weight - again, gradient - trained
            seen.add(name)
        weights.append(float(weight))
        gradients.append(float(gradient))
    return weights, gradients


def _micro(times: Times) -> list[str]:
    return [f"{getattr(times, one.name) * 1e6:.0f}" for one in fields(Times)]


def _kibi(layer: Layer) -> list[str]:
    sizes = (layer.activation_bytes, layer.held_until_weight_bytes, layer.weight_bytes, layer.output_bytes)
    return [f"{one / 1024:.1f}" for one in sizes]
