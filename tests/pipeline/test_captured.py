"""Captured steps, by graphs that need no device: the same bits as steps that run as ever, or a refusal."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.channel.launch.launch import launch
from drumline.core.errors import BatchError, MismatchError, ModelError, NonFiniteError, RunError
from drumline.features.capture.engine import CapturingEngine
from drumline.pipeline.pipeline import Pipeline
from host_recorder import HostRecorder
from matrices import chosen, long, mainly, some_of
from refused import refused
from some import some
from torch_models import SYNCHRONOUS, WIDTH, data, mlp, programs

pytestmark = [pytest.mark.torch, pytest.mark.features("capture")]


@contextmanager
def recording() -> Iterator[HostRecorder]:
    """Let pipelines capture on the host."""
    recorder = HostRecorder()
    with mock.patch("drumline.features.capture.engine.recorder_for", return_value=recorder):
        yield recorder


class Pair:
    """The same model twice: a pipeline that captures, and one that does not."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        with recording() as self.recorder:
            settings.setdefault("loss_fn", functional.mse_loss)
            self.captured = Pipeline(copy.deepcopy(model), capture=True, **settings)
            self.plain = Pipeline(model, **settings)

    def step(self, *batches: Any) -> None:
        """Take a step with each batch on both, and compare every bit."""
        for batch, target in batches:
            losses = [pipe.step(batch, target=target).loss for pipe in (self.captured, self.plain)]
            assert losses[0] is not None
            assert losses[1] is not None
            assert torch.equal(losses[0], losses[1])
            self.compare()

    def compare(self) -> None:
        theirs = dict(self.plain.named_parameters())
        for name, param in self.captured.named_parameters():
            expected = theirs[name].grad
            assert (param.grad is None) == (expected is None), name
            assert param.grad is None or expected is None or torch.equal(param.grad, expected), name

    def zero_grad(self) -> None:
        self.captured.zero_grad()
        self.plain.zero_grad()

    def counts(self) -> tuple[int, int]:
        """Return how many captures and replays there were since this was last asked."""
        found = self.recorder.num_captures, self.recorder.num_replays
        self.recorder.num_captures = self.recorder.num_replays = 0
        return found


@pytest.mark.matrix
@pytest.mark.parametrize("name", some_of(SYNCHRONOUS, ("1f1b", "zb-v", "chimera", "dualpipe")))
def test_captured_steps_give_the_same_bits(name: str) -> None:
    for num_ranks, checkpoint in chosen((2, 4, 1), ("none", ("1", "2", "6")), times=1):
        for program in programs(name, num_ranks, (4,)):
            pair = Pair(mlp(), schedule=program, num_ranks=num_ranks, checkpoint=checkpoint)
            for seed in range(4):
                pair.step(data(7, seed=seed))
                pair.captured.clip_grad_norm_(0.5)
                pair.plain.clip_grad_norm_(0.5)
                pair.compare()
                if seed != 1:
                    pair.zero_grad()


def test_a_step_like_the_last_is_captured_once_and_then_replayed() -> None:
    pair = Pair(mlp(), schedule="1f1b", num_microbatches=3, num_ranks=2)
    stretches = 5 + 3  # see test_stretches
    pair.step(data(6))
    assert pair.counts() == (0, 0)
    pair.step(data(6, seed=1))
    assert pair.counts() == (stretches, stretches)
    pair.step(data(6, seed=2), data(6, seed=3))
    assert pair.counts() == (0, 2 * stretches)


def test_on_one_rank_the_whole_step_is_one_graph() -> None:
    pair = Pair(mlp(), schedule="zb-v", num_microbatches=4, num_ranks=1)
    pair.step(*(data(8, seed=seed) for seed in range(4)))
    assert pair.counts() == (1, 3)


