"""Check that a pipeline computes what one process computes: `verify` runs both and compares all results.

The one process runs the unsplit model: `loss_fn(model(microbatch), target)` and backward(), with its own hooks, modes
and attributes. It uses none of the pipeline's pieces, so anything that these lose becomes visible.

Both build the same model from the same seed and draw the same random numbers. The pipeline trains for some steps. One
process repeats each step from the weights that the pipeline had then, so that rounding does not build up and an error
shows in the step that makes it. A schedule with one copy of each stage adds its gradients in an order that one process
can follow, so all bits must agree. With two copies (dualpipe, chimera), and for a parameter that several stages share,
the sums of the copies are added at the end: there, the results may differ by rounding.

On a mesh, the one process runs the microbatches of all lines. Lines add up what it adds up at once, so that results
differ by rounding. Gradients and weights of which ranks hold parts are put together before they are compared.

With slices, the one process runs whole sequences. The pipeline adds what slices add one after another, so results
differ by rounding there, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from drumline.channel.devices.rank_devices import RankDevices
from drumline.channel.launch.launch import launch
from drumline.channel.lines.axes import Axes
from drumline.channel.lines.grid import ROWS, described
from drumline.channel.lines.slices import put_together, slice_of
from drumline.channel.rank_names import mesh_shown
from drumline.core.errors import DrumlineError, ModelError, RunError, UsageError, nearest
from drumline.core.program import Program
from drumline.core.settings.clash import Together
from drumline.core.slices.division import SliceLengths
from drumline.engine.model.blocks import example_inputs
from drumline.engine.model.sources import Maker, Material, material_from
from drumline.engine.program.find import program_for
from drumline.engine.stages.assembly import Checkpointing, device_of
from drumline.engine.together import mesh_facts, program_facts
from drumline.engine.unsplit.comparing import difference, norm_of
from drumline.model.follow.inputs import Inputs
from drumline.model.precision import one_thread
from drumline.pipeline.options import taken
from drumline.pipeline.pipeline import Pipeline
from drumline.pipeline.together import table
from drumline.runtime.batch import cut as cut_batch
from drumline.runtime.user_batch import has_microbatches
from drumline.verification.batches import can_turn, turned
from drumline.verification.one_process import (
    LEARNING_RATE,
    CutOnce,
    Named,
    OneProcess,
    StepSeen,
    fingerprint,
    stepped,
)
from drumline.verification.result import Verification, differences
from drumline.verification.small import small

TRANSPORTS = ("auto", "in-process", "shared-memory", "gloo")

_ROUNDING = 1e-6  # of float32, for sums in a different order
_ROUNDING_OF_PARTS = 1e-5  # the same, where lines of a mesh or slices add up parts of every layer or gradient
_LEAST_SHARE = 1e-4  # of the norm of all gradients; where parts are added, a smaller one counts as if it were as large


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
    mesh: Mapping[str, int]  # by axis; empty without one
    zero: int
    sequence_parallel: bool
    division: SliceLengths
    start: str = ""  # fingerprint of the model and data in one process
    balance: tuple[int, ...] = ()  # blocks per stage of the cut there

    def material(self) -> Material:
        """Build the model and its data, the same in every process."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            if self.source is not None:
                return material_from(self.source)
            return small(self.program, self.dropout, self.mesh, self.division)

    @property
    def num_microbatches(self) -> int:
        """The microbatches of a step."""
        return self.program.num_microbatches

    @property
    def adds_parts(self) -> bool:
        """Whether the pipeline adds up parts of what one process computes at once."""
        return self.num_lines > 1 or self.division.num_slices > 1

    @property
    def num_lines(self) -> int:
        """The number of pipelines side by side."""
        return math.prod(size for axis, size in self.mesh.items() if axis != "pp")

    @property
    def num_parts(self) -> int:
        """Into how many parts lines divide the rows of a batch."""
        return math.prod(self.mesh.get(axis, 1) for axis in ROWS)

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
class _ProcessView:
    """What one process saw of the pipeline."""

    steps: list[StepSeen]
    devices: RankDevices
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
    mesh: Mapping[str, int] | None = None,
    zero: int = 0,
    sequence_parallel: bool = False,
    slices: int | Sequence[int] = 1,
) -> Verification:
    """Run a model pipelined and in one process, and compare losses, gradients and updated weights.

    >>> result = verify("zb-h1", num_ranks=2, num_microbatches=4, transport="in-process", dropout=0.1)
    >>> result.passes, result.identical, result.gradient_difference, result.num_stages
    (True, True, 0.0, 2)

    - `schedule`: a name, a `Program`, or a CSV file. A name runs on 2 ranks with 8 microbatches by default.
    - `model`: a function that returns (model, loss_fn, batch, target), or its location `FILE.py:NAME`. It must return
      the same each time. `verify` calls it after `torch.manual_seed(seed)` and trains with plain SGD. Rows trade places
      from step to step, so that every step has another batch. The default is a small MLP with `dropout`.
    - `num_steps`: how many steps were compared.
    - `transport`: "auto", "shared-memory" and "gloo" start `num_ranks` local processes. With "in-process", the ranks
      take turns in this one.
    - `mesh`, `zero`, `sequence_parallel`: as `Pipeline` takes them, such as `{"pp": 2, "dp": 2}`. The function returns
      the whole batch, of which each line gets its part. Gradients are compared whole, up to rounding.
    - `slices`: as `Pipeline` takes it. A `Program` or a file has the order of all slices, as that of `pipe.program`.
      The default model is a small causal decoder then.
    """
    _check_options(transport, num_steps, dropout, has_model=model is not None)
    if isinstance(schedule, Path) or (isinstance(schedule, str) and schedule.endswith(".csv")):
        schedule = Program.load(schedule)
    sizes = {} if mesh is None else described(mesh)[0]
    if num_ranks not in (None, sizes.get("pp", num_ranks)):
        raise UsageError(f"num_ranks is {num_ranks}", expected=f"{sizes['pp']}, the mesh's pp", fix="omit it")
    if num_ranks is None:
        num_ranks = sizes.get("pp") or (schedule.num_ranks if isinstance(schedule, Program) else 2)
    if num_microbatches is None and isinstance(schedule, str):
        num_microbatches = 8
    division = SliceLengths.of(slices if isinstance(slices, int) else tuple(slices))
    program = program_for(
        schedule,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        stages_per_rank=stages_per_rank,
        slices=division.num_slices,
    )
    of_lines = sizes, zero, sequence_parallel
    case = _Case(program, model, transport, checkpoint, dropout, num_steps, seed, timeout, *of_lines, division=division)
    _check_mesh(case)
    with one_thread():
        return _verified(case)


