"""Signals from outside: a polite stop loses nothing, an impatient one harms nothing, and no rank is left behind."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

from faults.cases import fault
from faults.config import Config
from faults.lab import SECONDS_TO_NOTICE, Lab, Strike
from faults.outcome import losses_of
from faults.plain import STALE
from faults.started import Started

BASE = Config()
_SLOW = {"do": "nothing", "rank": 1, "step": 4, "at": "optimizer done", "pace": 0.5}
_STOPPED = r"Stopped by {cause} .*after step (\d+) of 12"


def _stopped(lab: Lab, run: Started, struck: float, cause: str, config: Config = BASE) -> None:
    """Demand a stop after a step with a checkpoint of that step, and resume."""
    at, match = run.says(_STOPPED.format(cause=cause), SECONDS_TO_NOTICE)
    lab.row.detected = at - struck
    step = int(match[1])
    assert lab.newest("run") == step, f"stopped after step {step}; the newest checkpoint is of {lab.newest('run')}"
    lab.resumed(config, "run", Strike(struck, step, 0))
    assert lab.row.lost == 0


@fault("term-launcher", "SIGTERM to the command that started the ranks", short=True)
def term_launcher(lab: Lab) -> None:
    """As a scheduler does before it takes the machine away."""
    run = lab.train(BASE, "run", fault=_SLOW)
    lab.strike(run)
    struck = run.send(signal.SIGTERM)
    assert run.ends(SECONDS_TO_NOTICE) == 0, "no exit code of 0"
    _stopped(lab, run, struck, "SIGTERM")


@fault("term-rank", "SIGTERM to rank 1 alone")
def term_rank(lab: Lab) -> None:
    """All ranks stop after the same step."""
    run = lab.train(BASE, "run", fault=_SLOW)
    lab.strike(run)
    struck = run.send(signal.SIGTERM, run.rank(1))
    assert run.ends(SECONDS_TO_NOTICE) == 0, "no exit code of 0"
    _stopped(lab, run, struck, "SIGTERM")


@fault("term-torchrun", "SIGTERM to torchrun")
def term_torchrun(lab: Lab) -> None:
    """torchrun passes it on, waits for its ranks, and ends with a code of its own."""
    run = lab.train(BASE, "run", fault=_SLOW, torchrun=["--standalone"])
    lab.strike(run)
    struck = run.send(signal.SIGTERM)
    run.ends(SECONDS_TO_NOTICE)
    _stopped(lab, run, struck, "SIGTERM")


def _ctrl_c(lab: Lab, config: Config) -> None:
    run = lab.train(config, "run", fault=_SLOW)
    lab.strike(run)
    struck = time.time()
    os.killpg(run.pid, signal.SIGINT)
    assert run.ends(SECONDS_TO_NOTICE) == 0, "no exit code of 0"
    _stopped(lab, run, struck, "Ctrl-C", config)


@fault("ctrl-c", "Ctrl-C")
def ctrl_c(lab: Lab) -> None:
    """The terminal sends it to every process."""
    _ctrl_c(lab, BASE)


@fault("ctrl-c-without-flush", "Ctrl-C (pipedream-2bw)")
def ctrl_c_without_flush(lab: Lab) -> None:
    """The checkpoint is written while microbatches are in flight."""
    _ctrl_c(lab, replace(BASE, schedule=STALE))


@fault("ctrl-c-twice", "Ctrl-C twice, in a step that does not end")
def ctrl_c_twice(lab: Lab) -> None:
    """The first cannot be followed, because rank 1 hangs; the second ends everything at once."""
    run = lab.train(BASE, "run", fault={"do": "hang", "rank": 1, "step": 7, "at": "forward"})
    struck = lab.strike(run)
    first = time.time()
    os.killpg(run.pid, signal.SIGINT)
    run.says("stopping after this step", SECONDS_TO_NOTICE)
    time.sleep(max(0.0, first + 1.5 - time.time()))
    second = time.time()
    os.killpg(run.pid, signal.SIGINT)
    code = run.ends(15.0)
    lab.row.detected = run.ended - second
    assert code == 130, f"exit code {code}"
    lab.resumed(BASE, "run", struck)


def _orphaned(lab: Lab, run: Started) -> None:
    """Kill what started the ranks; demand that none outlives it, and resume in the same folder."""
    lab.strike(run)
    struck = run.send(signal.SIGKILL)
    left = run.left_behind(SECONDS_TO_NOTICE)
    lab.row.detected = time.time() - struck
    assert not left, f"ranks outlive what started them: {left}"
    run.ends(5.0)
    done = max(losses_of(lab.folder / "run"))
    lab.resumed(BASE, "run", Strike(struck, done, 0), out="run")


@fault("kill-launcher", "SIGKILL of the command that started the ranks; resumed in its folder", short=True)
def kill_launcher(lab: Lab) -> None:
    """The ranks have nobody to tell."""
    _orphaned(lab, lab.train(BASE, "run", fault=_SLOW))


@fault("kill-torchrun", "SIGKILL of torchrun; resumed in its folder")
def kill_torchrun(lab: Lab) -> None:
    """The ranks have nobody to tell."""
    _orphaned(lab, lab.train(BASE, "run", fault=_SLOW, torchrun=["--standalone"]))
