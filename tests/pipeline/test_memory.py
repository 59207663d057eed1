"""What is held, in pairs and in bytes, and that nothing is held for longer."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from drumline.core.measured.measured import Measured
from drumline.core.program import Program
from drumline.core.simulate.simulate import simulate
from drumline.pipeline.pipeline import Pipeline
from matrices import ALL, mainly, some_of
from some import some
from torch_models import SYNCHRONOUS, data, mlp, programs

pytestmark = [pytest.mark.torch, pytest.mark.features("record")]
ROWS = 16  # of every microbatch the same, so that one profile fits all


def weighed(program: Program, checkpoint: str = "none", seed: int = 0) -> Measured:
    pipe = Pipeline(
        mlp(),
        loss_fn=functional.mse_loss,
        schedule=program,
        num_ranks=program.num_ranks,
        checkpoint=checkpoint,
        weigh=True,
    )
    batch, target = data(ROWS * program.num_microbatches, seed=seed)
    pipe.step(batch, target=target)
    return pipe.timeline()


@pytest.mark.matrix
@pytest.mark.parametrize("name", some_of(SYNCHRONOUS, ("1f1b", "zb-v", "dualpipe")))
def test_stash_bytes_are_those_simulated_from_another_runs_profile(name: str) -> None:
    for program in (*programs(name, 2, (6,)), *programs(name, 4, (10,))):
        # The profile comes from another order of another number of microbatches.
        (other,) = programs(name, program.num_ranks, (program.num_microbatches - 2,))
        profile = weighed(other, seed=1).measured_costs()
        measured = weighed(program)
        simulated = simulate(program, profile)
        assert measured.stash is not None
        for rank, holding in some(enumerate(simulated.memory)):
            assert holding.bytes is not None
            expected = [int(after) for _, after in holding.bytes]
            assert list(measured.stash[rank]) == expected
            assert max(expected) > 0
            assert measured.peak_stash is not None
            assert measured.peak_stash[rank] == holding.peak_stash_bytes


def test_in_an_overlapped_pair_the_forward_counts_before_the_backward() -> None:
    for name in ("dualpipe", "dualpipe-v"):
        (program,) = programs(name, 4, (10,))
        measured = weighed(program)
        assert measured.stash is not None
        assert measured.peak_stash is not None
        after = [max(stash) for stash in measured.stash]
        assert any(peak > most for peak, most in zip(measured.peak_stash, after, strict=True))


def test_checkpointing_holds_less() -> None:
    (program,) = programs("1f1b", 2, (6,))
    plain, full = weighed(program), weighed(program, "full")
    assert plain.stash is not None
    assert full.stash is not None
    assert max(full.stash[0]) == 0  # only inputs are kept, which are counted apart
    assert max(plain.stash[0]) > 0


@mainly("name", "zb-v", "1f1b", "chimera")
def test_nothing_is_left_behind_step_after_step(name: str) -> None:
    (program,) = programs(name, 2, (4,))
    pipe = Pipeline(mlp(dropout=0.1), loss_fn=functional.mse_loss, schedule=program, num_ranks=2, checkpoint=["1"])
    optimizer = pipe.optimizer(torch.optim.Adam, lr=1e-3)
    batch, target = data(8)

    def tensors_after(steps: int) -> tuple[int, int]:
        for _ in range(steps):
            pipe.step(batch, target=target)
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
        alive = [value for value in gc.get_objects() if issubclass(type(value), Tensor)]
        storages = {value.untyped_storage()._cdata: value.untyped_storage().nbytes() for value in alive}
        return len(alive), sum(storages.values())

    assert tensors_after(10) == tensors_after(90 if ALL else 20)


def test_an_output_that_was_sent_is_not_held_for_its_backward() -> None:
    (program,) = programs("gpipe", 2, (4,))
    pipe = Pipeline(mlp(), loss_fn=functional.mse_loss, schedule=program, num_ranks=2)
    stage = pipe._engine.executors[0].stages[0]
    made = stage.forward(0, torch.randn(3, 6))
    storage = made.untyped_storage()
    place = storage.data_ptr()
    assert all(some(leaf.untyped_storage().data_ptr() != place for leaf in stage.passes[0][0].leaves))
    held = [root.node for root in stage.passes[0][0].roots]
    assert held, "a root is a place in the graph"


@pytest.mark.parametrize(("wanted", "most"), [(False, 1), (True, 6)])
def test_an_evaluation_holds_only_outputs_that_were_asked_for(wanted: bool, most: int) -> None:
    outputs: list[weakref.ref[torch.UntypedStorage]] = []
    alive: list[int] = []

    class Last(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            value = super().forward(x)
            outputs.append(weakref.ref(value.untyped_storage()))
            alive.append(sum(each() is not None for each in outputs))
            return value

    pipe = Pipeline(
        [torch.nn.Linear(4, 4), Last(4, 4)], loss_fn=functional.mse_loss, num_microbatches=6, num_ranks=2,
        check_model=False,
    )  # fmt: skip
    batch = torch.randn(12, 4)
    result = pipe.eval_step(batch, target=batch, outputs=wanted)
    assert max(alive[-6:]) == most
    assert (result.output is not None) is wanted
