"""`drumline watch RUN`: follow a run live in the terminal, and forward it to TensorBoard or Weights & Biases."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from drumline.cli import flags
from drumline.cli.output import print_result, progress, terminal_width
from drumline.core.errors import RecordError, UsageError
from drumline.core.measured.run import CONFIG, Run, read_run

if TYPE_CHECKING:
    from drumline.report.run.follow import Writer
    from drumline.report.run.live import LiveRun

EXAMPLE = "drumline watch runs/first --once"
_EVERY = 0.5
_FEWEST_SECONDS = 0.2  # between two frames


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = flags.adder(parser)
    add("RUN", "the folder you gave to record=", Path)
    add("--once", "show the last step and stop")
    add("--wait S", "seconds to wait for the run to begin", flags.number, 60.0)
    add("--tensorboard DIR", "also write the metrics there, for TensorBoard", Path)
    add("--wandb PROJECT", "also log the metrics to this Weights & Biases project")
    add("--json", "print one JSON object per step and line")


def run(args: argparse.Namespace) -> int:
    """Follow a run until it ends."""
    from drumline.report.run.follow import QUIET, lines, scalars
    from drumline.report.run.live import ASCII, FINE, LiveRun

    if args.wait < 0:
        raise UsageError(f"--wait is {args.wait:g}", expected="0 seconds or more")
    recorded_run = _begun(args.run, 0.0 if args.once else args.wait)
    marks = FINE if _takes(FINE.parts) else ASCII
    live = LiveRun(args.run.name or str(args.run), recorded_run.program, marks=marks, name_of=recorded_run.name_of)
    writers = _writers(args, recorded_run)
    screen = _Screen(live, args)
    try:
        for line in lines(recorded_run, quiet=0.0 if args.once else QUIET, every=_EVERY):
            if line is None:
                screen.show()
                continue
            live.add(line)
            for writer in writers:
                writer.write(line["step"], scalars(line))
            screen.step()
    finally:
        for writer in writers:
            writer.close()
    screen.end()
    if not live.line:
        raise RecordError(f"{args.run} has no step yet", fix="wait for the first step, or omit --once")
    if not (args.once or args.json):
        print("the run has ended" if recorded_run.has_ended else "no more steps arrived: the run was probably killed")
    return 0


class _Screen:
    """Where steps are shown: redrawn in place on a terminal, one line per step elsewhere."""

    def __init__(self, live: LiveRun, args: argparse.Namespace) -> None:
        self._live = live
        self._args = args
        self._redraws = sys.stdout.isatty() and not args.json and not args.once
        self._height = 0
        self._shown = -1.0
        self._stale = False

    def step(self) -> None:
        """Record a new step."""
        self._stale = True
        if self._redraws:
            if time.monotonic() - self._shown >= _FEWEST_SECONDS:
                self.show()
        elif not self._args.once:
            text = json.dumps(self._live.to_json(), allow_nan=False) if self._args.json else self._live.row()
            print(text, flush=True)

    def show(self) -> None:
        """Draw what is new."""
        if self._redraws and self._stale:
            frame = self._live.frame(terminal_width())
            up = f"\x1b[{self._height}F" if self._height else ""
            print(up + "\n".join(f"{line}\x1b[K" for line in frame.split("\n")) + "\x1b[J", flush=True)
            self._height = frame.count("\n") + 1
            self._shown = time.monotonic()
            self._stale = False

    def end(self) -> None:
        """Draw the rest."""
        self.show()
        if self._args.once and self._live.line:
            print_result(self._args, self._live.to_json(), self._live.frame(terminal_width()))


def _begun(path: Path, wait: float) -> Run:
    """Return the run once it has begun; wait at most as long as requested."""
    deadline = time.monotonic() + wait
    while True:
        try:
            if os.path.exists(path / CONFIG) or wait == 0:
                return read_run(path)
            problem = f"{path} does not contain {CONFIG}" if os.path.isdir(path) else f"no such folder: {path}"
        except RecordError as error:
            if time.monotonic() >= deadline:
                raise
            problem = error.error
        left = deadline - time.monotonic()
        if left <= 0:
            raise RecordError(
                f"{problem}, after waiting {wait:g} s",
                expected="the folder you gave to record=",
                fix="start the run, or wait longer with --wait",
            )
        progress(f"waiting for the run: {problem} ({left:.0f} s left)")
        time.sleep(min(_EVERY, left))


def _writers(args: argparse.Namespace, recorded: Run) -> list[Writer]:
    from drumline.report.run.follow import TensorBoard, WandB

    writers: list[Writer] = []
    if args.tensorboard is not None:
        writers.append(TensorBoard(args.tensorboard))
    if args.wandb is not None:
        writers.append(WandB(args.wandb, name=args.run.name, config={**recorded.config, "plan": recorded.plan}))
    return writers


def _takes(text: str) -> bool:
    """Whether stdout can show these characters."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        return False
    return True
