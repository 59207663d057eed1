"""Pipelines of models that nobody holds as a whole: built without memory, read or initialised stage by stage."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import drumline as dl
from drumline.core.errors import MismatchError, ModelError, RankFailed
from drumline.core.program import Program
from drumline.model.block import blocks_of
from drumline.model.blocks.cut import cut
from drumline.model.randomness import Randomness
from drumline.pipeline.pipeline import Pipeline
from reference_step import reference_step
from refused import refused
from torch_models import CPU, TWO_WAYS, WIDTH, data, mlp, on_meta, programs

pytestmark = pytest.mark.torch


def expected_of(blocks: Any, program: Program, batch: Tensor, target: Tensor, loss_fn: Any) -> dict[str, Any]:
    """Return the loss and the gradients of one process that holds all of the model."""
    stages = cut(blocks_of(blocks), program.num_stages)
    loss = reference_step(stages, program, batch, target, loss_fn, Randomness(0, CPU))
    named = [pair for stage in stages for block in stage for pair in block.named_parameters()]
    return {"loss": loss, **{name: param.grad for name, param in named}}


def stepped(
    model: Any, program: Program, batch: Tensor, target: Tensor, loss_fn: Any, **settings: Any
) -> dict[str, Any]:
    """Run one step of a pipeline; returns the loss and this process's gradients."""
    with Pipeline(model, loss_fn=loss_fn, schedule=program, num_ranks=program.num_ranks, **settings) as pipe:
        loss = pipe.step(batch, target=target).loss
        assert not any(param.is_meta for param in pipe.parameters())
        return {"loss": loss, **{name: param.grad for name, param in pipe.named_parameters()}}


def compare(found: dict[str, Any], wanted: dict[str, Any], *, exact: bool) -> None:
    for name, value in found.items():
        assert value is not None, name
        if exact:
            assert torch.equal(value, wanted[name]), name
        else:
            assert (value - wanted[name]).norm() <= 1e-6 * wanted[name].norm(), name


def deep() -> nn.Sequential:
    return mlp(8, dropout=0.2)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-v", "dualpipe"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_an_initialised_model_is_the_one_that_one_process_draws(name: str, num_ranks: int) -> None:
    (program,) = programs(name, num_ranks, (8,))
    wanted = expected_of(dl.materialise(on_meta(deep), seed=0), program, *data(8), functional.mse_loss)
    compare(stepped(on_meta(deep), program, *data(8), functional.mse_loss, seed=0), wanted, exact=name not in TWO_WAYS)


def one_rank(names: Sequence[str], folder: Path | None) -> dict[str, dict[str, Any]]:
    """Build the model without memory, and take one step with this rank's part of it, by every schedule."""
    every = {}
    for name in names:
        (program,) = programs(name, 2, (4,))
        model = on_meta(deep)
        found = stepped(model, program, *data(8), functional.mse_loss, weights=folder)
        held = {item for item, value in model.named_parameters() if not value.is_meta}
        assert held == set(found) - {"loss"}, "what is another rank's got memory"
        every[name] = found
    return every


@pytest.mark.parametrize("from_files", [True, False])
def test_ranks_of_their_own_materialise_their_own_stages_alone(tmp_path: Path, from_files: bool) -> None:
    names = ("1f1b", "zb-v", "dualpipe")
    whole = deep() if from_files else dl.materialise(on_meta(deep))
    if from_files:
        torch.save(whole.state_dict(), tmp_path / "pytorch_model.bin")
    ranks = dl.launch(one_rank, names, tmp_path if from_files else None, num_ranks=2)
    for name in names:
        (program,) = programs(name, 2, (4,))
        wanted = expected_of(copy.deepcopy(whole), program, *data(8), functional.mse_loss)
        for found in (every[name] for every in ranks):
            compare(found, wanted, exact=name not in TWO_WAYS)
            assert (len(found) == len(wanted)) == (name == "dualpipe")
        assert set().union(*(every[name] for every in ranks)) == set(wanted)


