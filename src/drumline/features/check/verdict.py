"""What the check of a step says: all ranks hear what each has found, and come to the same verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from drumline.channel.rank_names import BY_NUMBER, RankNames
from drumline.core.errors import ModelError
from drumline.engine.stages.assembly import Assembly
from drumline.features.check.gradients.expected import FLOOR


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What the last check looked at, what it cost, what it found wrong, and what it had to leave out."""

    seconds: float
    num_parameters: int
    wrong: tuple[str, ...] = ()
    unchecked: str = ""
    step: int = 0  # the number of the step
    num_microbatches: int = 1
    # Of sequences in slices, how many tokens' outputs were compared, and nothing else, for want of memory.
    num_tokens: int = 0


@dataclass(slots=True)
class RankOutcome:
    """What one rank tells of its comparison of one microbatch."""

    differences: dict[str, float] = field(default_factory=dict)  # of gradients, those that are too large
    num_parameters: int = 0
    others: dict[str, float] = field(default_factory=dict)  # "loss", "output": their differences
    shared: dict[str, list[float]] = field(default_factory=dict)  # sketches of what several ranks hold, as found here
    wanted: dict[str, list[float]] = field(default_factory=dict)  # and as the model by itself has it
    seconds: float = 0.0
    in_parts: frozenset[str] = frozenset()  # of `wanted`, what is of this rank's blocks alone
    changed: str = ""  # what blocks may have changed unseen by other ranks
    unchecked: str = ""
    raised: str = ""  # what the model by itself raised, where its pieces did not
    has_moods: bool = False
    num_tokens: int = 0  # first ones of sequences, of which nothing but the outputs is compared
    differing: list[str] = field(default_factory=list)  # blocks that return something else in units

    def is_wrong(self, allowed: float) -> bool:
        """Whether this rank has found something wrong by itself."""
        return bool(self.differences) or any(other > allowed for other in self.others.values())


def allowed_off(assembly: Assembly, kinds: set[torch.dtype]) -> float:
    """Return how far the two may be apart: they run the same kernels, unless the pieces are compiled."""
    kinds = kinds | {assembly.precision.dtype or torch.float32}
    coarsest = max(torch.finfo(kind).eps for kind in kinds if kind.is_floating_point)
    allowed = max(1e-4, 4 * coarsest)
    return allowed if assembly.compiler is None else 100 * allowed if coarsest < 1e-6 else 4 * allowed


# Outputs are right, and only gradients are wrong.
_PARTIAL = (
    "if the parameter is behind a colwise layer, and sees only some features: "
    'tensor_parallel={**PLAN, MODULE: "partial"}; else '
)

_TRACED = "move what hooks, modes or attributes change between blocks into a block, or pass a list of blocks"
_CHAIN = (
    "let blocks return all that later blocks need, as a tuple; do not keep values of a microbatch in lists, dicts or "
    "attributes: the next microbatch overwrites them before the backward; if the model has its own forward, define it "
    "in its class and pass example="
)


def verdict(
    outcomes: Sequence[RankOutcome],
    allowed: float,
    order: Sequence[str],
    homes: Mapping[str, str],
    naming: RankNames = BY_NUMBER,
    *,
    divides_layers: bool = False,
    is_chain: bool = False,
    slices: Sequence[str] = (),
    step: int = 0,
) -> tuple[CheckReport, ModelError | None]:
    """Return what all ranks found between them about a microbatch, and what to raise if something is wrong.

    `order` is that of the model's parameters, and `homes` are their blocks. `divides_layers` says that tp does,
    `is_chain` that a list of blocks is checked, and `slices` has the blocks in order if sequences are divided. A list
    that is another each time it is called cannot be checked, but it runs as it is; of other models only what was traced
    runs.

    >>> wrong = RankOutcome({"b.weight": 0.5}, num_parameters=2, others={"loss": 1e-9})
    >>> checked, error = verdict([wrong], 1e-4, ["a.weight", "b.weight"], {"b.weight": "b"})
    >>> checked.wrong, str(error)
    (('b.weight',), "...the gradient of b.weight, in block 'b', is 0.5 of its size off...")
    >>> str(verdict([RankOutcome(raised="it raises KeyError: 'x'")], 1e-4, [], {})[1])
    "the model by itself cannot run a microbatch that its blocks can: it raises KeyError: 'x'; expected a model..."
    >>> "partial" in str(verdict([wrong], 1e-4, ["b.weight"], {}, divides_layers=True)[1])
    True
    """
    wrong = {name: value for o in outcomes for name, value in o.differences.items()} | _shared_wrong(outcomes, allowed)
    places = {name: at for at, name in enumerate(order)}
    names = sorted(wrong, key=lambda name: places.get(name, len(places)))
    others = {what: distance for outcome in outcomes for what, distance in outcome.others.items() if distance > allowed}
    unchecked = {outcome.unchecked: rank for rank, outcome in reversed(list(enumerate(outcomes))) if outcome.unchecked}
    checked = CheckReport(
        max(outcome.seconds for outcome in outcomes),
        sum(outcome.num_parameters for outcome in outcomes)
        + len({name for outcome in outcomes for name in outcome.wanted}),
        (*others, *names),
        "; ".join(f"{naming.rank(at)}: {reason}" for reason, at in unchecked.items()),
        num_tokens=max(outcome.num_tokens for outcome in outcomes),
    )
    if raised := next((outcome.raised for outcome in outcomes if outcome.raised), ""):
        return checked, ModelError(
            f"the model by itself cannot run a microbatch that its blocks can: {raised}",
            expected="a model that can train without a pipeline",
            fix=_CHAIN if is_chain else _TRACED,
        )
    if not checked.wrong:
        return checked, None
    has_moods = any(outcome.has_moods for outcome in outcomes)
    if has_moods and is_chain:
        why = "the model returns something else each time it is called"
        return CheckReport(checked.seconds, 0, (), why), None
    if has_moods:
        return checked, ModelError(
            "the model returns something else each time it is called, so that its pieces cannot be checked",
            expected="a forward that does the same every time, for inputs of the same kind",
            fix="look for what it does once only, or only sometimes; check_model=False trains it unchecked",
        )
    what = [f"its {name} is {distance:.2g} of its size off" for name, distance in others.items()]
    if names:
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        home = homes.get(names[0], "")
        what.append(f"the gradient of {names[0]}{more}, in block {home!r}, is {wrong[names[0]]:.2g} of its size off")
    when = f" in step {step}" if step else ""
    if slices:
        wrong_homes, of_loss = [homes.get(name, "") for name in names], "loss" in others and "output" not in others
        return checked, _in_slices(outcomes, wrong_homes, slices, ", ".join(what) + when, of_loss=of_loss)
    changed = next((outcome.changed for outcome in outcomes if outcome.changed), "")
    return checked, ModelError(
        f"the model, {'run' if is_chain else 'traced'} block by block, returns something else than by itself{when}: "
        + ", ".join(what),
        expected="the same numbers as model(...) and backward() give; "
        + (f"step {step} is in no update" if step else "no optimizer has stepped"),
        fix=(_PARTIAL if divides_layers and names and not others else "")
        + (_CHAIN if is_chain else _TRACED)
        + (f"; or, since {changed}, which other ranks cannot see it change: check_model=False" if changed else ""),
    )


