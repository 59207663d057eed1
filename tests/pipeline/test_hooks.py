"""Hooks that act on gradients while they are added up, and blocks that torch itself cannot split or copy.

Each case trains like a plain loop over the same microbatches, or is refused by one line that names what and why.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from drumline.core.errors import ModelError
from drumline.pipeline.pipeline import Pipeline
from matrices import matrix
from refused import refused
from some import some

pytestmark = pytest.mark.torch

WIDTH, MICROBATCHES, STEPS = 6, 4, 3
WAYS: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "zb-h1": {},
    "zb-v": {},
    "gpipe": {"checkpoint": "full"},
    "dualpipe": {},
    "chimera": {},
}
SINGLE = [way for way in WAYS if way not in ("dualpipe", "chimera")]  # schedules with one copy of each stage


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + self.linear(x).tanh()


class Whole(nn.Module):
    """The same blocks as a model of their own, which is traced."""

    def __init__(self, blocks: nn.Sequential) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)


def made(make: Callable[[], nn.Sequential], kind: str = "chain") -> nn.Module:
    torch.manual_seed(0)
    return make() if kind == "chain" else Whole(make())


def blocks_of(model: nn.Module) -> list[Any]:
    return list(getattr(model, "blocks", model).children())


class Plain:
    """A plain loop over microbatches."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(self, number: int) -> None:
        for x, y in zip(*(tensor.chunk(MICROBATCHES) for tensor in data(number)), strict=True):
            torch.autograd.backward(functional.mse_loss(self.model(x), y) / MICROBATCHES)
        self.optimizer.step()
        self.optimizer.zero_grad()


def pipeline(model: nn.Module, way: str, **settings: Any) -> Pipeline:
    given: dict[str, Any] = {"loss_fn": functional.mse_loss, "num_microbatches": MICROBATCHES, "num_ranks": 2}
    if not isinstance(model, nn.Sequential):
        given["example"] = data(0)[0]
    return Pipeline(model, schedule=way, **given, **WAYS[way], device="cpu", balance="even", **settings)


class Trained:
    """A pipeline."""

    def __init__(self, model: nn.Module, way: str, **settings: Any) -> None:
        self.pipe = pipeline(model, way, **settings)
        self.optimizer = self.pipe.optimizer(torch.optim.SGD, lr=0.1)

    def step(self, number: int) -> None:
        x, y = data(number)
        self.pipe.step(x, target=y)
        self.optimizer.step()
        self.optimizer.zero_grad()


def trained(model: nn.Module, way: str, **settings: Any) -> None:
    train = Trained(model, way, **settings)
    for step in range(STEPS):
        train.step(step)
    train.pipe.settle()


def same(model: nn.Module, whole: nn.Module) -> None:
    wanted = dict(whole.named_parameters())
    for name, param in some(list(model.named_parameters())):
        torch.testing.assert_close(param, wanted[name], rtol=1e-4, atol=1e-6, msg=name)


def compare(
    make: Callable[[], nn.Sequential],
    way: str,
    kind: str,
    change: Callable[[nn.Module], Any] = lambda model: model,
    **settings: Any,
) -> None:
    """Train a model by a plain loop and by a pipeline; compare the weights."""
    whole, model = made(make, kind), made(make, kind)
    change(whole)
    change(model)
    train = Plain(whole)
    for step in range(STEPS):
        train.step(step)
    trained(model, way, **settings)
    same(model, whole)


def row(*others: nn.Module) -> nn.Sequential:
    """Return four blocks, these first."""
    return nn.Sequential(*others, *(Layer() for _ in range(4 - len(others))))


KINDS = ["chain", "traced"]


# ---- hooks where gradients are added up ------------------------------------------------------------------------------

NODES: list[Any] = []  # a node dies with its hooks unless somebody holds it


@pytest.fixture(autouse=True)
def _without_nodes() -> Iterator[None]:
    yield
    NODES.clear()


def node_of(parameter: nn.Parameter) -> Any:
    return get_gradient_edge(parameter).node


def hang(weight: nn.Parameter, *, before: bool) -> None:
    """Let what is added to a gradient be halved, in front of the sum or behind it."""
    NODES.append(node := node_of(weight))
    if before:
        node.register_prehook(lambda gradients: (gradients[0] * 0.5,))
    else:

        def halve(*_: Any) -> None:
            assert weight.grad is not None
            weight.grad.mul_(0.5)

        node.register_hook(halve)


