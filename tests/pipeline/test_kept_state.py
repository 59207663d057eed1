"""What blocks keep beside parameters and buffers: plain training's, also where a forward runs twice, or one refusal."""

from __future__ import annotations

import copy
import io
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.core.errors import ModelError
from drumline.pipeline.pipeline import Pipeline
from matrices import matrix, some_of
from refused import refused
from some import some
from state_kinds import (
    ATTRIBUTES,
    WIDTH,
    Array,
    Counter,
    DropsAndCounts,
    Keeps,
    MeanInPlace,
    MeanReplaced,
    NeedsGradient,
    NumpyGenerator,
    NumpyState,
    Object,
    OwnGenerator,
    PythonChance,
    Renewed,
    Table,
    Window,
)  # fmt: skip

pytestmark = pytest.mark.torch
ROWS, NUM_MICROBATCHES, NUM_STEPS = 8, 4, 5
KINDS = ATTRIBUTES


class Chained(nn.Module):
    """Calls its blocks one after another, in a forward of its own."""

    def __init__(self, kind: type[Keeps]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x) + x
        return x


def model_of(kind: type[Keeps], form: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(4))) if form == "chain" else Chained(kind)


def batch(step: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=chance), torch.randn(ROWS, WIDTH, generator=chance)


def blocks_in(model: nn.Module) -> list[Keeps]:
    return [module for module in model.modules() if isinstance(module, Keeps)]


def state_of(block: Keeps) -> dict[str, Any]:
    """Return what a block keeps, as values that can be compared; what it draws next stands for a generator."""
    return {name: plain(value) for name, value in vars(block).items() if not name.startswith("_")}


def plain(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [plain(item) for item in value]
    if isinstance(value, torch.Generator):
        other = torch.Generator()
        other.set_state(value.get_state())
        return torch.rand(3, generator=other).tolist()
    if isinstance(value, np.random.Generator | random.Random):
        return copy.deepcopy(value).random()
    return copy.deepcopy(value).rand() if isinstance(value, np.random.RandomState) else value


Outcome = tuple[list[list[Tensor]], list[dict[str, Any]]]


def trained_plainly(model: nn.Module) -> Outcome:
    """Return every step's gradients, and what blocks keep in the end."""
    gradients = []
    for step in range(NUM_STEPS):
        model.zero_grad()
        inputs, targets = batch(step)
        for x, y in zip(inputs.chunk(NUM_MICROBATCHES), targets.chunk(NUM_MICROBATCHES), strict=True):
            (functional.mse_loss(model(x), y) / NUM_MICROBATCHES).backward()  # type: ignore[no-untyped-call]
        gradients.append([param.grad.clone() for param in some(model.parameters()) if param.grad is not None])
    return gradients, [state_of(block) for block in blocks_in(model)]


def piped(model: nn.Module, schedule: str, **settings: Any) -> Pipeline:
    given: dict[str, Any] = {} if isinstance(model, nn.Sequential) else {"example": batch(0)[0]}
    given |= {
        "record": False,
        "balance": "even",
        "num_ranks": 2,
        "num_microbatches": NUM_MICROBATCHES,
        "transport": "in-process",
    }
    return Pipeline(model, loss_fn=functional.mse_loss, schedule=schedule, **{**given, **settings})


def trained_in_a_pipeline(model: nn.Module, schedule: str, **settings: Any) -> Outcome:
    pipe, gradients = piped(model, schedule, **settings), []
    for step in range(NUM_STEPS):
        model.zero_grad()
        x, y = batch(step)
        pipe.step(x, target=y)
        gradients.append([param.grad.clone() for param in some(model.parameters()) if param.grad is not None])
    return gradients, [state_of(block) for block in blocks_in(model)]


def compare(kind: type[Keeps], form: str, schedule: str, checkpoint: str) -> None:
    model = model_of(kind, form)
    wanted, state = trained_plainly(copy.deepcopy(model))
    gradients, kept_state = trained_in_a_pipeline(model, schedule, checkpoint=checkpoint)
    assert kept_state == state
    for step, (each, expected) in some(list(enumerate(zip(gradients, wanted, strict=True)))):
        for gradient, other in some(list(zip(each, expected, strict=True))):
            torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-7, msg=f"step {step}")


