"""Random meshes, schedules, losses, labels and dtypes against plain torch: some of what `make bench` runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from fuzz_mesh import Outcome, difference, fuzz, judged, table
from matrices import ALL
from mesh_cases import MESHES, PATTERNS, Case, drawn, plain
from mesh_models import LOSSES
from some import some

pytestmark = [pytest.mark.torch]


def kinds_of(case: Case) -> set[object]:
    """Return what a case has that other cases may lack: axes, patterns of labels, a dtype."""
    patterns = case.patterns if case.function.is_labels else ()
    return {"refused"} if case.refusal else {*case.mesh, *patterns, case.dtype}


def standing_for(cases: list[Case]) -> list[Case]:
    """Return few small cases that have between them every kind that all of these have."""
    left, found = set[object]().union(*map(kinds_of, cases)), []
    while left:
        found.append(max(cases, key=lambda case: (len(kinds_of(case) & left), -case.num_microbatches)))
        left -= kinds_of(found[-1])
    return found


RANKS = (1, 2, 4) if ALL else (1, 2)  # meshes of several axes take twice as long
CASES = [drawn(0, number) for number in range(60 if ALL else 600)]
if not ALL:
    CASES = [one for ranks in RANKS for one in standing_for([case for case in CASES if case.ranks == ranks])]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # of a busy machine; every wait inside is bounded
@pytest.mark.parametrize("ranks", RANKS)
def test_every_case_is_equal_to_plain_torch_or_refused_as_foreseen(ranks: int) -> None:
    numbers = [case.number for case in CASES if case.ranks == ranks]
    found = fuzz(0, numbers)
    assert found.is_clean, "\n".join(found.failures)
    assert 0 < found.counts["equal"] <= found.counts.total() == len(numbers)


def test_a_case_is_what_its_seed_and_number_make_it() -> None:
    assert [drawn(3, number).described() for number in range(20)] == [drawn(3, at).described() for at in range(20)]
    assert "--seed 3 --first 7 --cases 1" in drawn(3, 7).again


def test_cases_have_every_mesh_loss_and_pattern() -> None:
    cases = [drawn(0, number) for number in range(600)]
    assert {str(one) for each in MESHES.values() for one in each} == {str(case.mesh) for case in cases}
    assert {case.loss for case in cases} == set(LOSSES)
    assert {pattern for case in cases for pattern in case.patterns} == set(PATTERNS)
    assert {case.dtype for case in cases} == {"float64", "float32", "bfloat16"}
    assert 0.02 < sum(bool(case.refusal) for case in cases) / len(cases) < 0.2


@pytest.fixture(scope="module")
def right() -> tuple[Case, dict[str, Any]]:
    """A case in float64, and what a rank that is right would tell."""
    every = (drawn(0, number) for number in range(60))
    case = next(case for case in every if case.near == 1e-10 and case.evaluates and not case.refusal)
    wanted = plain(case)
    size = torch.stack([one.norm() for one in wanted["gradients"][1].values()]).norm()
    return case, {**wanted, "norm": float(size)}


def test_a_right_rank_is_equal_and_the_smallest_fault_is_noticed(right: tuple[Case, dict[str, Any]]) -> None:
    case, rank = right
    assert judged(case, [rank]) == ("equal", "")
    for spoil in some((_loss, _gradient, _norm, _state, _missing, _evaluation)):
        wrong = copy.deepcopy(rank)
        spoil(wrong)
        assert judged(case, [rank, wrong])[0] == "wrong", spoil.__name__


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
    refused = next(case for case in (drawn(0, at) for at in range(600)) if case.refusal)
    assert judged(refused, [{**told, "error": ("BatchError", f"x {refused.refusal} y")}])[0] == "refused"
    assert judged(refused, [rank])[0] == "wrong"
    assert difference(case, [rank], rank) == ""


def test_a_failure_is_shown_with_the_command_that_repeats_it() -> None:
    outcome, case = Outcome(0), drawn(0, 5)
    outcome.add(case, ("wrong", "the loss is off"))
    assert not outcome.is_clean
    assert case.again in outcome.failures[0]
    assert "wrong              1" in table(outcome)
