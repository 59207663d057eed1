"""The check of the first step on meshes: it compares every parameter, and finds what lines of a mesh get wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import drumline as dl
from drumline.core.errors import DrumlineError
from drumline.features.mesh.experts import parallel
from matrices import ALL
from mesh.small import MICROBATCHES, PLAN, Decoder, batch, decoder, example, loss_fn
from some import some

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.matrix, pytest.mark.features("mesh")]

CP, EP, DP, TP = ({"pp": 2, axis: 2} for axis in ("cp", "ep", "dp", "tp"))
RIGHT: dict[str, dict[str, Any]] = {
    "cp": {"mesh": CP},
    "cp, loss scale": {"mesh": CP, "precision": "fp16"},
    "ep": {"mesh": EP, "schedule": "zb-v"},
    "ep, two copies": {"mesh": EP, "schedule": "dualpipe"},
    "ep and cp": {"mesh": {"ep": 2, "cp": 2}},
    "ep and tp": {"mesh": {"ep": 2, "tp": 2}, "tensor_parallel": PLAN},
}
LOW = {"cp": CP, "ep": EP, "tp": TP, "ep and tp": {"ep": 2, "tp": 2}}  # in bfloat16, by measured rounding
if not ALL:  # the others have these in company
    RIGHT = {"ep, two copies": RIGHT["ep, two copies"]}
    LOW = {"ep and tp": LOW["ep and tp"]}
MORE = ("own positions, bf16", "louder, autocast")  # is found wrong, too


class NoPlaces(Decoder):
    """Takes the positions of its tokens, and begins at 0 all the same."""

    def forward(self, x: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        return super().forward(x, documents)


class Dropping(Decoder):
    """Drops some of what its first layer gets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(0, Drop())


class Drop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        dropped: Tensor = self.dropout(x)
        return dropped


def stepped(model: Any, **options: Any) -> tuple[int, str, str]:
    """Run a step; return how many parameters were checked, what was not, and what was found wrong."""
    given: dict[str, Any] = {"loss_fn": loss_fn, "balance": "even", "timeout": 60.0, "num_microbatches": MICROBATCHES}
    if isinstance(model, Decoder):
        given["example"] = example(options["mesh"])
    with dl.Pipeline(model, **{**given, **options}) as pipe:
        number, lines = pipe.axes.rows
        x, y, _ = zip(*batch("rows", 0, lines)[number], strict=True)
        try:
            pipe.step(torch.cat(x), target=torch.cat(y))
        except DrumlineError as error:
            return 0, "", str(error)
        assert pipe.checked is not None
        return pipe.checked.num_parameters, pipe.checked.unchecked, ""


def made(kind: type[Decoder]) -> Decoder:
    torch.manual_seed(0)
    return kind()


class Louder(parallel._Divided):
    """Experts whose outputs come back a little larger than they left."""

    by = 1.01

    def after(self, module: nn.Module, args: Any, made: Tensor) -> Any:
        there = self._call is not None
        return super().after(module, args, made * self.by if there else made)


class MuchLouder(Louder):
    """Enough for bfloat16."""

    by = 1.3


class Heavier(parallel._Divided):
    """Experts whose own gradients alone get something more."""

    def after(self, module: nn.Module, args: Any, made: Tensor) -> Any:
        more = sum((param.sum() - param.sum().detach() for param in module.parameters()), torch.zeros(()))
        return super().after(module, args, made * (1 + more) if self._call is not None else made)


def all_stepped() -> dict[str, tuple[int, str, str]]:
    found = {name: stepped(decoder(), **options) for name, options in RIGHT.items()}
    found["own positions"] = stepped(made(NoPlaces), mesh=CP)
    found["dropout, cp"] = stepped(made(Dropping), mesh=CP)
    chain = nn.Sequential(nn.Embedding(12, 8), dl.MoE(8, 8, num_experts=4), nn.Linear(8, 12))
    found["chain"] = stepped(chain, mesh=EP)
    for name, mesh in LOW.items():
        plan = {"tensor_parallel": PLAN} if "tp" in mesh else {}
        found[f"bf16, {name}"] = stepped(decoder().bfloat16(), mesh=mesh, **plan)
    if ALL:
        found["dropout, dp"] = stepped(made(Dropping), mesh=DP)
        found["own positions, bf16"] = stepped(made(NoPlaces).bfloat16(), mesh=CP)
    with pytest.MonkeyPatch.context() as patch:
        if ALL:
            patch.setattr(parallel, "_Divided", Louder)
            found["louder"] = stepped(decoder(), mesh=EP)
        patch.setattr(parallel, "_Divided", MuchLouder)
        found["louder, bf16"] = stepped(decoder().bfloat16(), mesh=EP)
        patch.setattr(parallel, "_Divided", Heavier)
        found["heavier, bf16"] = stepped(decoder().bfloat16(), mesh=EP)
        if ALL:
            patch.setattr(parallel, "_Divided", MuchLouder)
            found["louder, autocast"] = stepped(decoder(), mesh=EP, precision="bf16")
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, tuple[int, str, str]]]:
    return dl.launch(all_stepped, num_ranks=4)


@pytest.mark.features("check", "precision")
def test_every_parameter_is_compared(ranks: list[dict[str, tuple[int, str, str]]]) -> None:
    whole = len(list(decoder().parameters()))
    for rank in some(ranks):
        for name in some(RIGHT):
            assert rank[name] == (whole, "", ""), name
        for name in some(LOW):
            assert rank[f"bf16, {name}"] == (whole, "", ""), name
        assert not ALL or rank["dropout, dp"] == (whole, "", "")
        assert rank["chain"] == (6, "", "")


def test_what_lines_get_wrong_is_found(ranks: list[dict[str, tuple[int, str, str]]]) -> None:
    for rank in some(ranks):
        for name in (
            "own positions",
            "louder, bf16",
            *(("louder", "own positions, bf16", "louder, autocast") if ALL else ()),
        ):
            assert "returns something else than by itself" in rank[name][2], name
        assert "the gradient of layers.1.inner.experts.w" in rank["heavier, bf16"][2]


def test_random_numbers_of_parts_of_sequences_are_not_compared(ranks: list[dict[str, tuple[int, str, str]]]) -> None:
    for rank in some(ranks):
        assert rank["dropout, cp"][0] == 0
        assert "which are others for each part of a sequence" in rank["dropout, cp"][1]