@matrix("kind, schedule", KINDS, ["gpipe", "1f1b", "zb-h1"], times=1)
def test_a_recomputed_block_finds_what_its_first_run_found(kind: type[Keeps], schedule: str) -> None:
    compare(kind, "chain", schedule, "full")


# Tracing takes a tensor that one block stores in a dict for one that the next block reads, and refuses to cut there.
TRACED = [kind for kind in KINDS if kind not in (Table, Renewed)]


@matrix("kind, schedule", some_of(TRACED, TRACED[::2]), ["1f1b", "gpipe", "zb-h1"], times=1)
def test_so_does_a_block_of_a_traced_model(kind: type[Keeps], schedule: str) -> None:
    compare(kind, "traced", schedule, "full")


FEW = some_of(KINDS, [Counter, OwnGenerator, MeanReplaced, DropsAndCounts, NeedsGradient])


@matrix(
    "kind, schedule, form", FEW, ["zb-h1", "1f1b", "gpipe", "interleaved-1f1b", "zb-v"], ["chain", "traced"], times=1
)
def test_without_recomputation_blocks_keep_what_plain_training_leaves(
    kind: type[Keeps], schedule: str, form: str
) -> None:
    compare(kind, form, schedule, "none")


def test_measuring_blocks_for_a_cut_leaves_their_state_alone() -> None:
    model = model_of(Counter, "traced")
    piped(model, "1f1b", balance=None)
    assert [block.calls for block in some(blocks_in(model)) if isinstance(block, Counter)] == [0, 0, 0, 0]


def test_only_the_named_block_runs_on_what_it_kept() -> None:
    model = model_of(Counter, "chain")
    wanted, state = trained_plainly(copy.deepcopy(model))
    gradients, kept_state = trained_in_a_pipeline(model, "1f1b", checkpoint=["1", "2"])
    assert kept_state == state
    torch.testing.assert_close(gradients, wanted, rtol=1e-5, atol=1e-7)


class UsesUp(Keeps):
    def __init__(self, values: Any) -> None:
        super().__init__()
        self.values = values

    def scale(self, x: Tensor) -> Any:
        return next(self.values)


class UsesUpInside(UsesUp):
    def __init__(self, values: Any) -> None:
        super().__init__({"source": [values]})

    def scale(self, x: Tensor) -> Any:
        return next(iter(self.values["source"][0]))


def numbers() -> Iterator[float]:
    while True:
        yield random.random()


class SystemChance(UsesUp):
    def scale(self, x: Tensor) -> Any:
        return self.values.random()


class ReadsAFile(UsesUp):
    def scale(self, x: Tensor) -> Any:
        return float(self.values.readline())


def a_file() -> Any:
    return io.StringIO("1.5\n" * 100)


def a_loader() -> Any:
    numbers: Any = [1.0] * 100
    return iter(torch.utils.data.DataLoader(numbers))


USED_UP: dict[str, tuple[Callable[[], Keeps], str]] = {
    "a generator": (lambda: UsesUp(numbers()), "'values' of block '0' is or holds a generator"),
    "a list's iterator": (lambda: UsesUp(iter([1.0] * 100)), "a list_iterator"),
    "a counter": (lambda: UsesUp(itertools.count()), "a count"),
    "a loader": (lambda: UsesUp(a_loader()), "a _SingleProcessDataLoaderIter"),
    "an iterator in a list": (lambda: UsesUpInside(iter([1.0] * 100)), "'values' of block '0' is or holds a list_it"),
    "the system's chance": (lambda: SystemChance(random.SystemRandom()), "a SystemRandom"),
    "a file": (lambda: ReadsAFile(a_file()), "a StringIO"),
}


@pytest.mark.parametrize("name", USED_UP)
def test_what_cannot_be_taken_back_is_refused_by_name(name: str) -> None:
    make, words = USED_UP[name]
    model = nn.Sequential(make(), nn.Linear(WIDTH, WIDTH))
    pipe = piped(model, "1f1b", checkpoint="full", check_model=False)
    with refused(ModelError, words, expected="a recomputed block to find again", fix='checkpoint="none"'):
        pipe.step(batch(0)[0], target=batch(0)[1])
    assert not any("Spy" in type(value).__name__ for value in some(vars(model[0]).values()))


