"""Train a model without a pipeline, from the same start: the reference of `verify`.

The model runs unsplit, with its own hooks, modes and attributes. The pipeline's cut only adds names: of the blocks, for
their random numbers, and of each stage's parameters, for the order in which to add microbatches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core import rules
from drumline.core.errors import DrumlineError, ModelError
from drumline.core.program import Program
from drumline.engine.loss.own_loss import OwnWeight, own_loss
from drumline.engine.loss.targets import size_of
from drumline.engine.model.blocks import blocks_for, example_inputs
from drumline.engine.model.sources import Material
from drumline.engine.stages.assembly import device_of
from drumline.engine.unsplit.comparing import outputs_off
from drumline.engine.unsplit.plain import Plain
from drumline.engine.unsplit.unsplit_step import UnsplitMicrobatch, unsplit_step
from drumline.model.block import blocks_of
from drumline.model.blocks.cut import cut
from drumline.model.loss.counts import weighed
from drumline.model.precision import Precision
from drumline.model.randomness import Randomness
from drumline.model.values import mapped, moved, pack
from drumline.model.watch.keeping import nothing_left
from drumline.model.weights.tied import Ties
from drumline.plan.cut.peaks import held_by
from drumline.runtime.batch import cut as cut_batch
from drumline.runtime.batch import num_rows
from drumline.runtime.user_batch import has_microbatches
from drumline.verification.batches import can_turn, turned

LEARNING_RATE = 0.01
_ALIKE = 1e-5  # allowed difference between two runs of one model

Named = Sequence[tuple[str, Tensor | None]]


@dataclass(frozen=True, slots=True)
class StepSeen:
    """The results of one step."""

    loss: Tensor
    gradients: Named
    weights: Named


@dataclass(frozen=True, slots=True)
class CutOnce:
    """How a pipeline cuts a model: what the reference needs to know to add in the same order.

    It holds only names: the reference runs none of the cut pieces.
    """

    counts: tuple[int, ...]  # number of blocks, by stage
    names: tuple[str, ...]  # names of the blocks
    parameters: tuple[tuple[str, ...], ...]  # by stage; a shared one belongs to the first of its stages
    is_tied: bool

    @staticmethod
    def of(material: Material, program: Program, num_microbatches: int) -> CutOnce:
        """Cut a model, which cannot be used afterwards."""
        device = device_of(material.model)
        blocks = blocks_for(material.model, material.batch, device, num_microbatches=num_microbatches)
        stages = cut(blocks, program.num_stages, held_pairs=held_by(program))
        seen_parameters: set[nn.Parameter] = set()
        owned = []
        for stage in stages:
            here: dict[nn.Parameter, str] = {}
            for name, param in (pair for block in stage for pair in block.named_parameters()):
                here.setdefault(param, name)
            owned.append(tuple(name for param, name in here.items() if param not in seen_parameters))
            seen_parameters.update(here)
        return CutOnce(
            tuple(len(stage) for stage in stages),
            tuple(block.name for block in blocks),
            tuple(owned),
            any(tensor.is_tied for tensor in Ties(stages, program.placement).tensors),
        )


class OneProcess:
    """The model without a pipeline: `loss_fn(model(microbatch), target)` and backward(), microbatch by microbatch."""

    def __init__(
        self,
        material: Material,
        program: Program,
        seed: int,
        known: CutOnce,
        *,
        num_parts: int = 1,
        num_slices: int = 1,
    ) -> None:
        self._num_parts = num_parts  # of the batch's rows, each cut into microbatches by a line of a mesh
        self._num_slices = num_slices  # in which the program runs each microbatch
        self._plain = Plain(material.model, known.names)
        self._program = program
        device = device_of(material.model)
        named = self._plain.named_parameters()
        first: dict[nn.Parameter, str] = {}
        for name, param in named.items():
            first.setdefault(param, name)
        cut_up = dict.fromkeys(named[name] for stage in known.parameters for name in stage)
        self._named = [(first[p], p) for p in (cut_up | dict.fromkeys(first))]  # including those that a cut lost
        self._owned = [[named[name] for name in stage if named[name].requires_grad] for stage in known.parameters]
        trainable = [param for _, param in self._named if param.requires_grad]
        self._optimizer = torch.optim.SGD([{"params": trainable}], lr=LEARNING_RATE)
        self._batch = moved(example_inputs(material.model, material.batch), device)
        self._has_own_loss = material.loss_fn is None
        self._target = self._batch if self._has_own_loss else moved(material.target, device)
        self.turns = can_turn(self._batch, self._target)  # whether every step gets other rows in its microbatches
        self._is_split = has_microbatches(self._target)
        self._loss_fn = material.loss_fn
        model = material.model
        self._weight = OwnWeight(model, material.loss_fn) if isinstance(model, nn.Module) else None
        self._randomness = Randomness(seed, device)

    def load(self, weights: Named) -> None:
        """Continue from other weights."""
        tensors = dict(weights)
        with torch.no_grad():
            for name, param in self._named:
                if (value := tensors.get(name)) is not None:
                    param.copy_(value)

    def step(self) -> StepSeen:
        """Run one step and update the weights."""
        try:
            if self._randomness.step == 0:
                self._refuse_moods()
            loss = self._run()
        except DrumlineError:
            raise
        except Exception as error:
            raise ModelError(
                f"the model fails in a single process too, with {type(error).__name__}: {error}",
                expected="blocks that each take the output of the previous one, and a loss_fn(output, target)",
            ) from error
        self._randomness.step += 1
        return stepped(loss, self._named, self._optimizer)

    def _run(self) -> Tensor:
        """Add the gradients of all microbatches, in the order in which the program's stages add theirs."""
        program = self._program
        batch, target = self._batch, self._target
        if self.turns:
            batch, target = (turned(value, self._randomness.step) for value in (batch, target))
        microbatches = list(zip(self._cut(batch, "the batch"), self._cut(target, "the target"), strict=True))
        parts = weighed([[self._counted(*pair)] for pair in microbatches], [1] * len(microbatches)).shares
        each = [
            UnsplitMicrobatch(at, *pair, float(share))
            for at, (pair, share) in enumerate(zip(microbatches, parts, strict=True))
        ]
        in_units = [accumulation_order(program, stage) for stage in range(program.num_stages)]
        orders = [list(dict.fromkeys(unit // self._num_slices for unit in order)) for order in in_units]
        in_order = self._num_parts > 1 or all(order == sorted(order) for order in orders)
        losses: list[Tensor] = []
        gradients: list[dict[nn.Parameter, Tensor | None]] = []
        run = unsplit_step(self._plain, each, self._loss, randomness=self._randomness, precision=Precision())
        with self._randomness.kept_aside():
            for outcome in run:
                losses.append(outcome.loss * torch.tensor(outcome.share, dtype=outcome.loss.dtype))
                if not in_order:
                    gradients.append({param: param.grad for param in self._parameters})
                    self._optimizer.zero_grad()
        if not in_order:
            self._add(orders, gradients)
        return sum(losses[1:], start=losses[0])

    def _cut(self, values: Any, what: str) -> list[Any]:
        """Return the microbatches of all lines."""
        count = self._program.num_microbatches
        if self._num_parts == 1:
            return cut_batch(values, count, what=what)
        return [value for part in cut_batch(values, self._num_parts, what=what) for value in cut_batch(part, count)]

    def _counted(self, value: Any, target: Any) -> float:
        """Return the weight of a microbatch: what its loss averages over, from the calls of the unsplit model."""
        if self._weight is None:
            return size_of(target) if self._is_split else num_rows(target)
        return self._weight(value) if self._has_own_loss else self._weight(value, target, by_size=self._is_split)

    def _loss(self, output: Any, target: Any) -> Tensor | None:
        return own_loss(output) if self._loss_fn is None else self._loss_fn(output, target)

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [param for _, param in self._named if param.requires_grad]

    def _add(self, orders: Sequence[Sequence[int]], gradients: Sequence[Mapping[nn.Parameter, Tensor | None]]) -> None:
        """Add the microbatches' gradients stage by stage, each in its order; those of no stage, in order of arrival."""
        parameters = set(self._parameters).difference(*self._owned)
        for mine, order in [*zip(self._owned, orders, strict=True), (parameters, range(len(gradients)))]:
            for microbatch in order:
                for param in mine:
                    gradient = gradients[microbatch][param]
                    if gradient is not None:
                        param.grad = gradient if param.grad is None else param.grad.add_(gradient)

    def _refuse_moods(self) -> None:
        """Refuse a model that behaves differently each time: nothing could be compared with it."""
        value = self._cut(self._batch, "the batch")[0]
        models_made = []
        for _ in range(2):
            with (
                torch.no_grad(),
                nothing_left(self._plain.modules, self._randomness),
                self._plain.seeding(0, self._randomness) as run,
            ):
                models_made.append(mapped(run(value), lambda tensor: tensor.clone()))
        if outputs_off(*models_made) > _ALIKE:
            raise ModelError(
                "the model returns something different each time it is called",
                expected="a forward that does the same every time, for the same kind of inputs",
                fix="look for code between its blocks that runs only once, or only sometimes",
            )


def accumulation_order(program: Program, stage: int) -> list[int]:
    r"""Return the microbatches in the order in which a stage adds their gradients; of two copies, the owner's first.

    >>> accumulation_order(Program.parse("0F0,0F1,0I0,0I1,0W1,0W0"), stage=0)
    [1, 0]
    """
    ranks = program.placement.ranks_of(stage)
    home = program.placement.homes[stage]
    return [
        part.microbatch
        for rank in sorted(ranks, key=lambda rank: rank != home)
        for action in program.rows[rank]
        for part in action.work
        if part.stage == stage and part.op in rules.RELEASES and part.microbatch is not None
    ]


def stepped(
    loss: Tensor,
    named: Sequence[tuple[str, nn.Parameter]],
    optimizer: torch.optim.Optimizer,
    whole: Callable[[Tensor, Tensor], Tensor] = lambda part, _: part,
) -> StepSeen:
    """Update the weights, and return the results of the step; `whole` puts parts of parameters together."""
    gradients: Named = [
        (name, None if param.grad is None else whole(param.grad, param).detach().cpu().clone()) for name, param in named
    ]
    optimizer.step()
    optimizer.zero_grad()
    weights = [(name, whole(param.detach(), param).cpu().clone()) for name, param in named]
    return StepSeen(loss.detach().cpu(), gradients, weights)


def fingerprint(material: Material) -> str:
    """Return a fingerprint of a model and its data."""
    model = material.model
    modules = [model] if isinstance(model, nn.Module) else [block.module for block in blocks_of(model)]
    tensors = [param for module in modules for param in (*module.parameters(), *module.buffers())]
    digest = hashlib.blake2b(digest_size=16)
    for tensor in (*tensors, *pack(material.batch)[0], *pack(material.target)[0]):
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
