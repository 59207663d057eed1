"""Another program for the same stages: searched for measured costs, within a limit, in this process or beside it.

Training keeps its ranks' processors busy, and a search in the same process would hold up its rank. So a search has a
process of its own, with a lower priority:

    rank 0    step ── step ── step ── step ── take up
                 │                      ▲
    search       └── costs as JSON ─────┘ program as CSV
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress

from drumline.core.action import Op
from drumline.core.costs import Costs
from drumline.core.errors import DrumlineError
from drumline.core.program import Program
from drumline.core.prove.validate import validate
from drumline.core.prove.whole import join
from drumline.core.timeline.idle import Limit
from drumline.plan.search.bounds.instance import Instance
from drumline.plan.search.bounds.lower_bounds import lower_bound
from drumline.plan.search.search import search

_NICE = 5  # below training, and above nothing
_SECONDS_TO_START = 60.0  # beyond those of the search itself, on a busy machine


def is_split(program: Program) -> bool:
    r"""Whether any backward of a program is split into I and W.

    >>> is_split(Program.parse("0F0,0B0")), is_split(Program.parse("0F0,0I0,0W0"))
    (False, True)
    """
    return any(part.op is Op.BACKWARD_INPUT for part in program.work())


def repaired(costs: Costs, program: Program, limit: Limit, *, seconds: float) -> Program:
    """Return the best program found for a program's stages and these costs; whole backwards stay whole.

    >>> from drumline.core.simulate.simulate import simulate
    >>> from drumline.schedules import generate
    >>> program = generate("1f1b", num_ranks=2, num_microbatches=8)
    >>> slow = Costs(backward_input=2.0, backward_weight=0.0, comm=2.0)
    >>> result = repaired(slow, program, Limit(max_activations=4), seconds=1.0)
    >>> simulate(program, slow).makespan, simulate(result, slow).makespan, is_split(result)
    (43.0, 31.0, False)
    """
    result = search(costs, program.placement, num_microbatches=program.num_microbatches, limit=limit, seconds=seconds)
    new_program = result.program if is_split(program) else join(result.program, [True] * program.num_stages)
    assert not validate(new_program), "a program with joined backwards breaks a rule"
    return new_program


def least_seconds(costs: Costs, program: Program, limit: Limit) -> float:
    """Return what no program with the same stages on the same ranks can go below, within a limit.

    >>> from drumline.schedules import generate
    >>> program = generate("1f1b", num_ranks=2, num_microbatches=4)
    >>> least_seconds(Costs(backward_input=2, backward_weight=0), program, Limit(max_activations=2))
    15.0
    """
    instance = Instance(costs, program.placement, program.num_microbatches, limit)
    return float(lower_bound(instance, "makespan").value)


class Aside:
    """A search in its own process; `result` is None until it has ended, and an error's text if it failed."""

    def __init__(self, costs: Costs, program: Program, limit: Limit, *, seconds: float) -> None:
        self._program = program
        self._until = time.monotonic() + seconds + _SECONDS_TO_START
        task = {
            "costs": costs.to_json(),
            "program": program.compute_only().format(),
            "max_activations": limit.max_activations,
            "max_bytes": limit.max_bytes,
            "seconds": seconds,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._problem = ""
        try:
            self._process = self._started(json.dumps(task).encode())
        except OSError as error:
            self._problem = f"the search could not start: {error}"  # training continues without

    @staticmethod
    def _started(task: bytes) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(name for name in sys.path if name)
        process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for training, which ends this
        )
        assert process.stdin is not None
        with suppress(OSError):  # it has ended already, and `result` says so
            process.stdin.write(task)
            process.stdin.close()
        return process

    def result(self) -> Program | str | None:
        """Return what was found, or why nothing was; None while the search continues. It never waits."""
        if self._process is None:
            return self._problem
        if self._process.poll() is None:
            if time.monotonic() < self._until:
                return None
            self.stop()
            return "the search did not end in time"
        assert self._process.stdout is not None
        text = self._process.stdout.read()
        self._process.stdout.close()
        try:
            return Program.parse(text.decode(), "searched")
        except ValueError:
            return f"the search ended with {self._process.returncode}"

    def stop(self) -> None:
        """End the search."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(5.0)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __del__(self) -> None:
        self.stop()


def main() -> None:
    """Search for what stdin says, and write what is found to stdout."""
    if hasattr(os, "nice"):
        os.nice(_NICE)
    task = json.loads(sys.stdin.read())
    limit = Limit(task["max_activations"], task["max_bytes"])
    try:
        costs = Costs.from_json(json.dumps(task["costs"]))
        result = repaired(costs, Program.parse(task["program"]), limit, seconds=task["seconds"])
    except DrumlineError as error:
        raise SystemExit(f"drumline: {error}") from None
    print(result.format())
