"""Does the pipeline compute what one process computes? `verify` runs both, and compares all that comes out.

Both make the same model from the same seed, run the same steps with an optimizer between, and draw the same random
numbers. A schedule with one copy of each stage adds its gradients in an order that one process can follow, so all bits
must agree. With two copies (dualpipe, chimera) the copies' sums are added at the end: there the two may differ by
rounding.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import DrumlineError, ModelError, RunError, UsageError, nearest
from drumline.core.program import Program
from drumline.pipeline.assembly import Checkpointing, device_of
from drumline.pipeline.launch import launch
from drumline.pipeline.model_file import Maker, Material, material_from
from drumline.pipeline.pipeline import Pipeline
from drumline.pipeline.programs import program_for
from drumline.pipeline.reference import reference_step
from drumline.runtime.cut import blocks_of, cut
from drumline.runtime.randomness import Randomness
from drumline.runtime.shared_memory import SharedMemoryChannel
from drumline.runtime.values import moved, pack

TRANSPORTS = ("auto", "in-process", "shared-memory", "gloo")

_WIDTH = 32
_LEARNING_RATE = 0.01
_ROUNDING = 1e-6  # of float32, for sums in another order

Named = list[tuple[str, Tensor | None]]


@dataclass(frozen=True, slots=True)
class Verification:
    """What came of a comparison. A difference is ||pipeline - one process|| / ||one process||, over all steps the largest.

    `gradient_differences` has every parameter's, `tolerance` is what is allowed: 0 where all bits must agree. `bubble`
    is that of the last step, as measured; between ranks that take turns in one process it says little.
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
        """The parameter with the largest difference; empty where none differs."""
        name = max(self.gradient_differences, key=self.gradient_differences.__getitem__, default="")
        return name if self.gradient_difference else ""

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
        """Return it as plain values; a difference that is not finite is None."""
        finite = {
            name: value if math.isfinite(value) else None
            for name, value in (
                ("loss", self.loss),
                ("loss_difference", self.loss_difference),
                ("gradient_difference", self.gradient_difference),
                ("weight_difference", self.weight_difference),
            )
        }
        return {
            "schedule": self.schedule,
            "ranks": self.num_ranks,
            "stages": self.num_stages,
            "microbatches": self.num_microbatches,
            "steps": self.num_steps,
            "transport": self.transport,
            **finite,
            "worst_parameter": self.worst_parameter,
            "parameters": len(self.gradient_differences),
            "tolerance": self.tolerance,
            "identical": self.identical,
            "passes": self.passes,
            "bubble": self.bubble,
        }


