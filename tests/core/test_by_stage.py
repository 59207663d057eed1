"""Many samples of one program, timed by the seconds of its stages: as one simulation each."""

from __future__ import annotations

import numpy as np
import pytest

from drumline.core.costs import Costs
from drumline.core.errors import CostsError
from drumline.core.lower.lower import lower
from drumline.core.program import Program
from drumline.core.prove.violation import InvalidProgram
from drumline.core.simulate.by_stage import STAGE_OPS, makespans_by_stage
from drumline.core.simulate.simulate import simulate
from programs import NAMES, build
from refused import refused
from some import some

NAMED = [op.name.lower() for op in STAGE_OPS]


def one_by_one(program: Program, seconds: np.ndarray, comm: float) -> list[float]:
    found = []
    for sample in range(seconds.shape[2]):
        stages = {name: seconds[at, :, sample].tolist() for at, name in enumerate(NAMED)}
        found.append(simulate(program, Costs(**stages, comm=comm)).makespan)
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("comm", [0.0, 0.4])
def test_samples_take_what_single_simulations_do(name: str, comm: float) -> None:
    program = build(name, 4, 8)
    if program.num_updates:
        program = program.compute_only()
    seconds = np.random.default_rng(0).uniform(0.5, 2.0, (len(STAGE_OPS), program.num_stages, 3))
    expected = one_by_one(program, seconds, comm)
    assert makespans_by_stage(program, seconds, comm=comm).tolist() == pytest.approx(expected, rel=1e-12)


def test_messages_that_a_program_spells_take_their_time() -> None:
    program = lower(build("1f1b", 3, 4))
    seconds = np.random.default_rng(1).uniform(0.5, 2.0, (len(STAGE_OPS), 3, 2))
    expected = one_by_one(program, seconds, 0.3)
    assert makespans_by_stage(program, seconds, comm=0.3).tolist() == pytest.approx(expected, rel=1e-12)


def test_many_samples_are_those_of_few() -> None:
    """They are taken in blocks of as many as a cache holds."""
    program = build("zb-v", 4, 8)
    seconds = np.random.default_rng(2).uniform(0.5, 2.0, (len(STAGE_OPS), program.num_stages, 1500))
    together = makespans_by_stage(program, seconds)
    assert len(together) == 1500
    for at in some([0, 700, 1041, 1042, 1499]):
        assert together[at] == makespans_by_stage(program, seconds[:, :, at : at + 1])[0]


def test_another_shape_is_refused() -> None:
    with refused(CostsError, r"^seconds has the shape \(4, 3, 1\)", expected="(4 ops, 2 stages, samples)"):
        makespans_by_stage(build("1f1b", 2, 2), np.ones((4, 3, 1)))


def test_a_program_that_breaks_a_rule_is_refused() -> None:
    with pytest.raises(InvalidProgram):
        makespans_by_stage(Program.parse("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"), np.ones((4, 2, 1)))
