"""Data of a user's function: a run that continues takes the batches that would have followed, or is refused before.

The reference is the same data read once through, in the same order, without any stop.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from drumline.checkpoint.plain_json import packed, unpacked
from drumline.core.errors import RecordError, UsageError
from drumline.train.config.settings import (
    BatchSettings,
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    MeshSettings,
    ModelSettings,
    PipelineSettings,
    RunSettings,
    TrainSettings,
)
from drumline.train.data.items.batch import Batch, Data
from drumline.train.data.own.user_data import data_by_function
from drumline.train.data.position import own_position, position_of
from drumline.train.loop.run import run_training
from drumline.train.models.built import Built
from matrices import some_of
from refused import refused, saying

pytestmark = pytest.mark.torch
ROWS, SIZE, FEW = 14, 4, 5
BUILT = Built(nn.Linear(1, 1), None, inputs="x")
HIDDEN = np.random.default_rng(5)
POINTS = torch.randn(12, 16, generator=torch.Generator().manual_seed(0))


def rows() -> TensorDataset:
    return TensorDataset(torch.arange(ROWS), torch.arange(ROWS) * 2)


class Noisy(Dataset[Any]):
    """Rows with noise from every global generator, and from one of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        drawn = [torch.rand(()).item(), np.random.rand(), random.random(), self.rng.random()]
        return torch.tensor([at, *drawn]), torch.tensor(at)


