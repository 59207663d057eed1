"""The check of the first step where no rank has the whole model: blocks run where they are, all else on every rank."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from drumline.channel.launch.launch import launch
from drumline.channel.rank_names import BY_NUMBER
from drumline.core.errors import DrumlineError
from drumline.features.check.by_itself import remote_model
from drumline.features.check.by_itself.places import Home, Places
from drumline.features.check.by_itself.remote_model import GaveUp, Relay
from drumline.features.check.verdict import CheckReport
from drumline.model.blocks.pieces import Piece
from drumline.model.blocks.script import Live
from drumline.model.randomness import Randomness
from drumline.pipeline.pipeline import Pipeline
from follow_faults import FAULTS, WIDTH, Skips, data, stale_attribute
from matrices import long
from some import some
from torch_models import on_meta

pytestmark = [pytest.mark.torch, pytest.mark.features("check")]

Told = tuple[str, CheckReport | None, str]  # the error, what was checked, and stderr


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])


class Between(Layers):
    """Uses a parameter, a buffer and random numbers between blocks, and has a hook on itself."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(WIDTH))
        self.scale = 2.0
        self.register_buffer("steps", torch.empty(WIDTH))
        self.register_forward_hook(lambda module, given, made: made * 0.5)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, 1.5)
        nn.init.constant_(self.steps, 0.1)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = x + functional.dropout(layer(x * self.scale).tanh() * self.gain + self.steps, 0.2)
        return x


class Tied(Layers):
    """The last block has the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Any:
        first = self.layers[0](x)
        return self.layers[3](self.layers[2](self.layers[1](first).tanh()) + first)


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tensor: Tensor, other: Tensor) -> Any:
        return self.left(tensor) + self.right(other).tanh()


class Mixes(nn.Module):
    """Blocks with two arguments, which a piece could confuse."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Mix() for _ in range(4)])

    def forward(self, x: Tensor) -> Any:
        tensor, other = x, x * 2
        for block in self.blocks:
            tensor, other = block(tensor, other), tensor
        return tensor + other


class Twice(Layers):
    """Calls a block on both ranks."""

    def forward(self, x: Tensor) -> Any:
        first = self.layers[0](x).tanh()
        return self.layers[0](self.layers[3](self.layers[2](self.layers[1](first)))) + first


class Again(Layers):
    """Runs its blocks again in the backward."""

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: layer(x).tanh(), x, use_reentrant=False) + x
        return x


class Often(Layers):
    """Calls a block on both ranks whose weight other blocks have as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Any:
        return self.layers[0](self.layers[3](self.layers[2](self.layers[1](self.layers[0](x).tanh()))))


class InPlace(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.relu_())


class Changed(Layers):
    """Has a block that changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = InPlace(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x * 1.5)
        return x


def swapped(patch: pytest.MonkeyPatch) -> None:
    """Confuse the values that a piece hands on."""
    right = Piece.__call__

    def confused(self: Piece, value: Any) -> Any:
        made = right(self, value)
        return made._replace(tensors=made.tensors[::-1]) if isinstance(made, Live) else made

    patch.setattr(Piece, "__call__", confused)


def stepped(make: Callable[[], nn.Module], fault: Callable[[pytest.MonkeyPatch], None] | None, **settings: Any) -> Told:
    x, y = data()
    given: dict[str, Any] = {"num_microbatches": 4, "timeout": 60, "balance": "even", "loss_fn": functional.mse_loss}
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        if fault is not None:
            fault(patch)
        pipe = Pipeline(on_meta(make), example=x, **(given | settings))
        try:
            pipe.step(x, target=y)
            error = ""
        except DrumlineError as caught:
            error = str(caught)
        assert (error != "") == bool(pipe.checked and pipe.checked.wrong)
    return error, pipe.checked, said.getvalue()


