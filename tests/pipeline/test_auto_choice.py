"""What `schedule="auto"` settles on, for a pipeline that runs in the simulator: its steps take exactly what is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from drumline.adapt.repair import is_split
from drumline.core.costs import Costs
from drumline.core.measured.measured import Measured
from drumline.core.program import Program
from drumline.core.simulate.simulate import simulate
from drumline.features.adapt import auto_schedule
from drumline.features.adapt.auto_schedule import AutoSchedule
from drumline.features.adapt.auto_slices import AutoSlices
from drumline.schedules import generate
from simulated_runs import records_of

pytestmark = [pytest.mark.torch, pytest.mark.features("adapt")]

MILLI = 1e-3


def costs(weight: float) -> Costs:
    """Return two stages with whole backwards of twice a forward; in halves, W takes so many forwards."""
    each = [MILLI, MILLI]
    return Costs(forward=each, backward=[2 * MILLI] * 2, backward_input=each, backward_weight=[weight * MILLI] * 2)


class Simulated:
    """Stands in for a pipeline: what steps take is simulated, and its rank is alone."""

    def __init__(
        self,
        truth: Callable[[Program], Costs],
        monkeypatch: pytest.MonkeyPatch,
        name: str = "zb-h1",
        *,
        num_microbatches: int = 8,
        slices: int = 1,
        why: str = "",
    ) -> None:
        monkeypatch.setattr(auto_schedule, "_SECONDS", 0.5 if num_microbatches == 8 else 0.1)
        self.program = self.first = generate(name, num_ranks=2, num_microbatches=num_microbatches, slices=slices)
        self.truth, self.taken, self.asked = truth, [self.program], 0
        self.why = why  # slices do not run here
        axes = SimpleNamespace(number=0, is_mesh=False)
        crew = SimpleNamespace(rank=0, axes=axes, together=self._together, collect=lambda what, value: [value])
        site: Any = SimpleNamespace(
            crew=crew,
            ledger=SimpleNamespace(timeline=self._timeline),
            frozen=SimpleNamespace(pruned_too=lambda program: program),
            choice=SimpleNamespace(take=self.take),
            programs=SimpleNamespace(own_number=0),
            slicings=self._slicings,
        )
        adapting: Any = SimpleNamespace(is_paused=False)
        self.auto, self.adapting = AutoSchedule(site, adapting, self.program), adapting
        self.slices = AutoSlices(site, self.auto, adapting)

    def _slicings(self, programs: dict[int, Program]) -> tuple[list[int], str]:
        self.asked += 1
        return ([], self.why) if self.why else ([number for number in programs if number <= 16], "")

    @contextmanager
    def _together(self, what: str) -> Iterator[None]:
        yield

    def _timeline(self) -> Measured:
        return Measured(self.ran, tuple(records_of(simulate(self.ran, self.truth(self.ran)))))

    def take(self, program: Program) -> None:
        self.program = program
        self.taken.append(program)
        self.auto.took(program, 0)
        self.slices.took(program, 0)

    def run(self, num_steps: int) -> Simulated:
        for number in range(num_steps):
            step: Any = SimpleNamespace(number=number, program=0)
            self.auto.before(step)
            self.ran = self.program
            self.slices.after(step)
        return self

    @property
    def seconds(self) -> float:
        return simulate(self.program, self.truth(self.program)).makespan


def step_of(name: str, truth: Costs) -> float:
    return simulate(generate(name, num_ranks=2, num_microbatches=8), truth).makespan


@pytest.mark.parametrize("weight", [0.5, 1.0, 1.3, 2.0, 4.0])
def test_it_ends_with_a_step_as_short_as_the_best_schedule_whatever_halves_cost(
    weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = costs(weight)
    run = Simulated(lambda program: truth, monkeypatch).run(30)
    best = min(step_of(name, truth) for name in ("1f1b", "zb-h1"))
    assert run.seconds <= 1.01 * best
    assert not run.adapting.is_paused


def test_both_forms_of_backwards_run_before_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Simulated(lambda program: costs(2.0), monkeypatch)
    assert run.run(7).program is run.first
    second = run.run(1).program
    assert is_split(run.first) is not is_split(second)
    assert [action.stage for action in run.first.work() if action.op.name == "FORWARD"] == [
        action.stage for action in second.work() if action.op.name == "FORWARD"
    ]


def test_a_program_that_takes_longer_than_the_quicker_form_is_taken_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forms: list[Program] = []

    def truth(program: Program) -> Costs:
        if program not in forms and len(forms) < 2:
            forms.append(program)
        known = costs(1.5)  # with these, any search finds a mixture of both forms that gains, also without the kernel
        return known if program in forms else replace(known, forward=2 * MILLI)

    run = Simulated(truth, monkeypatch).run(30)
    assert run.auto.searched is not None
    assert run.auto.searched.gained is not None
    assert run.auto.searched.gained < 0
    assert not run.auto.searched.is_kept
    assert run.program == min(forms, key=lambda form: simulate(form, costs(1.5)).makespan)
    assert f"; back to {run.program.name}" in capsys.readouterr().err


def test_layers_that_move_meanwhile_begin_the_measurement_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Simulated(lambda program: costs(2.0), monkeypatch).run(10)
    run.auto.moved()
    assert run.run(7).auto.searched is None
    assert run.run(8).auto.searched is not None


def sliced_costs(program: Program, fixed: float = 0.0, attention: float = 0.3) -> Costs:
    """Return the costs of two stages whose slices take this much of a whole sequence more, each."""
    count = program.num_slices
    if count == 1:
        return costs(1.0)
    ends = [at / count for at in range(count + 1)]
    parts = [fixed + (1 - attention) * (b - a) + attention * (b * b - a * a) for a, b in pairwise(ends)]
    return replace(costs(1.0), slice_factor=parts)


@pytest.mark.parametrize("fixed", [0.0, 0.002, 0.005, 0.02, 0.06])
def test_few_microbatches_end_in_as_many_slices_as_their_measured_costs_pay_for(
    fixed: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Simulated(lambda program: sliced_costs(program, fixed), monkeypatch, num_microbatches=2).run(60)
    counts: Any = {"num_ranks": 2, "num_microbatches": 2}
    each = [
        generate(name, **counts, slices=number) for name in ("1f1b", "zb-h1", "gpipe") for number in (1, 2, 4, 8, 16)
    ]
    best = min(simulate(program, sliced_costs(program, fixed)).makespan for program in each)
    found = run.slices.outcome
    assert found is not None
    assert found.is_kept is (fixed < 0.01)
    assert found.is_kept is (run.program == found.program)
    assert run.seconds <= 1.02 * best
    seconds = simulate(found.program, sliced_costs(found.program, fixed)).makespan
    assert found.after == pytest.approx(seconds)
    assert found.predicted is None or found.predicted == pytest.approx(seconds, rel=0.02)
    assert found.gained == pytest.approx(1 - found.after / found.before)
    assert f"schedule: {found.program.name}: a measured step takes" in capsys.readouterr().err
    assert run.adapting.is_paused is found.is_kept  # it knows no slices
    assert len(run.taken) <= 6


def test_slices_that_gain_nothing_are_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Simulated(lambda program: sliced_costs(program, 0.5), monkeypatch, num_microbatches=2).run(60)
    found = run.slices.outcome
    assert found is not None
    assert not found.is_kept
    assert found.gained < 0
    assert run.program.num_slices == 1
    assert any(program.num_slices > 1 for program in run.taken)
    assert f"; back to {run.program.name}" in capsys.readouterr().err
    assert not run.adapting.is_paused


@pytest.mark.parametrize(("num_microbatches", "asked"), [(2, 1), (7, 1), (8, 0)])
def test_a_model_that_does_not_run_in_slices_says_why_only_where_they_could_pay(
    num_microbatches: int, asked: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Simulated(sliced_costs, monkeypatch, num_microbatches=num_microbatches, why="it convolves").run(40)
    assert run.asked == asked
    assert capsys.readouterr().err.count("schedule: no slices of sequences: it convolves") == asked
    assert {program.num_slices for program in run.taken} == {1}
    assert run.slices.outcome is None
    assert not run.adapting.is_paused


def test_slices_that_the_user_asked_for_stay_in_the_best_order(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Simulated(sliced_costs, monkeypatch, num_microbatches=2, slices=4).run(40)
    assert {program.num_slices for program in run.taken} == {4}
    counts: Any = {"num_ranks": 2, "num_microbatches": 2, "slices": 4}
    orders = [generate(name, **counts) for name in ("1f1b", "zb-h1", "gpipe")]
    assert run.seconds <= 1.01 * min(simulate(order, sliced_costs(order)).makespan for order in orders)
    assert (run.asked, run.adapting.is_paused) == (0, True)


def test_a_program_that_somebody_else_takes_up_ends_the_search_for_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Simulated(sliced_costs, monkeypatch, num_microbatches=2).run(24)
    assert not run.slices.is_over
    run.take(generate("gpipe", num_ranks=2, num_microbatches=2))
    assert run.run(20).slices.outcome is None
    assert not run.adapting.is_paused
