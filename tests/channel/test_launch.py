"""`launch`: local ranks from a script, their results by rank, and their errors by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from drumline.channel.launch.launch import _error, launch
from drumline.channel.launch.wire import Failure
from drumline.core.action import Action, B, F
from drumline.core.errors import BatchError, LaunchError, RankFailed, WaitTimeout
from drumline.schedules import generate, schedule, unregister
from matrices import long, mainly
from refused import refused, saying
from some import some

# Starts processes, which takes long on a busy machine.
pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def until(condition: Callable[[], bool]) -> bool:
    """Wait for what must happen; the bound only keeps a failing test from hanging."""
    limit = time.monotonic() + 200
    while not condition() and time.monotonic() < limit:
        time.sleep(0.02)
    return condition()


def pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in sorted(folder.glob("pid*")) if path.read_text()]


def write_pid(folder: Path) -> None:
    (folder / f"pid{os.environ['RANK']}").write_text(str(os.getpid()))


def open_files() -> set[str]:
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return {str(link.readlink()) for link in links if link.is_symlink()}


@pytest.mark.cold_ranks
def test_results_come_by_rank_from_a_group_with_everything_set_up(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRUMLINE_TEST_WORD", "inherited")
    monkeypatch.setenv("RANK", "7")
    monkeypatch.chdir(tmp_path)
    offset = 10

    def fn(base: int, *, factor: int) -> dict[str, Any]:
        import torch
        import torch.distributed as dist

        total = torch.ones(2)
        dist.all_reduce(total)
        rank = dist.get_rank()
        print(f"first of {rank}\nsecond of {rank}")
        print(f"error of {rank}", file=sys.stderr)
        os.write(1, b"no newline")
        if rank == 0:
            time.sleep(0.5)  # the other rank finishes first
        shared = torch.full((3_000_000,), float(rank))
        return {
            "value": (base + offset) * factor + rank,
            "sum": total.tolist(),
            "words": [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")],
            "inherited": os.environ["DRUMLINE_TEST_WORD"],
            "master": os.environ["MASTER_ADDR"],
            "threads": (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]),
            "backend": dist.get_backend(),
            "argv": sys.argv,
            "cwd": os.getcwd(),
            "path": sys.path,
            "pid": os.getpid(),
            "large": shared,
            "view": shared[:2],
        }

    results = launch(fn, 1, num_ranks=2, kwargs={"factor": 2}, threads=3)
    assert [result["value"] for result in results] == [22, 23]
    assert [result["sum"] for result in results] == [[2.0, 2.0]] * 2
    assert [result["words"] for result in results] == [["0", "0", "2", "2"], ["1", "1", "2", "2"]]
    for rank, result in enumerate(results):
        assert (result["inherited"], result["master"], result["backend"]) == ("inherited", "127.0.0.1", "gloo")
        assert result["threads"] == (3, "3")
        assert (result["argv"], result["cwd"], result["path"]) == (sys.argv, str(tmp_path), sys.path)
        assert result["large"].sum().item() == 3_000_000 * rank
        result["large"][1] = 5
        assert result["view"].tolist() == [rank, 5]
        assert not is_running(result["pid"])
    printed = capsys.readouterr()
    for rank in (0, 1):
        mine = [line for line in printed.out.splitlines() if line.startswith(f"[rank {rank}]")]
        assert mine == [f"[rank {rank}] {words}" for words in (f"first of {rank}", f"second of {rank}", "no newline")]
        assert f"[rank {rank}] error of {rank}" in printed.err.splitlines()


SCRIPT = """
import dataclasses, sys
import torch
from drumline.channel.launch.launch import launch

print("the script runs")
torch.randn(300, 300) @ torch.randn(300, 300)  # starts torch's threads

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 1, bias=False)
    def forward(self, x):
        return scale * self.linear(x)

@dataclasses.dataclass
class Answer:
    rank: int
    y: float

scale = 3

