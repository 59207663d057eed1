"""Check that a pipeline computes what one process computes: `verify` runs both and compares all results.

The one process runs the unsplit model: `loss_fn(model(microbatch), target)` and backward(), with its own hooks, modes
and attributes. It uses none of the pipeline's pieces, so anything that these lose becomes visible.

Both build the same model from the same seed and draw the same random numbers. The pipeline trains for some steps. One
process repeats each step from the weights that the pipeline had then, so that rounding does not build up and an error
shows in the step that makes it. A schedule with one copy of each stage adds its gradients in an order that one process
can follow, so all bits must agree. With two copies (dualpipe, chimera), and for a parameter that several stages share,
the sums of the copies are added at the end: there, the results may differ by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import DrumlineError, ModelError, RunError, UsageError, nearest
from drumline.core.program import Program
from drumline.pipeline.assembly import Checkpointing
from drumline.pipeline.launch.launch import launch
from drumline.pipeline.model.blocks import example_inputs
from drumline.pipeline.model.sources import Maker, Material, material_from
from drumline.pipeline.pipeline import Pipeline
from drumline.pipeline.programs import program_for
from drumline.pipeline.verify.one_process import (
    LEARNING_RATE,
    CutOnce,
    Named,
    OneProcess,
    StepSeen,
    fingerprint,
    stepped,
)
from drumline.runtime.follow.inputs import Inputs
from drumline.runtime.precision import one_thread

TRANSPORTS = ("auto", "in-process", "shared-memory", "gloo")

_WIDTH = 32
_ROUNDING = 1e-6  # of float32, for sums in a different order


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
    transport: str
    loss: float
    loss_difference: float
    gradient_differences: dict[str, float]
    weight_difference: float
    tolerance: float
    bubble: float

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
        return next((name for name, one in self.gradient_differences.items() if one > self.tolerance), "")

    @property
    def last_wrong_parameter(self) -> str:
        """The last such parameter: gradients flow from the model's end to its start, so the cause is next to it."""
        return next((name for name, one in reversed(self.gradient_differences.items()) if one > self.tolerance), "")

    @property
    def first_right_parameter(self) -> str:
        """The parameter behind the last wrong one; empty if the model ends there."""
        names = list(self.gradient_differences)
        at = names.index(self.last_wrong_parameter) + 1 if self.last_wrong_parameter else len(names)
        return names[at] if at < len(names) else ""

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
            "transport": self.transport,
            **{name: one if math.isfinite(one) else None for name, one in numbers.items()},
            "worst_parameter": self.worst_parameter,
            "first_wrong_parameter": self.first_wrong_parameter,
            "last_wrong_parameter": self.last_wrong_parameter,
            "parameters": len(self.gradient_differences),
            "tolerance": self.tolerance,
            "identical": self.identical,
            "passes": self.passes,
            "bubble": self.bubble,
        }


@dataclass(frozen=True, slots=True)
class _Case:
    """The inputs of both runs."""

    program: Program
    source: str | Maker | None
    transport: str
    checkpoint: Checkpointing
    dropout: float
    num_steps: int
    seed: int
    timeout: float
    start: str = ""  # fingerprint of the model and data in one process
    balance: tuple[int, ...] = ()  # blocks per stage of the cut there

    def material(self) -> Material:
        """Build the model and its data, the same in every process."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            if self.source is not None:
                return material_from(self.source)
            return _small_mlp(self.program, self.dropout)

    def made_again(self) -> Material:
        """Build them again, and refuse them if they differ."""
        material = self.material()
        if fingerprint(material) != self.start:
            raise ModelError(
                "the model or its data differed when built a second time",
                expected="the same weights, batch and target in every process",
                fix="draw all random numbers from torch, which Drumline seeds, or seed the others in the function",
            )
        return material


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one process saw of the pipeline."""

    steps: list[StepSeen]
    transport: str
    bubble: float


def verify(
    schedule: str | Path | Program = "1f1b",
    *,
    num_ranks: int | None = None,
    num_microbatches: int | None = None,
    stages_per_rank: int | None = None,
    model: str | Maker | None = None,
    transport: str = "auto",
    checkpoint: Checkpointing = "none",
    dropout: float = 0.0,
    num_steps: int = 2,
    seed: int = 0,
    timeout: float = 300.0,
) -> Verification:
    """Run a model pipelined and in one process, and compare losses, gradients and updated weights.

    >>> found = verify("zb-h1", num_ranks=2, num_microbatches=4, transport="in-process", dropout=0.1)
    >>> found.passes, found.identical, found.gradient_difference, found.num_stages
    (True, True, 0.0, 2)

    - `schedule`: a name, a `Program`, or a CSV file. A name runs on 2 ranks with 8 microbatches by default.
    - `model`: a function that returns (model, loss_fn, batch, target), or its location `FILE.py:NAME`. It must return
      the same each time. `verify` calls it after `torch.manual_seed(seed)` and trains with plain SGD. The default is a
      small MLP with `dropout`.
    - `transport`: "auto", "shared-memory" and "gloo" start `num_ranks` local processes. With "in-process", the ranks
      take turns in this one.
    """
    if transport not in TRANSPORTS:
        raise UsageError(f"transport is {transport!r}", fix=nearest(transport, TRANSPORTS))
    if num_steps < 1:
        raise UsageError(f"the number of steps is {num_steps}", expected="1 or more")
    if not 0 <= dropout < 1:
        raise UsageError(f"dropout is {dropout:g}", expected="at least 0 and less than 1")
    if dropout and model is not None:
        raise UsageError("dropout was given together with a model", fix="add dropout to the model itself")
    if isinstance(schedule, Path) or (isinstance(schedule, str) and schedule.endswith(".csv")):
        schedule = Program.load(schedule)
    if num_ranks is None:
        num_ranks = schedule.num_ranks if isinstance(schedule, Program) else 2
    if num_microbatches is None and isinstance(schedule, str):
        num_microbatches = 8
    program = program_for(
        schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank
    )
    case = _Case(program, model, transport, checkpoint, dropout, num_steps, seed, timeout)
    with one_thread():
        made = case.material()
        start = fingerprint(made)
        known = CutOnce.of(made, program)
        case = replace(case, start=start, balance=known.counts)
        del made  # it was traced; the reference must be one that never was
        one_process = OneProcess(case.made_again(), program, seed, known)
        expected = [one_process.step()]  # before any rank starts: a failure here is the model's own
        if transport == "in-process":
            found = [_in_turns(case)]
        else:
            found = launch(_pipelined, case, num_ranks=program.num_ranks, threads=1)
        for before in range(num_steps - 1):
            one_process.load([pair for seen in found for pair in seen.steps[before].weights])
            expected.append(one_process.step())
    return _compared(case, found, expected, rounds=bool(program.placement.mirrored) or known.is_tied)


