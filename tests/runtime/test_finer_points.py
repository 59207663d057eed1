"""What small models over a quiet channel do not show: order, aliases, forms, what is looked at and how often."""

from __future__ import annotations

import functools
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.core.action import Action
from drumline.core.errors import RunError
from drumline.core.placement import Placement
from drumline.pipeline.pipeline import Pipeline
from drumline.runtime.backward.tape import Tape, accumulate, merged
from drumline.runtime.blocks.cut import Block
from drumline.runtime.channel.in_process import Hub
from drumline.runtime.channel.layout import MessageLayouts
from drumline.runtime.channel.link import Link
from drumline.runtime.channel.shared_memory import Slot, new_memory
from drumline.runtime.follow.attributes import BETWEEN, Attributes
from drumline.runtime.gradients import clip
from drumline.runtime.randomness import Randomness
from drumline.runtime.recomputing import Buffers
from drumline.runtime.values import MISSING, joined
from drumline.runtime.watch.watch import Surroundings, Watch
from drumline.runtime.weights import files as weights
from drumline.runtime.weights.tied import Copies, Ties

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [1.0, 1e-6, 0.0])
def test_gradients_are_clipped_as_torch_clips_them_to_the_last_bit(factor: float, kind: torch.dtype) -> None:
    torch.manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.zeros(5, dtype=kind)) for _ in range(3)] for _ in range(2))
    for one, other in zip(ours, theirs, strict=True):
        one.grad = torch.randn(5, dtype=kind) * factor
        other.grad = one.grad.clone()
    norms = clip.norms_of(ours, 2.0)
    total = clip.total_norm([norm for norm in norms if norm is not None], 2.0, is_double=kind is torch.float64)
    clip.scale(ours, total, 1e-7)
    assert torch.equal(total, nn.utils.clip_grad_norm_(theirs, 1e-7))
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(ours, theirs, strict=True))  # type: ignore[arg-type]


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
    one, other, shared = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2)), torch.ones(2)
    tape = Tape()
    tape.early = [(one, shared), (other, shared)]
    accumulate(tape.weight_gradients())
    for _ in range(2):
        accumulate([(one, torch.ones(2))])
    assert torch.equal(shared, torch.ones(2))
    assert torch.equal(other.grad, torch.ones(2))  # type: ignore[arg-type]
    assert torch.equal(one.grad, torch.full((2,), 3.0))  # type: ignore[arg-type]


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
        found.append([one.grad.clone() for one in model.parameters() if one.grad is not None])
    assert len(found[0]) == 16
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


# ---- random numbers and buffers --------------------------------------------------------------------------------------


def test_every_part_of_a_seed_counts() -> None:
    def seed(*, seed: int = 0, step: int = 0, microbatch: int = 0, first: int = 0, block: str = "a") -> int:
        one = Randomness(seed, CPU, first=first)
        one.step = step
        return one.seed_for(microbatch, block)

    seeds = [seed(), seed(seed=1), seed(step=1), seed(microbatch=1), seed(first=4), seed(block="b")]
    assert len(set(seeds)) == len(seeds)
    # The second line of a mesh draws as one process does for the same microbatch of the whole batch.
    assert seed(first=4, microbatch=1) == seed(microbatch=5)


def test_dropout_drops_other_places_in_every_step() -> None:
    torch.manual_seed(0)
    pipe = Pipeline(
        nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)),
        loss_fn=functional.mse_loss,
        num_microbatches=2,
        num_ranks=1,
    )
    batch, target = torch.randn(8, 6), torch.randn(8, 6)
    assert len({float(pipe.step(batch, target=target).loss) for _ in range(4)}) == 4  # type: ignore[arg-type]


