"""Compiled stages: the same loss and gradients as without, for whole and split backwards."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import drumline as dl
from drumline.core.errors import MismatchError, ModelError
from drumline.core.program import Program
from drumline.pipeline.pipeline import Pipeline
from drumline.runtime.backward import compiled
from drumline.runtime.backward.compiled import compiler_for
from drumline.runtime.backward.split_backend import DeferredWeights
from matrices import ALL, long, mainly, matrix
from refused import refused, saying
from some import some
from torch_models import TWO_WAYS, WIDTH, Reference, data, programs

pytestmark = [
    pytest.mark.torch,
    # torch's own, while it traces a function that a graph break resumes, and while it imports its compiler.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]
SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe")
EAGER = "aot_eager"


class Layer(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.dropout(functional.gelu(self.norm(self.linear(x))))
        return made


class Transformer(nn.Module):
    """Rows are positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.into(self.first(x)).view(1, -1, 3, 2, WIDTH // 2)
        query, key, value = (item.transpose(1, 2) for item in heads.unbind(2))
        attended = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(x.shape)
        x = x + self.out(attended)
        made: Tensor = x + self.wide(self.second(x))
        return made


class Breaks(nn.Module):
    """Two graphs with plain code between; one parameter is used in both of them, and in the code between."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        made = torch.tanh(self.before(x)) * self.scale
        made = made + _plain(made, self.scale)
        out: Tensor = self.after(made) + x * self.scale
        return out


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _plain(x: Tensor, scale: Tensor) -> Tensor:
    return torch.sin(x) * scale


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.linear(x)))


class Nested(nn.Module):
    """Takes a tensor, or a tuple with a dict inside, and returns the latter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Any) -> Any:
        x, more = (value, {"factor": 2.0, "y": value}) if isinstance(value, Tensor) else value
        made = self.linear(x)
        return made + more["y"], {"factor": more["factor"], "y": torch.sin(made)}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": Layer,
    "transformer": Transformer,
    "breaks": Breaks,
    "batch norm": Normed,
    "dropout": lambda: Layer(dropout=0.3),
    "nested": Nested,
}


def loss_fn(output: Any, target: Tensor) -> Tensor:
    output = output if isinstance(output, Tensor) else output[0] + output[1]["y"] * output[1]["factor"]
    return functional.mse_loss(output, target)


def model_of(name: str, num_blocks: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(MODELS[name]() for _ in range(num_blocks)))


def pipeline(model: nn.Sequential, schedule: Program | str = "zb-h1", **settings: Any) -> Pipeline:
    given: dict[str, Any] = {"loss_fn": loss_fn, "num_ranks": 2, "compile": EAGER, **settings}
    if isinstance(schedule, str):
        given.setdefault("num_microbatches", 4)
    return Pipeline(model, schedule=schedule, **given)


def agree(model: nn.Module, other: nn.Module, tolerance: float = 0.0) -> None:
    for (name, param), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert param.grad is not None, name
        assert theirs.grad is not None, name
        assert (param.grad - theirs.grad).norm() <= tolerance * theirs.grad.norm(), name


@matrix("name, num_ranks", MODELS, (2, 4), times=1, later=("transformer", "dropout", "batch norm"))
def test_loss_and_gradients_are_those_of_one_process(name: str, num_ranks: int) -> None:
    at = list(MODELS).index(name)
    for schedule in SCHEDULES if ALL else (SCHEDULES[at % 5], SCHEDULES[(at + 3) % 5]):
        if (name, schedule) == ("batch norm", "dualpipe"):
            continue  # running statistics in two copies are refused
        (program,) = programs(schedule, num_ranks, (8,))
        model = model_of(name, program.num_stages)
        reference = Reference(model, program, loss_fn)
        pipe = pipeline(model, program, num_ranks=num_ranks)
        for seed in range(2):
            batch, target = data(16, seed=seed)
            assert torch.equal(pipe.step(batch, target=target).loss, reference.step(batch, target))  # type: ignore[arg-type]
        # A parameter that several graphs use is summed in another order.
        reference.compare(pipe, exact=schedule not in TWO_WAYS and name != "breaks")
        buffers = list(zip(model.buffers(), reference.model.buffers(), strict=True))
        assert bool(buffers) is (name == "batch norm")
        assert all(torch.equal(tensor, other) for tensor, other in buffers)


