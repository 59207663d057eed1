"""Build a pipeline's stages on each rank; two copies of a stage get the same weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.action import Op
from drumline.core.errors import ModelError, nearest
from drumline.core.program import Program
from drumline.core.rules import Backward
from drumline.engine.ranks import transports
from drumline.model.block import Block
from drumline.model.precision import Precision
from drumline.model.quantised.packed import kind_of
from drumline.model.quantised.placing import to_device
from drumline.model.randomness import Randomness
from drumline.model.weights.tied import TiedCopies, Ties
from drumline.runtime.backward.compiled import Compiler
from drumline.runtime.gradients import clip
from drumline.runtime.stage import Loss, Stage

Checkpointing = str | Collection[str] | Mapping[int, str | Collection[str]]


def device_of(model: Any) -> torch.device:
    """Return the device of the model's first parameter or buffer, else the host.

    Meta tensors have no device yet: they go where this rank computes.
    """
    listed = model.values() if isinstance(model, Mapping) else model if isinstance(model, Iterable) else [model]
    modules = (module for module in listed if isinstance(module, nn.Module))
    tensors = (param for module in modules for param in (*module.parameters(), *module.buffers()))
    devices = dict.fromkeys(tensor.device for tensor in tensors)
    there = [device for device in devices if device.type != "meta"]
    return there[0] if there else transports.default_device() if devices else torch.device("cpu")


def checkpointed(choice: Checkpointing, cuts: Sequence[Sequence[Block]]) -> frozenset[str]:
    """Return the names of the blocks to recompute.

    >>> cuts = [[Block("0", nn.ReLU()), Block("1", nn.ReLU())], [Block("2", nn.ReLU())]]
    >>> sorted(checkpointed({0: "full", 1: "none"}, cuts)), sorted(checkpointed(["2"], cuts))
    (['0', '1'], ['2'])
    """
    if isinstance(choice, Mapping):
        for stage in choice:
            if stage not in range(len(cuts)):
                raise ModelError(f"checkpoint names stage {stage!r}", expected=f"stages 0 to {len(cuts) - 1}")
        return frozenset().union(*(checkpointed(collection, [cuts[stage]]) for stage, collection in choice.items()))
    # The loss itself is cheap, so it runs only once.
    names = [block.name for stage in cuts for block in stage if not isinstance(block.module, LossHolder)]
    if isinstance(choice, str):
        if choice not in ("none", "full"):
            raise ModelError(f"checkpoint is {choice!r}", expected='"none", "full" or names of blocks')
        return frozenset(names if choice == "full" else ())
    if not isinstance(choice, Iterable):
        expected = '"none", "full", names of blocks, or a dict with one of these per stage'
        raise ModelError(f"checkpoint is {choice!r}", expected=expected)
    choice = [str(name) for name in choice]
    for name in choice:
        if name not in names:
            raise ModelError(f"checkpoint names block {name!r}, which does not exist", fix=nearest(name, names))
    return frozenset(choice)


@dataclass(frozen=True, slots=True)
class Assembly:
    """The parts from which the stages of all ranks are built."""

    program: Program
    cuts: Sequence[Sequence[Block]]
    device: torch.device
    randomness: Randomness
    checkpointed: frozenset[str]
    loss: Loss | None
    ties: Ties
    precision: Precision
    compiler: Compiler | None = None
    order: Sequence[str] = ()  # names of all parameters of the unsplit model
    trained: Mapping[str, torch.Size] = field(default_factory=dict)  # shapes of the trainable ones
    is_double: bool = False  # whether any trainable one is float64
    lends: Callable[[], Collection[nn.Parameter]] | None = None  # what the loss uses of other stages of this process

    def of_ranks(self, ranks: Iterable[int]) -> Assembly:
        """Return the same assembly without the blocks of other ranks, so that these can be freed; all names stay."""
        held_stages = {stage for rank in ranks for stage in self.program.placement.stages_of(rank)}
        cuts = [blocks if stage in held_stages else () for stage, blocks in enumerate(self.cuts)]
        return replace(self, cuts=cuts)

    def named(self) -> Assembly:
        """Return the same assembly with the names and shapes of all parameters of the unsplit model."""
        named = [pair for stage in self.cuts for block in stage for pair in block.named_parameters()]
        order = list(dict.fromkeys(self.ties.first(name) for name, _ in named))
        trained = {self.ties.first(name): param.shape for name, param in named if param.requires_grad}
        is_double = any(param.dtype is torch.float64 for _, param in named if param.requires_grad)
        return replace(self, order=order, trained=trained, is_double=is_double)

    def total_norm(self, norms: Iterable[Mapping[str, float]], norm_type: float) -> Tensor:
        """Return the norm of all gradients, given the norms by name that ranks have told."""
        every = {name: norm for entry in norms for name, norm in entry.items()}
        listed = [every[name] for name in self.order if name in every]
        return clip.total_norm(listed, norm_type, is_double=self.is_double)

    def stages_of(
        self, rank: int, copies: TiedCopies | None = None, known: Mapping[int, Stage] | None = None
    ) -> dict[int, Stage]:
        """Return a rank's stages, with copies of blocks that belong to another rank of this process.

        Those of `known` that have the same blocks and the same backwards are taken as they are.
        """
        placement = self.program.placement
        stages: dict[int, Stage] = {}
        for index in placement.stages_of(rank):
            blocks = tuple(self.cuts[index])
            if len(placement.ranks_of(index)) > 1:
                refuse_statistics(
                    blocks, "under this schedule: each of its two copies of a stage sees half of the batch"
                )
            if copies is not None:
                blocks = copies.of(index, blocks)
            for block in blocks:
                to_device(block.module, self.device)
            self.ties.join([*(block for stage in stages.values() for block in stage.blocks), *blocks])
            before = None if known is None else known.get(index)
            stages[index] = self._stage(index, blocks) if before is None else self._again(before, blocks)
        return stages

    def _trained_below(self, index: int) -> bool:
        return index > self.program.backwards.count(Backward.NONE)

    def _again(self, stage: Stage, blocks: tuple[Block, ...]) -> Stage:
        """Return a stage again, if nothing that it was built from has changed; else a new one."""
        kind = self.program.backwards[stage.index], self._trained_below(stage.index)
        if stage.blocks != blocks or kind != (stage.kind, stage.trained_below):
            return self._stage(stage.index, blocks)
        stage.split_only(split_of(self.program, stage.index))
        return stage

    def _stage(self, index: int, blocks: tuple[Block, ...]) -> Stage:
        stage = Stage(
            index,
            blocks,
            self.randomness,
            checkpointed=self.checkpointed,
            loss=held_loss(self.loss, blocks[-1]) if index == self.program.num_stages - 1 else None,
            split=split_of(self.program, index),
            precision=self.precision,
            kind=self.program.backwards[index],
            trained_below=self._trained_below(index),
            compiler=self.compiler,
        )
        if stage.loss is not None:
            stage.segments[-1].has_loss, stage.segments[-1].lends = True, self.lends
        return stage

    def described(self, **more: Any) -> dict[str, Any]:
        """Return the settings that must be the same on all ranks."""
        return {
            "model": [
                (name, tuple(param.shape), kind_of(param), param.requires_grad)
                for stage in self.cuts
                for block in stage
                for name, param in block.named_parameters()
            ],
            "the set of tied tensors": self.ties.described,
            "balance": [len(stage) for stage in self.cuts],
            "schedule": self.program.format(),  # after pruning
            "checkpoint": sorted(self.checkpointed),
            "seed": self.randomness.seed,
            "precision": self.precision.name,
            "compile": None if self.compiler is None else str(self.compiler.settings),
            **more,
        }


def split_of(program: Program, stage: int) -> set[int]:
    r"""Return the microbatches whose backward a stage runs in halves.

    >>> split_of(Program.parse("0F0,0F1,0B0,0I1,0W1"), 0)
    {1}
    """
    return {
        part.microbatch
        for part in program.work()
        if part.stage == stage and part.op is Op.BACKWARD_INPUT and part.microbatch is not None
    }


def refuse_statistics(blocks: Sequence[Block], why: str) -> None:
    """Refuse running statistics in a stage that several ranks hold: each would see only some of the microbatches."""
    for block in blocks:
        for module in block.module.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
                raise ModelError(
                    f"block {block.name!r} keeps running statistics ({type(module).__name__})",
                    expected=f"none {why}",
                    fix="use a layer without them, such as LayerNorm, or one pipeline of one copy of each stage",
                )


class LossHolder(nn.Module):
    """Holds the parameters of the loss. It follows the last block and returns its output unchanged."""

    def __init__(self, loss_fn: nn.Module) -> None:
        super().__init__()
        self.loss_fn = loss_fn

    def forward(self, value: Any) -> Any:
        """Return the value unchanged."""
        return value


def loss_block(loss_fn: Any) -> tuple[Block, ...]:
    """Return a block that holds the parameters and buffers of a loss, if it has any.

    >>> [name for name, _ in loss_block(nn.Linear(1, 1))[0].named_parameters()], loss_block(nn.MSELoss())
    (['loss_fn.weight', 'loss_fn.bias'], ())
    """
    if not isinstance(loss_fn, nn.Module) or not any(True for _ in loss_fn.parameters()):
        return ()
    return (Block("loss_fn", LossHolder(loss_fn), prefix=""),)


def held_loss(loss: Any, block: Block) -> Any:
    """Return the loss of a stage, using the module in its last block; a second copy of the stage uses its own copy."""
    module = block.module
    return partial(loss, fn=module.loss_fn) if loss is not None and isinstance(module, LossHolder) else loss