def test_other_shapes_run_as_ever_and_are_captured_when_they_come_again() -> None:
    pair = Pair(mlp(), schedule="zb-h1", num_microbatches=4, num_ranks=2)
    for rows in (8, 8, 12, 7, 8, 8, 8):
        pair.step(data(rows, seed=rows))
    captures, replays = pair.counts()
    assert captures * 3 == replays * 2  # the two steps that followed their like, and one more


def test_weights_change_in_place_between_captured_steps() -> None:
    pair = Pair(mlp(), schedule="zb-v", num_microbatches=4, num_ranks=2)
    optimizers = [pipe.optimizer(torch.optim.Adam, lr=0.1) for pipe in (pair.captured, pair.plain)]
    for seed in range(4):
        pair.step(data(8, seed=seed))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_an_evaluation_of_another_size_in_between_changes_nothing() -> None:
    pair = Pair(mlp(), schedule="1f1b", num_microbatches=4, num_ranks=2)
    for seed in range(4):
        pair.step(data(8, seed=seed))
        batch, target = data(7)
        for pipe in (pair.captured, pair.plain):
            pipe.eval_step(batch, target=target)


@pytest.mark.parametrize("change", ["freeze", "move", "mode", "replace"])
def test_what_graphs_take_for_granted_is_looked_at_before_every_step(change: str) -> None:
    pair = Pair(mlp(), schedule="zb-h1", num_microbatches=4, num_ranks=2)
    pair.step(data(8), data(8), data(8))
    pair.counts()
    pair.zero_grad()
    for pipe in (pair.captured, pair.plain):
        block = pipe._engine.executors[1].stages[1].blocks[0].module
        assert isinstance(block, nn.Sequential)
        linear = block[0]
        assert isinstance(linear, nn.Linear)
        match change:
            case "freeze":
                linear.weight.requires_grad_(False)
            case "move":
                linear.weight.data = linear.weight.data * 2
            case "mode":
                block.eval()
            case "replace":
                linear.weight = nn.Parameter(linear.weight.detach() * 3)
    pair.step(data(8))
    assert pair.counts() == (0, 0)
    pair.step(data(8), data(8))
    assert pair.counts()[0] > 0


class Nested(nn.Module):
    """Hands on several tensors, one of them of whole numbers, and plain values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            value = {"x": value, "rows": torch.ones_like(value[:, 0], dtype=torch.long), "scale": 0.5, "none": None}
        made = self.linear(value["x"]) * value["scale"] + value["rows"][:, None]
        return {**value, "x": made}


class Last(nn.Module):
    def forward(self, value: Any) -> Tensor:
        made: Tensor = value["x"]
        return made


def test_messages_of_several_tensors_and_plain_values_are_captured() -> None:
    model = nn.Sequential(Nested(), Nested(), Nested(), Last())
    pair = Pair(model, schedule="1f1b", num_microbatches=4, num_ranks=4)
    pair.step(*(data(8, seed=seed) for seed in range(4)))
    assert pair.counts()[1] > 0


class Skips(nn.Module):
    """A model of its own kind: what it begins with is used again by every layer, on whichever rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        first = x.tanh()
        for layer in self.layers:
            x = layer(x).relu() + first * factor
        return x


def test_models_that_are_no_chain_are_captured() -> None:
    torch.manual_seed(0)
    example = {"x": data(8)[0], "factor": data(8)[0]}
    pair = Pair(Skips(), schedule="zb-h1", num_microbatches=4, num_ranks=2, example=example, balance="even")
    for seed in range(4):
        batch, target = data(8, seed=seed)
        losses = [pipe.step(batch, factor=batch + 1, target=target).loss for pipe in (pair.captured, pair.plain)]
        assert losses[0] is not None
        assert losses[1] is not None
        assert torch.equal(losses[0], losses[1])
        pair.compare()
    assert pair.counts()[1] > 0


