"""Cuts of a model into stages: by name, count, parameters or measured times."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from counted_time import counted_time
from drumline.channel.launch.launch import launch
from drumline.core.errors import BatchError, ModelError, PlanError
from drumline.core.simulate.simulate import simulate
from drumline.engine.stages.balance import Balance, balance
from drumline.pipeline.pipeline import Pipeline
from refused import refused, saying
from torch_models import WIDTH, Reference, data, mlp

pytestmark = pytest.mark.torch


def pipeline(model: Any, *, num_ranks: int = 3, **settings: Any) -> Pipeline:
    return Pipeline(model, loss_fn=functional.mse_loss, num_microbatches=4, num_ranks=num_ranks, **settings)


class Slow(nn.Module):
    """Computes much with nothing to show for it."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(200):
            x = (x + 1.0) - 1.0
        return x


def counts(pipe: Pipeline) -> list[int]:
    return [len(stage) for stage in pipe._engine.assembly.cuts]


def balanced(model: Any, **settings: Any) -> Balance:
    batch, target = data(16)
    settings = {"num_microbatches": 4, "num_ranks": 2, "num_runs": 2, **settings}
    return balance(model, batch, target=target, loss_fn=functional.mse_loss, **settings)


def test_cuts_name_the_first_block_of_every_stage_but_the_first() -> None:
    assert counts(pipeline(mlp(8), cuts=["3", "5"])) == [3, 2, 3]
    named = {name: nn.Linear(WIDTH, WIDTH) for name in ("embed", "middle", "top", "head")}
    assert counts(pipeline(named, cuts=["top"], num_ranks=2)) == [2, 2]
    assert counts(pipeline(mlp(8), cuts=[], num_ranks=1)) == [8]


@pytest.mark.features("moving")
@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_counts_may_be_an_array(kind: Callable[[list[int]], Any]) -> None:
    pipe = pipeline(mlp(8), balance=kind([1, 5, 2]), example=data(12)[0])
    assert [len(blocks) for blocks in pipe.blocks] == [1, 5, 2]
    assert pipe.repartition(balance=kind([2, 2, 4])).balance_after == (2, 2, 4)
    with refused(ModelError, r"balance is \[1.0, 5.0, 2.0\]", expected="3 counts"):
        pipe.repartition(balance=kind([1.0, 5.0, 2.0]))  # type: ignore[list-item]


@pytest.mark.features("adapt")
@pytest.mark.parametrize("settings", [{}, {"example": data(12)[0]}, {"example": data(12)[0], "balance": "even"}])
def test_a_model_with_too_few_blocks_is_refused_with_the_mend(settings: dict[str, Any]) -> None:
    with refused(ModelError, "has 2 blocks for 3 stages", fix="fewer stages per rank"):
        pipeline(mlp(2), adapt=True, **settings)


def test_blocks_are_dealt_evenly_if_asked() -> None:
    assert counts(pipeline(mlp(8), balance="even")) == [3, 3, 2]


def test_without_a_word_the_number_of_parameters_decides_and_looking_up_is_free() -> None:
    heavy = [nn.Embedding(10_000, 8), *(nn.Linear(8, 8) for _ in range(6)), nn.Linear(8, 64), nn.Linear(64, 2)]
    assert counts(pipeline(heavy, num_ranks=2)) == [7, 2]


def test_with_an_example_the_cut_is_measured_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    batch, target = data(12)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Sequential(Slow(), nn.Linear(WIDTH, WIDTH)))
    with counted_time():
        pipe = pipeline(model, num_ranks=2, example=batch, example_target=target)
    assert counts(pipe) == [3, 1]
    assert pipe.balance is not None
    assert pipe.balance.counts == (3, 1)
    told = capsys.readouterr().err
    assert "balance=[3, 1], measured on cpu" in told
    assert "milliseconds" in told


