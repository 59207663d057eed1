"""Lines of a mesh that differ in what they count, or in what they are given: as in one process, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import drumline as dl
from chain_tricks import Scaled
from drumline.channel.lines.slices import put_together, slice_of
from drumline.core.errors import DrumlineError, UsageError
from drumline.features.mesh.attach.lines import summed_losses
from mesh.small import LENGTH, WIDTH, WORDS, decoder
from refused import refused
from some import some

# PyTorch says so once on processors without bfloat16.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
    pytest.mark.features("mesh"),
]

ROWS, MICROBATCHES = 8, 4  # of a line


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS))


def watched(output: Tensor, target: Tensor) -> Tensor:
    """What it counts is known only once it has run."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def summed(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def labels(empty: slice, lines: int = 2) -> tuple[Tensor, Tensor]:
    """Return the rows of all lines, of which some have no labels."""
    torch.manual_seed(1)
    x, y = (torch.randint(WORDS, (lines * ROWS, LENGTH)) for _ in range(2))
    y[empty] = -100
    return x, y


class WithLoss(nn.Module):
    """A model that computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = decoder()

    def forward(self, x: Tensor, labels: Tensor, positions: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.inner(x, positions=positions)
        return {"loss": watched(logits, labels), "logits": logits}


class Grouped(nn.Module):
    """Attention with one head of keys and values, whose forward alone knows their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(WIDTH, 4, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            linear(x).unflatten(-1, (-1, 4)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        key, value = (item.repeat_interleave(query.shape[1] // item.shape[1], 1) for item in (key, value))
        made: Tensor = self.out(functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return made


def grouped() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), Grouped(), nn.Linear(WIDTH, WORDS))


PLAN = {"*.query": "colwise", "*.key": "colwise", "*.value": "colwise", "*.out": "rowwise"}
# By name: the model, its loss, the mesh with further options, and which rows of all lines have no labels.
TRAINED: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any], slice]] = {
    "bf16, a microbatch": (lambda: chain().bfloat16(), functional.cross_entropy, {"mesh": {"dp": 2}}, slice(0, 2)),
    "bf16, a line": (lambda: chain().bfloat16(), watched, {"mesh": {"dp": 2}}, slice(8, 16)),
    "float64, a line": (lambda: chain().double(), functional.cross_entropy, {"mesh": {"dp": 2}}, slice(0, 8)),
    "cp, the first microbatch": (decoder, watched, {"mesh": {"cp": 2}}, slice(0, 2)),
    "cp, a sum": (decoder, summed, {"mesh": {"cp": 2}}, slice(0, 2)),
    "cp, the model's own loss": (WithLoss, None, {"mesh": {"cp": 2}}, slice(0, 2)),
}
WRONG = ("other rows along cp", "a target on one line", "an evaluation on one line", "heads of keys and values")


