"""A rank that is killed, crashes, raises, leaves or stops answering; and what the rest of the run says to it."""

from __future__ import annotations

from dataclasses import replace

from faults.cases import fault
from faults.config import Config
from faults.lab import Lab
from faults.plain import STALE

BASE = Config()
DROPOUT = Config(dropout=0.1)  # random numbers inside blocks come back as well
STEP = 7  # of 12; checkpoints are written after 3, 6, 9 and 12
_SAVING = ("saving", "publishing")
KILLED = r"rank {rank} was killed by SIGKILL"
_MOMENTS = {
    "forward": "in a forward",
    "backward": "in a backward",
    "optimizer": "in the optimizer's step",
    "saving": "while it writes a checkpoint",
}


def _kill(lab: Lab, config: Config, rank: int, at: str, on: Config | None = None) -> None:
    step = 9 if at in _SAVING else STEP
    run = lab.train(config, "run", fault={"do": "kill", "rank": rank, "step": step, "at": at})
    struck = lab.strike(run)
    code = lab.detected(run, struck.time, KILLED.format(rank=rank))
    assert code == 3, f"exit code {code}"
    if at in _SAVING:
        assert lab.newest("run") == 6, f"rank {rank} was killed writing step 9; the newest is {lab.newest('run')}"
    lab.resumed(config, "run", struck, on=on)


def _add_kill(rank: int, at: str, where: str) -> None:
    short = (rank, at) == (0, "saving")
    config = DROPOUT if at == "backward" else BASE

    @fault(f"kill-{at}-{rank}", f"SIGKILL of rank {rank} {where}", short=short)
    def killed(lab: Lab) -> None:
        _kill(lab, config, rank, at)


for _at, _where in _MOMENTS.items():
    for _rank in (0, 1):
        _add_kill(_rank, _at, _where)


@fault("kill-publishing", "SIGKILL of rank 0 before it renames a checkpoint")
def kill_publishing(lab: Lab) -> None:
    """All files are written, and the checkpoint has not appeared."""
    _kill(lab, BASE, 0, "publishing")


@fault("kill-moving", "SIGKILL of rank 1 while layers move from it to rank 0")
def kill_moving(lab: Lab) -> None:
    """The checkpoint is of another cut than the one with which the run goes on."""
    _kill(lab, DROPOUT, 1, "moving")


def _add_kill_moving(lines: str, what: str) -> None:
    @fault(f"kill-moving-{lines.replace(' ', '-')}", f"SIGKILL of rank 3 of 4 while {what} move from it to rank 1")
    def killed(lab: Lab) -> None:
        """The other line of the mesh may have moved all of its layers already."""
        _kill(lab, Config(lines=lines), 3, "moving")


for _lines, _what in {
    "tp": "parts of layers",
    "ep": "experts",
    "zero 1": "pieces of optimizer state",
    "zero 3": "pieces of parameters",
}.items():
    _add_kill_moving(_lines, _what)


@fault("kill-without-flush", "SIGKILL of rank 1 in a backward (pipedream-2bw)", short=True)
def kill_without_flush(lab: Lab) -> None:
    """The checkpoint has gradients of an update that was not made yet."""
    _kill(lab, replace(BASE, schedule=STALE), 1, "backward")


@fault("kill-middle-of-3", "SIGKILL of rank 1 of 3; resumed on 3")
def kill_middle(lab: Lab) -> None:
    """The rank in the middle has two neighbours."""
    _kill(lab, replace(DROPOUT, ranks=3), 1, "backward")


@fault("fewer-ranks", "SIGKILL of rank 3 of 4 (zb-h1); resumed on 2 (1f1b)")
def fewer_ranks(lab: Lab) -> None:
    """Half of the ranks are left, and another schedule runs on them."""
    _kill(lab, replace(BASE, ranks=4, schedule="zb-h1"), 3, "forward", on=BASE)
