"""A model trained without a pipeline, from the same start: what `verify` holds a pipeline against."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import DrumlineError, ModelError
from drumline.core.program import Program
from drumline.pipeline.assembly import device_of
from drumline.pipeline.model_file import Material
from drumline.pipeline.models import blocks_for, example_inputs, is_chain
from drumline.pipeline.own_loss import OwnWeight, own_loss
from drumline.pipeline.reference import reference_step
from drumline.plan.held import held_by
from drumline.runtime.batch import cut as cut_batch
from drumline.runtime.cut import Block, blocks_of, cut
from drumline.runtime.randomness import Randomness
from drumline.runtime.tied import Ties
from drumline.runtime.values import moved, pack

LEARNING_RATE = 0.01
_FOLLOWED = 1e-5  # how far a model that was followed may be from itself

Named = Sequence[tuple[str, Tensor | None]]


@dataclass(frozen=True, slots=True)
class StepSeen:
    """What one step left behind."""

    loss: Tensor
    gradients: Named
    weights: Named


class OneProcess:
    """The model without a pipeline; `counts` is how many of its blocks each stage of the pipeline gets."""

    def __init__(self, material: Material, program: Program, seed: int) -> None:
        self.start = fingerprint(material)
        device = device_of(material.model)
        batch = moved(example_inputs(material.model, material.batch), device)
        blocks = blocks_for(material.model, material.batch, device, num_microbatches=program.num_microbatches)
        if isinstance(material.model, nn.Module) and not is_chain(material.model):
            _same(material.model, blocks, cut_batch(batch, program.num_microbatches)[0])
        self._program = program
        self._stages = cut(blocks, program.num_stages, held=held_by(program))
        self.counts = [len(stage) for stage in self._stages]
        names: dict[nn.Parameter, str] = {}
        for name, one in (pair for block in blocks for pair in block.named_parameters()):
            names.setdefault(one, name)
        self._named = [(name, one) for one, name in names.items()]
        self.is_tied = any(one.is_tied for one in Ties(self._stages, program.placement).tensors)
        trainable = [one for _, one in self._named if one.requires_grad]
        self._optimizer = torch.optim.SGD([{"params": trainable}], lr=LEARNING_RATE)
        self._batch = batch
        self._own = material.loss_fn is None
        self._target = batch if self._own else moved(material.target, device)
        self._weight = OwnWeight(material.model) if self._own and isinstance(material.model, nn.Module) else None
        self._loss_fn = material.loss_fn
        self._randomness = Randomness(seed, device)

    def load(self, weights: Named) -> None:
        """Go on from other weights."""
        found = dict(weights)
        with torch.no_grad():
            for name, one in self._named:
                if (value := found.get(name)) is not None:
                    one.copy_(value)

    def step(self) -> StepSeen:
        """Run one step and update the weights."""
        try:
            loss = reference_step(
                self._stages,
                self._program,
                self._batch,
                self._target,
                self._loss,
                self._randomness,
                loss_weight=self._weight,
            )
        except DrumlineError:
            raise
        except Exception as error:
            raise ModelError(
                f"the model fails in one process already, with {type(error).__name__}: {error}",
                expected="blocks that each take what the one before returns, and a loss_fn(output, target)",
            ) from error
        self._randomness.step += 1
        return stepped(loss, self._named, self._optimizer)

    def _loss(self, output: Any, target: Any) -> Tensor:
        loss = own_loss(output) if self._loss_fn is None else self._loss_fn(output, target)
        assert loss is not None
        return loss


def stepped(loss: Tensor, named: Sequence[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer) -> StepSeen:
    """Update the weights, and return what the step left behind."""
    gradients: Named = [(name, None if one.grad is None else one.grad.cpu().clone()) for name, one in named]
    optimizer.step()
    optimizer.zero_grad()
    return StepSeen(loss.detach().cpu(), gradients, [(name, one.detach().cpu().clone()) for name, one in named])


def fingerprint(material: Material) -> str:
    """Return what tells one model and its data from another's."""
    model = material.model
    modules = [model] if isinstance(model, nn.Module) else [block.module for block in blocks_of(model)]
    tensors = [one for module in modules for one in (*module.parameters(), *module.buffers())]
    digest = hashlib.blake2b(digest_size=16)
    for one in (*tensors, *pack(material.batch)[0], *pack(material.target)[0]):
        digest.update(f"{tuple(one.shape)} {one.dtype}".encode())
        digest.update(one.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def _same(model: nn.Module, blocks: Sequence[Block], microbatch: Any) -> None:
    """Check that the model, followed block by block, returns what it returns by itself, where nothing is random."""
    modules = [*model.modules(), *(part for block in blocks for part in block.module.modules())]
    trained = [module for module in dict.fromkeys(modules) if module.training]
    for module in trained:
        module.training = False
    try:
        value: Any = microbatch
        for block in blocks:
            value = block.module(value)
        wanted = model(*microbatch.args, **microbatch.kwargs)
    finally:
        for module in trained:
            module.training = True
    for one, other in zip(pack(value)[0], pack(wanted)[0], strict=False):
        if one.is_floating_point() and float((one - other).norm()) > _FOLLOWED * float(other.norm()):
            raise ModelError(
                "the model, followed block by block, returns something else than by itself",
                expected="a forward that does the same every time, for inputs of the same kind",
                fix="look for what it does once only, or only sometimes, between its blocks",
            )
