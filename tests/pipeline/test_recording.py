"""Runs that a pipeline writes: ranks that take turns in one process, and one launch of real ones."""

from __future__ import annotations

import gc
import json
import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import drumline as dl
from drumline.core.errors import RankFailed, RunError, UsageError
from drumline.core.measured.account import account, parts_of, summed_parts
from drumline.pipeline.pipeline import Pipeline
from drumline.report.run.report import report_of
from drumline.report.run.text import reports_text
from drumline.runtime.draft import Clock, Draft
from matrices import mainly
from refused import refused
from some import some

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(900),
    pytest.mark.features("record"),
]  # starts processes, which takes long on a busy machine


def pipeline(**settings: Any) -> Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
    settings = {"num_microbatches": 4, "schedule": "1f1b", "num_ranks": 2, **settings}
    return Pipeline(model, loss_fn=nn.functional.mse_loss, **settings)


def train(pipe: Pipeline, num_steps: int = 3) -> list[float]:
    torch.manual_seed(1)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    losses = []
    for _ in range(num_steps):
        batch = torch.randn(8, 4)
        result = pipe.step(batch, target=batch.flip(1))
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert result.loss is not None
        losses.append(result.loss.item())
    return losses


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "dualpipe-v"])
def test_a_folder_holds_every_step(tmp_path: Path, schedule: str) -> None:
    with pipeline(schedule=schedule, record=tmp_path / "run") as pipe:
        losses = train(pipe)
        timeline = pipe.timeline()
        program = pipe.program
    run = dl.read_run(tmp_path / "run")
    assert run.steps == (0, 1, 2)
    assert run.program == program
    assert run.timeline().records == timeline.records
    assert [metric["loss_metrics/global_avg_loss"] for metric in run.metrics()] == losses
    assert all(metric["grad_norm"] > 0 for metric in run.metrics())
    assert run.metrics()[-1]["pp/bubble"] == pytest.approx(timeline.bubble)


def test_steps_that_nobody_asked_about_have_their_metrics_when_the_pipeline_is_closed(tmp_path: Path) -> None:
    with pipeline(record=tmp_path) as pipe:
        for _ in range(3):
            pipe.step(torch.randn(8, 4), target=torch.zeros(8, 4))
    assert [metric["step"] for metric in dl.read_run(tmp_path).metrics()] == [0, 1, 2]


def test_a_gradient_norm_is_noted_on_the_step_that_it_is_of(tmp_path: Path) -> None:
    norms: list[float | None] = []
    with pipeline(record=tmp_path) as pipe:
        for clipped in (False, False, True, True, False, True):  # the metrics of steps not asked about are not written
            pipe.step(torch.randn(8, 4), target=torch.zeros(8, 4))
            norms.append(pipe.clip_grad_norm_(1e9).item() if clipped else None)
    assert [metric.get("grad_norm") for metric in dl.read_run(tmp_path).metrics()] == norms
    assert len(set(norms)) == 4


def test_a_run_says_which_version_recorded_it(tmp_path: Path) -> None:
    pipeline(record=tmp_path).close()
    assert dl.read_run(tmp_path).config["drumline"] == dl.__version__


def test_plan_and_surroundings_are_written_without_paths(tmp_path: Path) -> None:
    with pipeline(record=str(tmp_path), checkpoint=["1"], balance=[1, 3]) as pipe:
        run = dl.read_run(tmp_path)
        assert run.num_steps == 0
        train(pipe, 1)
    assert run.plan["blocks"] == [["0"], ["1", "2", "3"]]
    assert run.plan["checkpoint"] == [[], ["1"]]
    assert run.plan["placement"] == [[0], [1]]
    assert run.config["settings"]["balance"] == [1, 3]
    assert run.environment["ranks"][1]["torch"] == torch.__version__
    for name in ("config.json", "plan.json", "environment.json"):
        text = (tmp_path / name).read_text()
        assert str(tmp_path) not in text
        assert str(Path.home()) not in text


def test_what_a_measured_cut_predicts_is_part_of_the_plan(tmp_path: Path) -> None:
    batch = torch.randn(8, 4)
    with pipeline(record=tmp_path, example=batch, example_target=batch) as pipe:
        assert pipe.balance is not None
        plan = dl.read_run(tmp_path).plan
        assert dl.Costs.from_json(json.dumps(plan["predicted"]["costs"])) == pipe.balance.costs
        assert plan["predicted"]["makespan"] == pipe.balance.timeline.makespan