def test_a_model_cut_by_names_trains_like_one_process() -> None:
    model = mlp(8, dropout=0.2)
    pipe = pipeline(model, cuts=["1", "6"], schedule="zb-h1")
    reference = Reference(model, pipe.program, functional.mse_loss, balance=[1, 5, 2])
    batch, target = data(12)
    loss = pipe.step(batch, target=target).loss
    assert loss is not None
    assert torch.equal(loss, reference.step(batch, target))
    reference.compare(pipe, exact=True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"cuts": ["3", "55"]},
            saying("cuts names block '55', which the model does not have", fix=r"did you mean 5\?"),
        ),
        ({"cuts": ["5", "3"]}, saying("cuts names block '3' after '5'", expected="the first block of each of stages")),
        ({"cuts": ["3", "3"]}, saying("cuts names block '3' twice")),
        ({"cuts": ["0", "3"]}, saying("cuts names block '0', which already begins the first stage")),
        ({"cuts": ["3"]}, saying(r"cuts is \['3'\]", expected="2 names")),
        ({"cuts": "35"}, saying(r"cuts is \['35'\]", expected="2 names")),
        (
            {"cuts": ["3", "5"], "balance": [3, 2, 3]},
            saying(r"balance is \[3, 2, 3\] and cuts is", expected="only one of them"),
        ),
        ({"balance": "auto"}, saying("balance is 'auto' but there is no example batch", fix="pass example=")),
        (
            {"balance": "evn"},
            saying("balance is 'evn'", expected='"auto", "even", "parameters"'),
        ),
    ],
)
def test_cuts_that_make_no_sense_are_refused(settings: dict[str, Any], words: dict[str, str]) -> None:
    with refused(ModelError, **words):
        pipeline(mlp(8), **settings)


def test_a_heavy_block_gets_a_stage_of_its_own() -> None:
    model = nn.Sequential(*mlp(6), nn.Sequential(Slow(), nn.Linear(WIDTH, WIDTH)))
    with counted_time():
        found = balanced(model)
    assert found.counts == (6, 1)
    assert found.cuts == ("6",)
    assert found.seconds[1] == max(found.seconds)
    assert counts(pipeline(model, num_ranks=2, balance=found.counts)) == [6, 1]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "dualpipe"])
def test_predictions_are_those_of_the_simulator(schedule: str) -> None:
    found = balanced(mlp(8), schedule=schedule, optimizer_states=0)
    assert sum(found.counts) == 8
    assert found.is_exact
    assert found.rank_bytes == simulate(found.program, found.costs).peak_bytes
    assert len(found.table().splitlines()) == found.program.num_stages + 1
    told = json.loads(found.to_json())
    assert told["counts"] == list(found.counts)
    assert told["makespan"] == found.timeline.makespan > 0


def test_a_memory_limit_moves_the_cut_or_names_what_would_do() -> None:
    found = balanced(mlp(8))
    with refused(PlanError, "no cut of 8 blocks into 2 stages", expected="max_bytes=") as caught:
        balanced(mlp(8), max_bytes=100)
    smallest = caught.value.smallest_bytes
    assert smallest is not None
    tight = balanced(mlp(8), max_bytes=smallest)
    assert max(tight.rank_bytes) <= smallest <= max(found.rank_bytes)


def test_a_batch_that_cannot_be_cut_is_refused() -> None:
    with refused(BatchError, "the batch has 2 rows for 4 microbatches"):
        balance(mlp(4), torch.ones(2, WIDTH), num_microbatches=4, num_ranks=2)
    with refused(BatchError, "the batch contains no tensor"):
        balance(mlp(4), None, num_microbatches=4, num_ranks=2)


def test_all_ranks_use_rank_0s_figures() -> None:
    def decide() -> tuple[str, list[int]]:
        model = mlp(8)
        found = balanced(model, num_ranks=None)
        return found.to_json(), counts(pipeline(model, num_ranks=2, balance=found.counts))

    (first, mine), (second, theirs) = launch(decide, num_ranks=2)
    assert first == second
    assert [*mine[:1], *theirs[1:]] == json.loads(first)["counts"]
    assert mine[1] == theirs[0] == 0, "a rank keeps the blocks of its own stages only"


@pytest.mark.usefixtures("patient")
def test_a_rank_that_cannot_measure_fails_all() -> None:
    def decide() -> None:
        import torch.distributed as dist

        balance(mlp(4), torch.ones(8 if dist.get_rank() else 2, WIDTH), num_microbatches=4)

    with refused(BatchError, "the batch has 2 rows for 4 microbatches"):
        launch(decide, num_ranks=2)
