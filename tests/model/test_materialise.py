"""Memory and values for some blocks of a model and no others: from files, or from the modules' initialisers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import drumline as dl
from drumline.core.errors import ModelError
from drumline.model.block import Block, blocks_of
from drumline.model.weights.files import Weights
from drumline.model.weights.materialise import materialise
from materials import assert_same, by_parts, values
from matrices import some_of
from refused import refused, saying
from some import some
from torch_models import CPU, on_meta

pytestmark = pytest.mark.torch


class Custom(nn.Module):
    """Many kinds of layers, one of them with an initialiser above its children."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8, padding_idx=2)
        self.attention = nn.MultiheadAttention(8, 2)
        self.lstm = nn.LSTM(8, 8)
        self.conv = nn.Conv1d(8, 8, 3)
        self.norm = nn.BatchNorm1d(8)
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
        self.head = nn.Linear(8, 9)
        self.head.weight = self.embed.weight  # with a bias of its own
        self.frozen = nn.Linear(8, 8).requires_grad_(False)


def custom_blocks(model: nn.Module) -> list[Block]:
    return [Block(name, child) for name, child in model.named_children()]


def layer_by_layer(model: nn.Module) -> list[Block]:
    """Cut even inside of the transformer, whose own initialiser draws for all of its layers."""
    found = []
    for name, child in model.named_children():
        if name == "transformer":
            found += [Block(f"{name}.{part}", module) for part, module in child.named_children()]
        else:
            found.append(Block(name, child))
    return found


@pytest.mark.parametrize("cut", [custom_blocks, layer_by_layer])
@pytest.mark.parametrize("num_ranks", some_of([1, 2, 3, 8], [2, 8]))
def test_every_cut_draws_the_same_model(cut: Callable[[Any], list[Block]], num_ranks: int) -> None:
    state = torch.get_rng_state()
    whole = dl.materialise(on_meta(Custom), seed=1)
    assert_same(by_parts(Custom, cut, num_ranks, None, seed=1), values(whole))
    assert torch.equal(torch.get_rng_state(), state), "the user's own random numbers moved"
    assert whole.head.weight is whole.embed.weight
    assert torch.equal(whole.embed.weight[2], torch.zeros(8))
    assert not whole.frozen.weight.requires_grad
    assert not torch.equal(whole.lstm.weight_hh_l0, whole.lstm.weight_ih_l0)
    assert whole.lstm(torch.randn(3, 2, 8))[0].isfinite().all()


def test_equal_layers_under_two_names_draw_different_weights() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    dl.materialise(model)
    assert not torch.equal(model[0].weight, model[1].weight)


def test_a_list_of_blocks_is_a_model_too() -> None:
    def make() -> list[nn.Module]:
        return [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)]

    listed = dl.materialise(on_meta(make), seed=2)
    sequence = dl.materialise(on_meta(lambda: nn.Sequential(*make())), seed=2)
    assert [param.tolist() for block in listed for param in block.parameters()] == [
        param.tolist() for param in sequence.parameters()
    ]


@pytest.mark.parametrize("bits", [torch.bfloat16, torch.float16, torch.float64])
def test_the_model_decides_about_the_type(tmp_path: Path, bits: torch.dtype) -> None:
    saved: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    torch.save(saved.state_dict(), tmp_path / "pytorch_model.bin")
    model = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(bits))
    dl.materialise(model, tmp_path)
    assert torch.equal(model[0].weight, saved[0].weight.to(bits))
    assert model[1].num_batches_tracked.dtype is torch.int64


def test_weights_are_read_over_values_that_are_there(tmp_path: Path) -> None:
    saved, model = nn.Linear(4, 4), nn.Linear(4, 4)
    torch.save(saved.state_dict(), tmp_path / "pytorch_model.bin")
    before = model.weight
    dl.materialise(model, tmp_path)
    assert model.weight is before
    assert torch.equal(model.weight, saved.weight)


def test_values_that_are_there_are_kept_without_weights() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), on_meta(lambda: nn.Linear(2, 2)))
    before = model[0].weight.clone()
    dl.materialise(model)
    assert torch.equal(model[0].weight, before)
    assert model[1].weight.isfinite().all()


def sequential(**more: nn.Module) -> Any:
    model = nn.Module()
    for name, module in {"first": nn.Linear(3, 3), "second": nn.Linear(3, 3, bias=False), **more}.items():
        model.add_module(name, module)
    return model


