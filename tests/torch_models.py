"""Small models and one comparison for the pipeline's tests."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.core.program import Program
from drumline.model.block import blocks_of
from drumline.model.blocks.cut import cut
from drumline.model.randomness import Randomness
from drumline.pipeline.pipeline import Pipeline
from drumline.schedules import find, generate
from names import NAMES
from reference_step import reference_step

SYNCHRONOUS = tuple(name for name in NAMES if name not in ("pipedream", "pipedream-2bw", "forward-only"))
TWO_WAYS = ("dualpipe", "chimera")
WIDTH = 6
CPU = torch.device("cpu")


def mlp(num_blocks: int = 8, *, dropout: float = 0.0, seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(dropout))
            for _ in range(num_blocks)
        )
    )


class LowRank(nn.Module):
    """A frozen layer with a trainable correction of low rank beside it."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = functional.gelu(self.base(x) + self.up(self.down(x)))
        return made


def low_rank_upper_half(num_blocks: int = 8, *, dropout: float = 0.0, seed: int = 1) -> nn.Sequential:
    """Return a model whose lower half is frozen, and whose upper half trains corrections of low rank only."""
    torch.manual_seed(seed)
    half = num_blocks // 2
    lower = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout)) for _ in range(half)]
    for block in lower:
        block.requires_grad_(False)
    return nn.Sequential(*lower, *(LowRank() for _ in range(num_blocks - half)))


def on_meta(make: Callable[[], Any]) -> Any:
    """Make a model without memory."""
    with torch.device("meta"):
        return make()


class Unused(nn.Module):
    """Has a layer that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.used(x)
        return made


def data(rows: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


def programs(name: str, num_ranks: int, counts: tuple[int, ...]) -> list[Program]:
    """Return the schedule's programs for these counts of microbatches; none where it wants an even number of ranks."""
    if find(name).even_ranks and num_ranks % 2:
        return []
    return [generate(name, num_ranks=num_ranks, num_microbatches=count) for count in counts]


class Reference:
    """The same model in one process, with the same random numbers."""

    def __init__(
        self,
        model: nn.Sequential,
        program: Program,
        loss_fn: Callable[..., Tensor],
        *,
        device: torch.device = CPU,
        **settings: Any,
    ) -> None:
        self.model = copy.deepcopy(model)
        self.cuts = cut(blocks_of(self.model), program.num_stages, settings.pop("balance", None))
        self.program = program
        self.loss_fn = loss_fn
        self.settings = settings
        self.randomness = Randomness(0, device)

    def step(self, batch: Any, target: Any) -> Tensor:
        loss = reference_step(self.cuts, self.program, batch, target, self.loss_fn, self.randomness, **self.settings)
        self.randomness.step += 1
        return loss

    def compare(self, pipe: Pipeline, *, exact: bool, tolerance: float = 1e-6) -> None:
        """Assert that the pipeline's gradients are the reference's: to the last bit, or within a part of their norm."""
        expected = dict(self.model.named_parameters())
        for name, parameter in pipe.named_parameters():
            wanted = expected[name].grad
            if not parameter.requires_grad:
                assert parameter.grad is wanted is None, name
                continue
            assert parameter.grad is not None, name
            assert wanted is not None, name
            if exact:
                assert torch.equal(parameter.grad, wanted), f"{name} of {self.program!r}"
            else:
                assert (parameter.grad - wanted).norm() <= tolerance * wanted.norm(), f"{name} of {self.program!r}"
