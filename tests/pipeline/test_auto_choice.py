"""What `schedule="auto"` settles on, for a pipeline that runs in the simulator: its steps take exactly what is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
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

    def __init__(self, truth: Callable[[Program], Costs], monkeypatch: pytest.MonkeyPatch, name: str = "zb-h1") -> None:
        monkeypatch.setattr(auto_schedule, "_SECONDS", 0.5)
        self.program = self.first = generate(name, num_ranks=2, num_microbatches=8)
        self.truth, self.taken = truth, [self.program]
        axes = SimpleNamespace(number=0, is_mesh=False)
        crew = SimpleNamespace(rank=0, axes=axes, together=self._together, collect=lambda what, value: [value])
        site: Any = SimpleNamespace(
            crew=crew,
            ledger=SimpleNamespace(timeline=self._timeline),
            frozen=SimpleNamespace(pruned_too=lambda program: program),
            choice=SimpleNamespace(take=self._take),
        )
        adapting: Any = SimpleNamespace(is_paused=False)
        self.auto, self.adapting = AutoSchedule(site, adapting, self.program), adapting

    @contextmanager
    def _together(self, what: str) -> Iterator[None]:
        yield

    def _timeline(self) -> Measured:
        return Measured(self.ran, tuple(records_of(simulate(self.ran, self.truth(self.ran)))))

    def _take(self, program: Program) -> None:
        self.program = program
        self.taken.append(program)

    def run(self, num_steps: int) -> Simulated:
        for number in range(num_steps):
            step: Any = SimpleNamespace(number=number)
            self.auto.before(step)
            self.ran = self.program
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
