"""I and then W give what B gives, to the last bit, for every kind of module."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

from drumline.core.errors import ModelError
from drumline.model.block import Block
from drumline.model.precision import Precision
from drumline.model.randomness import Randomness
from drumline.runtime.backward.owners import owners_in
from drumline.runtime.backward.tape import Tape
from drumline.runtime.stage import Stage
from refused import refused
from some import some

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


class Scale(nn.Module):
    """A container with a parameter of its own beside a child that owns some."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.gain * self.inner(x)
        return made


class RootMeanSquare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Tied(nn.Module):
    """Uses its layer's weight a second time, behind the layer's back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.layer(x).tanh(), self.layer.weight.t())


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(self.layer(self.layer(x)).sigmoid()) + x
        return made


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.second(functional.relu_(self.first(x)))
        return made.mul_(2.0)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.inner(x, x, x)[0]
        return made


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x)[0]
        return made


class Transposed(nn.Module):
    """Feeds a layer memory that is not laid out row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x.transpose(-1, -2)).transpose(-1, -2)
        return made


class Branch(nn.Module):
    """Runs one of its layers and never the other."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.used(x)
        self.unused(x)
        return made


def frozen_weight() -> nn.Module:
    layer = nn.Linear(6, 6)
    layer.weight.requires_grad_(False)
    return layer


ZOO: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 6),
    "linear without bias": lambda: nn.Linear(6, 6, bias=False),
    "frozen weight": frozen_weight,
    "layer norm": lambda: nn.LayerNorm(6),
    "layer norm without bias": lambda: nn.LayerNorm(6, bias=False),
    "plain norm": lambda: nn.Sequential(nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 6)),
    "group norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm((5, 6))),
    "root mean square": RootMeanSquare,
    "convolution": lambda: nn.Conv1d(5, 5, 3, padding=1),
    "batch norm": lambda: nn.BatchNorm1d(5),
    "mlp": lambda: nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Dropout(0.3), nn.Linear(24, 6)),
    "scale": Scale,
    "tied": Tied,
    "twice": Twice,
    "in place": InPlace,
    "in place after any": lambda: nn.Sequential(
        RootMeanSquare(), nn.ReLU(inplace=True), nn.Conv1d(5, 5, 1), nn.ELU(1, True)
    ),
    "attention": Attention,
    "recurrent": Recurrent,
    "transposed": Transposed,
    "branch": Branch,
    "weight norm": lambda: weight_norm(nn.Linear(6, 6)),
    "transformer": lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.1, batch_first=True),
}


def results(
    block: nn.Module,
    inputs: list[Tensor],
    gradient: Tensor,
    *,
    split: bool,
    index: int = 1,
    checkpoint: bool = False,
    precision: str = "fp32",
) -> dict[str, Tensor]:
    """Return what two microbatches leave behind: outputs, input gradients and parameter gradients."""
    blocks = [Block("0", nn.Identity()), Block("1", block)]
    stage = Stage(
        index,
        blocks,
        Randomness(0, CPU),
        split={0, 1} if split else (),
        checkpointed={"1"} if checkpoint else (),
        precision=Precision(precision),
    )
    found: dict[str, Tensor] = {}
    with stage.precision.step():
        for microbatch, value in enumerate(inputs):
            found[f"output {microbatch}"] = stage.forward(microbatch, value)
            gradient = gradient.to(found[f"output {microbatch}"].dtype)
    for microbatch in range(len(inputs)):
        if split:
            (back,) = stage.backward_input(microbatch, (gradient,))
        else:
            (back,) = stage.backward(microbatch, (gradient,))
        if back is not None:
            found[f"input {microbatch}"] = back
    if split:
        for microbatch in range(len(inputs)):
            stage.backward_weight(microbatch)
    assert not stage.passes
    for name, parameter in block.named_parameters():
        if parameter.grad is not None:
            assert not parameter.grad.requires_grad
            found[name] = parameter.grad
    return found


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("name", ZOO)
def test_split_equals_whole_to_the_last_bit(name: str, index: int, checkpoint: bool, precision: str) -> None:
    if name == "recurrent" and precision != "fp32":
        pytest.skip("torch has no recurrent layers under autocast on every host")
    torch.manual_seed(0)
    block = ZOO[name]()
    twin = copy.deepcopy(block)
    inputs = [torch.randn(3, 5, 6) for _ in range(2)]
    gradient = torch.randn(3, 5, 6)
    whole = results(block, inputs, gradient, split=False, index=index, precision=precision)
    split = results(twin, inputs, gradient, split=True, index=index, checkpoint=checkpoint, precision=precision)
    same(whole, split)
    assert len(whole) > 2 + 2 * (index > 0), "no parameter was reached"


def test_embeddings_split_to_the_last_bit() -> None:
    torch.manual_seed(0)
    every: tuple[dict[str, Any], ...] = ({}, {"padding_idx": 1}, {"scale_grad_by_freq": True}, {"max_norm": 1.0})
    for settings, precision in [(entry, kind) for entry in every for kind in ("fp32", "bf16")]:
        block = nn.Embedding(7, 6, **settings)
        twin = copy.deepcopy(block)
        inputs = [torch.randint(0, 7, (3, 5)) for _ in range(2)]
        gradient = torch.randn(3, 5, 6)
        same(
            results(block, inputs, gradient, split=False, index=0, precision=precision),
            results(twin, inputs, gradient, split=True, index=0, precision=precision),
        )


def test_two_dimensional_rows_split_to_the_last_bit() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    twin = copy.deepcopy(block)
    inputs, gradient = [torch.randn(4, 6) for _ in range(2)], torch.randn(4, 6)
    same(results(block, inputs, gradient, split=False), results(twin, inputs, gradient, split=True))


def test_input_gradients_leave_weight_gradients_untouched_until_w() -> None:
    for name in ("mlp", "root mean square", "attention", "recurrent", "layer norm", "convolution"):
        torch.manual_seed(0)
        block = ZOO[name]()
        stage = Stage(1, [Block("0", block)], Randomness(0, CPU), split={0})
        stage.forward(0, torch.randn(3, 5, 6))
        stage.backward_input(0, (torch.randn(3, 5, 6),))
        assert all(parameter.grad is None for parameter in block.parameters()), name
        stage.backward_weight(0)
        assert all(parameter.grad is not None for parameter in block.parameters()), name


def test_i_computes_no_weight_gradients_of_layers_that_defer_them() -> None:
    block = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Conv1d(5, 5, 1))
    stage = Stage(1, [Block("0", block)], Randomness(0, CPU), split={0})
    stage.forward(0, torch.randn(3, 5, 6))
    stage.backward_input(0, (torch.randn(3, 5, 6),))
    (this,) = stage.passes[0]
    assert this.tape is not None
    assert this.tape.early == []
    assert len(this.tape.records) == 3


def test_merged_w_gives_the_same_gradients_up_to_rounding() -> None:
    torch.manual_seed(0)
    for name in ("mlp", "twice", "scale", "batch norm"):
        block = ZOO[name]()
        twin = copy.deepcopy(block)
        inputs, gradient = [torch.randn(3, 5, 6) for _ in range(3)], torch.randn(3, 5, 6)
        for module, together in ((block, False), (twin, True)):
            stage = Stage(1, [Block("0", module)], Randomness(0, CPU), split={0, 1, 2})
            for microbatch, value in enumerate(inputs):
                stage.forward(microbatch, value)
                stage.backward_input(microbatch, (gradient,))
            if together:
                stage.backward_weight_merged([0, 1, 2])
            else:
                for microbatch in range(3):
                    stage.backward_weight(microbatch)
            assert not stage.passes
        for param, other in zip(block.parameters(), twin.parameters(), strict=True):
            assert param.grad is not None
            assert other.grad is not None
            assert (param.grad - other.grad).norm() <= 1e-6 * param.grad.norm()


class ChangesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2.0
        made: Tensor = self.layer(x)
        x.add_(1.0)
        return made


def test_an_input_changed_in_place_is_refused_as_autograd_would() -> None:
    stage = Stage(1, [Block("0", ChangesItsInput())], Randomness(0, CPU), split={0})
    stage.forward(0, torch.randn(3, 6))

    def backward() -> None:
        stage.backward_input(0, (torch.randn(3, 6),))
        stage.backward_weight(0)

    with pytest.raises(RuntimeError, match=r"in place|inplace"):
        backward()


def test_an_input_changed_in_place_between_i_and_w_is_refused_by_name() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Any:
            self.kept = x * 2.0
            return self.layer(self.kept)

    block = Keeps()
    stage = Stage(1, [Block("0", block)], Randomness(0, CPU), split={0})
    stage.forward(0, torch.randn(3, 6))
    stage.backward_input(0, (torch.randn(3, 6),))
    with torch.no_grad():
        block.kept.add_(1.0)
    with refused(ModelError, "the input of Linear was changed in place after it was used, and its weight"):
        stage.backward_weight(0)


def test_forwards_are_given_back_even_if_a_block_fails() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("no")

    block = nn.Sequential(nn.Linear(6, 6), Fails())
    stage = Stage(1, [Block("0", block)], Randomness(0, CPU), split={0})
    with pytest.raises(KeyError):
        stage.forward(0, torch.randn(3, 6))
    assert all(some("forward" not in vars(owner.module) for owner in owners_in(block, Tape())))


def test_parameters_whose_memory_was_exchanged_are_followed() -> None:
    block = nn.Linear(6, 6)
    stage = Stage(1, [Block("0", block)], Randomness(0, CPU), split={0})
    value = torch.randn(3, 6)
    stage.begin()
    stage.forward(0, value)
    block.weight.data = torch.randn(6, 6)
    stage.begin()
    assert torch.equal(stage.forward(0, value), functional.linear(value, block.weight, block.bias))


def fused_in_eval() -> nn.Module:
    """Return a layer that takes another path where gradients are off, on every processor."""
    return nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True).eval()


class AsksForGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: Tensor) -> Tensor:
        made: Tensor = self.linear(value)
        return made if torch.is_grad_enabled() and made.requires_grad else 2 * made


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("make", [fused_in_eval, AsksForGradients, Recurrent])
def test_the_first_run_of_a_checkpointed_block_computes_what_its_second_does(
    make: Callable[[], nn.Module], split: bool
) -> None:
    torch.manual_seed(0)
    block = make()
    twin = copy.deepcopy(block)
    inputs, gradient = [torch.randn(3, 5, 6) for _ in range(2)], torch.randn(3, 5, 6)
    plain = {}
    for microbatch, value in enumerate(some(inputs)):
        leaf = value.clone().requires_grad_()
        output = twin(leaf)
        plain[f"output {microbatch}"] = output.detach()
        output.backward(gradient)
        assert leaf.grad is not None
        plain[f"input {microbatch}"] = leaf.grad
    plain |= {name: param.grad for name, param in twin.named_parameters() if param.grad is not None}
    same(plain, results(block, inputs, gradient, split=split, checkpoint=True))


def test_a_first_run_saves_nothing_for_a_backward() -> None:
    saved: list[Tensor] = []

    class Squares(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            between = value * 2
            saved.append(between)
            return between * between

    stage = Stage(1, [Block("0", Squares())], Randomness(0, CPU), checkpointed={"0"})
    output = stage.forward(0, torch.randn(4))
    kept = weakref.ref(saved.pop())
    assert kept() is None
    assert not output.requires_grad