@long
def test_shapes_may_change_between_microbatches_and_steps() -> None:
    (program,) = programs("zb-v", 2, (4,))
    model = model_of("mlp", 4)
    reference = Reference(model, program, loss_fn)
    pipe = pipeline(model, program)
    for rows in (8, 11, 5, 14):  # five rows are microbatches of 2, 1, 1 and 1
        batch, target = data(rows, seed=rows)
        pipe.step(batch, target=target)
        reference.step(batch, target)
    reference.compare(pipe, exact=True)


@pytest.mark.parametrize("name", ["dropout", "batch norm"])
def test_recomputed_blocks_get_the_same_gradients_and_buffers(name: str) -> None:
    (program,) = programs("zb-h1", 2, (4,))
    for checkpoint in ("full", ["0", "3"]):
        model = model_of(name, 4)
        reference = Reference(model, program, loss_fn)
        pipe = pipeline(model, program, checkpoint=checkpoint)
        for seed in range(2):
            batch, target = data(8, seed=seed)
            assert torch.equal(pipe.step(batch, target=target).loss, reference.step(batch, target))  # type: ignore[arg-type]
        reference.compare(pipe, exact=True)
        buffers = list(zip(model.buffers(), reference.model.buffers(), strict=True))
        assert bool(buffers) is (name == "batch norm")
        assert all(torch.equal(tensor, other) for tensor, other in buffers)