class Counts(nn.Module):
    """Counts its calls; nobody can know that it draws nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 6), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        made: Tensor = self.layer(x)
        return made


def test_a_block_that_draws_nothing_runs_once_also_beside_one_that_is_seeded() -> None:
    counts = Counts()
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), counts, nn.Linear(6, 6))
    pipe = Pipeline(model, loss_fn=functional.mse_loss, num_microbatches=4, num_ranks=1, checkpoint=["0", "1"])
    batch = torch.randn(8, 6)
    for step in range(1, 4):
        pipe.step(batch, target=batch)
        assert counts.calls == 4 * step


def test_statistics_are_saved_though_the_first_forward_left_them_alone() -> None:
    buffers = Buffers([nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))])
    for _ in range(2):
        assert len(buffers.save()) == 3
        buffers.learn()


def test_a_copy_is_frozen_and_freed_with_what_it_follows() -> None:
    first, last = nn.Linear(2, 2), nn.Linear(2, 2)
    last.weight = first.weight
    cuts = [[Block("0", first)], [Block("1", last)]]
    copies = Copies(1, Ties(cuts, Placement.linear(2)), cuts)
    (made,) = copies.of(1, cuts[1])
    assert isinstance(made.module, nn.Linear)
    for trains in (False, True, False):
        first.weight.requires_grad_(trains)
        copies.follow()
        assert made.module.weight.requires_grad is trains


# ---- messages --------------------------------------------------------------------------------------------------------


def test_a_message_that_meets_another_ones_receive_is_refused() -> None:
    one, other = Hub(2).channels()
    one.begin(0)
    other.begin(0)
    other.post(Action.parse("1RECV_F1"), 0)
    with pytest.raises(RunError, match="rank 0 sends 1RECV_F0 but rank 1 expects 1RECV_F1"):
        one.send(Action.parse("1RECV_F0"), 1, [torch.ones(1)], None)


def test_forms_that_are_equal_and_not_the_same_have_layouts_of_their_own() -> None:
    layouts, tensor = MessageLayouts(), torch.ones(2)
    found = [layouts.find([tensor], form) for form in (1, True, 1.0, (1, 2), (True, 2))]
    assert len({one.number for one in found}) == len(found)
    assert [type(one.form) for one in found[:3]] == [int, bool, float]
    assert layouts.find([tensor], True) is found[1]


def test_packets_arrive_in_the_order_in_which_they_were_sent() -> None:
    left, right = (Link(peer, end) for peer, end in enumerate(socket.socketpair()))
    heard: list[int] = []

    def note(peer: int, packet: bytes, fds: list[int]) -> None:
        heard.append(int.from_bytes(packet[1:5], "little"))

    def packet(number: int, size: int) -> bytes:
        return b"\x05" + number.to_bytes(4, "little") + bytes(size)

    sent = 0
    while left.send(packet(sent, 20_000)):
        sent += 1
    right.read([note] * 256)  # makes room for something small
    right.read([note] * 256)
    for _ in range(3):
        sent += 1
        left.send(packet(sent, 1))
    while len(heard) <= sent:
        left.push()
        right.read([note] * 256)
    assert heard == list(range(sent + 1))
    left.close()
    right.close()


def test_conjugates_and_negatives_are_copied_as_what_they_mean() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    slot = Slot(0, new_memory(4096), 4096)
    for tensor in (numbers.conj(), numbers.conj().imag):
        layout = MessageLayouts().find([tensor], None)
        slot.fill(layout, [tensor])
        assert torch.equal(slot.copies(layout, CPU)[0], tensor.resolve_conj().resolve_neg())


def test_an_output_without_dimensions_is_the_mean_by_shares() -> None:
    values = [torch.tensor(2.0), torch.tensor(5.0)]
    assert joined(values, [torch.tensor(0.75), torch.tensor(0.25)]) == pytest.approx(2.75)
    assert joined(values) == pytest.approx(3.5)


def test_a_tensor_larger_than_the_buffer_is_read_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = torch.arange(1000, dtype=torch.float32)
    torch.save({"weight": wanted}, tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(weights, "_BUFFER_BYTES", 256)
    target = torch.empty(1000, dtype=torch.float64)
    weights.Weights(tmp_path).tensors["weight"].into(target)
    assert torch.equal(target, wanted.double())


# ---- what a followed model is watched for ----------------------------------------------------------------------------


def test_a_hook_in_the_place_of_another_is_a_change() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    first = model[0].register_forward_hook(lambda module, given, made: made * 2)
    watch = Watch(model.named_modules(), frozenset({""}))
    first.remove()
    model[0].register_forward_hook(lambda module, given, made: made * 3)
    assert watch.has_changed()
    assert not watch.has_changed()


def test_what_answers_to_any_name_is_not_asked() -> None:
    class Proxy:
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt(name)  # which hasattr() lets through

    anything, scales = Proxy(), [1.0]

    @functools.cache
    def scale(at: int) -> float:
        return scales[at]

    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * scale(0) if anything is not None else x

    around = Surroundings([Scaled()])
    before = around.now()
    scales[0] = 2.0
    assert around.changed(before)
    with around.kept():
        scale(0)
    assert scale.cache_info().currsize == 0


def test_an_attribute_that_is_set_before_it_is_read_is_the_forwards_own() -> None:
    module = nn.Linear(1, 1)
    found = Attributes({id(module): "0"}, lambda: BETWEEN)
    found.set(module, "scale", MISSING, 1.0)
    found.read(module, "scale", 1.0)
    found.set(module, "scale", 1.0, 2.0)
    assert found.read_between() == []
    found.judge(str, lambda first, last, why: None)  # refuses nothing