def _verified(case: _Case) -> Verification:
    """Run a case in one process and as a pipeline, and compare the two."""
    program, material = case.program, case.material()
    _check_rows(case, material)
    start = fingerprint(material)
    known = CutOnce.of(material, program, case.num_microbatches)
    case = replace(case, start=start, balance=known.counts)
    del material  # it was traced; the reference must be one that never was
    one_process = OneProcess(
        case.made_again(), program, case.seed, known, num_parts=case.num_parts, num_slices=case.division.num_slices
    )
    expected = [one_process.step()]  # before any rank starts: a failure here is the model's own
    if case.transport == "in-process":
        views = [_in_turns(case)]
    else:
        num_processes = program.num_ranks * case.num_lines
        views = launch(_pipelined, case, num_ranks=num_processes, threads=1, backend="gloo")
    for before in range(case.num_steps - 1):
        one_process.load([pair for view in views for pair in view.steps[before].weights])
        expected.append(one_process.step())
    rounds = bool(program.placement.mirrored) or known.is_tied
    return _compared(case, views, expected, rounds=rounds, turns=one_process.turns)


def _check_options(transport: str, num_steps: int, dropout: float, *, has_model: bool) -> None:
    """Refuse values that no model can be verified with."""
    if transport not in TRANSPORTS:
        raise UsageError(f"transport is {transport!r}", fix=nearest(transport, TRANSPORTS))
    if num_steps < 1:
        raise UsageError(f"the number of steps is {num_steps}", expected="1 or more")
    if not 0 <= dropout < 1:
        raise UsageError(f"dropout is {dropout:g}", expected="at least 0 and less than 1")
    if dropout and has_model:
        raise UsageError("dropout was given together with a model", fix="add dropout to the model itself")


def _check_mesh(case: _Case) -> None:
    """Refuse what cannot be compared on a mesh; `Pipeline` refuses what cannot run."""
    if case.dropout and case.mesh.get("cp", 1) > 1:
        raise UsageError(
            f"dropout is {case.dropout:g}, and the mesh is {mesh_shown(case.mesh)}",
            expected="no dropout with cp: each line draws for its own part of a sequence",
        )
    if case.zero not in (0, 1, 3):
        raise UsageError(f"zero is {case.zero}", expected="0, 1 (optimizer state) or 3 (parameters and gradients too)")
    facts = {
        "transport": case.transport,
        "zero": case.zero,
        "sequence_parallel": case.sequence_parallel,
        "slices": case.division.num_slices,
    }
    Together(table(), facts | mesh_facts(case.mesh) | program_facts(case.program)).refuse()


