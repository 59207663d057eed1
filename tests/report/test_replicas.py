"""One step of many copies of a pipeline: each is the simulation of its own times, and no second is lost."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import drumline as dl
import kernel_cases
from drumline.cli.main import main
from drumline.core.action import Op
from drumline.core.errors import CostsError, ProgramError
from drumline.core.kernel.library import kernel
from drumline.core.program import Program
from drumline.report.replicas.measured import measured_spread
from drumline.report.replicas.picture import drawing
from drumline.report.replicas.spread import FactorDraws, Spread
from drumline.report.replicas.step import REASONS, ReplicaStep, replicas
from drumline.report.summary import idle_by_cause
from refused import refused
from some import some

TRACES = Path(__file__).parents[2] / "docs" / "traces"
UNEQUAL = dl.Costs(forward=1.0, backward_input=1.5, backward_weight=0.5, comm=0.25, reduce=3.0)


def program_of(name: str, num_ranks: int = 4, num_microbatches: int = 6) -> Program:
    return dl.generate(name, num_ranks=num_ranks, num_microbatches=num_microbatches)


def idle_of(step: ReplicaStep, reason: str) -> list[float]:
    """Return the seconds of a reason, rank by rank of the only replica."""
    seconds: list[float] = step.idle[[str(each) for each in REASONS].index(reason), 0].tolist()
    return seconds


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved-1f1b"])
def test_one_copy_without_variation_is_the_simulation(name: str) -> None:
    program = program_of(name)
    step, timeline = replicas(program, UNEQUAL, num_replicas=1), dl.simulate(program, UNEQUAL)
    assert step.ends.tolist() == [timeline.makespan]
    assert step.busy[0] == pytest.approx(timeline.busy)
    by_cause = idle_by_cause(timeline)
    for reason in ("fill", "wait", "transfer"):
        assert idle_of(step, reason) == pytest.approx(by_cause[reason])
    # A rank's own gradients move after its last action, of which the last rank to be ready has all to wait for.
    assert all(seconds > 0 for seconds in idle_of(step, "exchange"))
    assert idle_of(step, "replicas") == [0.0] * 4


def test_every_copy_is_simulated_with_its_own_times_and_links() -> None:
    """The reference simulates each copy by itself, with the factors as arguments, and adds the exchanges by hand."""
    program, spread = program_of("zb-v"), Spread.log_normal(0.2, 0.5)
    step = replicas(program, UNEQUAL, num_replicas=3, spread=spread, seed=7)
    draws, edges = FactorDraws(spread, program.columns, 7), dl.simulate(program, UNEQUAL).graph.edges[0]
    timelines = []
    for _ in range(3):
        factors, slow = draws.actions(), draws.links(len(edges))
        assert factors is not None
        links = {edge: dl.Edge(0.25 * factor) for edge, factor in zip(edges, slow.tolist(), strict=True)}
        timelines.append(dl.simulate(program, dl.Costs(1.0, 1.5, 0.5, comm=0.25, edges=links), factors=factors))
    assert step.ends.tolist() == [timeline.end for timeline in timelines]
    assert len(set(step.ends.tolist())) == 3
    slowest = np.max([draws.links(4) for _ in range(3)], axis=0)
    ends = []
    for rank in range(4):
        free = 0.0
        lasts = {stage: [last_end(timeline, rank, stage) for timeline in timelines] for stage in (rank, 7 - rank)}
        for ready in sorted(map(max, lasts.values())):
            free = max(free, ready) + 3.0 * slowest[rank]
        ends.append(free)
    assert step.makespan == pytest.approx(max(*ends, *step.ends))


def last_end(timeline: dl.Timeline, rank: int, stage: int) -> float:
    track = timeline.tracks[rank]
    return max(end for action, end in zip(track.actions, track.ends, strict=True) if action.stage == stage)


@pytest.mark.parametrize("name", ["1f1b", "v-half", "zb-h1"])
def test_busy_and_idle_time_are_all_there_is_with_and_without_a_kernel(name: str) -> None:
    steps = []
    for use in (kernel(), None):
        with kernel_cases.using(use):
            steps.append(replicas(program_of(name), UNEQUAL, num_replicas=4, spread=0.3, seed=1))
    for step in some(steps):
        assert (step.busy + step.idle.sum(axis=0)).ravel() == pytest.approx([step.makespan] * 16)
        assert sum(step.idle_shares.values()) == pytest.approx(step.bubble)
        assert (step.idle >= -1e-12).all()
        assert step.idle_shares["imbalance"] > 0.0 < step.idle_shares["replicas"]
    assert steps[0].idle.tobytes() == steps[1].idle.tobytes()
    assert steps[0].ends.tobytes() == steps[1].ends.tobytes()


def test_the_slow_link_is_named() -> None:
    costs = dl.Costs(comm=0.01, edges={(2, 1): dl.Edge(2.0)})
    step = replicas(program_of("1f1b"), costs, num_replicas=2, spread=0.01)
    assert step.slowest is not None
    assert (step.slowest.source, step.slowest.target) == (2, 1)
    assert step.slowest.latency == pytest.approx(2.0, rel=0.1)
    assert step.slowest.waited > 3 * 2.0
    assert replicas(program_of("1f1b"), num_replicas=2).slowest is None


def test_what_was_measured_gives_the_factors() -> None:
    spread = measured_spread(TRACES / "1f1b")
    assert {op: round(float(spread.ops[op].mean()), 9) for op in (Op.FORWARD, Op.BACKWARD)} == dict.fromkeys(
        (Op.FORWARD, Op.BACKWARD), 1.0
    )
    assert np.ptp(spread.ops[Op.FORWARD]) > 0.01
    assert np.ptp(spread.links) == 0.0


def test_what_cannot_be_copied_is_refused() -> None:
    with refused(CostsError, "0 replicas of 4 ranks"):
        replicas(program_of("1f1b"), num_replicas=0)
    with refused(CostsError, "without a bandwidth", fix="comm or edges"):
        replicas(program_of("1f1b"), dl.Costs(message_bytes=1, bytes_per_second=1), num_replicas=2)
    for name in ("dualpipe", "chimera", "pipedream"):
        with refused(ProgramError, name, expected="a flushed program"):
            replicas(program_of(name, num_microbatches=8), num_replicas=2)
    with refused(CostsError, "the spread is -1"):
        replicas(program_of("1f1b"), num_replicas=2, spread=-1.0)


def test_the_command_names_what_is_slow_and_draws_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["replicas", "1f1b", "--replicas", "3", "--jitter", "0.1", "--comm", "0.1", "--reduce", "2"]
    assert main([*command, "--link-jitter", "0.5", "--out", str(tmp_path / "a.svg")]) == 0
    assert "slowest link: rank " in capsys.readouterr().out
    assert "12 ranks" in (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert main([*command, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["replicas"], printed["actions"], len(printed["replica_makespans"])) == (3, 192, 3)
    assert main([*command, "--measured", str(TRACES / "1f1b")]) == 2
    assert "--jitter and --measured" in capsys.readouterr().err


def test_a_picture_has_a_shade_for_each_rank() -> None:
    text = drawing(replicas(program_of("1f1b"), UNEQUAL, num_replicas=2, spread=0.2))
    assert text.count("v18h-") >= 4
    assert all(word in text for word in ("busy", "wait", "exchange"))
