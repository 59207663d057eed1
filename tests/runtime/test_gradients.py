"""Gradients: clipped, sparse, laid out like their parameter, and merged from halves."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from drumline.pipeline.pipeline import Pipeline
from drumline.runtime.backward.tape import Tape, accumulate, merged
from drumline.runtime.gradients import clip

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [1.0, 1e-6, 0.0])
def test_gradients_are_clipped_as_torch_clips_them_to_the_last_bit(factor: float, kind: torch.dtype) -> None:
    torch.manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.zeros(5, dtype=kind)) for _ in range(3)] for _ in range(2))
    for param, other in zip(ours, theirs, strict=True):
        param.grad = torch.randn(5, dtype=kind) * factor
        other.grad = param.grad.clone()
    norms = clip.norms_of(ours, 2.0)
    total = clip.total_norm([norm for norm in norms if norm is not None], 2.0, is_double=kind is torch.float64)
    clip.scale(ours, total, 1e-7)
    assert torch.equal(total, nn.utils.clip_grad_norm_(theirs, 1e-7))
    assert all(torch.equal(p.grad, other.grad) for p, other in zip(ours, theirs, strict=True))  # type: ignore[arg-type]


def test_a_sparse_gradient_that_names_a_place_twice_has_the_norm_of_its_sum() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    with torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
        parameter.grad = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([3.0, 1.0]), (3,))
    assert clip.norms_of([parameter], 2.0) == [4.0]


def test_a_gradient_of_another_layout_is_laid_out_like_its_parameter() -> None:
    weight = nn.Parameter(torch.zeros(2, 3))
    accumulate([(weight, torch.arange(6.0).reshape(3, 2).t())])
    assert weight.grad is not None
    assert weight.grad.stride() == weight.stride()
    whole = torch.ones(4, 3)
    other = nn.Parameter(torch.zeros(2, 3))
    accumulate([(other, whole[:2])])
    whole.zero_()
    assert torch.equal(other.grad, torch.ones(2, 3))  # type: ignore[arg-type]


def test_what_was_found_early_is_nobody_elses_tensor() -> None:
    parameter, other, shared = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2)), torch.ones(2)
    tape = Tape()
    tape.early = [(parameter, shared), (other, shared)]
    accumulate(tape.weight_gradients())
    for _ in range(2):
        accumulate([(parameter, torch.ones(2))])
    assert torch.equal(shared, torch.ones(2))
    assert torch.equal(other.grad, torch.ones(2))  # type: ignore[arg-type]
    assert torch.equal(parameter.grad, torch.full((2,), 3.0))  # type: ignore[arg-type]


def test_merged_weight_halves_add_what_every_microbatch_found_early() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    tapes = [Tape() for _ in range(3)]
    for number, tape in enumerate(tapes):
        tape.early = [(parameter, torch.full((2,), 10.0**number))]
    accumulate(merged(tapes))
    assert torch.equal(parameter.grad, torch.full((2,), 111.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["zb-v", "interleaved-zb", "zb-h1"])
def test_weight_halves_are_merged_stage_by_stage(schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(8)))
    batch, target = torch.randn(12, 6), torch.randn(12, 6)
    found = []
    for merge in (False, True):
        model.zero_grad()
        pipe = Pipeline(
            model,
            loss_fn=functional.mse_loss,
            schedule=schedule,
            num_microbatches=6,
            num_ranks=2,
            merge_weight_gradients=merge,
        )
        pipe.step(batch, target=target)
        found.append([param.grad.clone() for param in model.parameters() if param.grad is not None])
    assert len(found[0]) == 16
    for value, other in zip(*found, strict=True):
        torch.testing.assert_close(value, other)
