"""Rows cut into what is computed between two messages."""

from __future__ import annotations

import pytest

from drumline.channel.in_process import Hub
from drumline.core.action import RECV_OPS, Action
from drumline.core.lower.lower import lower
from drumline.core.program import Program
from drumline.features.capture.captured_row import Stretch, stretches
from drumline.runtime.draft import Clock
from drumline.runtime.execute.executor import Executor
from drumline.runtime.execute.jobs import Job
from drumline.schedules import find, generate
from some import some
from torch_models import SYNCHRONOUS, programs

pytestmark = [pytest.mark.torch, pytest.mark.features("capture")]


def rows(program: Program) -> list[list[Job]]:
    """Return every rank's jobs; without stages, since they are cut and not run."""
    lowered = lower(program)
    channels = Hub(program.num_ranks).channels()
    return [Executor(lowered, rank, {}, channels[rank], Clock()).jobs for rank in range(program.num_ranks)]


def cut_rows(name: str, num_ranks: int, num_microbatches: int) -> list[str]:
    program = generate(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    cut = [stretches(row, print) for row in rows(program)]
    return [" ".join(str(job) if isinstance(job, Stretch) else str(job.action) for job in row) for row in cut]


def test_1f1b_computes_f_and_b_of_the_last_stage_in_one_stretch() -> None:
    assert cut_rows("1f1b", 2, 3) == [
        "0RECV_B0 0RECV_B1 [0F0] 0SEND_F0 [0F1] 0SEND_F1 [0B0 0F2] 0RECV_B2 0SEND_F2 [0B1] [0B2]",
        "1RECV_F0 1RECV_F1 [1F0 1B0] 1RECV_F2 1SEND_B0 [1F1 1B1] 1SEND_B1 [1F2 1B2] 1SEND_B2",
    ]


def test_zb_h1_sends_the_input_gradient_before_the_weight_gradient_is_computed() -> None:
    assert cut_rows("zb-h1", 2, 3) == [
        "0RECV_B0 0RECV_B1 [0F0] 0SEND_F0 [0F1] 0SEND_F1 [0I0 0W0 0F2] 0RECV_B2 0SEND_F2 [0I1 0W1] [0I2 0W2]",
        "1RECV_F0 1RECV_F1 [1F0 1I0] 1RECV_F2 1SEND_B0 [1F1 1I1] 1SEND_B1 [1W0] [1F2 1I2] 1SEND_B2 [1W1 1W2]",
    ]


def test_an_overlapped_pair_waits_for_both_of_its_messages_and_exchanges_stay_apart() -> None:
    (row, _) = rows(generate("dualpipe", num_ranks=2, num_microbatches=4))
    cut = stretches(row, print)
    assert [str(job) for job in cut if isinstance(job, Stretch)] == [
        "[0F0]",
        "[1F2 0F1]",
        "[1B2]",
        "[(1F3;0B0)OVERLAP_F_B 1B3]",
        "[0I1 0W1]",
    ]
    (pair,) = (job for job in cut if "OVERLAP" in str(job.action))
    assert [str(receive) for receive, _ in pair.needs] == ["1RECV_F3", "0RECV_B0"]
    assert [str(job.action) for job in cut[-2:]] == ["0REDUCE_GRAD", "1REDUCE_GRAD"]


@pytest.mark.parametrize("name", [name for name in SYNCHRONOUS if not find(name).even_ranks])
def test_one_rank_is_one_stretch(name: str) -> None:
    for program in some(programs(name, 1, (1, 4))):
        (row,) = rows(program)
        assert len(stretches(row, print)) == 1


def flat(row: list[Job]) -> list[Job]:
    return [job for inner_job in row for job in (inner_job.jobs if isinstance(inner_job, Stretch) else [inner_job])]


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_nothing_is_lost_and_only_posts_move_and_only_behind_computations_that_wait_for_nothing(name: str) -> None:
    moved = 0
    for num_ranks in (2, 3, 4):
        for program in programs(name, num_ranks, (1, 4, 7)):
            for row in some(rows(program)):
                cut = stretches(row, print)
                after = flat(cut)
                assert sorted(map(id, after)) == sorted(map(id, row))
                posts = [job for job in after if job.action.op in RECV_OPS]
                others = [job for job in after if job.action.op not in RECV_OPS]
                assert posts == [job for job in row if job.action.op in RECV_OPS]
                assert others == [job for job in row if job.action.op not in RECV_OPS]
                for job in some(cut):
                    if isinstance(job, Stretch):
                        assert job.needs == job.jobs[0].needs
                        assert not any(job.needs for job in job.jobs[1:])
                for post in posts:
                    passed = set(map(id, after[: after.index(post)])) - set(map(id, row[: row.index(post)]))
                    behind = [job for job in row if id(job) in passed]
                    assert not any(job.needs or not job.timed for job in behind)
                    moved += len(behind)
    assert moved > 0 or name in ("naive", "gpipe")


def test_a_receive_is_posted_before_its_message_is_needed() -> None:
    for name in SYNCHRONOUS:
        for program in programs(name, 2, (4,)):
            for row in some(rows(program)):
                posted: set[Action] = set()
                for job in some(stretches(row, print)):
                    assert posted.issuperset(receive for receive, _ in job.needs)
                    if job.action.op in RECV_OPS:
                        posted.add(job.action)