def saved_state(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    torch.save(change(sequential().state_dict()), folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize(
    ("prefix_in_file", "prefix_in_model"), [("", "model."), ("model.", ""), ("module.", ""), ("", "inner.")]
)
def test_one_prefix_may_be_there_or_not(tmp_path: Path, prefix_in_file: str, prefix_in_model: str) -> None:
    saved_state(tmp_path, lambda state: {prefix_in_file + name: tensor for name, tensor in state.items()})
    expected = torch.load(tmp_path / "pytorch_model.bin")

    def make() -> nn.Module:
        model = nn.Module()
        model.add_module(prefix_in_model.removesuffix(".") or "none", sequential())
        return model if prefix_in_model else sequential()

    for name, value in some(values(dl.materialise(on_meta(make), tmp_path)).items()):
        assert torch.equal(value, expected[prefix_in_file + name.removeprefix(prefix_in_model)])


def test_a_head_beside_a_prefixed_model_keeps_its_name(tmp_path: Path) -> None:
    saved_state(
        tmp_path, lambda state: {f"model.{name}" if "first" in name else name: tensor for name, tensor in state.items()}
    )
    expected = torch.load(tmp_path / "pytorch_model.bin")
    found = values(dl.materialise(on_meta(sequential), tmp_path))
    assert torch.equal(found["first.weight"], expected["model.first.weight"])
    assert torch.equal(found["second.weight"], expected["second.weight"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda state: {name: entry for name, entry in state.items() if name != "first.bias"},
            saying(
                "has no tensor for the parameter first.bias",
                expected="a tensor for every",
                fix=r"fresh=\['first.bias'\]",
            ),
        ),
        (
            lambda state: {name.replace("first", "frist"): entry for name, entry in state.items()},
            saying("has no tensor for the parameter first.weight and 1 other", fix=r"did you mean frist.weight\?"),
        ),
        (
            lambda state: {**state, "third.weight": torch.zeros(1)},
            saying(
                "the model has no place for the tensor 'third.weight' of .*pytorch_model.bin",
                fix=r"ignore=\['third.weight'\]",
            ),
        ),
        (
            lambda state: {**state, "first.weight": torch.zeros(4, 3)},
            saying(
                r"'first.weight' of .*pytorch_model.bin has shape \(4, 3\)",
                expected=r"\(3, 3\)",
            ),
        ),
        (
            lambda state: {**state, "first.weight": torch.zeros(3, 3, dtype=torch.int64)},
            saying("'first.weight' of .*pytorch_model.bin has dtype torch.int64", expected="torch.float32"),
        ),
    ],
)
def test_files_that_do_not_fit_are_refused_on_every_rank_and_leave_the_model_as_it_was(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], words: dict[str, str]
) -> None:
    weights = Weights(saved_state(tmp_path, change))
    model = on_meta(sequential)
    blocks = custom_blocks(model)
    for mine in blocks:  # whichever of them is wrong
        with refused(ModelError, **words):
            materialise(blocks, [mine], root=model, weights=weights, device=CPU, seed=0)
    assert all(param.is_meta for param in model.parameters())


def test_what_is_too_many_or_too_few_can_be_named(tmp_path: Path) -> None:
    saved_state(tmp_path, lambda state: {"old.weight": torch.zeros(2), "first.weight": state["first.weight"]})
    weights = Weights(tmp_path, ignore=["old.*"], fresh=["*.bias", "second.*"])
    model = dl.materialise(on_meta(sequential), weights)
    fresh = dl.materialise(on_meta(sequential))
    assert torch.equal(model.first.weight, torch.load(tmp_path / "pytorch_model.bin")["first.weight"])
    assert torch.equal(model.second.weight, fresh.second.weight)


def tied() -> Any:
    model = sequential()
    model.second.weight = model.first.weight
    return model


def test_a_tied_parameter_is_read_under_either_name(tmp_path: Path) -> None:
    for name in ("first.weight", "second.weight"):
        state = {name: torch.randn(3, 3), "first.bias": torch.zeros(3)}
        torch.save(state, tmp_path / "pytorch_model.bin")
        model = dl.materialise(on_meta(tied), tmp_path)
        assert model.first.weight is model.second.weight
        assert torch.equal(model.first.weight, state[name])


def test_a_tied_parameter_with_two_values_is_refused(tmp_path: Path) -> None:
    saved_state(tmp_path, lambda state: state)
    with refused(ModelError, r"one tensor for first.weight and second.weight, but .* has two that differ"):
        dl.materialise(on_meta(tied), tmp_path)
    saved_state(tmp_path, lambda state: {**state, "second.weight": state["first.weight"].clone()})
    dl.materialise(on_meta(tied), tmp_path)


class Scale(nn.Module):
    """Has a parameter and no initialiser."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(3))


class Mask(nn.Module):
    """Computes a buffer that is not saved when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).tril(), persistent=False)


class Renewed(Mask):
    """Computes it again when asked to."""

    def reset_parameters(self) -> None:
        """Make the buffer anew."""
        self.mask = torch.ones(3, 3, dtype=torch.bool).tril()


class Hidden(nn.Module):
    """Keeps a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.tensor(2.0)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            Scale,
            saying(
                "the parameter more.factor is on the meta device, and Scale has no initialiser for it", fix="add one"
            ),
        ),
        (
            Mask,
            saying(
                "the buffer more.mask of Mask is on the meta device, and no weights file contains it",
                fix="device='cpu'",
            ),
        ),
        (
            Hidden,
            saying(
                "more.scale of Hidden is on the meta device, but is neither a parameter nor a buffer", fix="register it"
            ),
        ),
    ],
)
def test_what_nothing_gives_a_value_is_refused_by_name(kind: type[nn.Module], words: dict[str, str]) -> None:
    model = on_meta(lambda: sequential(more=kind()))
    with refused(ModelError, **words):
        dl.materialise(model)
    assert all(param.is_meta for param in model.parameters())


def test_a_buffer_that_is_not_saved_is_computed_by_its_module(tmp_path: Path) -> None:
    real = sequential(more=Renewed())
    torch.save(real.state_dict(), tmp_path / "pytorch_model.bin")
    assert_same(values(dl.materialise(on_meta(lambda: sequential(more=Renewed())), tmp_path)), values(real))
    with refused(ModelError, r"the buffer more\.mask of Mask"):
        dl.materialise(on_meta(lambda: sequential(more=Mask())), tmp_path)


def test_an_initialiser_above_that_writes_over_values_is_refused() -> None:
    model = on_meta(lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True))
    model.encoder = nn.Transformer(8, 2, 1, 1, 16, batch_first=True).encoder
    with refused(ModelError, r"the initialiser of the model \(Transformer\) overwrites tensors"):
        dl.materialise(model)


def test_the_whole_model_has_the_names_of_its_blocks() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)))
    blocks = blocks_of(model)
    materialise(blocks, blocks[:1], root=None, weights=None, device=CPU, seed=0)
    whole = dl.materialise(on_meta(lambda: nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))))
    assert torch.equal(model[0][0].weight, whole[0][0].weight)
    assert model[1].weight.is_meta