def llama(**settings: Any) -> Told:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    ids = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(0))
    make: Any = LlamaForCausalLM
    pipe = Pipeline(on_meta(lambda: make(config)), num_microbatches=2, balance="even", timeout=60, **settings)
    pipe.step(input_ids=ids, labels=ids)
    return "", pipe.checked, ""


RIGHT = [Skips, Between, Tied, Mixes, Twice, Again]


def on_a_rank() -> dict[str, Told]:
    found = {make.__name__: stepped(make, None, schedule=name) for make in RIGHT for name in ("1f1b", "zb-v")}
    found |= {fault.__name__: stepped(Skips, fault) for fault in FAULTS}
    found["swapped"] = stepped(Mixes, swapped)
    found["wrong between"] = stepped(Between, stale_attribute)
    found |= {make.__name__: stepped(make, None) for make in (Often, Changed)}
    found["llama"] = llama()
    return found


@long
def test_ranks_check_a_model_of_which_each_has_only_a_part() -> None:
    zero, entry = launch(on_a_rank, num_ranks=2, timeout=240)
    for name, number in {
        "Skips": 10,
        "Between": 9,
        "Tied": 7,
        "Mixes": 16,
        "Twice": 8,
        "Again": 8,
        "llama": 20,
    }.items():
        for error, checked, said in (zero[name], entry[name]):
            assert checked is not None
            assert (error, said, checked.wrong, checked.unchecked) == ("", "", (), ""), name
            assert checked.num_parameters == number, name
    for name in (*(fault.__name__ for fault in FAULTS), "swapped", "wrong between"):
        for error, checked, _ in (zero[name], entry[name]):
            assert "the model, traced block by block, returns something else than by itself" in error, name
            assert checked is not None
            assert checked.wrong
    texts = {
        "Often": "only in part checked against the model by itself: rank 0: not the gradient of layers.0.weight, which",
        "Changed": "could not run it together: rank 0: call 1 of layers.1 with gradients changes its arguments",
    }
    for name, text in texts.items():
        assert zero[name][0] == entry[name][0] == ""
        assert text in zero[name][2], name
        assert zero[name][2].count("\n") == 1
        assert entry[name][2] == ""


def test_ranks_of_one_process_have_all_of_it_between_them() -> None:
    _, checked, _ = llama(num_ranks=2)
    assert checked is not None
    assert (checked.num_parameters, checked.wrong, checked.unchecked) == (20, (), "")


def test_a_chain_without_memory_runs_as_it_is() -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    x, y = data()
    model = on_meta(make)
    pipe = Pipeline(model, loss_fn=functional.mse_loss, num_microbatches=4, num_ranks=2)
    loss = pipe.step(x, target=y).loss
    assert pipe.checked is not None
    assert (pipe.checked.num_parameters, pipe.checked.wrong) == (8, ())
    device = next(model.parameters()).device
    whole = functional.mse_loss(model(x.to(device)), y.to(device))
    torch.testing.assert_close(loss, whole.detach())
    gradients = torch.autograd.grad(whole, list(model.parameters()))
    for param, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(param.grad, gradient)


def test_what_the_blocks_make_may_be_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    class Alone:
        """The only rank."""

        naming = BY_NUMBER

        def all_told(self, what: str, values: list[Any]) -> list[Any]:
            return values

    monkeypatch.setattr(remote_model, "MOST_BYTES", 0)
    model = Mixes()
    places = Places(tuple(f"blocks.{number}" for number in range(4)), ())
    home = Home({name: model.get_submodule(name) for name in places.blocks}, {}, frozenset(map(id, model.parameters())))
    crew: Any = Alone()
    device = torch.device("cpu")
    with (
        pytest.raises(GaveUp, match="rank 0: its blocks produce over 0 MiB per microbatch"),
        Relay(crew, model, places, home, device, Randomness(0, device)).running(),
    ):
        model(data()[0])
    assert all("forward" not in vars(module) for module in some(model.modules()))