@dataclass(frozen=True, slots=True)
class _Case:
    """What both runs are given."""

    program: Program
    source: str | Maker | None
    transport: str
    checkpoint: Checkpointing
    dropout: float
    num_steps: int
    seed: int
    timeout: float

    def material(self) -> Material:
        """Make the model and its data, the same in every process."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            if self.source is not None:
                return material_from(self.source)
            return _small_mlp(self.program, self.dropout)


@dataclass(slots=True)
class _Seen:
    """What one process saw of a run: losses and gradients of every step, the weights at the end."""

    start: str
    losses: list[Tensor] = field(default_factory=list)
    gradients: list[Named] = field(default_factory=list)
    weights: Named = field(default_factory=list)
    transport: str = ""
    bubble: float = 0.0

    def note(self, loss: Tensor, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Keep what a step left behind."""
        self.losses.append(loss.detach().cpu())
        self.gradients.append([(name, None if one.grad is None else one.grad.cpu().clone()) for name, one in named])

    def note_end(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Keep the weights."""
        self.weights = [(name, one.detach().cpu().clone()) for name, one in named]


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

    - `schedule`: a name, a `Program`, or a CSV file; a name is run on 2 ranks with 8 microbatches unless given.
    - `model`: a function that returns (model, loss_fn, batch, target), or where one stands: `FILE.py:NAME`. It must
      make the same each time, is called after `torch.manual_seed(seed)`, and gets a plain SGD. Without one, a small
      MLP with `dropout` is used.
    - `transport`: "auto", "shared-memory" and "gloo" start `num_ranks` local processes; "in-process" lets the ranks
      take turns in this one.
    """
    if transport not in TRANSPORTS:
        raise UsageError(f"transport is {transport!r}", fix=nearest(transport, TRANSPORTS))
    if num_steps < 1:
        raise UsageError(f"the number of steps is {num_steps}", expected="1 or more")
    if not 0 <= dropout < 1:
        raise UsageError(f"dropout is {dropout:g}", expected="0 or more, and less than 1")
    if dropout and model is not None:
        raise UsageError("dropout was given along with a model", fix="put it into the model itself")
    if isinstance(schedule, Path) or (isinstance(schedule, str) and schedule.endswith(".csv")):
        schedule = Program.load(schedule)
    named = isinstance(schedule, str)
    program = program_for(
        schedule,
        num_ranks=num_ranks or (schedule.num_ranks if isinstance(schedule, Program) else 2),
        num_microbatches=num_microbatches or (8 if named else None),
        stages_per_rank=stages_per_rank,
    )
    case = _Case(program, model, transport, checkpoint, dropout, num_steps, seed, timeout)
    with _one_thread():
        expected = _in_one_process(case)
        if transport == "in-process":
            found = [_in_turns(case)]
    if transport != "in-process":
        found = launch(_pipelined, case, num_ranks=program.num_ranks, threads=1)
    return _compared(case, found, expected)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread, as every rank does: more would add up in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _small_mlp(program: Program, dropout: float) -> Material:
    """Return an MLP with a block for every stage at least, and a batch that does not divide evenly."""
    num_rows = 4 * program.num_microbatches + 1
    blocks = (
        nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.LayerNorm(_WIDTH), nn.GELU(), nn.Dropout(dropout))
        for _ in range(max(8, program.num_stages))
    )
    model = nn.Sequential(*blocks)
    return Material(model, nn.functional.mse_loss, torch.randn(num_rows, _WIDTH), torch.randn(num_rows, _WIDTH))


def _fingerprint(material: Material) -> str:
    """Return what tells one model and its data from another's."""
    modules = [block.module for block in blocks_of(material.model)]
    tensors = [one for module in modules for one in (*module.parameters(), *module.buffers())]
    digest = hashlib.blake2b(digest_size=16)
    for one in (*tensors, *pack(material.batch)[0], *pack(material.target)[0]):
        digest.update(f"{tuple(one.shape)} {one.dtype}".encode())
        digest.update(one.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _in_one_process(case: _Case) -> _Seen:
    """Run all steps without a pipeline."""
    material = case.material()
    seen = _Seen(_fingerprint(material))
    blocks = blocks_of(material.model)
    device = device_of(blocks)
    stages = cut(blocks, case.program.num_stages)
    named = [(f"{block.name}.{name}", one) for block in blocks for name, one in block.module.named_parameters()]
    optimizer = torch.optim.SGD([{"params": [one for _, one in named if one.requires_grad]}], lr=_LEARNING_RATE)
    batch, target = moved(material.batch, device), moved(material.target, device)
    randomness = Randomness(case.seed, device)
    for step in range(case.num_steps):
        randomness.step = step
        try:
            loss = reference_step(stages, case.program, batch, target, material.loss_fn, randomness)
        except DrumlineError:
            raise
        except Exception as error:
            raise ModelError(
                f"the model fails in one process already, with {type(error).__name__}: {error}",
                expected="blocks that each take what the one before returns, and a loss_fn(output, target)",
            ) from error
        seen.note(loss, named)
        optimizer.step()
        optimizer.zero_grad()
    seen.note_end(named)
    return seen


def _in_turns(case: _Case) -> _Seen:
    """Run all ranks of the pipeline in this process."""
    try:
        return _pipelined(case)
    except DrumlineError:
        raise
    except Exception as error:
        raise RunError(f"the pipeline failed with {type(error).__name__}: {error}") from error


def _pipelined(case: _Case) -> _Seen:
    """Run all steps on the ranks of this process: all of them, or the one that was launched."""
    material = case.material()
    seen = _Seen(_fingerprint(material))
    with Pipeline(
        material.model,
        loss_fn=material.loss_fn,
        schedule=case.program,
        num_ranks=case.program.num_ranks,
        checkpoint=case.checkpoint,
        transport=case.transport,
        seed=case.seed,
        timeout=case.timeout,
    ) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=_LEARNING_RATE)
        named = list(pipe.named_parameters())
        for _ in range(case.num_steps):
            result = pipe.step(material.batch, target=material.target)
            assert result.loss is not None
            seen.note(result.loss, named)
            optimizer.step()
            optimizer.zero_grad()
        seen.note_end(named)
        seen.bubble = pipe.timeline().bubble
        seen.transport = _transport_of(pipe, case.transport)
    return seen