def test_an_iterator_that_no_forward_uses_is_no_matter() -> None:
    block = UsesUp(iter([1.0]))
    model = nn.Sequential(block, nn.Linear(WIDTH, WIDTH))
    values, block.scale = block.values, lambda x: 1.0  # type: ignore[method-assign]
    pipe = piped(model, "1f1b", checkpoint="full")
    pipe.step(batch(0)[0], target=batch(0)[1])
    assert block.values is values
    assert next(values) == 1.0


def test_an_iterator_without_recomputation_goes_on_from_microbatch_to_microbatch() -> None:
    block = UsesUp(iter([1.0, 2.0, 3.0, 4.0]))
    pipe = piped(nn.Sequential(block, nn.Linear(WIDTH, WIDTH)), "1f1b", check_model=False)
    pipe.step(batch(0)[0], target=batch(0)[1])
    assert list(block.values) == []


class TensorLate(MeanInPlace):
    """Begins to change a tensor in place when its recomputation can no longer find what that was."""

    is_late = False

    def scale(self, x: Tensor) -> Any:
        return super().scale(x) if self.is_late else 1


def test_a_tensor_that_begins_to_change_later_is_refused() -> None:
    model = nn.Sequential(TensorLate(), nn.Linear(WIDTH, WIDTH))
    pipe = piped(model, "1f1b", checkpoint="full")
    pipe.step(batch(0)[0], target=batch(0)[1])
    TensorLate.is_late = True
    try:
        with refused(ModelError, "'mean' of block '0' is or holds a tensor that its forward changes", fix="recompute"):
            pipe.step(batch(0)[0], target=batch(0)[1])
    finally:
        TensorLate.is_late = False


COPIED = [Counter, OwnGenerator, NumpyGenerator, NumpyState, PythonChance, MeanInPlace, Window, Object, Array]


@matrix("kind, checkpoint", COPIED, ["none", "full"], times=1)
def test_two_copies_of_a_stage_refuse_what_each_would_keep_for_itself(kind: type[Keeps], checkpoint: str) -> None:
    pipe = piped(model_of(kind, "chain"), "dualpipe", checkpoint=checkpoint, check_model=False)
    with refused(ModelError, "block '[0-3]' changes its attribute", expected="each of its two copies", fix="zb-v"):
        pipe.step(batch(0)[0], target=batch(0)[1])


class Stores(Keeps):
    """Stores what it computes, and never reads it."""

    def begin(self) -> None:
        self.features: list[Tensor] = []

    def scale(self, x: Tensor) -> Any:
        self.last = x
        self.features[:] = [x]
        return 1


def test_two_copies_of_a_stage_may_store_what_they_compute() -> None:
    pipe = piped(model_of(Stores, "chain"), "dualpipe")
    pipe.step(batch(0)[0], target=batch(0)[1])


def test_layers_of_torch_are_not_looked_at() -> None:
    model = nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, 1, 8, batch_first=True) for _ in range(2)))
    pipe = piped(model, "1f1b", checkpoint="full")
    segments = [segment for stage in pipe._engine.stages() for segment in stage.segments]
    assert not any(segment.ledger.is_needed for segment in some(segments))


def test_blocks_that_keep_nothing_are_known_to_change_nothing() -> None:
    class Plain(Keeps):
        def begin(self) -> None:
            self.sizes = [1, 2]

        def scale(self, x: Tensor) -> Any:
            return self.sizes[0]

    pipe = piped(model_of(Plain, "chain"), "gpipe", checkpoint="full")
    for _ in range(2):
        pipe.step(batch(0)[0], target=batch(0)[1])
    ledgers = [segment.ledger for stage in pipe._engine.stages() for segment in stage.segments]
    assert [ledger.is_needed for ledger in ledgers].count(True) == 2
    assert not any(ledger.changes for ledger in some(ledgers))