def _in_slices(
    outcomes: Sequence[RankOutcome], wrong_homes: Sequence[str], order: Sequence[str], what: str, *, of_loss: bool
) -> ModelError:
    """Return what to raise if slices compute something else: the first block that returns something else is named.

    If none does, a backward is wrong, and gradients of the blocks before it are too; or it is only `of_loss`.
    """
    differing = {name for outcome in outcomes for name in outcome.differing}
    first = next((name for name in order if name in differing), "")
    last = next((name for name in reversed(order) if name in wrong_homes), "")
    where = f"; its forward differs from block {first!r} on" if first else ""
    if not first and last:
        where = f"; its forward is the same, and its backward differs from block {last!r} on"
    if of_loss:
        return ModelError(
            f"the model in slices computes something else than on whole sequences: {what}; its output is the same",
            expected="a loss that is a mean or a sum over tokens, each of which counts in its own slice",
            fix="use slices=1, or pass loss_weight=, what a slice's target counts",
        )
    return ModelError(
        f"the model in slices computes something else than on whole sequences: {what}{where}",
        expected="blocks in which only scaled_dot_product_attention sees other tokens, and positions that are used",
        fix="use slices=1"
        + (f", or look in {first or last!r} for what works along a sequence" if first or last else ""),
    )


def merged(
    verdicts: Sequence[tuple[CheckReport, ModelError | None]], step: int
) -> tuple[CheckReport, ModelError | None]:
    """Return one verdict of those about several microbatches of a step.

    >>> merged([(CheckReport(0.1, 3), None), (CheckReport(0.0, 3, ("loss",)), ModelError("wrong"))], 0)
    (CheckReport(seconds=0.1, num_parameters=3, wrong=('loss',), ...num_tokens=0), ModelError('wrong'))
    """
    every = [checked for checked, _ in verdicts]
    unchecked = next((report.unchecked for report in every if report.unchecked), "")
    error = next((error for _, error in verdicts if error is not None), None)
    wrong = tuple(dict.fromkeys(name for report in every for name in report.wrong))
    number = max(report.num_parameters for report in every)
    least = min(report.num_tokens for report in every)
    seconds = sum(report.seconds for report in every)
    return CheckReport(seconds, number, wrong, unchecked, step, len(every), least), error


def _shared_wrong(outcomes: Sequence[RankOutcome], allowed: float) -> dict[str, float]:
    """Return what several ranks hold and whose sum over them is wrong."""
    wrong = {}
    for name, (*wanted, norm, whole) in _wanted_of(outcomes).items():
        each = [outcome.shared[name] for outcome in outcomes if name in outcome.shared]
        totals = [sum(column) for column in zip(*each, strict=True)] or [0.0] * len(wanted)
        distance = max(abs(value - other) for value, other in zip(totals, wanted, strict=True))
        if distance > 4 * max(allowed * norm, FLOOR * whole):
            wrong[name] = distance / norm if norm else distance
    return wrong


def _wanted_of(outcomes: Sequence[RankOutcome]) -> dict[str, list[float]]:
    """Return the sketches of what several ranks hold, as the model has it: of all of it, or the sum of the parts."""
    wanted: dict[str, list[float]] = {}
    for each in outcomes:
        for name, row in each.wanted.items():
            if name in each.in_parts and name in wanted:
                wanted[name] = [first + second for first, second in zip(wanted[name], row, strict=True)]
            else:
                wanted[name] = row
    return wanted