class Batches(BatchSampler):
    """Batches of the user's own, from a generator that only a closure holds."""

    def __init__(self) -> None:
        mine = random.Random(9)

        def order() -> list[int]:
            return mine.sample(range(ROWS), ROWS)

        self.order = order

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order()
        yield from (order[at : at + SIZE] for at in range(0, ROWS, SIZE))

    def __len__(self) -> int:
        return -(-ROWS // SIZE)


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for at in torch.randperm(ROWS).tolist():
            yield torch.tensor([at, random.random()]), torch.tensor(at)


class Written:
    """A class with a generator function, which draws from numpy's global state."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(3):
            yield torch.from_numpy(np.random.rand(2)), torch.zeros(2)


class ByEpoch:
    """An order that depends on the epoch alone."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = np.random.default_rng(self.epoch).permutation(FEW)
        yield from ((torch.tensor(int(at)), torch.tensor(0)) for at in order)


class Stateful:
    """Keeps its own position, as torchdata's StatefulDataLoader does: tensors, nested dicts, bytes, generators."""

    def __init__(self) -> None:
        self.at, self.order, self.loaded = 0, torch.empty(0, dtype=torch.long), False

    def __iter__(self) -> Iterator[Any]:
        if not self.loaded:
            seed = int(torch.empty((), dtype=torch.int64).random_())
            self.at, self.order = 0, torch.randperm(FEW, generator=torch.Generator().manual_seed(seed))
        self.loaded = False
        return self._rest()

    def _rest(self) -> Iterator[Any]:
        while self.at < FEW:
            self.at += 1
            yield self.order[self.at - 1], torch.rand(1)

    def state_dict(self) -> dict[str, Any]:
        inner = {"order": self.order, ("a", 1): b"\xff", "nan": float("nan"), "large": 2**90, "none": None}
        return {"at": self.at, "nested": {"inner": inner, "numbers": np.arange(3)}, "flags": (True, {1, 2})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        inner = state["nested"]["inner"]
        assert (inner["a", 1], inner["large"], state["flags"]) == (b"\xff", 2**90, (True, {1, 2}))
        self.at, self.order = state["at"], inner["order"]
        self.loaded = bool(len(self.order))


def seeded_loader(**more: Any) -> DataLoader[Any]:
    return DataLoader(rows(), batch_size=SIZE, shuffle=True, generator=torch.Generator().manual_seed(7), **more)


EXACT: dict[str, Callable[[], Any]] = {
    "a list": lambda: [(torch.tensor([at]), torch.tensor([at])) for at in range(5)],
    "shuffled": lambda: DataLoader(rows(), batch_size=SIZE, shuffle=True),
    "shuffled, seeded": seeded_loader,
    "a sampler": lambda: DataLoader(rows(), SIZE, sampler=RandomSampler(rows(), replacement=True, num_samples=9)),
    "batches of their own": lambda: DataLoader(rows(), batch_sampler=Batches()),
    "noise": lambda: DataLoader(Noisy(), batch_size=SIZE, shuffle=True),
    "iterable": lambda: DataLoader(Streamed(), batch_size=SIZE),
    "a generator": Written,
    "by epoch": ByEpoch,
    "a state": Stateful,
}
WORKERS: dict[str, Callable[[], Any]] = {
    "workers that live on": lambda: DataLoader(Noisy(), SIZE, shuffle=True, num_workers=1, persistent_workers=True),
    "iterable workers": lambda: DataLoader(Streamed(), batch_size=SIZE, num_workers=2),
}


def made(make: Callable[..., Any], **settings: Any) -> Data:
    """Return the data of a process that has just begun."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    given = DataSettings(kind="function", function=f"{__name__}:{name_of(make)}", **settings)
    return data_by_function(TrainSettings(data=given, evaluation=EvaluationSettings(every=0)), BUILT, rank=0, size=1)


def name_of(make: Callable[..., Any]) -> str:
    globals()["_given"] = make
    return "_given"


def read(batches: Iterator[Batch], count: int, noise: int) -> list[Any]:
    """Return so many batches, while training draws random numbers in between."""
    found = []
    for _ in range(count):
        batch = next(batches)
        found.append((batch.inputs["x"].tolist(), batch.target.tolist()))
        for _ in range(noise):
            torch.rand(1), np.random.rand(), random.random()
    return found


def check_continues(make: Callable[[], Any], stops: tuple[int, ...]) -> None:
    data = made(make)
    whole = read(iter(data.training), 12, 1)
    data.close()
    assert len({str(value) for value in whole}) > 1
    for stop in stops:
        first = made(make)
        begun = read(iter(first.training), stop, 2)
        saved = json.dumps(packed(first.training.state_dict()))
        first.close()
        other = made(make)
        other.training.load_state_dict(unpacked(json.loads(saved)))
        assert begun + read(iter(other.training), 12 - stop, 3) == whole, f"stopped after {stop}"
        other.close()


@pytest.mark.parametrize("kind", EXACT)
def test_data_continue_with_the_batches_that_would_have_followed(kind: str) -> None:
    check_continues(EXACT[kind], (0, 1, 4, 6, 9))


@pytest.mark.parametrize("kind", some_of(list(WORKERS), ["workers that live on"]))
def test_data_of_workers_continue_exactly(kind: str) -> None:
    check_continues(WORKERS[kind], (6,))


class Onwards:
    """Goes on where it was left, and cannot be brought back."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.at += 1
            yield torch.tensor(self.at), torch.tensor(0)


class Hidden:
    """Draws from a generator that cannot be found."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.tensor(random.SystemRandom().random()), torch.tensor(0)


class Forgetful(Stateful):
    """Says where it is, and not in which order."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Unsavable(Stateful):
    def state_dict(self) -> dict[str, Any]:
        return {"nested": [{"lock": object()}]}


def drawn_once() -> Iterator[Any]:
    yield torch.zeros(1), torch.zeros(1)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            Onwards,
            saying(
                "gives other batches when it is gone through once more", fix=r"have state_dict\(\) and load_state_dict"
            ),
        ),
        (Hidden, saying("gives other batches when it is gone through once more from the same random state")),
        (Forgetful, saying("gives data that do not continue where their state_dict")),
        (Unsavable, saying(r"cannot be saved: state\['nested'\]\[0\]\['lock'\] is an object of the class object")),
        (drawn_once, saying("returned a generator", fix="__iter__")),
        (partial(seeded_loader, num_workers=2, in_order=False), saying("in_order=False")),
    ],
)
def test_data_that_could_not_be_continued_exactly_are_refused_at_the_start(make: Any, match: dict[str, str]) -> None:
    with refused(UsageError, **match):
        made(make)


def test_data_that_cannot_be_continued_exactly_train_if_that_is_allowed() -> None:
    assert read(iter(made(Onwards, exact=False).training), 3, 0) == [(at, 0) for at in (1, 2, 3)]


def test_a_generator_of_the_module_is_found() -> None:
    class Drawing:
        def __iter__(self) -> Iterator[Any]:
            yield from ((torch.tensor(HIDDEN.random()), torch.tensor(0)) for _ in range(FEW))

    def make() -> Any:
        HIDDEN.bit_generator.state = np.random.default_rng(5).bit_generator.state  # as in another process
        return Drawing()

    check_continues(make, (3, 7))