def train(model):
    import io, torch.distributed as dist
    torch.save(model, io.BytesIO())  # plain pickle, which looks the class up by name
    print("hello")
    return Answer(dist.get_rank(), model(torch.ones(2)).item())

net = Net()
torch.nn.init.ones_(net.linear.weight)
answers = launch(train, net, prefix=False)
assert all(type(one) is Answer for one in answers)
print(answers, sys.argv[1:])
"""


@mainly("source", "script", "stdin")
def test_an_unguarded_script_runs_once_and_its_functions_and_classes_travel(source: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-W", "error", "-" if source == "stdin" else str(script), "a word"]
    done = subprocess.run(
        command, input=SCRIPT if source == "stdin" else "", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "the script runs",
        "hello",
        "hello",
        "[Answer(rank=0, y=6.0), Answer(rank=1, y=6.0)] ['a word']",
    ]
    assert done.stderr == ""


@pytest.mark.usefixtures("patient")
def test_schedules_that_the_user_registered_are_known_to_the_ranks() -> None:
    @schedule("backwards-last", summary="all forwards, then all backwards")
    def backwards_last(num_ranks: int, *, num_microbatches: int) -> Iterator[list[Action]]:
        for rank in range(num_ranks):
            yield [op(rank, m) for op in (F, B) for m in range(num_microbatches)]

    def rows() -> str:
        return str(generate("backwards-last", num_ranks=2, num_microbatches=2))

    try:
        assert launch(rows, num_ranks=2) == ["0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1"] * 2
    finally:
        unregister("backwards-last")


@pytest.mark.cold_ranks
def test_a_failing_rank_is_named_with_its_error_and_the_others_end(tmp_path: Path) -> None:
    class MyError(Exception):
        pass

    def fn() -> None:
        import torch.distributed as dist

        write_pid(tmp_path)
        dist.barrier()
        if dist.get_rank() == 1:
            raise MyError("the reason")
        dist.barrier()

    with pytest.raises(RankFailed) as caught:
        launch(fn, num_ranks=2)
    assert str(caught.value) == "rank 1 failed with MyError: the reason"
    assert caught.value.rank == 1
    assert type(caught.value.__cause__) is MyError
    notes = "\n".join(caught.value.__notes__)
    assert "rank 0 then failed with RuntimeError" in notes
    assert 'raise MyError("the reason")' in notes
    assert "worker.py" not in notes
    assert len(pids(tmp_path)) == 2
    assert not any(map(is_running, pids(tmp_path)))


@pytest.mark.cold_ranks
def test_a_killed_rank_is_named_and_a_rank_that_hangs_is_ended_cleanly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fn() -> None:
        import torch.distributed as dist

        write_pid(tmp_path)
        try:
            dist.barrier()
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(10_000)
        finally:
            (tmp_path / "cleaned").touch()

    monkeypatch.setattr("drumline.channel.launch.launch._SECONDS_OF_GRACE", 0.0)  # the one that hangs needs none
    before, children = open_files(), threading.active_count()
    with pytest.raises(RankFailed, match=r"^rank 1 was killed by SIGKILL") as caught:
        launch(fn, num_ranks=2)
    assert caught.value.rank == 1
    assert (tmp_path / "cleaned").exists()
    assert len(pids(tmp_path)) == 2
    assert not any(map(is_running, pids(tmp_path)))
    assert until(lambda: open_files() <= before | {"anon_inode:[eventfd]", "anon_inode:[eventpoll]"})
    assert threading.active_count() == children


@pytest.mark.usefixtures("patient")
def test_an_error_that_every_rank_raises_is_raised_itself() -> None:
    def fn() -> None:
        raise BatchError("a batch of 5", expected="a multiple of 2")

    with refused(BatchError, "^a batch of 5", expected="a multiple of 2") as caught:
        launch(fn, num_ranks=2)
    assert caught.value.expected == "a multiple of 2"
    assert "in fn" in "\n".join(caught.value.__notes__)


def unpicklable_error() -> None:
    class Holder(Exception):
        def __init__(self, code: int) -> None:
            super().__init__(f"code {code}")
            self.lock = threading.Lock()

    raise Holder(5)


def unmakeable_error() -> None:
    class TwoWords(Exception):
        def __init__(self, name: str, other: str) -> None:
            super().__init__(f"{name} {other}")

    raise TwoWords("a", "b")


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (unpicklable_error, "rank 0 failed with Holder: code 5"),
        (unmakeable_error, "rank 0 failed with TwoWords: a b"),
        (lambda: os._exit(3), "rank 0 exited with code 3 before fn returned"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "rank 0 was killed by SIGTERM"),
    ],
    ids=["unpicklable", "unmakeable", "exit", "terminated"],
)
def test_errors_that_cannot_travel_arrive_as_text(fn: Callable[[], None], words: str) -> None:
    with pytest.raises(RankFailed) as caught:
        launch(fn, num_ranks=1)
    assert str(caught.value) == words
    assert caught.value.__cause__ is None


def test_a_result_that_cannot_travel_is_named() -> None:
    with refused(LaunchError, r"the result holds \['guard'\], a lock"):
        launch(lambda: {"x": 1, "guard": threading.Lock()}, num_ranks=1)


class Hurried:
    """Stands in for `time`: hours pass as soon as both ranks are at work, and not before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def monotonic(self) -> float:
        return time.monotonic() + (10_000 if len(pids(self.folder)) == 2 else 0)


