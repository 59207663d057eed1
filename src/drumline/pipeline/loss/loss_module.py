"""A loss with parameters of its own: they belong to the last stage, under names that begin with `loss_fn`."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from drumline.runtime.blocks.cut import Block


class LossHolder(nn.Module):
    """Stands behind the last block and hands on what that returns; it holds the loss, which runs behind it."""

    def __init__(self, loss_fn: nn.Module) -> None:
        super().__init__()
        self.loss_fn = loss_fn

    def forward(self, value: Any) -> Any:
        """Return the value as it is."""
        return value


def loss_block(loss_fn: Any) -> tuple[Block, ...]:
    """Return the block that holds a loss's parameters and buffers, if it has any.

    >>> [name for name, _ in loss_block(nn.Linear(1, 1))[0].named_parameters()], loss_block(nn.MSELoss())
    (['loss_fn.weight', 'loss_fn.bias'], ())
    """
    if not isinstance(loss_fn, nn.Module) or not any(True for _ in loss_fn.parameters()):
        return ()
    return (Block("loss_fn", LossHolder(loss_fn), prefix=""),)


def held_loss(loss: Any, block: Block) -> Any:
    """Return a stage's loss: by the module that its last block holds, which in a second copy of a stage is a copy."""
    module = block.module
    return partial(loss, fn=module.loss_fn) if loss is not None and isinstance(module, LossHolder) else loss