def halved(model: nn.Module, *, before: bool) -> nn.Module:
    for block in blocks_of(model)[1:3]:
        hang(block.linear.weight, before=before)
    return model


@matrix("kind, before, way", KINDS, [True, False], SINGLE, times=1)
def test_hooks_where_autograd_adds_gradients_up_run(way: str, before: bool, kind: str) -> None:
    compare(row, way, kind, change=lambda model: halved(model, before=before))


@pytest.mark.parametrize("way", SINGLE)
def test_such_hooks_may_take_gradients_away(way: str) -> None:
    """As libraries do that keep sums in another dtype; the first step is checked, and adds nothing to them."""

    def moving(model: nn.Module) -> dict[str, Tensor]:
        sums = {name: torch.zeros_like(param, dtype=torch.float64) for name, param in model.named_parameters()}
        for name, param in model.named_parameters():

            def take(*_: Any, param: nn.Parameter = param, name: str = name) -> None:
                assert param.grad is not None
                sums[name] += param.grad
                param.grad = None

            NODES.append(node := node_of(param))
            node.register_hook(take)
        return sums

    whole, model = made(row), made(row)
    wanted, found = moving(whole), moving(model)
    Plain(whole).step(0)
    Trained(model, way).step(0)
    for name, tensor in some(list(found.items())):
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize("way", ["zb-h1", "zb-v"])
def test_such_hooks_may_come_and_go_between_steps(way: str) -> None:
    def losses(model: nn.Module, step: Callable[[int], None]) -> None:
        for number in range(STEPS):
            if number == 1:
                halved(model, before=True)
            if number == 2:
                NODES.clear()
            step(number)

    whole, model = made(row), made(row)
    losses(whole, Plain(whole).step)
    pipe = Trained(model, way)
    losses(model, pipe.step)
    same(model, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_two_copies_of_a_stage_refuse_such_hooks(kind: str) -> None:
    model = halved(made(row, kind), before=True)
    with refused(ModelError, "adds up the gradient of 'weight' in block.*copy", fix="register_hook.*zb-v"):
        trained(model, "dualpipe")


def clipped(model: nn.Module) -> nn.Module:
    for param in model.parameters():
        param.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))  # type: ignore[no-untyped-call]
    return model


def capped(model: nn.Module) -> nn.Module:
    def cap(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.clamp_(-0.01, 0.01)

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(cap)  # type: ignore[no-untyped-call]
    return model


@matrix("change, kind, way", [clipped, capped], KINDS, ["zb-h1", "zb-v"], times=1)
def test_hooks_that_are_not_linear_see_each_microbatch_when_weight_gradients_merge(
    way: str, kind: str, change: Callable[[nn.Module], nn.Module]
) -> None:
    compare(row, way, kind, change=change, merge_weight_gradients=True)


@matrix("way, kind", ["dualpipe", "chimera"], KINDS, times=1)
def test_two_copies_of_a_stage_refuse_hooks_that_change_sums(kind: str, way: str) -> None:
    words = "changes the gradient of '(blocks.)?[0-3].linear.(weight|bias)' after a microbatch was added"
    with refused(ModelError, words, fix="register_hook.*zb-v"):
        trained(capped(made(row, kind)), way)


@pytest.mark.parametrize("way", WAYS)
def test_hooks_that_only_look_run_for_every_microbatch(way: str) -> None:
    model = made(row)
    calls: list[int] = []
    for block in blocks_of(model):
        block.linear.weight.register_post_accumulate_grad_hook(lambda param: calls.append(1))
    train = Trained(model, way, check_model=False)
    train.step(0)
    assert len(calls) == len(blocks_of(model)) * MICROBATCHES


def optimized(model: nn.Module) -> nn.Module:
    """Let a hook of each parameter step an optimizer and drop the gradient."""
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}

    def step(param: nn.Parameter) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in optimizers:
        param.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
    return model


def by_hand(model: nn.Module, *, data: bool = True) -> nn.Module:
    @torch.no_grad()
    def step(param: nn.Parameter) -> None:
        (param.data if data else param).sub_(param.grad, alpha=0.1)  # type: ignore[arg-type]
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
    return model


