"""What a user meets: losses, shapes, evaluation, checkpoints of buffers, errors and timelines, in one process."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import drumline as dl
from drumline.core.errors import BatchError, ModelError, NonFiniteError, ProgramError, RunError, UsageError
from drumline.pipeline.pipeline import Pipeline
from refused import refused, saying
from some import some
from torch_models import Reference, Unused, data, mlp, programs

pytestmark = pytest.mark.torch


def pipeline(model: Any = None, **settings: Any) -> Pipeline:
    given: dict[str, Any] = {
        "loss_fn": functional.mse_loss,
        "schedule": "1f1b",
        "num_microbatches": 4,
        "num_ranks": 2,
        **settings,
    }
    return Pipeline(mlp() if model is None else model, **given)


def test_an_uneven_batch_counts_every_row_the_same() -> None:
    model = mlp()
    whole = copy.deepcopy(model)
    batch, target = data(7)
    result = pipeline(model, num_microbatches=3).step(batch, target=target)
    loss = functional.mse_loss(whole(batch), target)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(result.loss, loss.detach())
    for param, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(param.grad, other.grad)


def test_token_weighted_losses_average_over_tokens_of_the_whole_batch() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target, ignore_index=-1)

    def tokens(target: Tensor) -> Tensor:
        return (target != -1).sum()

    torch.manual_seed(0)
    batch, target = torch.randn(8, 6), torch.tensor([0, 1, -1, -1, -1, 5, 2, -1])
    for weigh in (tokens, lambda target: int(tokens(target))):
        model = mlp()
        whole = copy.deepcopy(model)
        result = pipeline(model, loss_fn=loss_fn, loss_weight=weigh).step(batch, target=target)
        loss = loss_fn(whole(batch), target)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(result.loss, loss.detach())
        for param, other in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(param.grad, other.grad)


def test_evaluation_is_the_model_in_eval_mode_and_leaves_no_trace() -> None:
    model = mlp(dropout=0.5)
    batch, target = data(7)
    pipe = pipeline(model, schedule="zb-v")
    result = pipe.eval_step(batch, target=target)
    assert model.training
    model.eval()
    expected = model(batch).detach()
    torch.testing.assert_close(result.output, expected)
    torch.testing.assert_close(result.loss, functional.mse_loss(expected, target))
    assert pipe.eval_step(batch).loss is None
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(stage.passes for executor in pipe._engine.executors for stage in executor.stages.values())


@pytest.mark.parametrize("name", ["dualpipe", "chimera", "interleaved-1f1b"])
def test_evaluation_goes_any_schedules_way(name: str) -> None:
    model = mlp()
    batch, _ = data(9)
    torch.testing.assert_close(pipeline(model, schedule=name).eval_step(batch).output, model(batch).detach())


@pytest.mark.parametrize("checkpoint", ["none", "full", ["1"]])
def test_running_statistics_change_once_per_microbatch(checkpoint: Any) -> None:
    def normed() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6))

    model, whole = normed(), normed()
    for step in range(3):
        batch, target = data(12, seed=step)
        for part in batch.tensor_split(4):
            whole(part)
        if step == 0:
            pipe = pipeline(model, checkpoint=checkpoint)
        pipe.step(batch, target=target)
    for buffer, other in some(zip(model.buffers(), whole.buffers(), strict=True)):
        assert torch.equal(buffer, other)


def test_shapes_may_change_from_step_to_step() -> None:
    model = nn.Sequential(nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 11))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())

    (program,) = programs("zb-h1", 2, (3,))
    reference = Reference(model, program, loss_fn)
    pipe = pipeline(model, schedule=program, num_microbatches=None, loss_fn=loss_fn)
    for rows, tokens in ((6, 4), (3, 9), (8, 1), (6, 4)):
        batch = torch.randint(0, 11, (rows, tokens))
        pipe.step(batch, target=batch)
        reference.step(batch, batch)
    reference.compare(pipe, exact=True)


class Pair(nn.Module):
    """Hands on a pair with a mask, a word and nothing."""

    def __init__(self, first: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.first = first

    def forward(self, value: Any) -> Any:
        if self.first:
            value = {"x": value, "mask": value > 0, "word": "plain", "nothing": None, "twice": (value, value)}
        made = self.layer(value["x"]) * value["mask"] + value["twice"][0]
        return {**value, "x": made}


class Single(nn.Module):
    def forward(self, value: Any) -> Any:
        assert value["word"] == "plain"
        assert value["nothing"] is None
        return value["x"]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "dualpipe"])
def test_values_of_any_form_travel_between_stages(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Pair(first=True), Pair(), Pair(), nn.Sequential(Pair(), Single()))
    (program,) = programs(name, 2, (4,))
    reference = Reference(model, program, functional.mse_loss)
    pipe = pipeline(model, schedule=program)
    batch, target = data(8)
    pipe.step(batch, target=target)
    reference.step(batch, target)
    reference.compare(pipe, exact=name != "dualpipe")


def test_a_step_leaves_the_users_random_numbers_alone() -> None:
    pipe = pipeline(mlp(dropout=0.5))
    batch, target = data(8)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    pipe.step(batch, target=target)
    assert torch.equal(torch.rand(3), expected)


def test_dropout_differs_between_steps_microbatches_and_seeds() -> None:
    batch = torch.ones(4, 6)

    def losses(seed: int) -> list[float]:
        torch.manual_seed(0)
        pipe = pipeline(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)), seed=seed)
        return [float(pipe.step(batch, target=torch.zeros(4, 6)).loss or 0.0) for _ in range(3)]

    assert len(set(losses(0))) == 3
    assert losses(0) == losses(0)
    assert losses(0) != losses(1)


def test_a_block_that_starts_to_draw_late_is_seeded_all_the_same() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.layer(x)
            return functional.dropout(made, 0.5) if x.sum() > 0 else made

    torch.manual_seed(0)
    model = nn.Sequential(Late(), Late(), Late(), Late())
    for name in ("1f1b", "zb-h1"):
        (program,) = programs(name, 2, (4,))
        reference = Reference(model, program, functional.mse_loss)
        pipe = pipeline(copy.deepcopy(model), schedule=program)
        for sign in (-1.0, 1.0, -1.0, 1.0):
            batch, target = data(8)
            result = pipe.step(batch.abs() * sign, target=target)
            loss = reference.step(batch.abs() * sign, target)
            assert result.loss is not None
            assert torch.equal(result.loss, loss)
        reference.compare(pipe, exact=True)


@pytest.mark.parametrize("own", [True, False])
def test_a_nan_stops_every_optimizer_before_it_changes_anything(own: bool) -> None:
    model = mlp()
    pipe = pipeline(model)
    kind = torch.optim.Adam
    optimizer = pipe.optimizer(kind, lr=0.1) if own else kind(pipe.parameters(), lr=0.1)
    batch, target = data(8)
    before = [param.detach().clone() for param in model.parameters()]
    pipe.step(batch * float("inf"), target=target)
    for _ in range(2):  # trying again does not help
        with refused(NonFiniteError, "rank 0"):
            optimizer.step()
    assert all(torch.equal(tensor, other) for tensor, other in zip(before, model.parameters(), strict=True))
    assert not optimizer.state
    optimizer.zero_grad()
    pipe.step(batch, target=target)
    optimizer.step()
    assert optimizer.state


def test_a_nan_in_gradients_alone_is_found_and_the_check_can_be_turned_off() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 0).sqrt() + x  # finite, with a slope that is not

    batch, target = data(8)
    for check in (True, False):
        pipe = pipeline(nn.Sequential(nn.Linear(6, 6), Root()), check_finite=check)
        result = pipe.step(batch, target=target)
        assert result.loss is not None
        assert math.isfinite(result.loss)
        if check:
            with pytest.raises(NonFiniteError):
                pipe.clip_grad_norm_(1.0)
        else:
            assert not math.isfinite(pipe.clip_grad_norm_(1.0))


def test_large_gradients_are_not_mistaken_for_infinite_ones() -> None:
    batch, target = data(8)
    pipe = pipeline(loss_fn=lambda output, target: functional.mse_loss(output, target) * 1e37)
    pipe.step(batch, target=target)
    pipe.settle()


def test_parameters_that_no_loss_reaches_are_named() -> None:
    batch, target = data(8)
    for name in ("1f1b", "zb-h1"):
        pipe = pipeline(nn.Sequential(nn.Linear(6, 6), Unused()), schedule=name, unused="raise")
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        pipe.step(batch, target=target)
        with refused(ModelError, r"no loss reaches 1\.unused\.bias, 1\.unused\.weight"):
            optimizer.step()


def test_frozen_parameters_get_no_gradient() -> None:
    for name in ("1f1b", "zb-h1", "zb-v"):
        model = mlp()
        for parameter in model[1].parameters():
            parameter.requires_grad_(False)
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        batch, target = data(8)
        pipe = pipeline(model, schedule=name)
        pipe.step(batch, target=target)
        pipe.settle()
        assert all(p.grad is None for block in (model[0], model[1]) for p in block.parameters())
        assert all(p.grad is not None for p in model[2].parameters())


@pytest.mark.parametrize(
    ("settings", "batch", "error", "says"),
    [
        ({}, (3, 3), BatchError, saying("3 rows for 4 microbatches")),
        ({}, (8, 7), BatchError, saying("the batch has 8 rows and the target has 7")),
        ({}, (0, 0), BatchError, saying("0 rows")),
        ({"loss_fn": lambda output, target: output}, (8, 8), ModelError, saying("loss_fn returned a tensor of shape")),
        ({"loss_fn": lambda output, target: 1.0}, (8, 8), ModelError, saying("loss_fn returned float")),
        (
            {"loss_weight": lambda target: 0},
            (8, 8),
            BatchError,
            saying("loss weights are", expected="not all of them 0"),
        ),
        (
            {"loss_weight": lambda target: "1"},
            (8, 8),
            BatchError,
            saying("loss_weight returned '1'", expected="a number"),
        ),
        (
            {"loss_weight": lambda target: torch.ones(2)},
            (8, 8),
            BatchError,
            saying("loss_weight returned a tensor of shape"),
        ),
    ],
)
def test_a_bad_step_is_refused_and_the_next_good_one_runs(
    settings: Any, batch: Any, error: Any, says: dict[str, str]
) -> None:
    pipe = pipeline(**settings)
    x, y = data(8)
    with refused(error, **says):
        pipe.step(x[: batch[0]], target=y[: batch[1]])
    if not settings:
        pipe.step(x, target=y)
        pipe.settle()


WITH_WAITS = dl.Program.parse(
    "0F0,0SEND_F0,0RECV_B0,0B0,0WAIT_SEND_F0\n1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0", name="for torch 2.15"
)
WITH_STATE = dl.Program.parse("0UNSHARD,0F0,0B0,0RESHARD\n1F0,1B0", name="for torch")


@pytest.mark.features("capture")
@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"schedule": "1f1v"}, dl.DrumlineError, saying("unknown schedule '1f1v'", fix="did you mean 1f1b")),
        ({"schedule": "forward-only"}, ProgramError, saying("no backward passes")),
        (
            {"schedule": WITH_WAITS, "num_microbatches": 1},
            ProgramError,
            saying("'for torch 2.15' says where to wait", fix=r"compute_only\(\)"),
        ),
        (
            {"schedule": WITH_STATE, "num_microbatches": 1},
            ProgramError,
            saying("'for torch' gathers", expected="zero=3", fix=r"compute_only\(\)"),
        ),
        ({"num_microbatches": None}, ProgramError, saying("num_microbatches is missing")),
        ({"num_ranks": 9}, ModelError, saying("8 blocks for 9 stages")),
        ({"balance": [1, 2]}, ModelError, saying(r"balance is \[1, 2\]")),
        ({"balance": [8, 0]}, ModelError, saying(r"balance is \[8, 0\]")),
        ({"checkpoint": "some"}, ModelError, saying("checkpoint is 'some'")),
        ({"checkpoint": ["77"]}, ModelError, saying("'77', which does not exist")),
        ({"checkpoint": {5: "full"}}, ModelError, saying("checkpoint names stage 5")),
        ({"checkpoint": {"0": "full"}}, ModelError, saying("checkpoint names stage '0'")),
        ({"checkpoint": True}, ModelError, saying("checkpoint is True", expected='"none", "full"')),
        ({"checkpoint": {0: None}}, ModelError, saying("checkpoint is None", expected='"none", "full"')),
        ({"balance": 2}, ModelError, saying("balance is 2", expected="a list")),
        ({"cuts": 2}, ModelError, saying("cuts is 2", expected="a list of block names")),
        ({"loss_fn": "mse"}, ModelError, saying("loss_fn is 'mse'", expected="a function")),
        (
            {"loss_fn": nn.MSELoss},
            ModelError,
            saying("loss_fn is the class MSELoss", expected="a function", fix=r"MSELoss\(\)"),
        ),
        ({"loss_weight": 2}, ModelError, saying("loss_weight is 2", expected="a function")),
        ({"transport": "carrier pigeon"}, UsageError, saying("carrier pigeon")),
        ({"transport": "gloo"}, UsageError, saying("no launcher started")),
        ({"model": "resnet"}, ModelError, saying("the model is a str")),
        ({"model": []}, ModelError, saying("no blocks")),
        ({"model": [nn.Linear(2, 2), 3]}, ModelError, saying("block '1' is a int")),
        ({"capture": True}, ModelError, saying("capture=True")),
    ],
)
def test_a_bad_pipeline_is_refused(settings: Any, error: Any, says: dict[str, str]) -> None:
    with refused(error, **says):
        pipeline(**settings)


def test_blocks_may_be_named_by_their_numbers() -> None:
    pipe = pipeline(cuts=[3], checkpoint=[0, 4])
    assert pipe._engine.executors[1].stages[1].blocks[0].name == "3"
    assert pipe._engine.assembly.checkpointed == {"0", "4"}


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (lambda state: None, saying("the state is a NoneType", expected="a dict")),
        (
            lambda state: {name: entry.tolist() for name, entry in state.items()},
            saying("is a list in the state", expected="a tensor"),
        ),
        (
            lambda state: {name: entry.to("meta") for name, entry in state.items()},
            saying("is on the meta device in the state"),
        ),
    ],
)
def test_a_state_that_has_no_numbers_is_refused_and_changes_nothing(state: Any, says: dict[str, str]) -> None:
    pipe = pipeline()
    before = {name: entry.clone() for name, entry in pipe.state_dict().items()}
    with refused(ModelError, **says):
        pipe.load_state_dict(state(before))
    assert all(some(torch.equal(entry, before[name]) for name, entry in pipe.state_dict().items()))


def test_an_optimizer_that_weighs_all_parameters_together_runs_in_one_process_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = dl.Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], num_microbatches=2, num_ranks=2)
    assert pipe.optimizer(torch.optim.LBFGS)
    monkeypatch.setattr(pipe._run.crew, "alone", False)
    with refused(dl.DrumlineError, "each rank holds a part of them", expected="an optimizer that treats"):
        pipe.optimizer(torch.optim.LBFGS)


def test_an_optimizer_that_is_no_class_is_refused() -> None:
    with refused(dl.DrumlineError, r"pipe\.optimizer got 'adam'", expected="an optimizer class"):
        pipeline().optimizer("adam")  # type: ignore[arg-type]


def test_sparse_gradients_are_clipped_like_dense_ones() -> None:
    norms, found = [], []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 6, sparse=sparse), nn.Linear(6, 6), nn.Linear(6, 9))
        pipe = pipeline(model, loss_fn=nn.functional.cross_entropy)
        words = torch.tensor([0, 1, 1, 2, 2, 2, 8, 8])
        pipe.step(words, target=words)
        norms.append(pipe.clip_grad_norm_(0.1))
        found.append([param.grad.to_dense() for param in model.parameters() if param.grad is not None])
    torch.testing.assert_close(norms[0], norms[1])
    for value, other in zip(*found, strict=True):
        torch.testing.assert_close(value, other)


def test_float64_gradients_are_clipped_by_a_norm_of_float64() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5)).double()
    pipe = pipeline(model, loss_fn=nn.functional.mse_loss)
    pipe.step(torch.randn(8, 6).double(), target=torch.randn(8, 5).double())
    expected = nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None])
    assert torch.equal(pipe.clip_grad_norm_(0.1), expected)


@pytest.mark.features("record")
def test_a_program_and_a_csv_file_run_as_they_are(tmp_path: Path) -> None:
    program = dl.Program.parse("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0")
    path = tmp_path / "mine.csv"
    path.write_text(program.format())
    batch, target = data(4)
    found = []
    for schedule in (program, path, str(path)):
        model = mlp()
        pipe = pipeline(model, schedule=schedule, num_microbatches=None)
        pipe.step(batch, target=target)
        assert [str(action) for action in pipe.timeline().tracks[1].actions] == ["1F0", "1F1", "1B1", "1B0"]
        found.append([param.grad for param in model.parameters()])
    for other in some(found[1:]):
        assert all(some(torch.equal(t, two) for t, two in zip(found[0], other, strict=True)))  # type: ignore[arg-type]
    with refused(ProgramError, "is for 2 ranks"):
        pipeline(schedule=program, num_ranks=3, num_microbatches=None)
    with refused(ProgramError, "has 2 microbatches"):
        pipeline(schedule=program, num_microbatches=4)


@pytest.mark.features("record")
def test_the_measured_timeline_reads_like_any_other() -> None:
    pipe = pipeline(schedule="zb-h1", num_ranks=3, num_microbatches=5)
    with refused(RunError, "no step has run"):
        pipe.timeline()
    batch, target = data(10)
    pipe.step(batch, target=target)
    timeline = pipe.timeline()
    assert timeline.program is pipe.program
    assert 0 < timeline.bubble < 1
    assert sum(timeline.busy) + sum(timeline.idle) == pytest.approx(3 * timeline.makespan)
    sent = [(transfer.source, transfer.target) for transfer in timeline.transfers]
    assert sorted(set(sent)) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    assert len(sent) == 20
    assert all(some(transfer.made <= transfer.end <= transfer.consumed for transfer in timeline.transfers))
    assert all(some(transfer.num_bytes == 2 * 6 * 4 for transfer in timeline.transfers))
    assert all(some(wait.end >= wait.start for wait in timeline.waits))
    assert all(some(idle.cause for idle in timeline.causes))
    assert "3 ranks" in dl.grid(timeline) or dl.grid(timeline)
    assert dl.simulate(pipe.program, timeline.measured_costs()).makespan > 0


def test_a_closed_pipeline_says_so() -> None:
    with pipeline() as pipe:
        pass
    with refused(RunError, "it was closed"):
        pipe.step(*data(8)[:1])


def test_the_optimizer_hook_forgets_pipelines_that_are_gone() -> None:
    model = mlp()
    pipe = pipeline(model)
    batch, target = data(8)
    pipe.step(batch * float("nan"), target=target)
    del pipe
    import gc

    gc.collect()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