def different_copies() -> list[tuple[str, Tensor]]:
    """Give every rank weights of its own, in a schedule with two copies of every stage."""
    (program,) = programs("dualpipe", 2, (4,))
    with Pipeline(mlp(seed=torch.distributed.get_rank()), loss_fn=functional.mse_loss, schedule=program) as pipe:
        return [(name, param.detach()) for name, param in pipe.named_parameters()]


def test_second_copies_get_the_values_of_the_first() -> None:
    first, second = (dict(row) for row in dl.launch(different_copies, num_ranks=2))
    homes = [dict(mlp(seed=rank).named_parameters()) for rank in (0, 1)]
    assert set(first) == set(second) == set(homes[0])
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name])
        assert torch.equal(tensor, homes[int(name.split(".")[0]) >= 4][name])


def let_go() -> tuple[list[int], float]:
    """Drop the model once the pipeline is made; returns which of its blocks are there after the first step's check."""
    rank = torch.distributed.get_rank()
    model = mlp()
    blocks = [weakref.ref(module) for module in model]
    (program,) = programs("1f1b", 2, (4,))
    with Pipeline(model, loss_fn=functional.mse_loss, schedule=program) as pipe:
        del model
        batch, target = data(8)
        pipe.step(batch if rank == 0 else None, target=target if rank == 1 else None)
        gc.collect()
        alive = [number for number, block in enumerate(blocks) if block() is not None]
        return alive, pipe.clip_grad_norm_(1.0).item()


def test_the_blocks_of_other_ranks_can_be_freed() -> None:
    (first, norm), (second, other) = dl.launch(let_go, num_ranks=2)
    assert (first, second) == ([0, 1, 2, 3], [4, 5, 6, 7])
    (program,) = programs("1f1b", 2, (4,))
    model = mlp()
    expected_of(model, program, *data(8), functional.mse_loss)
    assert norm == other == nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()


def given(cases: list[list[Path]]) -> list[str]:
    """Return what each case's folders, one for each rank, are refused with."""
    (program,) = programs("1f1b", 2, (4,))
    said = []
    for folders in cases:
        with pytest.raises((ModelError, MismatchError)) as caught:
            Pipeline(on_meta(mlp), schedule=program, weights=folders[torch.distributed.get_rank()])
        assert not isinstance(caught.value, RankFailed)
        said.append(str(caught.value))
    return said


def test_all_ranks_say_the_same_about_weights_that_do_not_fit(tmp_path: Path) -> None:
    state = mlp().state_dict()
    doubled = {name: entry.double() for name, entry in state.items()}
    lacking = {name: entry for name, entry in state.items() if name != "6.1.bias"}
    folders = []
    for number, kept in enumerate((state, doubled, lacking)):
        folders.append(tmp_path / str(number))
        folders[-1].mkdir()
        torch.save(kept, folders[-1] / "pytorch_model.bin")
    whole, double, lack = folders
    first, second = dl.launch(given, [[whole, double], [whole, lack], [lack, lack]], num_ranks=2)
    assert first == second
    assert first[0].startswith("ranks 0 and 1 disagree on weights: ('0.0.bias', (6,), 'torch.float32')")
    assert first[1].startswith("ranks 0 and 1 disagree on weights: 32 and 31 entries")
    assert "2 has no tensor for the parameter 6.1.bias" in first[2]


@pytest.mark.accelerator
def test_a_model_on_the_meta_device_goes_where_the_rank_computes() -> None:
    pipe = Pipeline(on_meta(mlp), loss_fn=functional.mse_loss, num_microbatches=2, num_ranks=2)
    expected = torch.accelerator.current_accelerator(check_available=True) or CPU
    assert pipe.device.type == expected.type
    assert {param.device.type for param in pipe.parameters()} == {expected.type}


def test_a_model_without_memory_cannot_be_measured() -> None:
    with refused(ModelError, "the model is on the meta device", fix="materialise"):
        dl.balance(on_meta(mlp), torch.randn(4, WIDTH), num_microbatches=2, num_ranks=2)
