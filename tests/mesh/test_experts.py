"""Experts that lines of a mesh divide train as in one process: tokens travel to their experts and back."""

from __future__ import annotations

from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import drumline as dl
from drumline.core.errors import DrumlineError
from matrices import ALL, long
from mesh.plain import STEPS, WIDTH, WORDS, furthest, words
from some import some

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.matrix]

EP = {"pp": 2, "ep": 2}
SOME = 6 if ALL else 3
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    # name: what is given to Pipeline, and to MoE, and the number of steps
    "1f1b": ({"mesh": EP, "schedule": "1f1b"}, {}, STEPS),
    "zb-v": ({"mesh": EP, "schedule": "zb-v"}, {}, STEPS),
    "interleaved-zb": ({"mesh": EP, "schedule": "interleaved-zb"}, {}, STEPS),
    "dualpipe-v": ({"mesh": EP, "schedule": "dualpipe-v"}, {"num_sparse": 4}, STEPS),
    "two copies": ({"mesh": EP, "schedule": "dualpipe"}, {}, SOME),
    "capacity": ({"mesh": EP, "schedule": "1f1b"}, {"capacity": 1.0}, STEPS),
    "capacity, zb-v": ({"mesh": EP, "schedule": "zb-v"}, {"capacity": 1.0}, SOME),
    "gated, recomputed": ({"mesh": EP, "schedule": "1f1b", "checkpoint": "full"}, {"gated": True}, SOME),
    "dp and ep": ({"mesh": {"dp": 2, "ep": 2}, "schedule": "1f1b", "zero": 1}, {}, STEPS),
    "ep alone": ({"mesh": {"ep": 4}, "schedule": "1f1b"}, {"top_k": 1}, SOME),
}
# `make matrices` runs all of them over 20 steps, other runs those that together have every part, over fewer.
if not ALL:
    KEPT = ("dualpipe-v", "capacity, zb-v", "dp and ep")
    CASES = {name: CASES[name] for name in KEPT}


class Layer(nn.Module):
    """A block of a chain that hands the load-balancing loss on."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = dl.MoE(WIDTH, 2 * WIDTH, num_experts=4, aux=True, **options)

    def forward(self, given: Any) -> tuple[Tensor, Tensor]:
        """Add what the experts make of x."""
        x, aux = given if isinstance(given, tuple) else (given, None)
        made, aux = self.moe(self.norm(x), aux)
        return x + made, aux


def layers(*, num_sparse: int = 2, **options: Any) -> nn.Sequential:
    """Return a model of six blocks, some of which have experts."""
    torch.manual_seed(0)
    dense = [dl.PassAux(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())) for _ in range(4 - num_sparse)]
    pairs = zip_longest((Layer(**options) for _ in range(num_sparse)), dense)
    blocks = [layer for pair in pairs for layer in pair if layer is not None]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, dl.PassAux(nn.Linear(WIDTH, WORDS)))


def loss_fn(output: Any, target: Tensor) -> Tensor:
    """Return the mean over the labels that count, and a part of the load-balancing loss."""
    x, aux = output
    total: Tensor = nn.functional.cross_entropy(x.flatten(0, 1), target.flatten()) + 0.1 * aux.mean()
    return total


def weight(target: Tensor) -> Tensor:
    """Return the number of labels that count."""
    return (target != -100).sum()


@cache
def plain(lines: int, steps: int, **options: Any) -> tuple[nn.Module, list[tuple[float, float]]]:
    """Train the plain model in this process; return it, and what was seen of its steps."""
    model = layers(**options)
    return model, trained(model, loss_fn, lines, steps)


def trained(model: nn.Module, loss_fn: Any, lines: int, steps: int = STEPS) -> list[tuple[float, float]]:
    """Train a model in this process over the same microbatches; return every step's loss and norm."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = []
    for step in range(steps):
        x, y = words(step)
        total, parts = 0.0, [part for line in zip(x.chunk(lines), y.chunk(lines), strict=True) for part in cut(*line)]
        for inputs, target in parts:
            loss = loss_fn(model(inputs), target) * (weight(target) / weight(y))
            torch.autograd.backward(loss)
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((total, norm.item()))
    return seen


