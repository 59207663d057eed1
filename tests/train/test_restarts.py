"""Runs whose ranks or launchers die: what starts again ends where an uninterrupted run ends."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.checkpoint.reader import Checkpoint
from drumline.core.errors import ConfigError, LaunchError, NonFiniteError, RankFailed, UsageError, WaitTimeout
from drumline.core.measured.run import read_run
from drumline.train import capacity
from drumline.train import claim as claims
from drumline.train.capacity import check_room
from drumline.train.config.files.settings_file import read_settings
from drumline.train.config.settings import (
    BatchSettings,
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    FailureSettings,
    MeshSettings,
    ModelSettings,
    PipelineSettings,
    RunSettings,
    TrainSettings,
)
from drumline.train.config.write import config_text
from drumline.train.folder import begin
from drumline.train.replan import planned_for
from drumline.train.restarts import Restarts
from drumline.train.start import start
from matrices import long
from refused import refused
from some import some

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(300)]
STEPS, EVERY = 12, 4
FRAGILE = str(Path(__file__).with_name("fragile.py"))


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def settings_for(folder: Path, *, ranks: int = 2, **tables: Any) -> TrainSettings:
    """Return settings of a model whose orders to die lie beside the run."""
    given = TrainSettings(
        model=ModelSettings(kind="function", function=f"{FRAGILE}:model", arguments={"orders": f"{folder}.orders"}),
        data=DataSettings(kind="points"),
        batch=BatchSettings(sequences=8, microbatch=2, sequence=1),
        mesh=MeshSettings(pipeline=ranks),
        pipeline=PipelineSettings(device="cpu", timeout=60.0),
        evaluation=EvaluationSettings(every=3, batches=1),
        checkpoint=CheckpointSettings(every=EVERY),
        run=RunSettings(steps=STEPS, out=str(folder), threads=1),
    )
    return replace(given, **tables)


def order(folder: Path, *names: str) -> None:
    orders = Path(f"{folder}.orders")
    orders.mkdir(exist_ok=True)
    for name in names:
        (orders / name).touch()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(line["train/step"], line["train/loss"]) for line in lines(folder / "metrics.jsonl")]


def tensors(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all that the last checkpoint holds but generators, which every process has of its own."""
    last = Checkpoint(folder / "checkpoints" / f"step-{STEPS:08d}")
    all_of_it = {**last.model, **{name: part for name, part in last.training.items() if not name.startswith("random.")}}
    return {name: tensor.numpy().tobytes() for name, tensor in all_of_it.items()}


def same_end(path: Path, other: Path) -> None:
    """Hold two runs against each other: every step once, every bit the same."""
    assert losses(path) == losses(other)
    assert [step for step, _ in losses(path)] == list(range(1, STEPS + 1))
    assert tensors(path) == tensors(other) != {}
    held_out = [[(line["step"], line["loss"]) for line in lines(run / "evaluations.jsonl")] for run in (path, other)]
    assert held_out[0] == held_out[1]
    assert read_run(path).num_steps >= 1


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    start(settings_for(folder, pipeline=PipelineSettings(device="cpu", transport="in-process")))
    return folder


