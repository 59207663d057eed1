"""What programs are refused for: not a program, costs of too many, exports that PyTorch cannot run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from drumline.core.costs import Costs
from drumline.core.errors import CostsError, DrumlineError, ProgramError
from drumline.core.files import FileKind, parse_json
from drumline.core.lower.lower import lower
from drumline.core.lower.torch_text import for_torch, titan_by_placement, titan_schedule
from drumline.core.placement import Placement
from drumline.core.program import Program
from drumline.core.prove.validate import _by_place
from drumline.core.prove.violation import InvalidProgram, Violation
from drumline.core.simulate.simulate import makespans, simulate
from drumline.core.simulate.steps import in_groups, several_steps
from drumline.schedules import generate
from refused import refused

PROGRAM = Program.parse("0F0,0B0\n1F0,1B0", "small")
BROKEN = Program.parse("0B0,0F0\n1F0,1B0", "broken")


def test_what_is_no_program_is_not_simulated() -> None:
    given: Any = "1f1b"
    with refused(ProgramError, "'1f1b' is not a program", fix=r"dl\.generate"):
        simulate(given)


def test_factors_go_with_one_set_of_costs() -> None:
    factors = np.ones((2, len(list(PROGRAM.work()))))
    assert makespans(PROGRAM, Costs(), factors=factors).tolist() == [simulate(PROGRAM).makespan] * 2
    with refused(CostsError, "factors was passed with 2 Costs", expected="a single Costs"):
        makespans(PROGRAM, [Costs(), Costs()], factors=factors)


def test_steps_that_update_while_they_run_are_not_repeated() -> None:
    endless = Program.parse("0F0,0B0,0UPDATE0\n1F0,1B0,1UPDATE0", "own")
    with refused(ProgramError, "program 'own' updates weights while it runs"):
        several_steps(endless, 2)
    assert in_groups(PROGRAM, 1) is PROGRAM
    assert in_groups(PROGRAM, 2).num_microbatches == 2


@pytest.mark.parametrize("ask", [lower, for_torch])
def test_a_program_that_breaks_a_rule_is_not_handed_on(ask: Any) -> None:
    with refused(InvalidProgram, "0B0"):
        ask(BROKEN)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (generate("chimera", num_ranks=2, num_microbatches=2), "it holds each stage on two ranks"),
        (several_steps(PROGRAM, 2), "it spans several optimizer steps"),
        (Program.parse("0F0\n1F0", "serving"), "it has no backward"),
    ],
    ids=["chimera", "steps", "serving"],
)
def test_what_pytorch_cannot_run_is_said(program: Program, reason: str) -> None:
    with refused(ProgramError, reason):
        for_torch(program)


def test_torchtitan_places_stages_in_lines_loops_and_a_short_v() -> None:
    assert titan_by_placement(Placement.v(4)) == "ZBVZeroBubble"
    assert titan_by_placement(Placement.v(2, stages_per_rank=4)) is None
    with refused(ProgramError, r"torchtitan has no schedule with the placement of 'longer'"):
        titan_schedule(Program(generate("hanayo", num_ranks=2, num_microbatches=2, stages_per_rank=4).rows, "longer"))


def test_bytes_that_are_no_text_are_named_by_their_place() -> None:
    with refused(DrumlineError, "the byte at offset 8 is not UTF-8 text"):
        parse_json(b'{"comm":\xff1}', FileKind("costs", CostsError, "costs"))


def test_what_has_no_place_stands_before_what_has_one() -> None:
    found = [Violation(rank, index, None, "") for rank, index in ((1, 0), (0, 0), (1, None), (None, None), (0, None))]
    places = [(violation.rank, violation.index) for violation in sorted(found, key=_by_place)]
    assert places == [(None, None), (0, None), (0, 0), (1, None), (1, 0)]