def _check_rows(case: _Case, material: Material) -> None:
    """Refuse a batch that lines cannot divide as they will."""
    if case.num_parts > 1 and (has_microbatches(material.batch) or has_microbatches(material.target)):
        raise UsageError(
            f"the batch is given as Microbatches, and {case.num_parts} lines divide its rows",
            expected="tensors with rows, of which each line gets its part",
        )


def _in_turns(case: _Case) -> _ProcessView:
    """Run all ranks of the pipeline in this process."""
    try:
        return _pipelined(case)
    except DrumlineError:
        raise
    except Exception as error:
        raise RunError(f"the pipeline failed with {type(error).__name__}: {error}") from error


def _pipelined(case: _Case) -> _ProcessView:
    """Run all steps on the ranks of this process: all of them, or the launched one."""
    material = case.made_again()
    features = taken(check_model=False)  # verify is itself a longer check
    if case.num_lines > 1 or case.zero or case.sequence_parallel:
        mesh = case.mesh if case.num_lines > 1 else None
        features |= {"mesh": mesh, "zero": case.zero, "sequence_parallel": case.sequence_parallel}
    if case.division.num_slices > 1:
        features |= {"slices": case.division.lengths or case.division.num_slices}
    with Pipeline(
        material.model,
        loss_fn=material.loss_fn,
        schedule=case.program,
        num_ranks=case.program.num_ranks,
        balance=case.balance,
        example=material.batch,
        checkpoint=case.checkpoint,
        transport=case.transport,
        device=device_of(material.model),  # a reference of one process computes there too
        seed=case.seed,
        timeout=case.timeout,
        **features,
    ) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=LEARNING_RATE)
        named = list(pipe.named_parameters())
        number, count = pipe.axes.rows
        whole, own_target = example_inputs(material.model, material.batch), material.target
        turns = can_turn(whole, own_target)
        steps = []
        for at in range(case.num_steps):
            batch, target = (turned(part, at) if turns else part for part in (whole, own_target))
            if count > 1:
                batch = cut_batch(batch, count)[number]
                target = None if target is None else cut_batch(target, count, what="the target")[number]
            if isinstance(batch, Inputs):
                loss = pipe.step(*batch.args, target=target, **batch.kwargs).loss
            else:
                loss = pipe.step(batch, target=target).loss
            assert loss is not None
            steps.append(stepped(loss, named, optimizer, partial(_whole, pipe.axes)))
        return _ProcessView(steps, pipe.devices, pipe.timeline().bubble)


def _whole(axes: Axes, part: Tensor, parameter: Tensor) -> Tensor:
    """Return the whole of which a tensor is a part, as its parameter is; all ranks call it alike."""
    return put_together(part, slice_of(parameter), axes)


def _compared(
    case: _Case, ranks: Sequence[_ProcessView], expected: Sequence[StepSeen], *, rounds: bool, turns: bool
) -> Verification:
    """Compare what all ranks saw with one process; `rounds` if they add in a different order.

    `turns` says that every step had another batch.
    """
    losses, weights = [0.0], [0.0]
    gradients: dict[str, float] = {}
    for at, wanted in enumerate(expected):
        ours = [view.steps[at] for view in ranks]
        losses += [difference(step.loss, wanted.loss) for step in ours]
        weights += differences([step.weights for step in ours], wanted.weights).values()
        norms = [norm_of(tensor) for _, tensor in wanted.gradients]
        least = _LEAST_SHARE * math.hypot(*norms) if case.adds_parts else 0.0
        for name, value in differences([step.gradients for step in ours], wanted.gradients, least).items():
            gradients[name] = max(value, gradients.get(name, 0.0))
    program, tolerance = case.program, 0.0
    if case.adds_parts:
        tolerance = max(_ROUNDING_OF_PARTS, _allowed(expected[0].weights))
    elif rounds:
        tolerance = _allowed(expected[0].weights)
    return Verification(
        schedule=program.name,
        num_ranks=program.num_ranks * case.num_lines,
        num_stages=program.num_stages,
        num_microbatches=case.num_microbatches,
        num_steps=case.num_steps,
        devices=ranks[0].devices,
        loss=expected[-1].loss.item(),
        loss_difference=max(losses),
        gradient_differences=gradients,
        weight_difference=max(weights),
        tolerance=tolerance,
        bubble=ranks[0].bubble,
        mesh=mesh_shown(case.mesh) if case.mesh else "",
        zero=case.zero,
        batches_differ=turns and case.num_steps > 1,
        num_slices=case.division.num_slices,
    )


def _allowed(weights: Named) -> float:
    """Return how much rounding may change sums in a different order, for the coarsest dtype that occurs."""
    kinds = {tensor.dtype for _, tensor in weights if tensor is not None and tensor.is_floating_point()}
    return max([_ROUNDING, *(8 * torch.finfo(kind).eps for kind in kinds)])