@long
def test_local_ranks_start_again_and_end_like_an_uninterrupted_run(tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "run"
    order(folder, "1-0-a", f"0-{EVERY}-b")
    start(settings_for(folder, failures=FailureSettings(restarts=2)))
    same_end(folder, whole)
    restarts = lines(folder / "restarts.jsonl")
    assert [(restart["step"], restart["ranks"]) for restart in restarts] == [(0, 2), (EVERY, 2)]
    assert all(0 <= restart["lost"] <= 2 * EVERY for restart in restarts)
    assert read_run(folder / "earlier" / "02").num_steps >= 1


@long
def test_fewer_ranks_go_on_where_one_does_not_come_back(
    tmp_path: Path, whole: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    order(folder, f"1-{EVERY}-a", f"1-{EVERY}-b")
    chimera = PipelineSettings(device="cpu", schedule="chimera", timeout=60.0)
    start(settings_for(folder, ranks=2, pipeline=chimera, failures=FailureSettings(restarts=2, elastic=True)))
    found = losses(folder)
    assert [step for step, _ in found] == list(range(1, STEPS + 1))
    assert [value for _, value in found] == pytest.approx([value for _, value in losses(whole)], rel=1e-6)
    assert [line["ranks"] for line in lines(folder / "restarts.jsonl")] == [2, 1]
    assert "planned for 1 rank instead of 2; schedule 1f1b, because chimera does not admit" in caplog.text
    assert "rank 1 was killed by SIGKILL; restart 2 of 2, on 1 rank" in caplog.text


def config_file(settings: TrainSettings, folder: Path) -> str:
    path = folder / "config.toml"
    path.write_text(config_text(settings))
    return str(path)


@contextmanager
def started(*command: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that is gone afterwards, with all that it has started."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)


@long
def test_torchrun_starts_the_run_again_in_its_folder(tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "run"
    order(folder, f"0-{EVERY}-a")
    config = config_file(settings_for(folder), tmp_path)
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    with started(*torchrun, "-m", "drumline", "train", config) as process:
        told, _ = process.communicate(timeout=240)
    assert process.returncode == 0, told
    same_end(folder, whole)
    assert [line["step"] for line in lines(folder / "restarts.jsonl")] == [EVERY]


def children(process: int) -> list[int]:
    return [int(name) for name in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def listening(process: int) -> list[str]:
    """Return the addresses on which a process waits for connections, as the kernel writes them."""
    files = [os.readlink(path) for path in Path(f"/proc/{process}/fd").iterdir() if path.is_symlink()]
    sockets = {found[1] for file in files if (found := re.fullmatch(r"socket:\[(\d+)\]", file))}
    tables = [Path(f"/proc/{process}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in sockets]


def wait_until(is_so: Callable[[], Any], seconds: float = 120.0) -> None:
    limit = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < limit, "waited too long"
        time.sleep(0.05)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@long
def test_a_killed_launcher_leaves_no_rank_and_the_run_continues(tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "run"
    order(folder, "slow")
    settings = settings_for(folder)
    with started("drumline", "train", config_file(settings, tmp_path)) as launcher:
        wait_until(lambda: (folder / "checkpoints" / f"step-{EVERY:08d}").exists())
        ranks = children(launcher.pid)
        assert len(ranks) == 2
        heard_at = [name for process in (launcher.pid, *ranks) for name in listening(process)]
        assert all(name == "0100007F" for name in some(heard_at)), "on loopback alone"
        with refused(UsageError, rf"run\.out: .* is under way: process {launcher.pid} on .* since 20"):
            start(settings)
        launcher.kill()
        wait_until(lambda: not any(map(is_running, ranks)))
    (Path(f"{folder}.orders") / "slow").unlink()
    with refused(UsageError, f"holds a run already, of process {launcher.pid} on"):
        start(settings)
    start(replace(settings, checkpoint=replace(settings.checkpoint, resume=str(folder))))
    same_end(folder, whole)


class Failing:
    """Attempts that fail in turn, and what they were started with."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.seen = list(errors), list[tuple[int, bool]]()

    def __call__(self, settings: TrainSettings, continues: bool) -> str:
        self.seen.append((settings.num_ranks, continues))
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def killed(rank: int) -> RankFailed:
    return RankFailed(rank, f"rank {rank} was killed by SIGKILL")


def test_which_failures_are_worth_another_attempt_and_on_how_many_ranks() -> None:
    failures = FailureSettings(restarts=4, elastic=True, again_within=2)
    four = TrainSettings(mesh=MeshSettings(pipeline=4), failures=failures)
    checked: list[int] = []
    attempts = Failing(killed(3), killed(1), killed(3), WaitTimeout("rank 0 waits"))
    restarts = Restarts(four, lambda settings: checked.append(settings.num_ranks))
    assert restarts.run(attempts, continues=False) == "done"
    assert attempts.seen == [(4, False), (4, True), (4, True), (3, True), (3, True)]
    assert checked == [3]

    for error in some([NonFiniteError("a NaN"), LaunchError("cannot start"), UsageError("wrong")]):
        attempts = Failing(error)
        with pytest.raises(type(error)):
            Restarts(four, print).run(attempts, continues=False)
        assert len(attempts.seen) == 1

    fewest = replace(four, failures=replace(failures, min_ranks=4))
    with pytest.raises(RankFailed) as raised:
        Restarts(fewest, print).run(Failing(killed(0), killed(0)), continues=False)
    assert raised.value.__notes__ == ["failures.min_ranks = 4: a run may not continue with fewer ranks"]

    once = replace(four, failures=FailureSettings(restarts=1))
    with pytest.raises(RankFailed, match="rank 2 was killed"):
        Restarts(once, print).run(Failing(killed(1), killed(2)), continues=False)


@pytest.mark.features("capture", "check", "lengths", "precision", "record", "stream")
def test_ranks_that_cannot_hold_the_model_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "run", ranks=1)
    check_room(settings)
    monkeypatch.setattr(capacity, "host_bytes", lambda: 1024)
    with refused(UsageError, "1 rank cannot hold the model: 1 rank of them need .* KiB", expected="at most 1 KiB"):
        check_room(settings)
    monkeypatch.setattr(capacity, "_LARGEST", 0)  # too large to be run: only its state is counted
    gpt = TrainSettings(mesh=MeshSettings(pipeline=4), pipeline=PipelineSettings(device="cpu"))
    with refused(UsageError, r"4 ranks cannot hold the model: 4 ranks of them need 1\d\d MiB together"):
        check_room(gpt)


def test_more_ranks_come_back_and_ranks_beyond_the_model_are_refused() -> None:
    elastic = FailureSettings(elastic=True)
    layers = PipelineSettings(schedule="interleaved-1f1b", stages_per_rank=2, layers=(1, 1, 2, 2))
    two = TrainSettings(pipeline=layers, failures=elastic)
    four = planned_for(two, 4)
    assert (four.num_ranks, four.pipeline.schedule, four.pipeline.stages_per_rank) == (4, "interleaved-1f1b", 2)
    assert four.pipeline.layers == ()
    assert planned_for(two, 5).pipeline.schedule == "1f1b"
    with refused(UsageError, "9 ranks are there", expected="at most"):
        planned_for(two, 9)
    with refused(UsageError, "1 rank is left", expected=r"2 or more.*failures\.min_ranks"):
        planned_for(replace(two, failures=replace(elastic, min_ranks=2)), 1)


def test_folders_have_safe_names_and_default_ones_are_unique(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in some(["a/..", "x/-rf", "a\nb", "nul", "a" * 101, "a\x1b[2J"]):
        with refused(ConfigError, r"run\.out"):
            read_settings(None, {"run.out": name})
    monkeypatch.chdir(tmp_path)
    settings = TrainSettings(model=ModelSettings(name="../../some/model"))
    assert settings.folder == "out/train/some-model"
    names = []
    for _ in range(3):
        begun = begin(settings)
        names.append(begun.settings.folder)
        (Path(begun.settings.folder) / "config.json").touch()
        if len(names) != 2:
            begun.claimed.close()
    assert names == [f"out/train/some-model{end}" for end in ("", "-2", "-3")]


def test_a_folder_that_cannot_be_written_is_refused_before_ranks_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in some([tmp_path / "file" / "run", Path("/proc/run")]):
        with refused(UsageError, rf"run\.out: cannot write to {folder}: N"):
            start(settings_for(folder), train=lambda settings: pytest.fail("a rank was started"))


def test_a_job_finds_its_run_again_and_others_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-1")
    first = begin(TrainSettings(), job=claims.job_here())
    (Path(first.settings.folder) / "config.json").touch()
    first.claimed.close()
    again = begin(TrainSettings(), job="job-1")
    assert (again.settings.folder, again.continues) == (first.settings.folder, True)
    again.claimed.close()
    other = begin(TrainSettings(), job="job-2")
    assert (other.settings.folder, other.continues) == (f"{first.settings.folder}-2", False)
    named = TrainSettings(run=RunSettings(out=first.settings.folder))
    with refused(UsageError, f"holds a run already, of process {os.getpid()} on", fix="--continue"):
        begin(named, job="job-3")
    for variable, value in {"RUN_ID": "none", "RESTART_COUNT": "0"}.items():  # a job without a name has its address
        monkeypatch.setenv(f"TORCHELASTIC_{variable}", value)
    nameless = RunSettings(out="nameless")
    begun = begin(TrainSettings(run=nameless), job=claims.job_here())
    (Path("nameless") / "config.json").touch()
    begun.claimed.close()
    with refused(UsageError, "holds a run already"):
        begin(TrainSettings(run=nameless), job=claims.job_here())


def test_file_systems_without_locks_ask_whether_the_owner_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with claims.claim(tmp_path) as mine:
        mine.keep()
        with refused(claims.FolderInUse, rf"process {os.getpid()} "):
            claims.claim(tmp_path)
        lock = tmp_path / claims.LOCK
        owner = json.loads(lock.read_text())
        lock.write_text(json.dumps({**owner, "started": owner["started"] - 1}))  # its number was given to another
        claims.claim(tmp_path).close()
        lock.write_text(json.dumps({**owner, "boot": "elsewhere", "host": "far"}))
        with refused(claims.FolderInUse, "on far since", fix=r"remove .*run\.lock"):
            claims.claim(tmp_path)
    assert mine.before == {}
    claims.claim(tmp_path).close()