@long
@pytest.mark.cold_ranks
def test_past_the_timeout_ranks_show_their_stacks_and_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fn() -> None:
        write_pid(tmp_path)
        time.sleep(10_000)

    monkeypatch.setattr("drumline.channel.launch.launch.time", Hurried(tmp_path))
    monkeypatch.setattr(
        "drumline.channel.launch.processes._SECONDS_TO_SHOW_STACKS", 200.0
    )  # it ends when all have shown them
    with refused(WaitTimeout, "^ranks 0, 1 did not finish within 5000 s"):
        launch(fn, timeout=5000)
    shown = capsys.readouterr().err
    for rank in (0, 1):
        assert f"[rank {rank}] Current thread" in shown or f"[rank {rank}] Thread" in shown
    assert not any(map(is_running, pids(tmp_path)))


def test_when_a_rank_gives_up_waiting_the_one_that_hangs_shows_its_stack(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs_here() -> None:
        write_pid(tmp_path)
        time.sleep(10_000)

    def fn() -> None:
        if os.environ["RANK"] == "1":
            hangs_here()
        while not pids(tmp_path):
            time.sleep(0.01)
        raise WaitTimeout("rank 0 waits for rank 1")

    monkeypatch.setattr("drumline.channel.launch.launch._SECONDS_OF_GRACE", 0.0)
    monkeypatch.setattr(
        "drumline.channel.launch.processes._SECONDS_TO_SHOW_STACKS", 200.0
    )  # it ends when all have shown them
    with pytest.raises(RankFailed, match="rank 0 failed with WaitTimeout: rank 0 waits for rank 1"):
        launch(fn)
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("[rank 1]")]
    assert any("in hangs_here" in line for line in shown)


ENDLESS = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background, it would be ignored
from pathlib import Path
from drumline.channel.launch.launch import launch

def endless(folder):
    try:
        (folder / f"pid{os.environ['RANK']}").write_text(str(os.getpid()))  # from here on it may be ended at any moment
        time.sleep(10_000)
    finally:
        (folder / f"cleaned{os.environ['RANK']}").touch()

