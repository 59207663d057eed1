"""Random meshes, schedules, losses, labels and dtypes against plain torch: some of what `make bench` runs."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fuzz_mesh
from fuzz_mesh import Outcome, fuzz, table
from matrices import ALL, long
from mesh_cases import MESHES, PATTERNS, Case, drawn
from mesh_judge import difference, judged
from mesh_models import LOSSES
from mesh_plain import Results, plain, wanted
from mesh_runs import line_of, read
from some import some

# PyTorch says so once on processors without bfloat16.
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")]
COUNTS = {1: 30, 2: 8, 4: 2}  # cases by their ranks, of which small ones are chosen


def size_of(case: Case) -> int:
    """Return about what a case costs: models that are followed cost most, and all cost more that are checked."""
    return case.num_microbatches * (1 if case.kind == "chain" else 50) * (2 if "check_model" in case.options else 3)


def standing_for(cases: list[Case], count: int) -> list[Case]:
    """Return small cases: of two ranks one of each axis, and others that have as many kinds as can be."""
    axes = sorted({axis for case in cases for axis in case.mesh} if cases[0].ranks == 2 else ())
    found = [min((case for case in cases if axis in case.mesh and not case.refusal), key=size_of) for axis in axes]
    left = set[str]()
    while len(found) < count:
        left = left or {kind for case in cases for kind in kinds_of(case)}
        rest = [case for case in cases if case not in found]
        found.append(min(rest, key=lambda case: (-len(kinds_of(case) & left) / size_of(case), case.number)))
        left -= kinds_of(found[-1])
    return found


def kinds_of(case: Case) -> set[str]:
    """Return what a case has that other cases may lack: axes, dtype, patterns of labels, a loss."""
    patterns = case.patterns if case.function.is_labels else ()
    return {"refused"} if case.refusal else {*case.kinds, *patterns, case.loss}


EVERY = [drawn(0, number) for number in range(400)]
CASES = {
    ranks: standing_for([case for case in EVERY if case.ranks == ranks and (ranks == 2 or case.kind == "chain")], count)
    for ranks, count in COUNTS.items()
}


def test_forty_cases_are_run() -> None:
    assert sum(map(len, CASES.values())) == 40
    assert {axis for each in CASES.values() for case in each for axis in case.mesh} == {"pp", "dp", "cp", "tp", "ep"}


@pytest.mark.features("check", "mesh")
@pytest.mark.slow
@pytest.mark.timeout(1800)  # of a busy machine; every wait inside is bounded
@pytest.mark.parametrize("ranks", COUNTS)
def test_every_case_is_equal_to_plain_torch_or_refused_as_foreseen(ranks: int) -> None:
    numbers = [case.number for case in (EVERY if ALL else CASES[ranks]) if case.ranks == ranks]
    found = fuzz(0, numbers)
    assert found.is_clean, "\n".join(found.failures)
    assert 0 < found.counts["equal"] <= found.counts.total() == len(numbers)


def test_a_case_is_what_its_seed_and_number_make_it() -> None:
    assert [drawn(3, number).described() for number in range(20)] == [drawn(3, at).described() for at in range(20)]
    assert "--seed 3 --first 7 --cases 1" in drawn(3, 7).again


def test_cases_have_every_mesh_loss_and_pattern() -> None:
    cases = EVERY
    assert {str(entry) for each in MESHES.values() for entry in each} == {str(case.mesh) for case in cases}
    assert {case.loss for case in cases} == set(LOSSES)
    assert {pattern for case in cases for pattern in case.patterns} == set(PATTERNS)
    assert {case.dtype for case in cases} == {"float64", "float32", "bfloat16"}
    assert 0.02 < sum(bool(case.refusal) for case in cases) / len(cases) < 0.2


@pytest.fixture(scope="module")
def right() -> tuple[Case, dict[str, Any]]:
    """A case in float64, and what a rank that is right would tell."""
    case = next(case for case in EVERY if case.near == 1e-10 and case.evaluates and not case.refusal)
    return case, told_by(plain(case))


def told_by(made: Results) -> dict[str, Any]:
    """Return what a rank with these results tells."""
    names = ("losses", "gradients", "state", "norm", "evaluated")
    return {name: getattr(made, name) for name in names}


def test_a_right_rank_is_equal_and_the_smallest_fault_is_noticed(right: tuple[Case, dict[str, Any]]) -> None:
    case, rank = right
    assert judged(case, [rank]) == ("equal", "")
    for spoil in some((_loss, _gradient, _norm, _state, _missing, _evaluation)):
        wrong = copy.deepcopy(rank)
        spoil(wrong)
        assert judged(case, [rank, wrong])[0] == "wrong", spoil.__name__


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_low_precision_is_judged_by_how_far_the_plain_model_is_off(dtype: str) -> None:
    case = next(case for case in EVERY if case.dtype == dtype and not case.own and not case.refusal)
    exact, bounds = wanted(case)
    assert all(tensor.dtype is torch.float64 for tensor in some(exact.state.values()))
    rank = told_by(plain(case, each=True))
    assert judged(case, [rank]) == ("equal", "")
    name, gradient = next(iter(rank["gradients"][0].items()))
    gradient.add_(torch.randn_like(gradient), alpha=2 * bounds.gradients[0])
    assert f"the gradient of {name} on rank 0 is off" in judged(case, [rank])[1]


def test_bounds_grow_with_what_a_dtype_rounds() -> None:
    low = next(case for case in EVERY if case.dtype == "bfloat16" and not case.refusal and case.kind == "chain")
    fine = replace(low, dtype="float32")
    assert 1e3 < wanted(low)[1].gradients[0] / wanted(fine)[1].gradients[0] < 1e7


def _loss(rank: dict[str, Any]) -> None:
    rank["losses"][1] *= 1 + 1e-8


def _gradient(rank: dict[str, Any]) -> None:
    next(iter(rank["gradients"][0].values())).mul_(1.5)


def _norm(rank: dict[str, Any]) -> None:
    rank["norm"] *= 1 + 1e-6


def _state(rank: dict[str, Any]) -> None:
    rank["state"]["another"] = torch.zeros(1)


def _missing(rank: dict[str, Any]) -> None:
    rank["gradients"][1]["another"] = torch.zeros(1)


def _evaluation(rank: dict[str, Any]) -> None:
    rank["evaluated"] += 1e-6


def test_errors_are_told_apart(right: tuple[Case, dict[str, Any]]) -> None:
    case, rank = right
    told: dict[str, Any] = {"losses": [], "gradients": []}
    assert judged(case, [{**told, "error": ("traceback", "KeyError: 0")}])[0] == "traceback"
    assert judged(case, [{**told, "error": ("hang", "no end")}])[0] == "died"
    assert judged(case, [{**told, "error": ("WaitTimeout", "too late")}])[0] == "died"
    assert judged(case, [{**told, "error": ("ModelError", "a right model")}])[0] == "wrong"
    refused = next(case for case in EVERY if case.refusal)
    assert judged(refused, [{**told, "error": ("BatchError", f"x {refused.refusal} y")}])[0] == "refused"
    assert judged(refused, [rank])[0] == "wrong"
    assert difference(case, [rank], *wanted(case)) == ""


def test_a_failure_is_shown_with_the_command_that_repeats_it() -> None:
    outcome, case = Outcome(0), drawn(0, 5)
    outcome.add(line_of(case, "wrong", "the loss is off", 0.1))
    assert not outcome.is_clean
    assert case.again in outcome.failures[0]
    kind = case.kinds[0]
    assert any(line.split() == [kind, "0", "0", "1", "0", "0"] for line in table(outcome).splitlines())
    assert json.loads(json.dumps(outcome.summary()))["kinds"][kind] == {"wrong": 1}


@long
def test_every_job_runs_its_own_cases(tmp_path: Path) -> None:
    numbers, lines = sorted(case.number for number in (1, 2) for case in CASES[number][:4]), tmp_path / "lines"
    assert fuzz(0, numbers, jobs=2, lines=lines).counts.total() == 8
    assert sorted(line["case"] for line in read(lines)) == numbers


@pytest.mark.features("check")
def test_cases_that_have_lines_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, lines = [case.number for case in CASES[1][:3]], tmp_path / "lines"
    assert fuzz(0, numbers[:2], lines=lines).counts["equal"] == 2
    assert [(line["case"], line["outcome"]) for line in read(lines)] == [(at, "equal") for at in sorted(numbers[:2])]
    ran = list[int]()

    def noted(seed: int, ranks: int, left: list[int], files: Path | None) -> list[Any]:
        ran.extend(left)
        return []

    monkeypatch.setattr(fuzz_mesh, "_of_ranks", noted)
    assert fuzz(0, numbers, lines=lines).counts["equal"] == 2
    assert ran == numbers[2:]
    assert fuzz(1, numbers[:2], lines=lines).counts.total() == 0  # these are cases of another seed
    assert sorted(ran[1:]) == sorted(numbers[:2])


@pytest.mark.features("check")
def test_a_case_whose_ranks_die_is_told_and_others_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = [case.number for case in CASES[1][:3]]
    as_ever = fuzz_mesh._launched

    def dying(seed: int, ranks: int, left: list[int], files: list[Path]) -> str:
        runs = left[: left.index(numbers[1])] if numbers[1] in left else left
        as_ever(seed, ranks, runs, files)
        return "killed by SIGABRT" if runs != left else ""

    monkeypatch.setattr(fuzz_mesh, "_launched", dying)
    found = fuzz(0, numbers)
    assert found.counts.total() == 3
    assert found.counts["died"] == 1
    assert f"case {numbers[1]} died: killed by SIGABRT" in found.failures[0]
