"""NaN: the step is skipped on all ranks and counted, and training equals a plain loop that skips it."""

from __future__ import annotations

from dataclasses import replace

from faults.cases import fault
from faults.config import Config
from faults.lab import SECONDS_TO_FINISH, SECONDS_TO_START, Lab
from faults.outcome import near, outcome_of
from faults.plain import STALE, plain_losses

BASE = Config()
IN_DATA = Config(nan_at=2)  # steps 3 and 8
_STEP = 7


def _in_data(lab: Lab, config: Config) -> None:
    run = lab.train(config, "run")
    struck, _ = run.says(r"step 1/12 ", SECONDS_TO_START)
    at, _ = run.says(r"step 3\b.*skipped", SECONDS_TO_START)
    assert run.ends(SECONDS_TO_FINISH) == 0, "the run failed"
    lab.row.detected, lab.row.lost = at - struck, 0
    assert run.said(r"step 8\b.*skipped"), "step 8 is not told"
    assert run.said(r"2 steps skipped"), "the steps that were skipped are not counted"
    _equals_plain(lab, plain_losses(config))


@fault("nan-data", "NaN in one microbatch of steps 3 and 8", short=True)
def nan_data(lab: Lab) -> None:
    """All microbatches but one are fine."""
    _in_data(lab, IN_DATA)


@fault("nan-without-flush", "NaN in one microbatch of steps 3 and 8 (pipedream-2bw)")
def nan_without_flush(lab: Lab) -> None:
    """The update is left out in the step after."""
    _in_data(lab, replace(IN_DATA, schedule=STALE))


@fault("nan-gradient", "NaN in a gradient of rank 1 in step 8")
def nan_gradient(lab: Lab) -> None:
    """The loss is finite, and rank 0's own gradients may be as well."""
    run = lab.train(BASE, "run", fault={"do": "nan", "rank": 1, "step": _STEP, "at": "backward"})
    struck = lab.strike(run)
    at, _ = run.says(rf"step {_STEP + 1}\b.*skipped", SECONDS_TO_FINISH)
    assert run.ends(SECONDS_TO_FINISH) == 0, "the run failed"
    lab.row.detected, lab.row.lost = at - struck.time, 0
    _equals_plain(lab, plain_losses(BASE, skipped=(_STEP,)))


def _equals_plain(lab: Lab, expected: list[float]) -> None:
    found = outcome_of(lab.folder / "run").losses
    assert sorted(found) == list(range(1, BASE.steps + 1)), f"steps {sorted(found)}"
    lab.row.outcome = f"skipped; {len(found)} losses within {near(found, expected):.0e} of plain PyTorch that skips"


def _killed(lab: Lab, config: Config, step: int) -> None:
    run = lab.train(config, "run", fault={"do": "kill", "rank": 0, "step": step, "at": "backward"})
    struck = lab.strike(run)
    lab.detected(run, struck.time, r"rank 0 was killed by SIGKILL")
    lab.resumed(config, "run", replace(struck, steps=struck.steps + 2))  # two were skipped


@fault("nan-kill", "SIGKILL of rank 0 after a step skipped for NaN")
def nan_kill(lab: Lab) -> None:
    """How many steps were skipped comes back as well."""
    _killed(lab, IN_DATA, 8)


@fault("nan-kill-without-flush", "SIGKILL of rank 0 after a step skipped for NaN (pipedream-2bw)")
def nan_kill_without_flush(lab: Lab) -> None:
    """The checkpoint after step 8 has its update still to leave out."""
    _killed(lab, replace(IN_DATA, schedule=STALE, every=4), 7)


@fault("nan-always", "NaN in more steps than failures.max_skipped allows")
def nan_always(lab: Lab) -> None:
    """A run that cannot go on says so, rather than to skip for ever."""
    run = lab.train(IN_DATA, "run", "--set", "failures.max_skipped=0")
    struck, _ = run.says(r"step 1/12 ", SECONDS_TO_START)
    code = lab.detected(run, struck, r"drumline: step 3: .* in 1 step in a row", SECONDS_TO_START)
    assert code == 3, f"exit code {code}"
    lab.row.outcome = f"ended, exit code {code}"
