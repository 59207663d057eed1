"""The way of a microbatch from `Pipeline.step` to the module's own call: few frames of ours, each with a purpose."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import drumline
from drumline.pipeline.pipeline import Pipeline
from some import some
from torch_models import data

pytestmark = pytest.mark.torch
OURS = str(Path(drumline.__file__).parent)
MOST = 7  # from Pipeline.step, counted, to the module's own call
# Our calls before the first forward of a step, and the files they are in; in Python 3.11 comprehensions have frames.
CALLS = {"chain": (90, 20), "followed": (150, 30)}
INNER = {"<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>"}


def frames_of_ours() -> list[str]:
    """Return the functions of ours that led here, the outermost first."""
    found: list[str] = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(OURS):
            found.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return found[::-1]


class Counts(nn.Module):
    """Notes how it was reached."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.ways: list[list[str]] = []

    def forward(self, x: Tensor) -> Any:
        self.ways.append(frames_of_ours())
        return self.layer(x)


def ways(schedule: str) -> list[list[str]]:
    blocks = [Counts() for _ in range(4)]
    model, loss_fn = nn.Sequential(*blocks), functional.mse_loss
    pipe = Pipeline(model, loss_fn=loss_fn, schedule=schedule, num_microbatches=4, num_ranks=2)
    batch, target = data(8)
    pipe.step(batch, target=target)  # may run what it does not know yet twice
    for block in blocks:
        block.ways.clear()
    pipe.step(batch, target=target)
    return [way for block in blocks for way in block.ways]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b"])
def test_an_unsplit_forward_passes_few_frames(schedule: str) -> None:
    found = ways(schedule)
    assert len(found) == 16
    for way in found:
        assert way[0] == "Pipeline.step"
        assert way[-3:] == ["Executor.run", "Stage.forward", "Segment.run"]
        assert len(way) <= MOST


class Follows(nn.Module):
    """Calls its layers by a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def calls_before_a_forward(kind: str, num_microbatches: int) -> list[tuple[str, str]]:
    """Return file and function of our calls in a steady step until its first block runs."""
    model: Any = Follows() if kind == "followed" else nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    first = model.layers[0] if kind == "followed" else model[0]
    given: dict[str, Any] = {"example": torch.zeros(16, 6)} if kind == "followed" else {}
    pipe = Pipeline(
        model,
        loss_fn=functional.mse_loss,
        num_microbatches=num_microbatches,
        num_ranks=2,
        record=False,
        balance="even",
        transport="in-process",
        **given,
    )
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    batch, target = data(16)
    for _ in range(4):
        pipe.step(batch, target=target)
        optimizer.step()
        optimizer.zero_grad()
    found: list[tuple[str, str]] = []
    reached = False

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal reached
        code = frame.f_code
        begins = event == "call" and code.co_name in ("_wrapped_call_impl", "_call_impl", "forward")
        reached = reached or (begins and frame.f_locals.get("self") is first)
        if event == "call" and not reached and code.co_filename.startswith(OURS) and code.co_name not in INNER:
            found.append((code.co_filename.removeprefix(OURS), code.co_qualname))

    sys.setprofile(note)
    try:
        pipe.step(batch, target=target)
    finally:
        sys.setprofile(None)
    assert reached
    return found


@pytest.mark.features("record")
@pytest.mark.parametrize("kind", CALLS)
def test_few_calls_come_before_a_steps_first_forward(kind: str) -> None:
    found = calls_before_a_forward(kind, 4)
    calls, files = CALLS[kind]
    assert len(found) <= calls, found
    assert len({file for file, _ in found}) <= files
    assert len(calls_before_a_forward(kind, 16)) <= len(found)


def test_a_split_forward_goes_straight_on_from_its_stage() -> None:
    for way in some(ways("zb-h1")):
        assert way[-5:] == ["Executor.run", "Stage.forward", "Stage._with_graph", "Segment.recorded", "Segment.run"]
        assert len(way) <= MOST + 2


@pytest.mark.features("check")
def test_a_piece_of_a_followed_model_adds_one_frame() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x: Tensor) -> Any:
            return self.layers[1](self.layers[0](x)) + x

    layers = [Counts(), Counts()]
    model = Skips()
    pipe = Pipeline(
        model,
        loss_fn=functional.mse_loss,
        num_microbatches=2,
        num_ranks=2,
        example=torch.zeros(4, 6),
        check_model=False,
    )
    for layer in layers:
        layer.ways.clear()
    batch, target = data(4)
    pipe.step(batch, target=target)
    found = [way for layer in layers for way in layer.ways]
    assert found
    assert all(way[-3:] == ["Stage.forward", "Segment.run", "Piece.forward"] for way in found)
    assert max(map(len, found)) <= MOST + 1
