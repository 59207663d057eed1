"""What the blocks of a model cost at one microbatch size, as numbers: JSON, and the costs of any cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise

from drumline.core.costs import Costs
from drumline.core.errors import ModelError, PlanError
from drumline.core.files import FileKind, parse_object
from drumline.core.parsed import LARGEST, Parsed
from drumline.core.placement import Placement
from drumline.plan.cut.chain import BlockCosts
from drumline.plan.cut.cuts import ends_of

NOISY = 0.05  # above this share, a profile says more about the machine than about the model


@dataclass(frozen=True, slots=True)
class OpTimes:
    """Seconds of F, of the whole B, and of its halves I and W; `taped` is F when it keeps a tape for I and W."""

    forward: float
    backward: float
    backward_input: float
    backward_weight: float
    taped: float | None = None

    def forward_for(self, *, split: float) -> float:
        """Return the seconds of F if this share of the backwards is split.

        >>> OpTimes(2.0, 2.0, 1.0, 1.0, taped=3.0).forward_for(split=0.5)
        2.5
        """
        return self.forward if self.taped is None else (1 - split) * self.forward + split * self.taped

    def of(self, op: str, *, split: float) -> float:
        """Return the seconds of an op by name, if this share of the backwards is split."""
        return self.forward_for(split=split) if op == "forward" else float(getattr(self, op))

    def total(self, *, split: float) -> float:
        """Return the seconds of a microbatch, if this share of the backwards is split."""
        back = (1 - split) * self.backward + split * (self.backward_input + self.backward_weight)
        return self.forward_for(split=split) + back


@dataclass(frozen=True, slots=True)
class ProfiledBlock:
    """One block: seconds and bytes of one microbatch.

    `activation_bytes` are kept from F on, beyond what earlier blocks keep; `held_until_weight_bytes` from I to W. A
    stage that begins here also holds `start_bytes`: its input. `weight_bytes` include buffers; `gradient_bytes` are
    those of trained parameters; `output_bytes` is what the block passes on. `tied` lists what other blocks also hold,
    as (name, bytes of weight, bytes of gradient): a rank holds it once.

    A recomputed stage keeps its input and, for its last block, `checkpoint_bytes`; in its backward it holds
    `again_bytes` more for that block than a stage without recomputation. `spreads` are half the distance between the
    quartiles of each time.
    """

    name: str
    times: OpTimes
    activation_bytes: int
    held_until_weight_bytes: int
    start_bytes: int
    weight_bytes: int
    gradient_bytes: int
    output_bytes: int
    tied: tuple[tuple[str, int, int], ...] = ()
    checkpoint_bytes: int = 0
    again_bytes: int = 0
    spreads: OpTimes | None = None

    @property
    def trains(self) -> bool:
        """Whether any of its parameters trains."""
        return self.gradient_bytes > 0


@dataclass(frozen=True, slots=True)
class Profile:
    """What every block costs, and the fixed cost of calling any stage. Times are medians over `num_runs`."""

    layers: tuple[ProfiledBlock, ...]
    overhead: OpTimes
    device: str
    num_runs: int

    @property
    def noise(self) -> float:
        """The median over blocks of the relative distance of the quartiles of F and B from the middle."""
        shares = sorted(
            (layer.spreads.forward + layer.spreads.backward) / (layer.times.forward + layer.times.backward)
            for layer in self.layers
            if layer.spreads is not None and layer.times.forward + layer.times.backward > 0
        )
        return shares[len(shares) // 2] if shares else 0.0

    @property
    def disturbed(self) -> str:
        """What to tell the user if the machine was busy during the measurement; empty if it was quiet."""
        if self.noise <= NOISY:
            return ""
        return f"This machine was busy: half of the runs differ by {self.noise:.0%} or more from a block's time."

    def costs(
        self,
        counts: Sequence[int],
        *,
        optimizer_states: int = 2,
        placement: Placement | None = None,
        recompute: Sequence[bool] | None = None,
        split: float = 0.0,
    ) -> Costs:
        """Return the costs of the stages of a cut; a stage's input counts as held, the batch does not.

        The optimizer keeps `optimizer_states` tensors of every weight's size: 2 for Adam, 0 for plain SGD. With a
        `placement`, a tied weight counts in the first stage of a rank that holds it; without one, in all of them.
        Stages in `recompute` hold their input instead, and run F again before their backward. The share `split` of
        forwards keeps a tape, for backwards split into I and W.
        """
        ends = ends_of(counts)
        if ends[-1] != len(self.layers) or min(counts) < 1:
            raise ModelError(f"counts are {list(counts)}", expected=f"1 or more each, {len(self.layers)} in total")
        stages = [self.layers[i:j] for i, j in pairwise(ends)]

        def seconds(op: str) -> list[float]:
            own_seconds = self.overhead.of(op, split=split)
            return [own_seconds + sum(block.times.of(op, split=split) for block in stage) for stage in stages]

        def size(what: str) -> list[float]:
            return [sum(getattr(block, what) for block in stage) for stage in stages]

        weights, gradients = _static(stages, placement)
        again = [False] * len(stages) if recompute is None else list(recompute)
        kept_bytes = [stage[-1].checkpoint_bytes if flag else 0 for flag, stage in zip(again, stages, strict=True)]
        twice = [stage[-1].again_bytes if flag else 0 for flag, stage in zip(again, stages, strict=True)]
        received = [0.0, *(float(self.layers[end - 1].output_bytes) for end in ends[1:-1])]
        return Costs(
            forward=seconds("forward"),
            backward=seconds("backward"),
            backward_input=seconds("backward_input"),
            backward_weight=seconds("backward_weight"),
            message_bytes=[*(float(stage[-1].output_bytes) for stage in stages[:-1]), 0.0],
            activation_bytes=[
                held_bytes + stage[0].start_bytes + more
                for held_bytes, stage, more in zip(size("activation_bytes"), stages, twice, strict=True)
            ],
            held_until_weight_bytes=size("held_until_weight_bytes"),
            recompute=tuple(again) if any(again) else False,
            checkpoint_bytes=tuple(map(sum, zip(received, kept_bytes, strict=True))) if any(again) else 0.0,
            weight_bytes=weights,
            gradient_bytes=gradients,
            optimizer_bytes=[optimizer_states * gradient for gradient in gradients],
        )

    def blocks(self, *, split: float, optimizer_states: int = 2) -> list[BlockCosts]:
        """Return the blocks for cutting, with whole or split backwards."""
        return [
            BlockCosts(
                layer.times.total(split=split),
                layer.activation_bytes,
                layer.held_until_weight_bytes,
                layer.start_bytes,
                layer.weight_bytes + (1 + optimizer_states) * layer.gradient_bytes,
                tuple((name, weight + (1 + optimizer_states) * gradient) for name, weight, gradient in layer.tied),
                layer.output_bytes,
                layer.checkpoint_bytes,
                layer.again_bytes,
                layer.trains,
            )
            for layer in self.layers
        ]

    def to_json(self) -> str:
        """Return the profile as a JSON object.

        >>> profile = Profile((), OpTimes(1, 2, 1, 1), "cpu", 5)
        >>> Profile.from_json(profile.to_json()) == profile
        True
        """
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Profile:
        """Read a profile that `to_json` wrote, or raise PlanError with what is wrong."""
        return profile_from(Parsed(parse_object(text, _KIND), _KIND))


_KIND = FileKind("profile", PlanError, "the JSON of a profile")
_LAYER = tuple(field.name for field in fields(ProfiledBlock))
_BYTES = tuple(name for name in _LAYER if name.endswith("_bytes"))
_TIMES = tuple(field.name for field in fields(OpTimes))


def profile_from(table: Parsed) -> Profile:
    """Read a profile from a JSON object."""
    table.only(field.name for field in fields(Profile))
    return Profile(
        tuple(map(_layer_from, table["layers"].each())),
        _times_from(table["overhead"]),
        table["device"].text(),
        table["num_runs"].whole(),
    )


def _layer_from(table: Parsed) -> ProfiledBlock:
    table.only(_LAYER)
    sizes = {name: table[name].whole() for name in _BYTES if name in table.value or not name.startswith(_LATER)}
    tied, spreads = table.get("tied"), table.get("spreads")
    return ProfiledBlock(
        table["name"].text(),
        _times_from(table["times"]),
        tied=() if tied is None else tuple(map(_tied_from, tied.each())),
        spreads=None if spreads is None or spreads.value is None else _times_from(spreads, -LARGEST),  # rounding
        **sizes,
    )


_LATER = ("checkpoint", "again")  # bytes that the first version of profiles did not have


def _tied_from(row: Parsed) -> tuple[str, int, int]:
    if len(row.each()) != 3:
        raise row.refuse("a name, bytes of weights and bytes of gradients")
    name, weight, gradient = row.each()
    return name.text(), weight.whole(), gradient.whole()


def _times_from(table: Parsed, least: float = 0.0) -> OpTimes:
    table.only(_TIMES)
    taped = table.get("taped")
    seconds = {name: table[name].number(least) for name in _TIMES if name != "taped"}
    return OpTimes(**seconds, taped=None if taped is None or taped.value is None else taped.number(least))


def _static(stages: Sequence[Sequence[ProfiledBlock]], placement: Placement | None) -> tuple[list[float], list[float]]:
    """Return every stage's bytes of weights and of gradients; tied weights count once per rank."""
    weights, gradients = [], []
    ranks = [{stage} if placement is None else set(placement.ranks_of(stage)) for stage in range(len(stages))]
    for stage, layers in enumerate(stages):
        before = (stages[number] for number in range(stage) if ranks[number] & ranks[stage])
        seen_names = {name for other in before for layer in other for name, _, _ in layer.tied}
        weight, gradient = sum(layer.weight_bytes for layer in layers), sum(layer.gradient_bytes for layer in layers)
        for name, again, trained in (tied for layer in layers for tied in layer.tied):
            if name in seen_names:
                weight, gradient = weight - again, gradient - trained
            seen_names.add(name)
        weights.append(float(weight))
        gradients.append(float(gradient))
    return weights, gradients
