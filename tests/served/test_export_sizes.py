"""An export admits the sizes and numbers for which it is the model: branches on sizes, rows that mix, lookups."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
from torch import nn
from torch.nn.functional import one_hot

from drumline.core.errors import ModelError
from drumline.serve.export.check import StageCheck, Subject, check_sizes, plain_outputs
from drumline.serve.export.export import export
from drumline.serve.export.guards import Admission, Assumption, assumptions_of
from drumline.serve.export.lookups import bounds_of
from drumline.serve.export.whole import traced, write_whole
from drumline.serve.session import Session, open_session
from drumline.serve.wire.manifest import Sizes, Tensor
from drumline.serve.wire.tensors import Refused, check_values
from drumline.train.export_models import _resizing
from matrices import left, mainly
from refused import refused
from served.model_fuzz import drawn_model, exported_or_refused, wrong_answers

pytestmark = [pytest.mark.torch, pytest.mark.slow]
CHANGING = {"x": {0: "batch", 1: "length"}}


class Branching(nn.Module):
    def __init__(self, branch: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float() * (2 if self.branch(x) else 3)


class Function(nn.Module):
    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.table, self.function = nn.Embedding(10, 4), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def admission(branch: Callable[[torch.Tensor], bool], most: int = 64) -> Admission:
    """Return what a trace of 4 rows of length 12 admits; small sizes are as PyTorch computes them."""
    model = Branching(branch)
    program = traced(model, {"x": torch.ones(4, 12, dtype=torch.int64)}, CHANGING, {"length": most})

    def tries(rows: int, length: int) -> bool:
        return branch(torch.ones(rows, length)) == branch(torch.ones(4, 12))

    return Admission(assumptions_of(program, CHANGING), most={"length": most}, has_length=True, tries=tries)


@mainly(
    ("branch", "batch", "length"),
    *[
        (lambda x: x.shape[1] % 4 == 0, Sizes(1, None), Sizes(4, 64, 4)),
        (lambda x: x.shape[1] > 40, Sizes(1, None), Sizes(1, 40)),
        (lambda x: x.shape[0] > 8, Sizes(1, 8), Sizes(1, 64)),
        (lambda x: int(x.shape[1] ** 0.5) == 3, Sizes(1, None), Sizes(9, 15)),
        (lambda x: x.shape[0] * x.shape[1] > 64 * 16, Sizes(1, 16), Sizes(1, 64)),
    ],
)
def test_a_branch_on_sizes_becomes_a_range_of_them(
    branch: Callable[[torch.Tensor], bool], batch: Sizes, length: Sizes
) -> None:
    assert admission(branch).dimensions(12) == {"batch": batch, "length": length}


@mainly(
    ("branch", "text"),
    *[
        (lambda x: x.shape[0] < x.shape[1], "batch < length"),
        (lambda x: x.shape[0] == x.shape[1], r"Ne\(batch, length\)"),
        (lambda x: x.shape[1] == 30, r"Ne\(length, 30\)"),
        (lambda x: x.shape[0] % 2 == 0, r"Mod\(batch, 2\)"),
    ],
)
def test_a_branch_that_no_range_expresses_is_refused_by_its_condition(
    branch: Callable[[torch.Tensor], bool], text: str
) -> None:
    with refused(ModelError, text, expected="ranges of rows and lengths"):
        admission(branch).dimensions(12)


def _assumed(text: str, holds: Callable[[int, int], bool]) -> Assumption:
    return Assumption(text, frozenset({"batch", "length"}), lambda sizes: holds(sizes["batch"], sizes["length"]))


def _says(is_right: bool, rows: int, length: int) -> bool:
    return is_right


def test_small_sizes_that_a_trace_only_tells_from_one_are_admitted_if_they_are_computed_right() -> None:
    only_larger = [_assumed("2 <= length // 4", lambda rows, length: length // 4 >= 2)]
    for right, least in ((True, 1), (False, 8)):
        made = Admission(only_larger, most={"length": 32}, has_length=True, tries=partial(_says, right))
        assert made.dimensions(12)["length"] == Sizes(least, 32)


def test_a_refusal_names_a_condition_also_if_only_the_length_holds_that_is_tried() -> None:
    short = _assumed("length < 2", lambda rows, length: length < 2)
    made = Admission([short], most={"length": 32}, has_length=True, tries=lambda rows, length: False)
    with refused(ModelError, "the exported graph is right only if length < 2"):
        made.dimensions(12)


def test_what_a_trace_of_one_row_assumes_bounds_lengths() -> None:
    made = Admission([], most={"length": 32}, has_length=True, tries=lambda rows, length: False)
    made.with_one_row = [_assumed("length <= 20", lambda rows, length: length <= 20)]
    assert made.dimensions(12)["length"] == Sizes(2, 20)
    assert made.broken(2, 25) == ""


def test_one_row_is_compared_with_pytorch_whatever_the_exporter_takes_it_for(tmp_path: Path) -> None:
    x = torch.randint(1, 9, (2, 12))
    subject = Subject("one", Branching(lambda x: x.shape[0] == 1), _resizing({"x": x}), {"length": 12})
    with refused(ModelError, r"differ from PyTorch by .* at 1 rows of length", fix="branches on sizes"):
        export(subject, tmp_path / "out", num_stages=1)


@pytest.mark.parametrize(
    "mixed",
    [
        lambda model, x: x - x.float().mean(),
        lambda model, x: (x - 0.01 * x.float().mean()) > 0.5,  # the same, whoever is beside
        *left(lambda model, x: x / x.sum(1).max(), lambda model, x: x + x.roll(1, 0)),
    ],
)
def test_rows_that_mix_by_whole_numbers_are_refused(
    mixed: Callable[[Any, torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    subject = Subject("mixed", Function(mixed), _resizing({"x": torch.full((1, 6), 7)}), {"length": 8})
    with refused(ModelError, "a row alone gives other outputs than in a batch"):
        export(subject, tmp_path / "out", num_stages=1)


def _with_room(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Add 1 to each token, but of equal ones there is room for 4 more than half of all tokens."""
    number = one_hot(x.flatten(), 10).cumsum(0).gather(1, x.reshape(-1, 1)).view(x.shape)
    return x.float() + (number <= x.numel() // 2 + 4)


def test_rows_that_mix_only_if_they_are_equal_are_refused(tmp_path: Path) -> None:
    subject = Subject("m", Function(_with_room), _resizing({"x": torch.arange(10).view(2, 5)}), {"length": 8})
    with refused(ModelError, "a row alone gives other outputs than in a batch"):
        export(subject, tmp_path / "out", num_stages=1)


def test_a_number_that_is_none_of_the_classes_of_a_one_hot_vector_is_refused(tmp_path: Path) -> None:
    model = Function(lambda model, x: one_hot(2 * x - x, 10))
    example = {"x": torch.ones(4, 12, dtype=torch.int64)}
    write_whole(model, traced(model, example, CHANGING, {"length": 64}), example, tmp_path / "whole.onnx")
    session, x = open_session(tmp_path / "whole.onnx"), np.array([[9, 0]])
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], plain_outputs(model, {"x": torch.from_numpy(x)})[0])
    for value in (-1, 10):
        with pytest.raises(InvalidArgument):
            session.run(None, {"x": np.array([[value, 0]])})