@pytest.mark.features("precision")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precision_and_a_changing_loss_scale_are_captured(precision: str) -> None:
    pair = Pair(mlp(), schedule="zb-h1", num_microbatches=4, num_ranks=2, precision=precision)
    optimizers = [pipe.optimizer(torch.optim.SGD, lr=0.1) for pipe in (pair.captured, pair.plain)]
    scales = []
    for seed in range(6):
        pair.step(data(8, seed=seed))
        for pipe, optimizer in zip((pair.captured, pair.plain), optimizers, strict=True):
            if pipe.scaler is not None:
                pipe.scaler.growth_interval = 2
                scales.append(pipe.scaler.scale)
            optimizer.step()
            optimizer.zero_grad()
    assert pair.counts()[1] > 0
    assert precision == "bf16" or len(set(scales)) > 1


def test_tied_and_frozen_parameters_are_captured() -> None:
    class Tied(nn.Linear):
        """Has its weight from elsewhere."""

    torch.manual_seed(0)
    first, last = nn.Linear(WIDTH, WIDTH), Tied(WIDTH, WIDTH)
    last.weight = first.weight
    blocks = nn.Sequential(*mlp(2), first, *mlp(2), last)
    for parameter in blocks[0].parameters():
        parameter.requires_grad_(False)
    for schedule in ("1f1b", "zb-v"):
        pair = Pair(copy.deepcopy(blocks), schedule=schedule, num_microbatches=4, num_ranks=2)
        optimizers = [pipe.optimizer(torch.optim.SGD, lr=0.1) for pipe in (pair.captured, pair.plain)]
        for seed in range(5):
            pair.step(data(8, seed=seed))
            if seed % 2:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        assert pair.counts()[1] > 0


def test_microbatches_that_weigh_nothing_may_be_others_in_every_step() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        counted = target[:, 0] >= 0
        return ((output - target).square().mean(1) * counted).sum() / counted.sum()

    def weight(target: Tensor) -> float:
        return float((target[:, 0] >= 0).sum())

    pair = Pair(mlp(), schedule="1f1b", num_microbatches=4, num_ranks=2, loss_fn=loss, loss_weight=weight)
    for empty in (None, None, None, 1, 2, None):
        batch, target = data(8)
        target[:, 0] = target[:, 0].abs()
        if empty is not None:
            target[2 * empty : 2 * empty + 2, 0] = -1.0
        pair.step((batch, target))
    assert pair.counts()[1] > 0


def test_merged_weight_gradients_are_captured() -> None:
    pair = Pair(mlp(), schedule="zb-h1", num_microbatches=4, num_ranks=2, merge_weight_gradients=True)
    pair.step(data(8), data(8, seed=1))
    captures, replays = pair.counts()
    assert captures == replays > 0
    pair.step(data(8, seed=2), data(8, seed=3))
    assert pair.counts() == (0, 2 * replays)


def test_another_program_is_captured_anew() -> None:
    pair = Pair(mlp(), schedule="1f1b", num_microbatches=4, num_ranks=2)
    pair.step(data(8), data(8, seed=1))
    assert pair.counts()[0] > 0
    (other,) = programs("zb-h1", 2, (4,))
    with mock.patch("drumline.features.capture.engine.recorder_for", return_value=pair.recorder):
        for pipe in (pair.captured, pair.plain):
            pipe.take_program(other)
    pair.step(data(8, seed=2), data(8, seed=3), data(8, seed=4))
    captures, replays = pair.counts()
    assert replays == 2 * captures > 0


def test_what_a_captured_step_sends_is_a_copy() -> None:
    pair = Pair(mlp(), schedule="1f1b", num_microbatches=4, num_ranks=2)
    pair.step(data(8), data(8, seed=1))
    engine = pair.captured._engine
    assert isinstance(engine, CapturingEngine)
    places, sent = set[int](), list[int]()
    for row in engine.captured.rows:
        places |= {tensor.data_ptr() for _, tensors, _ in row._sent.values() for tensor in tensors}
        send = row.executor.channel.send

        def spied(receive: Any, target: int, tensors: Any, form: Any, send: Any = send) -> None:
            sent.extend(tensor.data_ptr() for tensor in tensors)
            send(receive, target, tensors, form)

        setattr(row.executor.channel, "send", spied)  # noqa: B010 - a method of this one instance
    pair.step(data(8, seed=2))
    assert len(sent) == 8
    assert not places & set(sent), "the next stretch may write where a message still is"