def flat(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy, of which torch's own takes classes as the second dimension."""
    return functional.cross_entropy(output.transpose(1, 2), target)


def trained(name: str) -> dict[str, Any]:
    make, loss_fn, options, empty = TRAINED[name]
    lines = options["mesh"].get("dp", 1)
    x, y = labels(empty, lines)
    given: dict[str, Any] = {"example": {"x": x, "labels": y} if loss_fn is None else x} if "cp" in name else {}
    loss_fn = flat if loss_fn is functional.cross_entropy else loss_fn
    with pipeline(make(), loss_fn=loss_fn, **options, **given) as pipe:
        own = slice(ROWS * pipe.axes.rows[0], ROWS * (pipe.axes.rows[0] + 1))
        result = pipe.step(x[own], **{"labels" if loss_fn is None else "target": y[own]})
        pipe.settle()
        checked = pipe.checked
        return {
            "loss": result.loss,
            "gradients": gradients(pipe),
            "checked": None if checked is None else (checked.num_parameters, checked.unchecked),
        }


def pipeline(model: nn.Module, **options: Any) -> dl.Pipeline:
    return dl.Pipeline(model, num_microbatches=MICROBATCHES, device="cpu", timeout=60.0, balance="even", **options)


def gradients(pipe: dl.Pipeline) -> dict[str, Tensor]:
    named = ((name, param, param.grad) for name, param in pipe.named_parameters())
    return {name: put_together(each, slice_of(param), pipe.axes) for name, param, each in named if each is not None}


def other_kinds() -> list[float]:
    """Train on batches of which one line has seen microbatches of that size, with labels, and the other has not."""
    x, y = labels(slice(6, 8))
    with pipeline(chain().double(), loss_fn=watched, mesh={"dp": 2}, zero=3) as pipe:
        own = slice(0, 7) if pipe.axes.rows[0] == 0 else slice(8, 16)  # 2, 2, 2 and 1 rows without labels; 2 of all
        first = pipe.step(x[own], target=y[own]).loss
        own = slice(0, 4) if pipe.axes.rows[0] == 0 else slice(8, 16)  # 1 row each
        second = pipe.step(x[own], target=y[own]).loss
        pipe.settle()
    return [float(tensor) for tensor in (first, second) if tensor is not None]


def checked_later() -> tuple[list[float], int]:
    """Train with a check of every second step, of which the first finds nothing that counts on one line."""
    x, y = labels(slice(0, 8))
    other = labels(slice(0))[1]
    with pipeline(chain().double(), loss_fn=watched, mesh={"dp": 2}, check_model=2) as pipe:
        own = slice(ROWS * pipe.axes.rows[0], ROWS * (pipe.axes.rows[0] + 1))
        losses = [pipe.step(x[own], target=target[own]).loss for target in (y, other, other, other)]
        pipe.settle()
        assert pipe.checked is not None
        return [float(loss) for loss in losses if loss is not None], pipe.checked.step


def asked_on_one_line() -> list[int]:
    """Let one line trace the model again, and another not; return which check was the last after each step."""
    x, y = labels(slice(0))
    checked, hooks = [], []
    with pipeline(decoder(), loss_fn=watched, mesh={"dp": 2}, example=x[:ROWS], check_model=100) as pipe:
        for step in range(7):
            is_other = pipe.axes.rows[0] == 0
            if step == 4 and is_other:
                hooks.append(nn.modules.module.register_module_forward_hook(lambda *_: None))
            rows = 4 if step == 1 and is_other else ROWS
            pipe.step(x[:rows], target=y[:rows])
            pipe.settle()
            assert pipe.checked is not None
            checked.append(pipe.checked.step)
    for hook in hooks:
        hook.remove()
    return checked


def refusal(name: str) -> str:
    x, y = labels(slice(0))
    model = grouped() if name.startswith("heads") else decoder() if "cp" in name else chain()
    mesh = {"tp": 2} if name.startswith("heads") else {"cp": 2} if "cp" in name else {"dp": 2}
    given: dict[str, Any] = {"tensor_parallel": PLAN} if "tp" in mesh else {"example": x[:ROWS]} if "cp" in mesh else {}
    try:
        with pipeline(model, loss_fn=watched, mesh=mesh, **given) as pipe:
            line = pipe.axes.place("dp", "cp")
            if name == "other rows along cp":
                pipe.step(x[line:ROWS], target=y[line:ROWS])
            elif name == "a target on one line":
                pipe.eval_step(x[:ROWS], target=y[:ROWS] if line else None)
            elif name == "an evaluation on one line":
                (pipe.eval_step if line else pipe.step)(x[:ROWS], target=y[:ROWS])
            else:
                pipe.step(x[:ROWS], target=y[:ROWS])
    except DrumlineError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.is_wrong = False

    def forward(self, x: Tensor) -> Any:
        return Scaled.apply(x, self.weight, self) if self.is_wrong else x * self.weight  # type: ignore[no-untyped-call]


def wrong_on_one_line() -> str:
    """Train a model whose gradient is wrong on line 1 alone, where all forwards come first."""
    x, y = labels(slice(0))
    model = nn.Sequential(*list(chain())[:3], Scale(), nn.Linear(WIDTH, WORDS))
    with pipeline(model, loss_fn=watched, mesh={"dp": 2}, schedule="gpipe") as pipe:
        own = slice(ROWS * pipe.axes.rows[0], ROWS * (pipe.axes.rows[0] + 1))
        for module in model.modules():
            if isinstance(module, Scale):
                module.is_wrong = pipe.axes.rows[0] == 1
        try:
            pipe.step(x[own], target=y[own])
            pipe.settle()
        except DrumlineError as error:
            return f"{type(error).__name__}: {error}"
    return "accepted"


def everything() -> dict[str, Any]:
    found: dict[str, Any] = {name: trained(name) for name in TRAINED}
    found |= {name: refusal(name) for name in WRONG}
    found |= {"other kinds": other_kinds(), "checked later": checked_later(), "asked": asked_on_one_line()}
    return found | {"wrong": wrong_on_one_line()}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return dl.launch(everything, num_ranks=2)


def rounding(model: nn.Module, gradients: dict[str, Tensor], x: Tensor, y: Tensor) -> float:
    """Return how far the plain model's gradients are off those in float64, the farthest."""
    exact = copy.deepcopy(model).double()
    exact.zero_grad()
    torch.autograd.backward(watched(exact(x), y))
    each = {name: param.grad for name, param in exact.named_parameters() if param.grad is not None}
    return max(float((tensor - gradients[name]).norm()) for name, tensor in each.items())


@pytest.mark.features("check")
@pytest.mark.parametrize("name", TRAINED)
def test_lines_that_count_no_labels_train_as_one_process_does(ranks: list[dict[str, Any]], name: str) -> None:
    make, loss_fn, options, empty = TRAINED[name]
    model, (x, y) = make(), labels(empty, options["mesh"].get("dp", 1))
    loss = model(x, y)["loss"] if loss_fn is None else (summed if loss_fn is summed else watched)(model(x), y)
    torch.autograd.backward(loss)
    wanted = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    size = torch.stack([tensor.double().norm() for tensor in wanted.values()]).norm()
    near = {torch.float64: 1e-10, torch.float32: 1e-5}.get(loss.dtype) or 4 * rounding(model, wanted, x, y) / size
    for rank in some(ranks):
        assert rank[name]["loss"].dtype is loss.dtype
        torch.testing.assert_close(rank[name]["loss"], loss.detach(), rtol=near, atol=0)
        assert rank[name]["gradients"].keys() == wanted.keys()
        assert all(
            some((part - wanted[key]).double().norm() <= near * size for key, part in rank[name]["gradients"].items())
        )
        if "cp" in name:  # it was compared with the model by itself, on something that counts
            assert rank[name]["checked"][0] > 0
            assert rank[name]["checked"][1] == ""


def test_lines_count_together_whichever_has_seen_such_microbatches(ranks: list[dict[str, Any]]) -> None:
    model, (x, y) = chain().double(), labels(slice(6, 8))
    each = [
        (x[torch.arange(16) != 7], y[torch.arange(16) != 7]),
        (torch.cat([x[:4], x[8:]]), torch.cat([y[:4], y[8:]])),
    ]
    wanted = [float(watched(model(rows), target).detach()) for rows, target in each]
    assert all(rank["other kinds"] == pytest.approx(wanted, rel=1e-10) for rank in some(ranks))


def test_lines_check_the_same_steps_whichever_counted_something_first(ranks: list[dict[str, Any]]) -> None:
    model, (x, y) = chain().double(), labels(slice(0, 8))
    wanted = [float(watched(model(x), target).detach()) for target in (y, *[labels(slice(0))[1]] * 3)]
    for losses, step in some([rank["checked later"] for rank in ranks]):
        assert losses == pytest.approx(wanted, rel=1e-10)
        assert step == 2


def test_lines_check_the_same_steps_though_one_traced_the_model_again(ranks: list[dict[str, Any]]) -> None:
    assert [rank["asked"] for rank in ranks] == [[0] * 7, [0] * 7]


@pytest.mark.features("check")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("other rows along cp", "which see parts of the same sequences (cp), got different batches"),
        ("a target on one line", "other lines of the mesh make another kind of step"),
        ("an evaluation on one line", "other lines of the mesh make another kind of step"),
        ("heads of keys and values", "ModelError: the forward of 1 (Grouped) fails with the features that tp = 2"),
    ],
)
def test_what_lines_cannot_do_together_is_refused_by_name(ranks: list[dict[str, Any]], name: str, says: str) -> None:
    assert all(says in rank[name] for rank in some(ranks))