launch(endless, Path(sys.argv[1]))
"""


@long
@mainly("number", signal.SIGKILL, signal.SIGINT)
def test_ranks_end_with_the_process_that_started_them(number: signal.Signals, tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", ENDLESS, str(tmp_path)], stderr=subprocess.PIPE, text=True)
    try:
        assert until(lambda: len(pids(tmp_path)) == 2 or parent.poll() is not None)
        ranks = pids(tmp_path)
        assert len(ranks) == 2
        assert all(some(map(is_running, ranks)))
        parent.send_signal(number)
        _, shown = parent.communicate(timeout=200)
        assert until(lambda: not any(map(is_running, ranks)))
    finally:
        parent.kill()
        parent.wait()
    assert sorted(path.name for path in tmp_path.glob("cleaned*")) == ["cleaned0", "cleaned1"]
    if number == signal.SIGINT:
        assert shown.splitlines()[-1] == "KeyboardInterrupt"
        assert "[rank" not in shown


DEAF = """
import os, signal, sys, time
from pathlib import Path
from drumline.channel.launch.launch import launch

def deaf(folder):
    hears, missed = signal.getsignal(signal.SIGTERM), []

    def misses_two(number, frame):
        missed.append(number)
        if len(missed) > 2:
            hears(number, frame)

    signal.signal(signal.SIGTERM, misses_two)
    try:
        (folder / f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
        time.sleep(10_000)
    finally:
        (folder / f"cleaned{os.environ['RANK']}").touch()

launch(deaf, Path(sys.argv[1]))
"""


@long
def test_a_rank_whose_sleep_a_signal_did_not_end_is_told_again(tmp_path: Path) -> None:
    # A signal that comes just before a system call does not end it; here a handler plays two such signals.
    parent = subprocess.Popen([sys.executable, "-c", DEAF, str(tmp_path)], stderr=subprocess.PIPE, text=True)
    try:
        assert until(lambda: len(pids(tmp_path)) == 2 or parent.poll() is not None)
        ranks = pids(tmp_path)
        parent.send_signal(signal.SIGTERM)
        parent.communicate(timeout=200)
        assert until(lambda: not any(map(is_running, ranks)))
    finally:
        parent.kill()
        parent.wait()
    assert sorted(path.name for path in tmp_path.glob("cleaned*")) == ["cleaned0", "cleaned1"]


def no_ranks() -> Iterable[tuple[Callable[[], Any], dict[str, str]]]:
    lock = threading.Lock()

    def uses_lock() -> bool:
        return lock.locked()

    def two(a: int, b: int) -> int:
        return a + b

    yield lambda: launch(uses_lock), saying("^cannot send to the ranks: uses_lock uses the variable `lock`, a lock")
    yield lambda: launch(two, 1, [lock]), saying(r"^cannot send to the ranks: argument 1 holds \[0\], a lock")
    yield lambda: launch(two, 1, kwargs={"b": lock}), saying("^cannot send to the ranks: argument b, a lock")
    yield lambda: launch(two, 1), saying(r"^two\(a.*\) .*cannot be called .* missing a required argument: 'b'")
    yield lambda: launch(two(1, 2)), saying("^fn is 3$", expected="a function")  # type: ignore[arg-type]
    yield lambda: launch(two, 1, 2, num_ranks=0), saying("^num_ranks is 0$", expected="1 or more")
    yield lambda: launch(two, 1, 2, timeout=0), saying("^timeout is 0$", expected="a positive number")


def test_misuse_is_refused_before_any_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    for call, words in no_ranks():
        with refused(LaunchError, **words):
            call()


def test_the_origin_is_the_earliest_error_that_is_no_echo() -> None:
    echo = Failure(kind="RankFailed", text="rank 1 failed", at=1.0, echo=True)
    later = Failure(kind="ValueError", text="later", at=3.0)
    first = Failure(kind="KeyError", text="first", at=2.0)
    error = _error({0: echo, 1: later, 2: first}, num_ranks=3)
    assert isinstance(error, RankFailed)
    assert str(error) == "rank 2 failed with KeyError: first"
    assert isinstance(_error({0: echo}, num_ranks=3), RankFailed)
