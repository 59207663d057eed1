"""Layers move in every line of a mesh, and training goes on to the last bit, whatever the lines hold parts of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import drumline as dl
from drumline.core.errors import UsageError
from matrices import ALL
from mesh.plain import WIDTH, WORDS, loss_fn, words
from refused import refused
from some import some

pytestmark = [pytest.mark.torch, pytest.mark.features("moving")]

STEPS = 4
MOVES = {1: [2, 4], 2: [4, 2], 3: [2, 4]}  # there, back beyond where it began, and there again: it ends elsewhere
DP, TP, EP = ({"pp": 2, axis: 2} for axis in ("dp", "tp", "ep"))
PLAN = {"0": "embedding", "*.up": "colwise", "*.down": "rowwise", "5": "colwise_gather"}
BY_TP = {"mesh": TP, "tensor_parallel": PLAN}
LOW = {"dtype": torch.bfloat16, "master_weights": True}
CASES: dict[str, dict[str, Any]] = {
    "dp": {"mesh": DP, "schedule": "1f1b", "dropout": 0.1},
    "dp, float32 copies": {"mesh": DP, "schedule": "zb-h1", **LOW},
    "tp": {**BY_TP, "schedule": "zb-h1"},
    "tp, gradients on the way": {**BY_TP, "steps_per_update": 2},
    "tp, sequences": {**BY_TP, "sequence_parallel": True, "dropout": 0.1},
    "tp, float32 copies": {**BY_TP, **LOW},
    "tp, whole matrices": {**BY_TP, "kind": torch.optim.Adafactor},
    "zero 1": {"mesh": DP, "zero": 1, "schedule": "zb-h1"},
    "zero 1, gradients on the way": {"mesh": DP, "zero": {0: 1}, "steps_per_update": 2},
    "zero 1, float32 copies": {"mesh": DP, "zero": 1, **LOW},
    "zero 1, whole matrices": {"mesh": DP, "zero": 1, "kind": torch.optim.Adafactor},
    "zero 3": {"mesh": DP, "zero": 3, "schedule": "zb-h1"},
    "zero 3, gradients on the way": {"mesh": DP, "zero": 3, "steps_per_update": 2},
    "zero 3, float32 copies": {"mesh": DP, "zero": 3, **LOW},
    "ep": {"mesh": EP, "sparse": True, "schedule": "zb-h1"},
    "ep, gradients on the way": {"mesh": EP, "sparse": True, "steps_per_update": 2},
}
BRIEF = ("tp, sequences", "tp, whole matrices", "zero 1, gradients on the way", "ep")
KEPT = [name for name in CASES if ALL or name in BRIEF]


class Layer(nn.Module):
    """A norm and a feed-forward or experts, around which values go."""

    def __init__(self, dropout: float, *, sparse: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner: nn.Module = dl.MoE(WIDTH, WIDTH, num_experts=4, top_k=2) if sparse else FeedForward()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.dropout(self.inner(self.norm(x)))
        return added


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(functional.gelu(self.up(x)))
        return down


def model(dropout: float = 0.0, *, sparse: bool = False) -> nn.Sequential:
    """Return a chain of six blocks, whose head is its embedding; every second layer may have experts."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, WORDS + 1, bias=False)
    layers = [Layer(dropout, sparse=sparse and at % 2 == 1) for at in range(4)]
    made = nn.Sequential(nn.Embedding(WORDS + 1, WIDTH), *layers, head)
    head.weight = made.get_parameter("0.weight")
    return made


def loss(output: Tensor, target: Tensor) -> Tensor:
    return loss_fn(output.float(), target)


def optimizer_of(kind: Any) -> dict[str, Any]:
    """Return settings under which a rounding error of a gradient does not become a large one of a parameter."""
    return {"lr": 0.01} if kind is torch.optim.Adafactor else {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3}


def trained(
    moves: dict[int, list[int]],
    *,
    dtype: torch.dtype = torch.float32,
    dropout: float = 0.0,
    sparse: bool = False,
    steps_per_update: int = 1,
    kind: Any = torch.optim.AdamW,
    **options: Any,
) -> dict[str, Any]:
    """Train with moves before some steps; return all that came of it on this rank, and where in the mesh it is."""
    seen, moved = [], 0
    given = {"loss_fn": loss, "num_microbatches": 4, "timeout": 120.0, "balance": [3, 3], **options}
    with dl.Pipeline(model(dropout, sparse=sparse).to(dtype), **given) as pipe:
        optimizer = pipe.optimizer(kind, **optimizer_of(kind))
        for step in range(STEPS):
            if step in moves:
                moved += pipe.repartition(balance=moves[step]).bytes_moved
            number, count = pipe.axes.rows
            x, y = (word.chunk(count)[number] for word in words(step))
            found = pipe.step(x, target=y, share=1.0 / steps_per_update).loss
            assert found is not None
            seen.append(found.item())
            if (step + 1) % steps_per_update == 0:
                seen.append(pipe.clip_grad_norm_(0.5).item())
                optimizer.step()
                if step < STEPS - 1:
                    optimizer.zero_grad()
        tensors = {f"{name}/master": tensor for name, tensor in pipe.named_master_weights()}
        for name, param in pipe.named_parameters():
            tensors[f"{name}/value"] = param
            if param.grad is not None:
                tensors[f"{name}/gradient"] = param.grad
        for name, each in optimizer.state_dict()["state"].items():
            tensors |= {f"{name}/{key}": item for key, item in each.items() if isinstance(item, Tensor)}
        return {
            "place": {name: pipe.axes.place(name) for name in pipe.axes.names if name != "pp"},
            "seen": seen,
            "moved": moved,
            "tensors": {name: tensor.detach().clone() for name, tensor in tensors.items()},
            "state": {name: tensor.clone() for name, tensor in pipe.state_dict().items()},
        }


