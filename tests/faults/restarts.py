"""Ranks that are started again by themselves, and go on in the run's folder: the same ones, or fewer."""

from __future__ import annotations

import json
from dataclasses import replace

from faults.cases import fault
from faults.config import Config
from faults.lab import SECONDS_TO_FINISH, SECONDS_TO_START, Lab, Strike
from faults.outcome import losses_of, near
from faults.started import Started, until

BASE = Config()
_KILL = {"do": "kill", "rank": 1, "step": 7, "at": "backward"}


def _went_on(lab: Lab, run: Started, struck: Strike, pattern: str, ranks: int) -> None:
    """Demand the message, and steps after it; `restarts.jsonl` names the step and the ranks."""
    at, _ = run.says(pattern, SECONDS_TO_START)
    lab.row.detected = at - struck.time

    def went_on() -> bool:
        return any("/12  loss" in line for told, line in list(run.lines) if told > at) or run.is_over

    lab.row.recovered = until(went_on, SECONDS_TO_START, "a step after the restart") - struck.time
    assert run.ends(SECONDS_TO_FINISH) == 0, "the run failed"
    told = (lab.folder / "run" / "restarts.jsonl").read_text().splitlines()
    last = json.loads(told[-1])
    assert last["ranks"] == ranks, f"went on with {last['ranks']} ranks"
    lab.row.lost = sum(json.loads(name)["lost"] for name in told)
    assert sorted(losses_of(lab.folder / "run")) == list(range(1, BASE.steps + 1)), "steps are missing"


@fault("restart", "SIGKILL of rank 1 with --restarts 1")
def restart(lab: Lab) -> None:
    """The command starts its ranks again."""
    run = lab.train(BASE, "run", "--restarts", "1", fault=_KILL)
    _went_on(lab, run, lab.strike(run), r"rank 1 was killed by SIGKILL; restart 1 of 1", 2)
    lab.compared(BASE, "run")


@fault("restart-slices", "SIGKILL of rank 1 with --restarts 1 (zb-h1 in 4 slices)")
def restart_slices(lab: Lab) -> None:
    """Slices that were under way are gone with the rank; the step runs again from its first slice."""
    divided = replace(BASE, slices=4, schedule="zb-h1")
    run = lab.train(divided, "run", "--restarts", "1", fault=_KILL)
    _went_on(lab, run, lab.strike(run), r"rank 1 was killed by SIGKILL; restart 1 of 1", 2)
    lab.compared(divided, "run")


@fault("torchrun-restart", "SIGKILL of rank 1 under torchrun --max-restarts 1", short=True)
def torchrun_restart(lab: Lab) -> None:
    """torchrun's agent starts all ranks again, and they find their run."""
    run = lab.train(BASE, "run", fault=_KILL, torchrun=["--standalone", "--max-restarts", "1"])
    _went_on(lab, run, lab.strike(run), r"local_rank: 1 .*exitcode: -9|Signal 9 \(SIGKILL\)|rank 1 died", 2)
    lab.compared(BASE, "run")


@fault("torchrun-raise", "an exception on rank 1 under torchrun")
def torchrun_raise(lab: Lab) -> None:
    """Without restarts torchrun ends all ranks."""
    run = lab.train(BASE, "run", fault=_KILL | {"do": "raise"}, torchrun=["--standalone"])
    struck = lab.strike(run)
    code = lab.detected(run, struck.time, r"KeyError: 'no such layer: injected'")
    assert code != 0, "exit code 0"
    assert "bug in Drumline" not in run.text, "the user's error is called a bug of Drumline"
    lab.resumed(BASE, "run", struck)


@fault("torchrun-leave", "rank 1 leaves with exit code 0 under torchrun")
def torchrun_leave(lab: Lab) -> None:
    """torchrun takes exit code 0 for success, so the others must notice."""
    run = lab.train(BASE, "run", fault=_KILL | {"do": "leave"}, torchrun=["--standalone"])
    struck = lab.strike(run)
    code = lab.detected(run, struck.time, r"rank 1 (died|closed|left|ended|exited)")
    assert code != 0, "exit code 0"
    lab.resumed(BASE, "run", struck)


@fault("elastic", "rank 2 of 3 is killed again and again, with --elastic; goes on with 2")
def elastic(lab: Lab) -> None:
    """A rank that does not come back is planned around."""
    _elastic(lab, replace(BASE, ranks=3))


@fault("elastic-slices", "rank 2 of 3 is killed again and again, with --elastic; goes on with 2, in 4 slices")
def elastic_slices(lab: Lab) -> None:
    """Fewer ranks run the same slices."""
    _elastic(lab, replace(BASE, ranks=3, slices=4))
    program = (lab.folder / "run" / "program.csv").read_text()
    assert "1F3.3" in program, "the ranks that are left run no slices"


def _elastic(lab: Lab, three: Config) -> None:
    fault = _KILL | {"rank": 2, "step": 3, "again": True}
    run = lab.train(three, "run", "--restarts", "3", "--elastic", fault=fault)
    struck = lab.strike(run)
    _went_on(lab, run, struck, r"rank 2 was killed by SIGKILL; restart 2 of 3, on 2 ranks", 2)
    worst = near(losses_of(lab.folder / "run"), lab.references.of(three).losses)
    lab.row.outcome = f"on 2 ranks, {BASE.steps} losses within {worst:.0e}"