@pytest.mark.features("check")
def test_the_refusal_of_heads_names_the_layers_and_their_features(ranks: list[dict[str, Any]]) -> None:
    assert "1.query 8 of 16, 1.key 2 of 4, 1.value 2 of 4: RuntimeError" in ranks[0]["heads of keys and values"]


@pytest.mark.parametrize("mesh", [None, {"pp": 2}, {"pp": 2, "dp": 2}, {"pp": 2, "tp": 1}])
def test_sequence_parallel_needs_tp(mesh: dict[str, int] | None) -> None:
    with refused(UsageError, "sequence_parallel is True, and the mesh has no tp", fix="sequence_parallel=False"):
        dl.Pipeline(chain(), loss_fn=watched, num_microbatches=2, num_ranks=2, mesh=mesh, sequence_parallel=True)


@pytest.mark.features("check")
def test_all_lines_refuse_what_one_of_them_refuses(ranks: list[dict[str, Any]]) -> None:
    value, other = (rank["wrong"] for rank in ranks)
    assert other.startswith("ModelError: the model, run block by block, returns something else")
    assert value.startswith("ModelError: rank 1 (pp 0, dp 1) refuses the step: the model, run block by block, returns")


class TwoLines:
    """This line, and another that tells losses of bfloat16."""

    def group(self, *_: str) -> object:
        return self

    def summed(self, own: Tensor, *_: str) -> Tensor:
        return own + torch.tensor([0.25, 0.5, 0.0, 0.0, 1.0, 0.0], dtype=torch.float64)


def test_a_line_without_losses_has_the_dtype_of_those_of_others() -> None:
    found = summed_losses(cast(Any, TwoLines()), torch.zeros(2), [])
    assert found.tolist() == [0.25, 0.5]
    assert found.dtype is torch.bfloat16
