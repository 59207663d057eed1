"""Models measured by slice length, and plans in slices that a pipeline runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import drumline as dl
from drumline.core.errors import UsageError
from drumline.engine.model.blocks import blocks_for
from drumline.pipeline.slice_timing import profile_slices
from drumline.plan.device.planner import plan
from drumline.plan.device.slice_profile import SliceProfile, TimedSlice
from drumline.profile.identity import identity_of
from profiles import model_profile
from refused import refused

pytestmark = [pytest.mark.torch, pytest.mark.features("slices")]

TOKENS = 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        out: Tensor = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(16, 8), nn.Embedding(TOKENS, 8)
        self.layers = nn.Sequential(Layer(), Layer())
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.tokens(tokens) + self.places(positions)))
        return logits


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), target.flatten())


def made(rows: int = 2) -> tuple[Model, Tensor, Tensor]:
    torch.manual_seed(0)
    text = torch.randint(16, (rows, TOKENS + 1))
    return Model(), text[:, :-1], text[:, 1:]


def test_slices_are_measured_with_their_keys_and_values() -> None:
    model, x, target = made()
    before = [param.clone() for param in model.parameters()]
    profile = profile_slices(model, {"tokens": x}, target, loss_fn=loss_fn, slices=(2, 4, 5), num_runs=1)
    assert (profile.rows, profile.tokens) == (2, TOKENS)
    assert [(each.start, each.end) for each in profile.slices] == [
        (number * TOKENS // count, (number + 1) * TOKENS // count) for count in (1, 2, 4) for number in range(count)
    ]
    assert min(min(each.forward, each.backward) for each in profile.slices) > 0
    assert profile.key_value_bytes == 2 * 2 * (2 * TOKENS * 8) * 4  # layers, keys and values, of float32
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    # tokens and places, of other sizes; two layers of one kind; the head with the loss
    blocks = blocks_for(model, {"tokens": x, "positions": torch.arange(TOKENS)[None]}, x.device, num_microbatches=1)
    names = [block.name for block in blocks]
    assert len(profile.blocks) == len(names)
    assert profile.blocks[names.index("layers.0")] == profile.blocks[names.index("layers.1")]
    assert len(set(profile.blocks)) == len(names) - 1 == len(profile.kinds)
    for kind in profile.kinds:
        assert [(each.start, each.end) for each in kind] == [(each.start, each.end) for each in profile.slices]
        assert min(each.forward for each in kind) > 0


def test_a_plan_in_slices_runs_with_the_loss_of_one_process() -> None:
    model, x, target = made(rows=1)
    example = {"tokens": x, "positions": torch.arange(TOKENS)[None]}
    whole = loss_fn(model(**example), target)
    blocks = blocks_for(model, example, torch.device("cpu"), num_microbatches=1)
    slices = tuple(
        TimedSlice(start, start + each, each / 64 + start / 512, each / 32 + start / 256)
        for each in (32, 16, 8)
        for start in range(0, 32, each)
    )
    known = model_profile([1.0] * len(blocks), rows=(1, 2))
    layers = [replace(layer, name=block.name) for layer, block in zip(known.sizes[0][1].layers, blocks, strict=True)]
    sizes = tuple((rows, replace(size, layers=tuple(layers))) for rows, size in known.sizes)
    profile = replace(
        known, model=identity_of(blocks, "Model"), sizes=sizes, slices=SliceProfile(1, TOKENS, slices, 64.0)
    )
    planned = plan(profile, num_ranks=2, batch=1, schedules=["1f1b"], seconds=0)
    assert planned.best.slices
    pipe = dl.Pipeline(model, loss_fn=loss_fn, plan=planned, example=example, transport="in-process")
    assert pipe.program.num_slices == len(planned.best.slices)
    assert pipe.step(tokens=x, target=target).loss == pytest.approx(whole.item(), rel=1e-6)
    with refused(UsageError, "slices"):
        dl.Pipeline(model, loss_fn=loss_fn, plan=planned, example=example, slices=4)