def _small_mlp(program: Program, dropout: float) -> Material:
    """Return an MLP with at least one block per stage, and a batch that does not divide evenly."""
    num_rows = 4 * program.num_microbatches + 1
    blocks = (
        nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.LayerNorm(_WIDTH), nn.GELU(), nn.Dropout(dropout))
        for _ in range(max(8, program.num_stages))
    )
    model = nn.Sequential(*blocks)
    return Material(model, nn.functional.mse_loss, torch.randn(num_rows, _WIDTH), torch.randn(num_rows, _WIDTH))


def _in_turns(case: _Case) -> _Seen:
    """Run all ranks of the pipeline in this process."""
    try:
        return _pipelined(case)
    except DrumlineError:
        raise
    except Exception as error:
        raise RunError(f"the pipeline failed with {type(error).__name__}: {error}") from error


def _pipelined(case: _Case) -> _Seen:
    """Run all steps on the ranks of this process: all of them, or the launched one."""
    material = case.made_again()
    with Pipeline(
        material.model,
        loss_fn=material.loss_fn,
        schedule=case.program,
        num_ranks=case.program.num_ranks,
        balance=case.balance,
        example=material.batch,
        checkpoint=case.checkpoint,
        transport=case.transport,
        seed=case.seed,
        timeout=case.timeout,
        check_model=False,  # verify is itself a longer check
    ) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=LEARNING_RATE)
        named = list(pipe.named_parameters())
        batch = example_inputs(material.model, material.batch)
        steps = []
        for _ in range(case.num_steps):
            if isinstance(batch, Inputs):
                loss = pipe.step(*batch.args, target=material.target, **batch.kwargs).loss
            else:
                loss = pipe.step(batch, target=material.target).loss
            assert loss is not None
            steps.append(stepped(loss, named, optimizer))
        return _Seen(steps, pipe.transport, pipe.timeline().bubble)


def _compared(case: _Case, ranks: Sequence[_Seen], expected: Sequence[StepSeen], *, rounds: bool) -> Verification:
    """Compare what all ranks saw with one process; `rounds` if they add in a different order."""
    losses, weights = [0.0], [0.0]
    gradients: dict[str, float] = {}
    for at, wanted in enumerate(expected):
        ours = [seen.steps[at] for seen in ranks]
        losses += [difference(one.loss, wanted.loss) for one in ours]
        weights += _differences([one.weights for one in ours], wanted.weights).values()
        for name, value in _differences([one.gradients for one in ours], wanted.gradients).items():
            gradients[name] = max(value, gradients.get(name, 0.0))
    program = case.program
    return Verification(
        schedule=program.name,
        num_ranks=program.num_ranks,
        num_stages=program.num_stages,
        num_microbatches=program.num_microbatches,
        num_steps=case.num_steps,
        transport=ranks[0].transport,
        loss=expected[-1].loss.item(),
        loss_difference=max(losses),
        gradient_differences=gradients,
        weight_difference=max(weights),
        tolerance=_allowed(expected[0].weights) if rounds else 0.0,
        bubble=ranks[0].bubble,
    )


def _allowed(weights: Named) -> float:
    """Return how much rounding may change sums in a different order, for the coarsest dtype that occurs."""
    kinds = {one.dtype for _, one in weights if one is not None and one.is_floating_point()}
    return max([_ROUNDING, *(8 * torch.finfo(kind).eps for kind in kinds)])


def _differences(found: Sequence[Named], wanted: Named) -> dict[str, float]:
    """Return each tensor's difference, the largest of its copies; 1 if only one side has it."""
    copies: dict[str, list[Tensor | None]] = {}
    for name, one in (pair for named in found for pair in named):
        copies.setdefault(name, []).append(one)
    differences = {name: max(difference(one, value) for one in copies.get(name, [None])) for name, value in wanted}
    return differences | {name: 1.0 for name, each in copies.items() if name not in differences and each != [None]}


def difference(made: Tensor | None, wanted: Tensor | None) -> float:
    """Return ||made - wanted|| / ||wanted||: 0 only if all bits agree, 1 if one is missing.

    >>> difference(torch.tensor([3.0, 4.1]), torch.tensor([3.0, 4.0]))
    0.0199...
    >>> difference(None, torch.ones(2)), difference(torch.tensor(math.nan), torch.ones(()))
    (1.0, inf)
    """
    if made is None or wanted is None:
        return 0.0 if made is wanted else 1.0
    if torch.equal(made, wanted):
        return 0.0
    off, size = ((made.double() - wanted.double()).norm().item(), wanted.double().norm().item())
    ratio = off / size if size else off
    return ratio if math.isfinite(ratio) else math.inf