def test_data_that_have_changed_since_are_noticed() -> None:
    first = made(EXACT["a list"])
    read(iter(first.training), 2, 0)
    state = first.training.state_dict()
    for other, match in (
        (lambda: [(torch.tensor([at + (at == 1)]), torch.tensor([at])) for at in range(5)], "gives other batches than"),
        (lambda: [(torch.tensor([0]), torch.tensor([0]))], "gives 1 batches in an epoch of which 2 were used"),
    ):
        changed = made(other)
        changed.training.load_state_dict(state)
        with refused(UsageError, match):
            next(iter(changed.training))


def test_training_draws_what_it_would_without_data() -> None:
    data = made(EXACT["noise"])
    torch.manual_seed(4)
    next(iter(data.training))
    drawn = torch.rand(3)
    torch.manual_seed(4)
    assert torch.equal(drawn, torch.rand(3))


class Points(Stateful):
    """The same for an MLP: batches of four points with noise, and a state with tensors."""

    def _rest(self) -> Iterator[Any]:
        for _, _ in super()._rest():
            yield torch.rand(4, 16), torch.randint(0, 4, (4,))


@pytest.mark.features("capture", "check", "lengths", "precision", "record", "saving", "stream")
@pytest.mark.parametrize(
    "make", [Points, lambda: DataLoader(TensorDataset(POINTS, POINTS.argmax(1) % 4), 4, shuffle=True)]
)
def test_a_run_that_continues_trains_as_the_first_did(make: Callable[[], Any], tmp_path: Path) -> None:
    def losses(out: str, resume: str = "") -> list[float]:
        torch.manual_seed(len(out))  # whatever was drawn before
        settings = TrainSettings(
            model=ModelSettings(kind="mlp", num_layers=2, hidden=8),
            data=DataSettings(kind="function", function=f"{__name__}:{name_of(make)}"),
            batch=BatchSettings(sequences=4, microbatch=2, sequence=1),
            mesh=MeshSettings(pipeline=1),
            pipeline=PipelineSettings(transport="in-process", device="cpu"),
            evaluation=EvaluationSettings(every=0),
            checkpoint=CheckpointSettings(every=4, resume=resume),
            run=RunSettings(steps=9, out=str(tmp_path / out)),
        )
        return run_training(settings, tell=lambda told: None).losses

    whole = losses("whole")
    assert losses("again", str(tmp_path / "whole" / "checkpoints" / "step-00000004")) == whole[4:]


def test_every_data_parallel_rank_goes_on_from_its_own_position() -> None:
    class Told:
        def __init__(self, number: int, others: list[Any]) -> None:
            self.axes, self.others = SimpleNamespace(rows=(number, 2)), others

        def gather(self, value: Any) -> list[Any]:
            self.others.append(value)
            return [*self.others, *self.others]  # two ranks of each line

    def state_of(generator: int) -> Any:
        return SimpleNamespace(state_dict=lambda: {"order": torch.tensor([generator])})

    lines: list[Any] = [Told(0, []), Told(1, [(0, packed({"order": torch.tensor([5])}))])]
    saved = position_of(state_of(7), lines[1])
    assert [own_position(saved, at, 2)["order"].item() for at in (0, 1)] == [5, 7]
    with refused(UsageError, "that of 2 data-parallel ranks, and there are 1", fix="set mesh.data = 2"):
        own_position(saved, 0, 1)
    alike = position_of(state_of(5), Told(1, [(0, packed({"order": torch.tensor([5])}))]))  # type: ignore[arg-type]
    assert alike["order"].item() == 5


def test_what_a_checkpoint_keeps_of_the_user_comes_back_as_it_was() -> None:
    given = {
        "whole": [2**63, -(2**63), True], "float": [float("inf"), -0.0, 1e-310], "text": "né\udcff", "nothing": None,
        "tensors": (torch.arange(6).reshape(2, 3), torch.tensor(2.5, dtype=torch.bfloat16), torch.empty(0, 4)),
        "arrays": [np.arange(4, dtype=np.uint32), np.float32(0.1), np.array("ab")], 3: {"$drumline": (b"\0", {1})},
    }  # fmt: skip
    back = unpacked(json.loads(json.dumps(packed(given), allow_nan=False)))
    assert str(back) == str(given)
    assert [tensor.dtype for tensor in back["tensors"]] == [torch.int64, torch.bfloat16, torch.float32]
    assert [array.dtype for array in back["arrays"]] == [np.uint32, np.float32, np.dtype("<U2")]
    for wrong in ({"$drumline": "tensor", "of": ["int64", [9], "AAAA"]}, {"$drumline": "nosuch", "of": 1}):
        with refused(RecordError, "a saved value is damaged"):
            unpacked(wrong)