UPDATES: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "an optimizer": (optimized, r"a hook calls SGD.step\(\)"),
    "in place": (lambda model: by_hand(model, data=False), "changes the parameter"),
    "by data": (by_hand, "changes the parameter"),
}


@matrix("kind, name, way", KINDS, UPDATES, WAYS, times=1)
def test_an_update_inside_of_a_backward_is_refused(way: str, name: str, kind: str) -> None:
    change, what = UPDATES[name]
    with refused(ModelError, f"{what}.*in the middle of a step", fix="optimizer.step.. after pipe.step"):
        trained(change(made(row, kind)), way)


# ---- what torch itself cannot split or copy --------------------------------------------------------------------------


class Checkpointed(Layer):
    def forward(self, x: Tensor) -> Any:
        return x + checkpoint(lambda x: self.linear(x).tanh(), x.clone(), use_reentrant=True)


class CheckpointedGradient(Layer):
    """Takes a gradient in its forward, and has a reentrant checkpoint behind."""

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.linear(inner).square().sum(), inner)
        return x + gradient.detach() * 0.1 + checkpoint(lambda x: self.linear(x).tanh(), x.clone(), use_reentrant=True)


class Counted(Checkpointed):
    """Counts its forwards in a buffer, which must not count those that start again."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.calls += 1.0
        return super().forward(x) * (1 + 0.01 * self.calls)


def checkpoints() -> nn.Sequential:
    return row(Layer(), Checkpointed(), Layer(), Checkpointed())


@matrix("kind, way", KINDS, WAYS, times=1)
def test_reentrant_checkpoints_inside_of_blocks_train(way: str, kind: str) -> None:
    compare(checkpoints, way, kind)
    compare(lambda: row(Layer(), CheckpointedGradient(), Layer(), CheckpointedGradient()), way, kind)


@pytest.mark.parametrize("way", ["1f1b", "zb-h1", "zb-v"])
def test_a_block_that_starts_again_has_its_buffers_back(way: str) -> None:
    compare(lambda: row(Layer(), Counted(), Layer(), Layer()), way, "chain")


@pytest.mark.parametrize("way", ["zb-h1", "zb-v"])
def test_reentrant_checkpoints_merge_nothing(way: str) -> None:
    compare(checkpoints, way, "chain", merge_weight_gradients=True)


@pytest.mark.parametrize("way", ["zb-h1", "zb-v"])
def test_a_checkpoint_may_come_after_the_first_step(way: str) -> None:
    class Later(Layer):
        checkpoints = False

        def forward(self, x: Tensor) -> Any:
            if not self.checkpoints:
                return super().forward(x)
            return x + checkpoint(lambda x: self.linear(x).tanh(), x.clone(), use_reentrant=True)

    whole, model = (made(lambda: row(Layer(), *(Later() for _ in range(3)))) for _ in range(2))
    for each, train in ((whole, Plain(whole)), (model, Trained(model, way))):
        for step in range(STEPS):
            for block in blocks_of(each)[1:]:
                block.checkpoints = step > 0
            train.step(step)
    same(model, whole)


def old_weight_norm() -> nn.Module:
    layer = Layer()
    layer.linear = nn.utils.weight_norm(layer.linear)
    return layer


def pruned() -> nn.Module:
    layer = Layer()
    prune.l1_unstructured(layer.linear, "weight", 0.5)  # type: ignore[no-untyped-call]
    return layer


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@matrix("kind, make, way", KINDS, [old_weight_norm, pruned], WAYS, times=1)
def test_weights_that_hooks_compute_train(way: str, make: Callable[[], nn.Module], kind: str) -> None:
    compare(lambda: row(make(), Layer(), Layer(), make()), way, kind)


class Forgets(Layer):
    """Leaves something out when it is copied, as for a pickle."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = object()
        self.factor = lambda x: 2 * x

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "factor"}

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.factor(x))  # type: ignore[no-untyped-call]


def test_an_attribute_that_a_copy_lacks_is_named() -> None:
    with refused(ModelError, "block '1' reads its attribute 'factor', and the copy", fix="__init__.*zb-v"):
        trained(made(lambda: row(Layer(), Forgets())), "dualpipe")