def test_training_follows_the_uncompiled_pipeline_with_evaluations_between() -> None:
    outcomes = []
    for choice in (False, EAGER):
        model = model_of("dropout", 4)
        pipe = pipeline(model, "zb-v", compile=choice)
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        found = []
        for seed in range(3):
            batch, target = data(8, seed=seed)
            found.append(pipe.step(batch, target=target).loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(pipe.eval_step(batch, target=target).output)
        outcomes.append([*found, *model.parameters()])
    for value, other in some(zip(*outcomes, strict=True)):
        assert torch.equal(value, other)


@pytest.mark.features("record")
@pytest.mark.parametrize("settings", [{"merge_weight_gradients": True}, {"weigh": True}, {"stages_per_rank": 2}])
def test_other_options_go_together_with_it(settings: dict[str, Any]) -> None:
    schedule = "interleaved-zb" if "stages_per_rank" in settings else "zb-h1"
    model = model_of("mlp", 4)
    other = copy.deepcopy(model)
    batch, target = data(8)
    for sequential, choice in ((model, EAGER), (other, False)):
        pipe = pipeline(sequential, schedule, compile=choice, **settings)
        pipe.step(batch, target=target)
        pipe.settle()
        if "weigh" in settings:
            stash = pipe.timeline().stash
            assert stash is not None
            assert all(max(each) > 0 == each[-1] for each in stash)
    agree(model, other, tolerance=1e-6)


class Skips(nn.Module):
    """No chain of blocks: it has to be followed, and a value crosses several cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(4)])

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        first: Tensor = self.layers[0](x) * scale
        made = first
        for layer in self.layers[1:]:
            made = layer(made) + first
        return made


@long
def test_a_followed_model_gets_the_same_gradients_at_every_shape() -> None:
    torch.manual_seed(0)
    model = Skips()
    other = copy.deepcopy(model)
    for skips, choice in ((model, EAGER), (other, False)):
        pipe = pipeline(skips, "zb-v", compile=choice, example=data(8)[0])  # type: ignore[arg-type]
        for rows in (8, 12):
            batch, target = data(rows)
            pipe.step(batch, target=target)
        pipe.settle()
        assert pipe.eval_step(batch).output is not None
    agree(model, other, tolerance=1e-6)


@pytest.mark.features("precision")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precision_goes_together_with_it(precision: str) -> None:
    model = model_of("mlp", 2)
    other = copy.deepcopy(model)
    batch, target = data(8)
    for sequential, choice in ((model, EAGER), (other, False)):
        pipe = pipeline(sequential, compile=choice, precision=precision)
        pipe.step(batch, target=target)
        pipe.settle()
    agree(model, other, tolerance=1e-6)
    assert all(param.grad is not None and param.grad.dtype is torch.float32 for param in model.parameters())


def test_frozen_stages_go_together_with_it() -> None:
    model = model_of("mlp", 4)
    for frozen in (0, 2):
        model[frozen].requires_grad_(False)
    other = copy.deepcopy(model)
    batch, target = data(8)
    for sequential, choice in ((model, EAGER), (other, False)):
        pipe = pipeline(sequential, "zb-v", compile=choice)
        pipe.step(batch, target=target)
        pipe.settle()
    for first, second in zip(model.parameters(), other.parameters(), strict=True):
        assert (first.grad is None) == (second.grad is None) == (not first.requires_grad)
        torch.testing.assert_close(first.grad, second.grad, rtol=0, atol=0)


def test_what_was_frozen_when_it_was_compiled_gets_a_gradient_once_it_is_trained() -> None:
    model = model_of("mlp", 2)
    compiler = compiler_for(EAGER, torch.device("cpu"))
    assert compiler is not None
    run = compiler.function(list(model.named_children()), stage=0, split=False)
    batch, _ = data(8)
    weight = next(model.parameters())
    for is_trained in (False, True, False, True):
        weight.requires_grad_(is_trained)
        model.zero_grad()
        run(batch).sum().backward()
        assert (weight.grad is not None) == is_trained


def test_parameters_may_be_frozen_freed_and_hooked_between_steps() -> None:
    model = model_of("mlp", 2)
    other = copy.deepcopy(model)
    batch, target = data(8)
    pipes = [pipeline(sequential, compile=choice) for sequential, choice in ((model, EAGER), (other, False))]
    for frozen, hooked in ((True, False), (False, True)):
        for pipe, sequential in zip(pipes, (model, other), strict=True):
            pipe.zero_grad()
            linear: Any = sequential[0]
            linear.linear.requires_grad_(not frozen)
            if hooked:
                linear.norm.weight.register_hook(lambda gradient: 3 * gradient)
            pipe.step(batch, target=target)
            pipe.settle()
            assert (linear.linear.weight.grad is None) == frozen
        for first, second in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(first.grad, second.grad)


def test_a_weight_gradient_waits_for_w() -> None:
    model = model_of("mlp", 2)
    pipe = pipeline(model, num_microbatches=2)
    batch, target = data(8)
    pipe.step(batch, target=target)
    stage = pipe._engine.executors[1].stages[1]
    stage.begin()
    stage.forward(0, batch, target)
    (gradient,) = stage.backward_input(0, (torch.tensor(1.0),))
    (this,) = stage.passes[0]
    assert gradient is not None
    assert this.tape is not None
    assert this.tape.early == []
    assert [type(record) for record in this.tape.records] == [DeferredWeights]
    assert {id(param) for param, _ in stage.weight_gradients(0)} == {id(param) for param in model[1].parameters()}


def test_what_w_needs_may_not_be_changed_before_it() -> None:
    pipe = pipeline(model_of("mlp", 2), num_microbatches=2)
    batch, target = data(8)
    pipe.step(batch, target=target)
    stage = pipe._engine.executors[1].stages[1]
    stage.begin()
    value = batch.clone()
    stage.forward(0, value, target)
    stage.backward_input(0, (torch.tensor(1.0),))
    value.add_(1.0)
    with refused(ModelError, "changed in place"):
        stage.backward_weight(0)


def test_stages_that_are_made_alike_are_compiled_once() -> None:
    from torch._dynamo.utils import counters

    (program,) = programs("zb-v", 4, (8,))
    batch, target = data(16)
    graphs = []
    for num_blocks in (8, 8):
        before = counters["stats"]["unique_graphs"]
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid()) for _ in range(num_blocks)))
        pipeline(model, program, num_ranks=4).step(batch, target=target)
        graphs.append(counters["stats"]["unique_graphs"] - before)
    assert graphs == [2, 0]  # the first stage's input needs no gradient


class Unmade(nn.Module):
    """Cannot be traced as one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        made: Tensor = self.linear(x)
        return made


def test_a_block_that_cannot_be_compiled_is_named() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Unmade())
    pipe = pipeline(model, compile={"backend": EAGER, "fullgraph": True})
    batch, target = data(8)
    with refused(ModelError, "stage 1, block 3, cannot be compiled: Unsupported:", fix="use compile=False"):
        pipe.step(batch, target=target)


def test_a_backward_that_cannot_be_compiled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr("drumline.runtime.backward.split_backend.halves", fails)
    pipe = pipeline(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)))
    batch, target = data(8)
    words = "the backward of stage 1, blocks 2, 3, cannot be compiled: NotImplementedError: no such kernel"
    with refused(ModelError, words):
        pipe.step(batch, target=target)


