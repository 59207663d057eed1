"""Many programs under one set of costs: the same makespans as one by one, in one call."""

from __future__ import annotations

import random

import pytest

import drumline as dl
from drumline.core.errors import CostsError
from drumline.core.kernel import library
from drumline.core.program import Program
from drumline.core.prove.violation import InvalidProgram
from drumline.core.simulate import simulate as simulation
from kernel_cases import COSTS
from refused import refused

NAMES = ("1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "hanayo", "chimera", "dualpipe", "pipedream", "gpipe")


def drawn(rng: random.Random) -> Program:
    """Return a program of some schedule, now and then as rows of actions or with messages of its own."""
    name, ranks = rng.choice(NAMES), 2 * rng.randint(1, 3)
    program = dl.generate(name, num_ranks=ranks, num_microbatches=2 * rng.randint(1, 6))
    return rng.choice([program, program, Program(program.rows), dl.lower(program.compute_only())])


@pytest.mark.parametrize("seed", range(3))
def test_many_programs_take_what_each_takes_alone(seed: int) -> None:
    rng = random.Random(seed)
    programs = [drawn(rng) for _ in range(12)]
    for costs in COSTS:
        expected = [dl.simulate(Program(program.rows), costs).makespan for program in programs]
        assert dl.makespans(programs, costs).tolist() == expected


def test_microbatches_and_stages_have_their_own_costs() -> None:
    programs = [dl.generate(name, num_ranks=4, num_microbatches=3) for name in ("1f1b", "zb-h1", "gpipe")]
    costs = dl.Costs(forward=[1, 2, 3, 4], backward_input=0.5, microbatch_factor=[1, 3, 0.5], recompute=True, comm=0.1)
    expected = [dl.simulate(program, costs).makespan for program in programs]
    assert dl.makespans(programs, costs).tolist() == expected


def test_slices_wait_for_the_slices_before_them() -> None:
    """The last slice's backward comes first, so that the first slice's keys get all gradients."""
    sliced = Program.parse("0F0.0,0F0.1,0B0.1,0B0.0\n1F0.0,1F0.1,1B0.1,1B0.0")
    assert sliced.num_slices == 2
    costs = dl.Costs(forward=2.0, comm=0.5)
    assert dl.makespans([sliced], costs).tolist() == [dl.simulate(sliced, costs).makespan]


@pytest.mark.skipif(library.kernel() is None, reason="needs the kernel")
def test_plain_programs_are_not_simulated_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = [dl.generate(name, num_ranks=4, num_microbatches=8) for name in ("1f1b", "zb-h1")]
    monkeypatch.delattr(simulation, "simulate")
    assert dl.makespans(programs, dl.Costs()).tolist() == [33.0, 27.0]


def test_a_program_that_cannot_run_is_named_by_its_violation() -> None:
    legal = dl.generate("1f1b", num_ranks=2, num_microbatches=2)
    with pytest.raises(InvalidProgram) as told:
        dl.makespans([legal, Program.parse("0B0,0F0\n1F0,1B0", name="upside-down")], dl.Costs())
    assert "upside-down" in str(told.value)


def test_no_program_takes_no_time_and_many_of_both_are_refused() -> None:
    assert dl.makespans([], dl.Costs()).tolist() == []
    program = dl.generate("1f1b", num_ranks=2, num_microbatches=2)
    with refused(CostsError, "more than one Costs"):
        dl.makespans([program], [dl.Costs(), dl.Costs()])