def test_a_folder_with_a_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    with pipeline(record=tmp_path) as pipe:
        train(pipe, 1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with refused(UsageError, "already holds a run: it contains", fix="choose another folder"):
        pipeline(record=tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with refused(UsageError, "is a file, not a folder"):
        pipeline(record=tmp_path / "run")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused(UsageError, "cannot write to .*: Not a directory", fix="choose another one"):
        pipeline(record=tmp_path / "file" / "run")


class Full:
    """A disk that takes so many bytes more, then none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = 0
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, file: int, data: bytes) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        count = min(len(data), self.room)
        self.room -= count
        return self._write(file, bytes(data[:count]))


def test_a_full_disk_delays_the_record_and_not_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pipeline(record=tmp_path) as pipe:
        train(pipe, 1)
        pipe._recording.flush()
        with monkeypatch.context() as patch:
            disk = Full(patch)
            train(pipe, 1)
            disk.room = 100  # in the middle of a line
            pipe._recording.flush()
            train(pipe, 2)
            pipe._recording.flush()
        told = capsys.readouterr().err
        assert told.count("cannot write the record of the steps to") == 1
        assert "No space left on device; training continues" in told
        assert dl.read_run(tmp_path).steps == (0,)
        train(pipe, 1)
        pipe._recording.flush()
        assert capsys.readouterr().err.count("the record of the steps continues in") == 1
        assert dl.read_run(tmp_path).steps == (0, 1, 2, 3, 4), "no line is lost, and none is torn"
    run = dl.read_run(tmp_path)
    assert [metric["step"] for metric in run.metrics()] == [0, 1, 2, 3, 4]
    assert run.has_ended


@pytest.mark.features("saving")
def test_what_was_undone_is_not_written_when_a_disk_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pipeline(record=tmp_path / "run") as pipe:
        train(pipe, 2)
        pipe.save(tmp_path / "saved", wait=True)
        with monkeypatch.context() as patch:
            disk = Full(patch)
            train(pipe, 1)
            disk.room = 50
            pipe._recording.flush()
            train(pipe, 1)
            assert pipe.load(tmp_path / "saved").step == 2
        train(pipe, 1)
    run = dl.read_run(tmp_path / "run")
    assert run.steps == (0, 1, 2)
    assert [metric["step"] for metric in run.metrics()] == [0, 1, 2]


def test_lines_that_never_found_room_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pipeline(record=tmp_path) as pipe:
        train(pipe, 1)
        pipe._recording.flush()
        Full(monkeypatch)
        train(pipe, 2)
    assert "is not complete: the disk has not taken the last 6 lines" in capsys.readouterr().err
    assert dl.read_run(tmp_path).steps == (0,)


def test_a_forked_process_writes_nothing(tmp_path: Path) -> None:
    with pipeline(record=tmp_path) as pipe:
        train(pipe, 2)
        child = os.fork()
        if not child:  # it must not go on with the tests, whatever happens
            try:
                pipe._recording.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert not (tmp_path / "ended.json").exists()
        train(pipe, 1)
    assert dl.read_run(tmp_path).steps == (0, 1, 2)
    assert [len(path.read_text().splitlines()) for path in sorted(tmp_path.glob("rank*"))] == [3, 3]


def test_nothing_is_recorded_if_nothing_is_asked_for() -> None:
    pipe = pipeline(record=False)
    assert train(pipe) == train(pipeline())
    with refused(RunError, "nothing was recorded: record=False", fix="record=True"):
        pipe.timeline()


def test_steps_that_only_evaluate_are_no_steps_of_the_run(tmp_path: Path) -> None:
    with pipeline(record=tmp_path) as pipe:
        train(pipe, 1)
        for _ in range(11):
            pipe.eval_step(torch.randn(8, 4))
        result = pipe.step(torch.randn(8, 4), target=torch.randn(8, 4))
        pipe.note(result.step, own=7.0)
    run = dl.read_run(tmp_path)
    assert run.steps == (0, 1)
    assert [(metric["step"], metric.get("own")) for metric in run.metrics()] == [(0, None), (1, 7.0)]
    assert "step 1 of 2 steps" in reports_text([report_of(run, step=1)])


def test_a_loss_that_is_not_finite_is_written_as_null(tmp_path: Path) -> None:
    with pipeline(record=tmp_path, check_finite=False) as pipe:
        result = pipe.step(torch.full((8, 4), torch.nan), target=torch.zeros(8, 4))
        assert result.loss is not None
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text)["loss_metrics/global_avg_loss"] is None
    assert not re.search("NaN|Infinity", text)


def test_tokens_are_counted_where_the_batch_is_text(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    words = torch.randint(10, (4, 6))
    with Pipeline(model, loss_fn=loss, num_microbatches=2, num_ranks=2, record=tmp_path) as pipe:
        pipe.step(words, target=words).loss  # noqa: B018 - it is heard
    (metrics,) = dl.read_run(tmp_path).metrics()
    assert metrics["throughput(tps)"] * 2 == pytest.approx(metrics["throughput(rows/s)"] * 6)


def test_the_parts_of_every_rank_sum_to_its_step(tmp_path: Path) -> None:
    for schedule in ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe", "chimera"):
        pipe = pipeline(schedule=schedule, merge_weight_gradients=schedule == "zb-v")
        train(pipe, 2)
        timeline = pipe.timeline()
        for record, parts in zip(timeline.records, timeline.parts, strict=True):
            assert round(parts.total * 1e9) == record.end_ns - record.begin_ns
            assert min(parts.busy, parts.transfer, parts.wait, parts.overhead) > 0
            assert parts.unexplained >= 0
            assert summed_parts(record, same) == parts_of(account(record, same))
        for rank, idle in some(enumerate(timeline.idle)):
            assert sum(cause.seconds for cause in timeline.causes if cause.rank == rank) == pytest.approx(idle)


def same(rank: int, moment: int) -> int:
    return moment


@pytest.mark.features("check")
def test_what_happens_between_steps_is_measured_by_kind(tmp_path: Path) -> None:
    batches = [torch.randn(8, 4) for _ in range(3)]
    with pipeline(record=tmp_path, check_model="first") as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for batch in pipe.data(batches):
            pipe.step(batch, target=batch)
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            pipe.eval_step(batch)
    timeline = dl.read_run(tmp_path).timeline()
    for rank in range(2):
        passed = [interval for interval in timeline.between if interval.rank == rank]
        kinds = [interval.kind for interval in passed]
        # Clipping and the optimizer look at how the step went first; evaluating tells of itself.
        expected = "tell write clip hear clip hear update evaluate tell evaluate data"
        assert kinds == expected.split()
        assert all(interval.start <= interval.end for interval in passed)
        assert [interval.start for interval in passed[1:]] >= [interval.end for interval in passed[:-1]]
    metrics = dl.read_run(tmp_path).metrics()[-1]
    names = ("tell", "write", "hear", "clip", "update", "data", "evaluate", "outside")
    before = sum(metrics[f"pp/rank0/{name}_seconds"] for name in names)
    record = timeline.records[0]
    assert round(before * 1e9) == record.begin_ns - record.since_ns
    assert metrics["time_metrics/end_to_end(s)"] * 1e9 == pytest.approx(record.end_ns - record.since_ns)


def test_a_loader_that_fails_is_timed_all_the_same() -> None:
    def batches() -> Iterator[torch.Tensor]:
        yield torch.randn(8, 4)
        raise OSError("no more disk")

    pipe = pipeline()
    coming = pipe.data(batches())
    next(coming)
    with pytest.raises(OSError, match="no more disk"):
        next(coming)
    train(pipe, 1)
    assert "data" in [interval.kind for interval in pipe.timeline().between]


def test_an_optimizer_that_steps_the_pipeline_itself_is_no_trouble() -> None:
    pipe = pipeline()
    optimizer = torch.optim.LBFGS(pipe.parameters(), max_iter=2)
    batch = torch.randn(8, 4)

    def closure() -> torch.Tensor:
        pipe.zero_grad()
        loss = pipe.step(batch, target=batch).loss
        assert loss is not None
        return loss

    for _ in range(2):
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    assert {interval.kind for interval in pipe.timeline().between} <= {"tell", "write", "hear", "update"}


def test_records_of_no_kind_are_refused() -> None:
    for record in (3, None, ""):
        with refused(UsageError, f"record is {record!r}", expected="True, False, or a folder"):
            pipeline(record=record)


def test_the_first_step_of_a_run_is_weighed_and_others_only_if_asked(tmp_path: Path) -> None:
    for weigh in (False, True):
        with pipeline(record=tmp_path / str(weigh), weigh=weigh) as pipe:
            train(pipe, 2)
        run = dl.read_run(tmp_path / str(weigh))
        first, second = run.timeline(0), run.timeline(1)
        assert first.peak_stash is not None
        assert min(first.peak_stash) > 0
        assert (second.stash is not None) is weigh
        # What a pair holds is known from then on.
        assert [holding.peak_stash_bytes for holding in second.memory] == list(first.peak_stash)


def test_depths_of_queues_are_recorded_at_every_change() -> None:
    pipe = pipeline(schedule="gpipe")
    train(pipe, 1)
    timeline = pipe.timeline()
    assert timeline.queue_depths.keys() == {(0, 1), (1, 0)}
    for (source, target), curve in timeline.queue_depths.items():
        changes = 2 * len([item for item in timeline.transfers if (item.source, item.target) == (source, target)])
        assert len(curve) == changes == 2 * pipe.program.num_microbatches
        assert curve[-1][1] == 0


def test_a_failing_step_leaves_all_lines_before_it(tmp_path: Path) -> None:
    pipe = pipeline(record=tmp_path)
    train(pipe, 2)
    with pytest.raises(dl.DrumlineError):
        pipe.step(torch.randn(2, 4), target=torch.randn(2, 4))  # two rows for four microbatches
    assert dl.read_run(tmp_path).steps == (0, 1)


def test_a_run_that_nobody_closes_is_whole_when_the_pipeline_is_gone(tmp_path: Path) -> None:
    train(pipeline(record=tmp_path), 2)
    gc.collect()
    run = dl.read_run(tmp_path)
    assert run.steps == (0, 1)
    assert len(run.metrics()) == 2


# ---- real ranks ------------------------------------------------------------------------------------------------------


def record_and_die(folder: str) -> None:
    pipe = pipeline(record=folder)
    train(pipe, 3)
    pipe._recording.flush()  # as if a second had passed
    train(pipe, 2)
    if pipe.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    train(pipe, 1)


def record_twice(folder: str) -> tuple[list[float], str, str]:
    with pipeline(record=f"{folder}/run") as pipe:
        losses = train(pipe)
    try:
        pipeline(record=f"{folder}/run")
    except UsageError as error:
        refused = str(error)
    try:
        pipeline(record=f"{folder}/rank{pipe.rank}")
    except ValueError as error:
        differs = str(error)
    return losses, refused, differs


def test_every_rank_writes_its_own_file(tmp_path: Path) -> None:
    told = dl.launch(record_twice, str(tmp_path), num_ranks=2)
    run = dl.read_run(tmp_path / "run")
    assert run.steps == (0, 1, 2)
    assert [metric["loss_metrics/global_avg_loss"] for metric in run.metrics()] == told[0][0] == told[1][0]
    assert len(run.timeline().transfers) == 8
    assert told[0][1] == told[1][1]
    assert "already holds a run" in told[0][1]
    assert "ranks 0 and 1 disagree on record" in told[0][2]
    assert not (tmp_path / "rank0").exists()


def test_the_run_of_a_killed_rank_can_be_read(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 1 was killed"):
        dl.launch(record_and_die, str(tmp_path), num_ranks=2)
    run = dl.read_run(tmp_path)
    assert run.steps[:3] == (0, 1, 2)
    assert run.timeline(2).makespan > 0
    assert len(run.metrics()) >= 2


class LaggingClock(Clock):
    """A device's clock, whose step is known only once somebody waits for it."""

    def begin(self, draft: Draft) -> None:
        draft.marks = self

    def settle(self, draft: Draft, *, wait: bool) -> bool:
        if wait:
            draft.marks = None
        return draft.marks is None


def use(clock: Callable[[], Clock], patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let executors and channels of this process read another clock."""
    from drumline.engine.stages import engine
    from drumline.pipeline import setup

    for module_type in (engine, setup):
        patch(module_type, "clock_for", lambda device: clock())


def record_late(folder: str) -> tuple[int, int]:
    use(LaggingClock)
    with pipeline(record=folder) as pipe:
        train(pipe, 1)
        with refused(RunError, "a device has not finished the step yet"):
            pipe.timeline()
        train(pipe, 3)
        return pipe.timeline().records[0].step, pipe.timeline().records[1].step


def test_what_a_device_has_not_passed_is_told_and_written_a_step_later(tmp_path: Path) -> None:
    assert dl.launch(record_late, str(tmp_path), num_ranks=2) == [(2, 2), (2, 2)], "the last step that all know of"
    run = dl.read_run(tmp_path)
    assert run.steps == (0, 1, 2, 3), "the last one is written when the pipeline is closed"
    assert [metric["step"] for metric in run.metrics()] == [0, 1, 2]


def test_ranks_of_one_process_can_be_asked_for_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(LaggingClock, monkeypatch.setattr)
    with pipeline(record=tmp_path) as pipe:
        train(pipe, 3)
        assert [record.step for record in pipe.timeline().records] == [2, 2]
    assert dl.read_run(tmp_path).steps == (0, 1, 2)


# ---- clocks that differ ----------------------------------------------------------------------------------------------

OFFSETS_NS = (0, 7_000_000_000_000, -300_000_000)
DRIFTS = (0.0, 150e-6, -90e-6)


class SkewedClock(Clock):
    """A clock of its own, as another host has it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    @property
    def number(self) -> int:
        return self.rank + 1

    def now(self) -> int:
        return shown(self.rank, time.perf_counter_ns())


def shown(rank: int, moment: int) -> int:
    """Return what the rank's clock shows at a moment of the true one."""
    return moment + OFFSETS_NS[rank] + int(moment * DRIFTS[rank])


def true(rank: int, moment: int) -> float:
    return (moment - OFFSETS_NS[rank]) / (1 + DRIFTS[rank])


def record_with_skewed_clocks(folder: str, transport: str) -> tuple[int, ...]:
    import torch.distributed as dist

    use(lambda: SkewedClock(dist.get_rank()))
    with pipeline(record=folder, num_ranks=3, num_microbatches=6, transport=transport) as pipe:
        train(pipe, 6)
        return tuple(dial.own_ns - dial.common_ns for dial in pipe.timeline().dials)


@mainly("transport", "shared-memory", "gloo")
def test_clocks_that_differ_are_aligned_within_the_error_that_is_shown(tmp_path: Path, transport: str) -> None:
    told = dl.launch(record_with_skewed_clocks, str(tmp_path), transport, num_ranks=3)
    assert told[0] == told[1] == told[2], "all ranks read the clocks alike"
    run = dl.read_run(tmp_path)
    for step in some(run.steps):
        timeline = run.timeline(step)
        assert timeline.clock_errors[0] == 0
        assert 0 < timeline.clock_error < math.inf
        assert "clocks within" in repr(timeline)
        for record, error in zip(timeline.records, timeline.clock_errors, strict=True):
            for moment in (record.begin_ns, record.end_ns):
                off = timeline.common(record.rank, moment) - true(record.rank, moment)
                assert abs(off) <= error * 1e9 + 1000
        for record in timeline.records:
            for _, _, _, _, source, made, _, arrived, start, *_ in some(record.rows("messages")):
                assert timeline.common(source, made) <= timeline.common(record.rank, min(arrived, start)) + 1
            for source, left, came in some(record.rows("heard")):
                assert true(source, left) <= true(record.rank, came) + 1, "or the test's own clocks are wrong"
        assert all(some(item.made <= item.start <= item.end <= item.consumed for item in timeline.transfers))
        for parts, record in zip(timeline.parts, timeline.records, strict=True):
            assert round(parts.total * 1e9) == record.end_ns - record.begin_ns
            assert parts.unexplained >= 0
    assert all(some(metric["pp/clock_error_seconds"] > 0 for metric in run.metrics()))


def test_ranks_of_one_host_share_a_clock(tmp_path: Path) -> None:
    pipe = pipeline()
    train(pipe, 1)
    timeline = pipe.timeline()
    assert timeline.clock_error == 0
    assert "clocks" not in repr(timeline)
    assert not any(record.heard for record in timeline.records)