def test_an_error_of_a_block_is_its_own() -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("no such layer")

    pipe = pipeline(nn.Sequential(nn.Linear(WIDTH, WIDTH), Raises()))
    batch, target = data(8)
    with pytest.raises(KeyError, match="no such layer"):
        pipe.step(batch, target=target)


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("aot_eagre", saying("torch.compile has no backend 'aot_eagre'", fix="did you mean aot_eager")),
        ({"backnd": EAGER}, saying("compile has 'backnd'", fix="did you mean backend")),
        (3, saying("compile is a int")),
        ({"mode": "reduce-overhead"}, saying("asks for its own CUDA graphs", fix="max-autotune-no-cudagraphs")),
        ({"mode": "fastest"}, saying("Unrecognized mode")),
        ({"options": {"fallback_random": False}}, saying("own random numbers")),
    ],
)
def test_a_choice_that_cannot_work_is_refused(
    choice: Any, words: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "missing_tool", lambda device: "")
    with refused(ModelError, **words):
        pipeline(model_of("mlp", 2), compile=choice)


def test_without_a_compiler_it_is_refused_before_the_first_step() -> None:
    from torch._inductor import config

    with config.patch({"cpp.cxx": (None, "no-such-compiler")}), refused(ModelError, r"a C\+\+ compiler"):
        pipeline(model_of("mlp", 2), compile=True)


def test_ranks_that_compile_otherwise_differ() -> None:
    from drumline.engine.ranks.transports import agree as compare

    told = [pipeline(model_of("mlp", 2), compile=flag)._engine.assembly.described() for flag in (False, EAGER)]
    with refused(MismatchError, "disagree on compile"):
        compare(told)


@pytest.fixture
def compiler() -> None:
    """Needs what inductor needs; CI must have it."""
    missing = compiled.missing_tool(torch.device("cpu"))
    if missing and os.environ.get("CI") == "true":
        pytest.fail(f"inductor needs {missing}")
    if missing:
        pytest.skip(f"inductor needs {missing}")


@long
@pytest.mark.usefixtures("compiler")
def test_inductor_gives_the_same_gradients() -> None:
    (program,) = programs("zb-v", 2, (4,))
    model = model_of("dropout", 4)
    reference = Reference(model, program, loss_fn)
    pipe = pipeline(model, program, compile=True)
    batch, target = data(8)
    loss = pipe.step(batch, target=target).loss
    torch.testing.assert_close(loss, reference.step(batch, target))
    reference.compare(pipe, exact=False, tolerance=1e-5)


@long
@pytest.mark.usefixtures("compiler")
@mainly("schedule", "zb-h1", "1f1b")
def test_gradients_that_share_memory_stay_apart(schedule: str) -> None:
    class Terms(nn.Module):
        """One memory is the gradient of two parameters, and of what went to the stage before."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH**2))
            self.shift = nn.Parameter(torch.randn(2, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.shift) @ (self.first + self.second.view(WIDTH, WIDTH)) + self.shift

    torch.manual_seed(0)
    model = nn.Sequential(Terms(), Terms())
    other = copy.deepcopy(model)
    batch, target = data(8)
    for sequential, choice in ((model, "inductor"), (other, False)):
        pipe = pipeline(sequential, schedule, compile=choice)
        for _ in range(2):
            pipe.step(batch, target=target)
        pipe.settle()
    agree(model, other, tolerance=1e-5)


def _trained() -> dict[str, Tensor | None]:
    pipe = pipeline(model_of("dropout", 2), "zb-h1", num_ranks=None, compile=True)
    batch, target = data(8)
    pipe.step(batch, target=target)
    pipe.settle()
    return {name: param.grad for name, param in pipe.named_parameters()}


@long
@pytest.mark.usefixtures("compiler")
def test_inductor_in_ranks_of_their_own() -> None:
    model = model_of("dropout", 2)
    (program,) = programs("zb-h1", 2, (4,))
    reference = Reference(model, program, loss_fn)
    reference.step(*data(8))
    expected = dict(reference.model.named_parameters())
    ranks = dl.launch(_trained, num_ranks=2)
    found = {name: gradient for rank in ranks for name, gradient in rank.items()}
    assert found.keys() == expected.keys()
    for name, param in expected.items():
        mine = found[name]
        assert param.grad is not None
        assert mine is not None
        assert (mine - param.grad).norm() <= 1e-5 * param.grad.norm(), name