def test_bounds_of_lookups_are_followed_through_casts_sums_and_reshapes() -> None:
    def looked_up(model: Any, x: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = model.table((x.int() + 1).long().reshape(-1)).view(*x.shape, 4)
        return rows + one_hot(x.flatten(), 12).sum()

    program = traced(Function(looked_up), {"x": torch.ones(4, 12, dtype=torch.int64)}, CHANGING, {"length": 64})
    bounds = bounds_of(program, ["x"])["x"]
    assert bounds == (0, 9)
    tensor = Tensor("x", "INT64", ("batch", "length"), bounds.below, -1)
    check_values(tensor, np.array([[-1, 8]]))
    for value in (-2, 9):
        with pytest.raises(Refused, match=f"the value {value}; expected -1 to 8"):
            check_values(tensor, np.array([[value, 8]]))


def test_numbers_that_a_cast_wraps_are_not_bound_by_the_lookup_behind_it() -> None:
    model = Function(lambda model, x: model.table(x.to(torch.uint8).int() - 1))
    example = {"x": torch.ones(4, 12, dtype=torch.int64)}
    assert model(example["x"] + 256).equal(model(example["x"]))
    assert bounds_of(traced(model, example, CHANGING, {"length": 64}), ["x"]) == {}


def test_lookups_refuse_negative_numbers_where_pytorch_does(tmp_path: Path) -> None:
    model = Function(lambda model, x: model.table(2 * x - x) + model.table.weight[x - 1])
    example = _resizing({"x": torch.randint(0, 9, (2, 6))})
    made = export(Subject("m", model, example, {"length": 8}), tmp_path / "out", num_stages=1)
    session = Session(tmp_path / "out", made, 0)
    x = np.array([[8, 0]])  # plain indices may be negative, in PyTorch too
    np.testing.assert_allclose(session.run({"x": x})["output"], plain_outputs(model, {"x": torch.from_numpy(x)})[0])
    with pytest.raises(ValueError, match="cannot compute this input"):
        session.run({"x": np.array([[-1, 0]])})


@pytest.mark.parametrize(
    ("function", "dtype", "said"),
    [
        (lambda model, x: model.table(torch.where(x < 0, 0, x).long()), torch.int16, "Could not find"),
        (lambda model, x: model.table(x).squeeze(1), torch.int64, "running Squeeze node"),  # for PyTorch nothing
    ],
)
def test_a_graph_that_onnx_runtime_cannot_compute_is_refused(
    function: Callable[[Any, torch.Tensor], torch.Tensor], dtype: torch.dtype, said: str, tmp_path: Path
) -> None:
    example = _resizing({"x": torch.randint(0, 9, (2, 6)).to(dtype)})
    with refused(ModelError, f"ONNX Runtime does not compute the exported graph: .*{said}", fix="int64"):
        export(Subject("m", Function(function), example, {"length": 8}), tmp_path / "out", num_stages=1)
    assert not (tmp_path / "out").exists()


def test_a_model_that_does_something_else_for_one_token_is_served_from_two_on(tmp_path: Path) -> None:
    model = Function(lambda model, x: model.table(x) * (-2 if x.shape[1] == 1 else 1))
    example = _resizing({"x": torch.randint(0, 9, (2, 6))})
    made = export(Subject("m", model, example, {"length": 8}), tmp_path / "out", num_stages=1)
    assert made.dimensions["length"] == Sizes(2, 8)


def test_a_model_that_fails_for_one_row_is_refused(tmp_path: Path) -> None:
    """Without running statistics a normalisation takes the mean of its batch, of which one row has none."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False))
    subject = Subject("m", model, _resizing({"input": torch.randn(4, 4)}), {})
    with refused(
        ModelError, r"the model itself fails for inputs of shape input \[1, 4\]", expected="any number of rows"
    ):
        export(subject, tmp_path / "out", num_stages=1)


def test_the_check_runs_each_dimension_at_its_largest_and_says_what_it_did_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert check_sizes(4, 32, {"batch": Sizes(1, 8), "length": Sizes(8, 256, 8)})[-2:] == [(1, 8), (8, 8)]
    check = StageCheck.__new__(StageCheck)
    compared: list[tuple[int, int]] = []
    monkeypatch.setattr(check, "compare", lambda rows, length: compared.append((rows, length)), raising=False)
    assert check.compare_long(32, Sizes(8, 200, 8)) == ()
    assert compared == [(1, 64), (1, 128), (1, 200)]
    monkeypatch.setattr("drumline.serve.export.check.SECONDS", -1.0)
    assert check.compare_long(32, Sizes(8, 200, 8)) == ((1, 200),)
    assert compared[3:] == [(1, 64)]


@pytest.mark.parametrize("tensor", [Tensor("x", "INT64", ("batch",), 9, -1)])
def test_a_tensor_with_bounds_is_written_with_both(tensor: Tensor) -> None:
    assert tensor.to_json() == {"name": "x", "datatype": "INT64", "shape": ["batch"], "below": 9, "least": -1}


@mainly("seed", 11, 1, 3, 6)
def test_models_drawn_by_chance_are_refused_or_served_right(seed: int, tmp_path: Path) -> None:
    model = drawn_model(seed)
    made = exported_or_refused(model, tmp_path / "out", seed)
    if not isinstance(made, str):
        assert wrong_answers(model, tmp_path / "out", made, seed) == []