def cut(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the microbatches of one line."""
    return list(zip(x.chunk(4), y.chunk(4), strict=True))


def _train(
    model: nn.Module, options: dict[str, Any], *, steps: int = STEPS, first: int = 0, folder: Path | None = None
) -> dict[str, Any]:
    """Train on this rank's part of the batch; with a folder, save there, or go on from there after a first step."""
    options = {"loss_fn": loss_fn, "loss_weight": weight, "num_microbatches": 4, "timeout": 120.0, **options}
    with dl.Pipeline(model, **options) as pipe:
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.01)
        if first and folder is not None:
            pipe.load(folder)
        seen = []
        for step in range(first, first + steps):
            number, count = pipe.axes.rows
            x, y = (word.chunk(count)[number] for word in words(step))
            loss = pipe.step(x, target=y).loss
            norm = pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            assert loss is not None
            seen.append((loss.item(), norm.item()))
        if folder is not None and not first:
            pipe.save(folder, wait=True)
        held = {name: tuple(each.shape) for name, each in pipe.named_parameters()}
        return {"seen": seen, "held": held, "state": pipe.state_dict()}


def mixtral() -> nn.Module:
    """Return a small model of transformers, whose loss has a load-balancing part."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 2,
        "vocab_size": WORDS,
    }
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
    config = MixtralConfig(**sizes, **heads, output_router_logits=True, use_cache=False)
    model: nn.Module = MixtralForCausalLM(config)
    return model.train()


def given(x: Tensor) -> dict[str, Tensor]:
    """Return what a model of transformers takes; its loss counts experts by a mask."""
    return {"input_ids": x, "labels": x, "attention_mask": torch.ones_like(x)}


def plain_mixtral() -> list[float]:
    """Train it in this process, over the microbatches of two lines; return every step's loss."""
    model = mixtral()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for step in range(5):
        total = 0.0
        for x in words(step)[0].chunk(8):
            loss = model(**given(x)).loss / 8
            torch.autograd.backward(loss)
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def _mixtral() -> list[list[float]]:
    return [_mixtral_by(schedule) for schedule in ("1f1b", "zb-h1")]


def _mixtral_by(schedule: str) -> list[float]:
    example: dict[str, Any] = {"example": given(words(0)[0][:8]), "balance": "even"}
    with dl.Pipeline(
        mixtral(), mesh={"ep": 2}, schedule=schedule, num_microbatches=4, timeout=120.0, **example
    ) as pipe:
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.01)
        seen = []
        for step in range(5):
            number, count = pipe.axes.rows
            x = words(step)[0].chunk(count)[number]
            loss = pipe.step(**given(x)).loss
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            assert loss is not None
            seen.append(loss.item())
        assert any(param.shape[0] == 2 for name, param in pipe.named_parameters() if ".experts." in name)
        return seen


def _error(options: dict[str, Any], model: nn.Module) -> str:
    try:
        dl.Pipeline(model, loss_fn=loss_fn, num_microbatches=4, timeout=60.0, **options)
    except DrumlineError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def _all_cases(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (options, given, steps) in CASES.items():
        record = {"record": folder / "run"} if name == "capacity, zb-v" else {}
        found[name] = _train(layers(**given), {**options, **record}, steps=steps)
    saved = {"mesh": EP, "schedule": "1f1b"}
    found["saved"] = _train(layers(), saved, steps=2, folder=folder / "saved")
    found["going on"] = _train(
        layers(), {"mesh": {"dp": 2, "ep": 2}, "schedule": "1f1b"}, first=2, steps=2, folder=folder / "saved"
    )
    found["refused"] = [
        _error({"mesh": EP}, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))),
        _error({"mesh": {"ep": 4}}, nn.Sequential(nn.Embedding(2, 8), dl.MoE(8, 8, num_experts=6))),
    ]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return dl.launch(_all_cases, folder, num_ranks=4)