def _transport_of(pipe: Pipeline, asked: str) -> str:
    """Return what "auto" came to."""
    if asked != "auto":
        return asked
    if pipe._hub is not None:
        return "in-process"
    return "shared-memory" if isinstance(pipe._channels[0], SharedMemoryChannel) else "gloo"


def _compared(case: _Case, found: Sequence[_Seen], expected: _Seen) -> Verification:
    """Hold what all ranks saw against one process."""
    if any(one.start != expected.start for one in found):
        raise ModelError(
            "the model or its data came out differently when made again",
            expected="the same weights, batch and target in every process",
            fix="draw all random numbers from torch, which is seeded, or seed the others in the function",
        )
    gradients: dict[str, float] = {}
    for step, wanted in enumerate(expected.gradients):
        for name, value in _differences([seen.gradients[step] for seen in found], wanted).items():
            gradients[name] = max(value, gradients.get(name, 0.0))
    weights = _differences([seen.weights for seen in found], expected.weights)
    losses = [
        difference(ours, wanted) for seen in found for ours, wanted in zip(seen.losses, expected.losses, strict=True)
    ]
    program = case.program
    return Verification(
        schedule=program.name,
        num_ranks=program.num_ranks,
        num_stages=program.num_stages,
        num_microbatches=program.num_microbatches,
        num_steps=case.num_steps,
        transport=found[0].transport,
        loss=expected.losses[-1].item(),
        loss_difference=max(losses),
        gradient_differences=gradients,
        weight_difference=max(weights.values(), default=0.0),
        tolerance=_allowed([one for _, one in expected.weights]) if program.placement.mirrored else 0.0,
        bubble=found[0].bubble,
    )


def _allowed(weights: Sequence[Tensor | None]) -> float:
    """Return what rounding may do to sums in another order, by the coarsest numbers that occur."""
    kinds = {one.dtype for one in weights if one is not None and one.is_floating_point()}
    return max([_ROUNDING, *(8 * torch.finfo(kind).eps for kind in kinds)])


def _differences(found: Sequence[Named], wanted: Named) -> dict[str, float]:
    """Return each tensor's difference, the largest of its copies; one that no rank has is missing."""
    copies: dict[str, list[Tensor | None]] = {}
    for name, one in (pair for named in found for pair in named):
        copies.setdefault(name, []).append(one)
    return {name: max(difference(one, value) for one in copies.get(name, [None])) for name, value in wanted}


def difference(found: Tensor | None, wanted: Tensor | None) -> float:
    """Return ||found - wanted|| / ||wanted||: 0 only where all bits agree, 1 where one is missing.

    >>> difference(torch.tensor([3.0, 4.1]), torch.tensor([3.0, 4.0]))
    0.0199...
    >>> difference(None, torch.ones(2)), difference(torch.tensor(math.nan), torch.ones(()))
    (1.0, inf)
    """
    if found is None or wanted is None:
        return 0.0 if found is wanted else 1.0
    if torch.equal(found, wanted):
        return 0.0
    off, size = ((found.double() - wanted.double()).norm().item(), wanted.double().norm().item())
    ratio = off / size if size else off
    return ratio if math.isfinite(ratio) else math.inf
