"""Frozen parameters cost nothing: no W, no backward below the lowest trained stage, and right gradients elsewhere."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import drumline as dl
from drumline.core.action import Op
from drumline.core.errors import ModelError, ProgramError
from drumline.core.program import Program
from drumline.core.prove.frozen import prune
from drumline.core.rules import Backward
from drumline.core.simulate.simulate import simulate
from drumline.engine.stages.balance import balance
from drumline.pipeline.pipeline import Pipeline
from matrices import chosen, matrix
from refused import refused
from some import some
from tally import Tally
from torch_models import TWO_WAYS, WIDTH, Reference, data, low_rank_upper_half, mlp, programs

pytestmark = pytest.mark.torch

SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe", "dualpipe-v", "chimera")
CHECKPOINTS = ("none", "full", ("1", "2", "6"))
# Of eight blocks, those that are frozen.
PATTERNS = {
    "bottom": range(5),
    "middle": range(2, 6),
    "top": range(3, 8),
    "islands": (0, 1, 3, 4, 5, 7),
    "all but the last": range(7),
}


def model_of(pattern: str, *, dropout: float = 0.0) -> nn.Sequential:
    if pattern == "low rank":
        return low_rank_upper_half(dropout=dropout)
    model = mlp(dropout=dropout)
    for block in PATTERNS[pattern]:
        model[block].requires_grad_(False)
    return model


def pipeline(model: nn.Sequential, program: Program | str, **settings: Any) -> Pipeline:
    num_ranks = program.num_ranks if isinstance(program, Program) else 2
    counts = {} if isinstance(program, Program) else {"num_microbatches": 4}
    settings = {"loss_fn": functional.mse_loss, "num_ranks": num_ranks, "balance": "even", **counts, **settings}
    return Pipeline(model, schedule=program, **settings)


def check_what_ran(pipe: Pipeline) -> None:
    """Hold what a step did against what the simulator makes of the pruned program."""
    ran, simulated = pipe.timeline(), simulate(pipe.program)
    assert not any(executor._gradients or executor._outputs for executor in pipe._engine.executors), (
        "something was made that nobody takes"
    )
    assert list(ran.held) == [tuple(after for _, after in holding.pairs) for holding in simulated.memory]
    sent = [(transfer.action, transfer.source, transfer.target) for transfer in ran.transfers]
    assert sorted(map(str, sent)) == sorted(str((t.action, t.source, t.target)) for t in simulated.transfers)
    lowest = pipe.program.backwards.index(Backward.WHOLE)
    assert all(transfer.action.stage > lowest for transfer in ran.transfers if transfer.action.op is Op.SEND_B)


@pytest.mark.features("record")
@matrix("name, num_ranks", SCHEDULES, (2, 4), times=1)
def test_gradients_are_those_of_one_process(name: str, num_ranks: int) -> None:
    (program,) = programs(name, num_ranks, (8,))
    batch, target = data(11)
    turned = CHECKPOINTS[SCHEDULES.index(name) % 3 :] + CHECKPOINTS[: SCHEDULES.index(name) % 3]
    for pattern, checkpoint in some(chosen(("low rank", *PATTERNS), turned, times=1)):
        model = model_of(pattern, dropout=0.3)
        reference = Reference(model, program, functional.mse_loss, balance="even")
        pipe = pipeline(model, program, checkpoint=checkpoint)
        result = pipe.step(batch, target=target)
        assert result.loss is not None
        assert torch.equal(result.loss, reference.step(batch, target))
        reference.compare(pipe, exact=name not in TWO_WAYS)
        trained = [any(block.trains for block in stage) for stage in reference.cuts]
        assert pipe.program == prune(program, trained)
        assert pipe.timeline().program == pipe.program
        check_what_ran(pipe)
        pipe.settle()


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_parameters_follow_one_process_over_several_optimizer_steps(name: str) -> None:
    (program,) = programs(name, 2, (4,))
    model = low_rank_upper_half(dropout=0.2)
    reference = Reference(model, program, functional.mse_loss, balance="even")
    pipe = pipeline(model, program)
    ours = pipe.optimizer(torch.optim.AdamW, lr=1e-2)
    theirs = torch.optim.AdamW([param for param in reference.model.parameters() if param.requires_grad], lr=1e-2)
    for step in range(3):
        batch, target = data(9 + step, seed=step)
        pipe.step(batch, target=target)
        reference.step(batch, target)
        norm = pipe.clip_grad_norm_(0.1)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.model.parameters(), 0.1))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    wanted = dict(reference.model.named_parameters())
    for parameter_name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter, wanted[parameter_name])


def test_the_program_that_runs_is_shown() -> None:
    pipe = pipeline(model_of("bottom"), "zb-h1", num_ranks=4)
    assert pipe.program.backwards == (Backward.NONE, Backward.NONE, Backward.WHOLE, Backward.WHOLE)
    assert "I" not in pipe.program.format().splitlines()[1]
    pipe = pipeline(model_of("top"), "1f1b", num_ranks=4)
    assert pipe.program.format().splitlines()[3] == "3F0,3I0,3F1,3I1,3F2,3I2,3F3,3I3"


@pytest.mark.features("record")
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_what_is_frozen_below_records_no_graph(name: str) -> None:
    batch, target = data(16)
    frozen = pipeline(
        model_of("bottom"), name, weigh=True
    )  # stage 0 is frozen, stage 1 from its second block on is not
    frozen.step(batch, target=target)
    whole = pipeline(mlp(), name, weigh=True)
    whole.step(batch, target=target)
    held, before = frozen.timeline().stash, whole.timeline().stash
    assert held is not None
    assert before is not None
    assert max(held[0]) == 0
    assert 0 < max(held[1]) < max(before[1])
    stage = frozen._engine.executors[1].stages[1]
    stage.forward(0, torch.randn(4, WIDTH), torch.randn(4, WIDTH))
    assert not any(leaf.requires_grad for leaf in stage.passes[0][0].leaves)


def test_a_stage_that_hands_the_gradient_on_keeps_no_tape_and_lets_go_with_its_i() -> None:
    pipe = pipeline(model_of("top"), "zb-h1", num_ranks=4)
    stage = pipe._engine.executors[3].stages[3]
    stage.forward(0, torch.randn(4, WIDTH), torch.randn(4, WIDTH))
    assert all(some(this.tape is None for this in stage.passes[0]))
    (found,) = stage.backward_input(0, (torch.ones(()),))
    assert found is not None
    assert stage.passes == {}


def test_checkpointed_blocks_that_nothing_is_trained_below_are_not_run_again() -> None:
    calls = Tally()

    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls()
            return x * 2

    model = nn.Sequential(Counts(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    batch, target = data(8)
    pipeline(model, "1f1b", checkpoint=["0"], check_model=False).step(batch, target=target)
    assert calls.count == 4
    reference = nn.Sequential(nn.Linear(WIDTH, WIDTH), Counts(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    pipeline(reference, "1f1b", checkpoint=["1"], check_model=False).step(batch, target=target)
    assert calls.count == 4 + 8


def test_stages_without_parameters_count_as_frozen() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    (program,) = programs("interleaved-1f1b", 2, (4,))
    reference = Reference(model, program, functional.mse_loss, balance="even")
    pipe = pipeline(model, program)
    batch, target = data(8)
    pipe.step(batch, target=target)
    reference.step(batch, target)
    reference.compare(pipe, exact=True)
    assert [str(kind) for kind in pipe.program.backwards] == ["none", "whole", "input", "whole"]


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "chimera"])
def test_freeing_what_has_no_backward_is_refused_at_the_next_step(name: str) -> None:
    batch, target = data(8)
    for pattern, freed in (("bottom", 0), ("top", 7)):
        model = model_of(pattern)
        pipe = pipeline(model, name, num_ranks=4 if name == "1f1b" else 2)
        pipe.step(batch, target=target)
        pipe.settle()
        model[freed].requires_grad_(True)
        with refused(ModelError, rf"{freed}\.0\.weight was frozen when the pipeline was created"):
            pipe.step(batch, target=target)
        model[freed].requires_grad_(False)
        pipe.step(batch, target=target)
        pipe.settle()


def test_a_new_trainable_parameter_in_place_of_a_frozen_one_is_refused_too() -> None:
    batch, target = data(8)
    model = model_of("bottom")
    pipe = pipeline(model, "1f1b")
    layer = model.get_submodule("0.0")
    assert isinstance(layer, nn.Linear)
    layer.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    with refused(ModelError, r"0\.0\.weight was frozen when the pipeline was created"):
        pipe.step(batch, target=target)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "chimera", "dualpipe"])
def test_freezing_more_later_keeps_working(name: str) -> None:
    (program,) = programs(name, 2, (4,))
    batch, target = data(8)
    model = model_of("bottom")
    reference = Reference(model, program, functional.mse_loss, balance="even")
    pipe = pipeline(model, program)
    for sequential in (model, reference.model):
        sequential[5].requires_grad_(False)
    pipe.step(batch, target=target)
    reference.step(batch, target)
    reference.compare(pipe, exact=name not in TWO_WAYS)
    pipe.settle()


def test_where_nothing_trains_a_step_is_refused_and_evaluation_works() -> None:
    batch, target = data(8)
    model = mlp()
    model.requires_grad_(False)
    for name in ("1f1b", "zb-v", "chimera"):
        pipe = pipeline(model, name)
        with refused(ModelError, "nothing to train: every parameter of the model is frozen"):
            pipe.step(batch, target=target)
        result = pipe.eval_step(batch, target=target)
        torch.testing.assert_close(result.output, model(batch))
    later = mlp()
    pipe = pipeline(later, "1f1b")
    later.requires_grad_(False)
    with refused(ModelError, "nothing to train"):
        pipe.step(batch, target=target)
    assert pipe.eval_step(batch).output is not None


def test_something_trained_that_is_no_parameter_is_refused_and_not_forgotten() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = [torch.ones(WIDTH, requires_grad=True)]

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scales[0]

    batch, target = data(8)
    for checkpoint in ("none", "full"):
        for num_layers in (1, 2):
            hidden = Hidden()
            model = nn.Sequential(hidden, *(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))
            pipe = pipeline(model, "1f1b", checkpoint=checkpoint)
            if num_layers == 1:
                with refused(ModelError, "nothing up to stage 0 has trainable parameters"):
                    pipe.step(batch, target=target)
            else:  # its stage trains something else, so it has a backward
                pipe.step(batch, target=target)
                assert hidden.scales[0].grad is not None


def test_a_pruned_program_runs_only_the_model_that_it_was_made_for() -> None:
    batch, target = data(8)
    (program,) = programs("zb-h1", 2, (4,))
    pruned = prune(program, [False, True])
    pipe = pipeline(model_of("bottom"), pruned)
    pipe.step(batch, target=target)
    assert pipe.program is pruned
    with refused(ProgramError, "stage 0 has trainable parameters, but no backward in the program 'zb-h1'"):
        pipeline(mlp(), pruned)


def test_running_statistics_of_a_frozen_stage_change_once_per_microbatch() -> None:
    batch, target = data(16)
    for checkpoint in ("none", "full"):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(WIDTH).requires_grad_(False)
        pipe = pipeline(nn.Sequential(norm, nn.Linear(WIDTH, WIDTH)), "1f1b", checkpoint=checkpoint)
        pipe.step(batch, target=target)
        assert int(norm.num_batches_tracked or 0) == 4


def test_a_cut_is_balanced_by_what_frozen_blocks_take() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    for at in range(5):
        model[at].requires_grad_(False)
    x = torch.randn(256, 64)
    found = balance(
        model, x, target=x, loss_fn=functional.mse_loss, schedule="zb-h1", num_microbatches=4, num_ranks=2, num_runs=3
    )
    times = [layer.times for layer in found.profile.layers]
    assert all(time.backward == time.backward_input == time.backward_weight == 0 for time in times[:5])
    assert any(time.backward + time.backward_weight > 0 for time in times[5:])
    assert found.rank_bytes == simulate(found.program, found.costs).peak_bytes
    assert found.program.backwards[1] is Backward.WHOLE


def _freed_on_every_rank() -> str:
    torch.manual_seed(0)
    model = model_of("bottom")
    pipe = dl.Pipeline(model, loss_fn=functional.mse_loss, num_microbatches=4, balance="even")
    batch, target = data(8)
    before = pipe.step(batch, target=target).loss
    assert before is not None
    pipe.settle()
    model.requires_grad_(True)
    try:
        pipe.step(batch, target=target)
    except ModelError as error:
        return f"{[str(kind) for kind in pipe.program.backwards]}: {error.error}"
    return "no error"


def test_freeing_is_refused_on_all_ranks_of_their_own() -> None:
    found = dl.launch(_freed_on_every_rank, num_ranks=2)
    assert found == ["['none', 'whole']: 0.0.weight was frozen when the pipeline was created, and is trainable now"] * 2


def test_a_cut_that_is_guessed_counts_what_frozen_blocks_do() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    assert len(pipeline(model, "1f1b", balance=None)._engine.assembly.cuts[0]) == 4
    for at in range(4):
        model[at].requires_grad_(False)
    assert (
        len(pipeline(model, "1f1b", balance=None)._engine.assembly.cuts[0]) == 5
    )  # four of one product, and one of three


class Skips(nn.Module):
    """Two values cross several cuts: one made below what trains, one where it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = first = self.table(ids)
        kept = x
        for at, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) * mask.unsqueeze(-1)
            if at == 1:
                kept = x
        made: Tensor = self.head(x + first + kept).mean(1)
        return made


@pytest.mark.parametrize("checkpoint", ["none", "full"])
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "chimera"])
def test_values_that_cross_several_cuts_keep_their_gradients(name: str, checkpoint: str) -> None:
    torch.manual_seed(0)
    ids, mask, target = torch.randint(11, (8, 5)), torch.rand(8, 5), torch.randn(8, 3)
    for frozen in (("table", "layers.0"), ("table", "layers.0", "layers.1", "layers.2"), ("layers.5", "head")):
        model: Any = Skips()
        for path in frozen:
            model.get_submodule(path).requires_grad_(False)
        whole = copy.deepcopy(model)
        torch.autograd.backward(functional.mse_loss(whole(ids, mask), target))
        pipe = Pipeline(
            model,
            loss_fn=functional.mse_loss,
            schedule=name,
            num_microbatches=4,
            num_ranks=2,
            example=(ids, mask),
            balance="even",
            checkpoint=checkpoint,
        )
        pipe.step(ids, mask, target=target)
        pipe.settle()
        for (path, param), other in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert (param.grad is None) == (other.grad is None) == path.startswith(frozen)
            if param.grad is not None:
                torch.testing.assert_close(param.grad, other.grad)