class Activated(Layer):
    """Applies what is set later."""

    def __init__(self) -> None:
        super().__init__()
        self.act: Any = torch.tanh

    def twice(self, x: Tensor) -> Any:
        return self.linear(x) * 2

    def forward(self, x: Tensor) -> Any:
        return x + self.act(self.linear(x))


LATER: dict[str, Callable[[Any], Any]] = {
    "a function": lambda block: functional.relu,
    "a partial": lambda block: partial(functional.leaky_relu, negative_slope=0.3),
    "an object": lambda block: Scales(),
    "a method of its own": lambda block: block.twice,
}


class Scales:
    def __call__(self, x: Tensor) -> Any:
        return x * 3


@matrix("name, way", LATER, ["zb-v", "dualpipe"], times=1)
def test_attributes_that_are_replaced_between_steps_are_followed(way: str, name: str) -> None:
    whole, model = (made(lambda: row(*(Activated() for _ in range(4)))) for _ in range(2))
    plain, train = Plain(whole), Trained(model, way)
    for step in range(STEPS):
        for block in (*blocks_of(whole), *blocks_of(model)) if step == 1 else ():
            block.act = LATER[name](block)
        plain.step(step)
        train.step(step)
    train.pipe.settle()
    same(model, whole)


def test_a_method_of_another_module_is_refused_on_copies() -> None:
    model = made(lambda: row(*(Activated() for _ in range(4))))
    train, blocks = Trained(model, "dualpipe"), blocks_of(model)
    train.step(0)
    blocks[1].act = blocks[2].twice
    with refused(ModelError, "attribute 'act' of block '1' was set to a method of another module", fix="new pipeline"):
        train.step(1)


class Reads(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.missing


@pytest.mark.parametrize("way", WAYS)
def test_an_attribute_that_no_block_has_is_torchs_own_error(way: str) -> None:
    with pytest.raises(AttributeError, match="'Reads' object has no attribute 'missing'"):
        trained(made(lambda: row(Layer(), Reads())), way, check_model=False)


def skipping(kind: str) -> nn.Module:
    """Let a hook keep a block's output, and another add it two blocks later."""
    model = made(lambda: row(Layer(), nn.LayerNorm(WIDTH)), kind)
    blocks = blocks_of(model)
    seen: list[Tensor] = []
    blocks[1].register_forward_hook(lambda module, given, made: seen.append(made))
    blocks[3].register_forward_hook(lambda module, given, made: made + seen[-1])
    return model


@pytest.mark.parametrize("way", WAYS)
def test_a_skip_by_hooks_is_called_a_tensor(way: str) -> None:
    with refused(ModelError, "uses a tensor that a block of another stage created|something else than by itself"):
        trained(skipping("chain"), way)
    if way != "gpipe":  # where blocks are checked before they are recomputed
        with refused(ModelError, "uses a tensor that a block of another stage created", fix="return it"):
            trained(skipping("chain"), way, check_model=False)


class Branches(nn.Module):
    def __init__(self, *, late: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Layer() for _ in range(4)])
        self.late = late

    def forward(self, x: Tensor, flag: bool = True) -> Any:
        for block in self.blocks:
            x = block(x)
        if not flag or not self.late:
            x = x * 2 if x.sum() > 0 else x
        return x


class Opens(nn.Module):
    """Uses outside of a block what the block did not return."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Hides() for _ in range(4)])

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x) + block.hidden
        return x


class Hides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        self.hidden = x * self.weight
        return x + self.hidden


def test_refusals_of_a_trace_are_of_the_public_class() -> None:
    x, y = data(0)
    with refused(ModelError, "branches on the values of a tensor", fix="move it into a block") as caught:
        pipeline(Branches(late=False), "1f1b")
    pipe = pipeline(Branches(late=True), "1f1b")
    with refused(ModelError, "branches on the values of a tensor") as later:
        pipe.step(x, False, target=y)
    with refused(ModelError, "created but did not return") as unseen:
        pipeline(Opens(), "1f1b")
    for info in (caught, later, unseen):
        assert info.type is ModelError
        assert info.value.__cause__ is not info.value
        assert "Decides" not in "".join(traceback.format_exception(info.value))