@pytest.mark.features("mesh", "record", "saving")
@pytest.mark.parametrize("name", CASES)
def test_losses_norms_and_weights_are_those_of_one_process(ranks: list[dict[str, Any]], name: str) -> None:
    options, given, steps = CASES[name]
    model, seen = plain(options["mesh"].get("dp", 1) * options["mesh"]["ep"], steps, **given)
    for rank in some(ranks):
        losses, norms = furthest(rank[name]["seen"], seen)
        assert losses < 1e-5
        assert norms < 1e-4
        assert rank[name]["seen"] == ranks[0][name]["seen"]
    merged = {key: value for rank in ranks for key, value in rank[name]["state"].items()}
    assert merged.keys() == model.state_dict().keys()
    for key, value in some(model.state_dict().items()):
        assert torch.linalg.vector_norm(merged[key] - value) < 1e-4 * torch.linalg.vector_norm(value)


def test_each_line_holds_its_part_of_the_experts(ranks: list[dict[str, Any]]) -> None:
    for rank in some(ranks):
        shapes = {name: shape for name, shape in rank["saved"]["held"].items() if ".experts." in name}
        assert set(shapes.values()) == {(2, 2 * WIDTH, WIDTH), (2, WIDTH, 2 * WIDTH)}
        routers = {shape for name, shape in rank["saved"]["held"].items() if "router" in name}
        assert routers == {(4, WIDTH)}


@pytest.mark.features("saving")
def test_another_mesh_goes_on_from_a_checkpoint(ranks: list[dict[str, Any]], folder: Path) -> None:
    alone = _train(layers(), {"num_microbatches": 16}, first=2, steps=2, folder=folder / "saved")
    for rank in some(ranks):
        losses, norms = furthest(rank["going on"]["seen"], alone["seen"])
        assert losses < 1e-5
        assert norms < 1e-4


@long
def test_a_model_of_transformers_trains_as_in_one_process() -> None:
    wanted = plain_mixtral()
    for rank in some(dl.launch(_mixtral, num_ranks=2)):
        for losses in some(rank):
            assert losses == pytest.approx(wanted, rel=1e-5)


def test_what_cannot_be_divided_is_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in some(ranks):
        none, uneven = rank["refused"]
        assert none.startswith("ModelError: the mesh divides experts by 2 (ep), and the model has none")
        assert uneven.startswith("ModelError: 1.experts has 6 experts, and the mesh divides them by 4 (ep)")


def test_a_run_records_how_evenly_experts_are_loaded(ranks: list[dict[str, Any]], folder: Path) -> None:
    metrics = dl.read_run(folder / "run").metrics()
    for metric in some(metrics):
        assert 1.0 <= metric["expert_metrics/load_max"] <= 1.0 * 4 / 2
        assert 0.0 < metric["expert_metrics/dropped"] < 0.5
    assert len(metrics) == SOME


def test_a_block_computes_the_weighted_sum_of_the_chosen_experts() -> None:
    torch.manual_seed(0)
    block = dl.MoE(8, 16, num_experts=4, top_k=2, gated=True)
    x = torch.randn(3, 5, 8)
    chances = block.router(x).softmax(-1)
    wanted = torch.zeros_like(x)
    for row in range(3):
        for at in range(5):
            weights, index = chances[row, at].topk(2)
            for weight, expert in zip(weights / weights.sum(), index, strict=True):
                gate, up = (block.experts.w1[expert] @ x[row, at]).chunk(2)
                wanted[row, at] += weight * (block.experts.w2[expert] @ (nn.functional.gelu(gate) * up))
    torch.testing.assert_close(block(x), wanted)


def test_tokens_beyond_the_capacity_skip_their_expert() -> None:
    torch.manual_seed(0)
    block = dl.MoE(8, 16, num_experts=2, top_k=1, capacity=0.5)
    x = torch.randn(1, 1, 8).expand(1, 8, 8)  # all choose the same expert, which takes two of them
    made = block(x)
    assert [bool(value.any()) for value in made[0]] == [True] * 2 + [False] * 6
    assert block.load is not None
    assert sorted(block.load.tolist()) == [0, 2, 6]


def test_the_load_balancing_loss_is_one_if_all_experts_get_the_same() -> None:
    block = dl.MoE(4, 4, num_experts=4, top_k=1, aux=True)
    with torch.no_grad():
        block.router.weight.copy_(torch.eye(4) * 50)
    even, uneven = torch.eye(4), torch.eye(4)[:1].expand(4, 4)
    assert block(even)[1].tolist() == pytest.approx([1.0] * 4)
    assert block(uneven)[1].tolist() == pytest.approx([4.0] * 4)