def test_a_message_of_another_shape_than_the_captured_one_is_refused() -> None:
    with recording():
        model = mlp(4)
        pipe = Pipeline(model, loss_fn=functional.mse_loss, num_microbatches=4, num_ranks=2, capture=True)
    batch, target = data(8)
    for _ in range(3):
        pipe.step(batch, target=target)
    assert isinstance(pipe._engine, CapturingEngine)
    row = pipe._engine.captured.rows[0]
    action, (receive, (tensor,), form) = next(iter(row._sent.items()))
    row._sent[action] = receive, (torch.cat([tensor, tensor]),), form
    with refused(ModelError, r"1RECV_F0 brings \(4, 6\) of torch.float32.* but brought \(2, 6\)"):
        pipe.step(batch, target=target)
    pipe.zero_grad()
    fresh = Pair(model, num_microbatches=4, num_ranks=2)
    fresh.captured = pipe
    fresh.step((batch, target), (batch, target), (batch, target))  # a failure makes everything begin anew


def test_what_a_graph_could_not_repeat_is_refused() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.sum().item()

    batch, target = data(8)
    for model, says in (
        (mlp(dropout=0.5), "block 0 draws random numbers"),
        (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), "changes its buffers"),
        (nn.Sequential(nn.Linear(WIDTH, WIDTH), Reads()), r"\[1F0 1I0\] cannot be captured"),
    ):
        with recording():
            pipe = Pipeline(model, loss_fn=functional.mse_loss, num_microbatches=4, num_ranks=2, capture=True)
        if "cannot be captured" in says:
            pipe.step(batch, target=target)  # the first step runs as ever
        with refused(ModelError, says, fix="use capture=False"):
            pipe.step(batch, target=target)


def test_sparse_gradients_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(9, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH))
    with recording():
        pipe = Pipeline(
            model, loss_fn=functional.mse_loss, num_microbatches=4, num_ranks=2, capture=True, check_finite=False
        )
    with refused(ModelError, "a gradient is sparse"):
        pipe.step(torch.arange(8), target=data(8)[1])