def still_and_moved(names: list[str]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    with (
        refused(UsageError, "zero is 3 for some stages and not for others", fix="use zero=3"),
        dl.Pipeline(model(), loss_fn=loss, num_microbatches=4, timeout=120.0, mesh=DP, zero={0: 3}) as pipe,
    ):
        pipe.repartition(balance=[2, 4])
    return {name: (trained({}, **CASES[name]), trained(MOVES, **CASES[name])) for name in names}


def plain(case: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Train with torch alone in this process; return losses and norms, tensors and the state."""
    torch_model, kind, every = (
        model(sparse=case.get("sparse", False)),
        case.get("kind", torch.optim.AdamW),
        case.get("steps_per_update", 1),
    )
    optimizer = kind(torch_model.parameters(), **optimizer_of(kind))
    seen: list[float] = []
    for step in range(STEPS):
        x, y = words(step)
        found = loss(torch_model(x), y)
        torch.autograd.backward(found / every)
        seen.append(found.item())
        if (step + 1) % every == 0:
            seen.append(nn.utils.clip_grad_norm_(torch_model.parameters(), 0.5).item())
            optimizer.step()
            if step < STEPS - 1:
                optimizer.zero_grad()
    tensors: dict[str, Any] = {}
    for name, param in torch_model.named_parameters():
        tensors |= {f"{name}/{key}": param.detach() for key in ("value", "master")}
        tensors[f"{name}/gradient"] = param.grad
        tensors |= {f"{name}/{key}": item for key, item in optimizer.state[param].items() if isinstance(item, Tensor)}
    return seen, tensors, torch_model.state_dict()


def part_of(whole: Tensor, shape: torch.Size, place: dict[str, int]) -> Tensor:
    """Return of a whole tensor the part that a place of a mesh has, by its shape."""
    if "dp" in place:  # a flat half, or all of it on one of the lines
        is_whole = shape.numel() in (0, whole.numel())
        flat = whole.flatten() if is_whole else whole.flatten().chunk(2)[place["dp"]]
        return (flat if shape.numel() else flat[:0]).view(shape)
    for dim, (length, own) in enumerate(zip(whole.shape, shape, strict=True)):
        if length != own:
            (at,) = place.values()
            return whole.narrow(dim, at * own, own)
    return whole


def near(found: Any, wanted: Any, what: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, msg=lambda text: f"{what}: {text}")


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, tuple[dict[str, Any], dict[str, Any]]]]:
    return dl.launch(still_and_moved, KEPT, num_ranks=4)


@pytest.mark.parametrize("name", KEPT)
def test_training_goes_on_as_if_nothing_had_moved(name: str, ranks: list[dict[str, Any]]) -> None:
    each = [rank[name] for rank in ranks]
    places = {tuple(moved["place"].items()) for _, moved in each}
    assert len(places) == 2
    for place in some(places):
        line = [pair for pair in each if tuple(pair[1]["place"].items()) == place]
        assert len(line) == 2
        for still, moved in some(line):
            assert (still["moved"], moved["seen"]) == (0, still["seen"])
            assert moved["moved"] > 10_000
        before, after = ({n: t for pair in line for n, t in pair[at]["tensors"].items()} for at in (0, 1))
        assert all(still["tensors"].keys() != moved["tensors"].keys() for still, moved in line)  # it ends elsewhere
        assert before.keys() == after.keys()
        for key in some(before):
            assert torch.equal(before[key], after[key]), key


@pytest.mark.parametrize("name", [name for name in KEPT if not CASES[name].keys() & {"dtype", "dropout"}])
def test_training_with_moves_is_that_of_one_process(name: str, ranks: list[dict[str, Any]]) -> None:
    seen, tensors, state = plain(CASES[name])
    compared = set()
    for moved in some([rank[name][1] for rank in ranks]):
        near(moved["seen"], seen, "losses and norms")
        for key, tensor in some(moved["tensors"].items()):
            near(tensor, part_of(tensors[key], tensor.shape, moved["place"]), key)
            compared.add(key)
        for key, tensor in moved["state"].items():
            near(tensor, state[key], key)
    assert compared == tensors.keys()
