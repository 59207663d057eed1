"""Ranks that raise, leave, crash, stop or hang: the others must not wait for them longer than they were told to."""

from __future__ import annotations

from faults.cases import fault
from faults.config import Config
from faults.lab import SECONDS_TO_NOTICE, Lab

BASE = Config()
IMPATIENT = Config(timeout=15.0)
_STEP = 7


def _struck(
    lab: Lab, do: str, rank: int, pattern: str, *, config: Config = BASE, bound: float = SECONDS_TO_NOTICE
) -> str:
    """Strike, demand the line and exit code 3, resume; returns what the run printed."""
    run = lab.train(config, "run", fault={"do": do, "rank": rank, "step": _STEP, "at": "forward"})
    struck = lab.strike(run)
    code = lab.detected(run, struck.time, pattern, bound)
    assert code == 3, f"exit code {code}"
    lab.resumed(BASE, "run", struck)
    return run.text


@fault("raise-0", "an exception on rank 0")
def raise_0(lab: Lab) -> None:
    """The user's own error, with its traceback."""
    text = _struck(lab, "raise", 0, r"rank 0 failed with KeyError: 'no such layer: injected'")
    assert "in _raise" in text, "the traceback does not name the user's line"


@fault("raise-1", "an exception on rank 1")
def raise_1(lab: Lab) -> None:
    """The last stage, whose neighbour waits for a gradient."""
    _struck(lab, "raise", 1, r"rank 1 failed with KeyError: 'no such layer: injected'")


@fault("leave-0", "rank 0 leaves with exit code 0 (os._exit)")
def leave_0(lab: Lab) -> None:
    """An exit code of 0 is no success."""
    _struck(lab, "leave", 0, r"rank 0 exited with code 0 before")


@fault("leave-1", "rank 1 leaves with exit code 0 (os._exit)")
def leave_1(lab: Lab) -> None:
    """An exit code of 0 is no success."""
    _struck(lab, "leave", 1, r"rank 1 exited with code 0 before")


@fault("quit-1", "rank 1 leaves with exit code 0 (sys.exit)")
def quit_1(lab: Lab) -> None:
    """SystemExit passes through a user's code."""
    _struck(lab, "quit", 1, r"rank 1 failed with SystemExit")


@fault("crash-1", "rank 1 crashes (SIGSEGV)")
def crash_1(lab: Lab) -> None:
    """As in a faulty kernel."""
    text = _struck(lab, "crash", 1, r"rank 1 was killed by SIGSEGV")
    assert "user.py" in text, "no stack of the crash"


@fault("stop-0", "SIGSTOP of rank 0 past the bound of 15 s", waits=True)
def stop_0(lab: Lab) -> None:
    """A process that neither answers nor ends."""
    _struck(lab, "stop", 0, r"rank 1 .*waits for .*rank 0", config=IMPATIENT, bound=90.0)


@fault("stop-1", "SIGSTOP of rank 1 past the bound of 15 s", waits=True, short=True)
def stop_1(lab: Lab) -> None:
    """A process that neither answers nor ends."""
    _struck(lab, "stop", 1, r"rank 0 .*waits for .*rank 1", config=IMPATIENT, bound=90.0)


@fault("hang-1", "rank 1 hangs in the user's code past the bound of 15 s", waits=True)
def hang_1(lab: Lab) -> None:
    """The stack of the rank that hangs tells where."""
    text = _struck(lab, "hang", 1, r"rank 0 .*waits for .*rank 1", config=IMPATIENT, bound=90.0)
    assert "in _linger" in text, "no stack of the rank that hangs"