def test_hooks_that_change_gradients_are_captured_and_those_that_exchange_them_are_refused() -> None:
    model = mlp(4)
    pair = Pair(model, num_microbatches=4, num_ranks=2)
    for pipe in (pair.captured, pair.plain):
        for param in pipe.parameters():
            param.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
    pair.step(*(data(8, seed=seed) for seed in range(4)))
    assert pair.counts()[1] > 0

    def exchanges(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 2

    for pipe in (pair.captured, pair.plain):
        for param in pipe.parameters():
            param.register_post_accumulate_grad_hook(exchanges)  # type: ignore[no-untyped-call]
    pair.step(data(12))
    with refused(ModelError, "replaces a gradient by another tensor"):
        pair.captured.step(*data(12)[:1], target=data(12)[1])


def test_buffers_that_the_user_changes_between_steps_are_no_reason_to_refuse() -> None:
    class Scaled(nn.Module):
        factor: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("factor", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    pair = Pair(nn.Sequential(*mlp(2), Scaled(), *mlp(1)), num_microbatches=4, num_ranks=2)
    for rows in (8, 8, 8, 12, 12):
        for pipe in (pair.captured, pair.plain):
            for executor in pipe._engine.executors:
                for stage in executor.stages.values():
                    for block in stage.blocks:
                        if isinstance(block.module, Scaled):
                            block.module.factor.add_(1.0)
        pair.step(data(rows, seed=rows))


def test_a_nan_in_a_captured_step_stops_the_optimizer() -> None:
    with recording():
        pipe = Pipeline(mlp(), loss_fn=functional.mse_loss, num_microbatches=4, num_ranks=2, capture=True)
    optimizer = pipe.optimizer(torch.optim.Adam)
    batch, target = data(8)
    for _ in range(2):
        pipe.step(batch, target=target)
        pipe.zero_grad()
    pipe.step(batch * float("nan"), target=target)
    with pytest.raises(NonFiniteError):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.features("record")
def test_a_captured_step_has_no_timeline_and_the_one_before_has() -> None:
    with recording():
        pipe = Pipeline(mlp(), loss_fn=functional.mse_loss, num_microbatches=4, num_ranks=2, capture=True)
    batch, target = data(8)
    pipe.step(batch, target=target)
    assert pipe.timeline().makespan > 0
    pipe.step(batch, target=target)
    with refused(RunError, "a captured step has no timeline"):
        pipe.timeline()


def test_without_a_cuda_device_capture_is_refused() -> None:
    with refused(ModelError, "capture=True on cpu", expected="a CUDA device", fix="use capture=False"):
        Pipeline(mlp(), loss_fn=functional.mse_loss, num_microbatches=4, capture=True)


# ---- on ranks of their own -------------------------------------------------------------------------------------------


def on_ranks(transport: str) -> list[tuple[int, int]]:
    found = []
    for name in ("1f1b", "zb-v", "interleaved-1f1b", "dualpipe"):
        (program,) = programs(name, 2, (4,))
        pair = Pair(mlp(), schedule=program, transport=transport)
        for rows in (8, 8, 8, 7, 7, 7):
            pair.step(data(rows, seed=rows))
            pair.zero_grad()
        found.append(pair.counts())
        pair.captured.close()
        pair.plain.close()
    return found


@long
@mainly("transport", "shared-memory", "gloo")
def test_ranks_of_their_own_capture_and_replay_alike(transport: str) -> None:
    for counts in some(zip(*launch(on_ranks, transport, num_ranks=2), strict=True)):
        for captures, replays in some(counts):
            assert replays == 2 * captures > 0


def only_ends_see_the_batch() -> tuple[int, int]:
    pair = Pair(mlp(), schedule="1f1b", num_microbatches=4)
    rank = pair.plain.rank
    for rows in (8, 8, 8, 7, 7, 7):
        batch, target = data(rows, seed=rows)
        pair.step((batch if rank == 0 else None, target if rank == 2 else None))
        pair.zero_grad()
    return pair.counts()


def test_a_rank_in_the_middle_learns_from_the_others_that_shapes_changed() -> None:
    for captures, replays in launch(only_ends_see_the_batch, num_ranks=3):
        assert replays == 2 * captures > 0


def going_wrong() -> list[str]:
    """Return what a rank is told where only one captures, and where a batch is too small in the third step."""
    found = []
    with recording():
        with Pipeline(mlp(), loss_fn=functional.mse_loss, num_microbatches=4) as pipe:
            rank = pipe.rank
        try:
            Pipeline(mlp(), loss_fn=functional.mse_loss, num_microbatches=4, capture=rank == 0)
        except MismatchError as error:
            found.append(str(error))
        pipe = Pipeline(mlp(), loss_fn=functional.mse_loss, num_microbatches=4, capture=True)
    for rows in (8, 8, 3):
        batch, target = data(rows)
        try:
            pipe.step(batch, target=target)
        except (BatchError, RunError) as error:
            found.append(str(error))
    return found


def test_what_goes_wrong_on_one_rank_is_known_on_all() -> None:
    for mismatch, too_small in launch(going_wrong, num_ranks=2):
        assert "ranks 0 and 1 disagree on capture: True and False" in mismatch
        assert "3 rows for 4 microbatches" in too_small
