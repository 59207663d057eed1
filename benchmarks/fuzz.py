"""Fuzz every parser of files that users hand over: no traceback, no hang, no growth.

    PYTHONPATH=tests python benchmarks/fuzz.py --cases 10000 --json out/fuzz.json

Cases come from valid files, changed at random places (see `fuzz_mutations`), and are used as a user would (see
`fuzz_case`). A case hangs where it takes ten seconds of processor time. Memory is what the process holds beyond what
it held after the first tenth of the cases, and at its peak.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

from drumline.core.errors import DrumlineError
from fuzz_case import Case, Target
from fuzz_targets import named
from measure import machine

SECONDS = 10.0
_MIB = 2**20
_SHOWN = 5


@dataclass(slots=True)
class Outcome:
    """What became of a target's cases."""

    name: str
    cases: int = 0
    accepted: int = 0
    refused: int = 0
    tracebacks: int = 0
    hangs: int = 0
    peak_mib: float = 0.0
    growth_mib: float = 0.0
    seconds: float = 0.0
    found: dict[str, int] = field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        """Whether nothing was found."""
        return not self.tracebacks and not self.hangs


class _Hang(BaseException):
    """A case took too long."""


def _alarm(number: int, frame: FrameType | None) -> None:
    raise _Hang


def fuzz(target: Target, num_cases: int, *, seed: int = 0, first: int = 0, say: bool = False) -> Outcome:
    """Run so many cases of a target; each is made from the seed and its number alone."""
    outcome, places, seen = Outcome(target.name), Counter[str](), 0
    before = signal.signal(signal.SIGVTALRM, _alarm)
    begun, settled, base = time.perf_counter(), 0.0, _resident()
    try:
        with tempfile.TemporaryDirectory() as folder:
            case = target.begin(Path(folder))
            for number in range(first, first + num_cases):
                fault = _fault_of(case, random.Random(f"{seed} {target.name} {number}"), outcome)
                if fault:
                    places[fault[0]] += 1
                    if say and places[fault[0]] == 1 and seen < _SHOWN:
                        seen += 1
                        print(f"--- {target.name}, case {number}\n{fault[1]}", file=sys.stderr, flush=True)
                if say and outcome.cases % 1000 == 0:
                    print(f"{target.name}: {outcome.cases} cases", file=sys.stderr, flush=True)
                if outcome.cases % 50 == 0:
                    outcome.peak_mib = max(outcome.peak_mib, (_resident() - base) / _MIB)
                if outcome.cases == max(num_cases // 10, 1):
                    gc.collect()
                    settled = _resident()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
    gc.collect()
    outcome.growth_mib = (_resident() - settled) / _MIB
    outcome.seconds = time.perf_counter() - begun
    outcome.found = dict(places)
    return outcome


def _fault_of(case: Case, chance: random.Random, outcome: Outcome) -> tuple[str, str] | None:
    """Run one case, and return where it failed and how."""
    outcome.cases += 1
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        case(chance)
        outcome.accepted += 1
    except DrumlineError:
        outcome.refused += 1
    except _Hang:
        outcome.hangs += 1
        return f"hang in {_place(sys.exc_info()[2])}", traceback.format_exc()
    except Exception as error:
        outcome.tracebacks += 1
        return f"{type(error).__name__} in {_place(error.__traceback__)}", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    return None


def _place(trace: object) -> str:
    """Return the innermost place in the package."""
    frames = traceback.extract_tb(trace)  # type: ignore[arg-type]
    own = [frame for frame in frames if "drumline" in frame.filename] or frames
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}"


def _resident() -> float:
    """Return the bytes that the process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096.0


def table(outcomes: list[Outcome]) -> str:
    """Return what was found, a row for each parser."""
    lines = [f"{'parser':<14}{'cases':>8}{'accepted':>10}{'refused':>9}{'tracebacks':>12}{'hangs':>7}"
             f"{'peak MiB':>10}{'growth MiB':>12}{'s':>7}"]  # fmt: skip
    lines += [
        f"{item.name:<14}{item.cases:>8}{item.accepted:>10}{item.refused:>9}{item.tracebacks:>12}{item.hangs:>7}"
        f"{item.peak_mib:>10.1f}{item.growth_mib:>12.1f}{item.seconds:>7.0f}"
        for item in outcomes
    ]
    return "\n".join(lines)


def main() -> int:
    """Fuzz, print a table, and end with 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000, help="of each parser (default 10000)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case, to repeat one (default 0)")
    parser.add_argument("--only", default="", metavar="NAME,...", help="these parsers alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there, too")
    args = parser.parse_args()
    outcomes = []
    for target in named(args.only):
        outcomes.append(fuzz(target, args.cases, seed=args.seed, first=args.first, say=True))
        for place, count in sorted(outcomes[-1].found.items(), key=lambda pair: -pair[1]):
            print(f"{target.name}: {count} x {place}", file=sys.stderr, flush=True)
    print(f"{machine()}; seed {args.seed}\n")
    print(table(outcomes))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    return 0 if all(outcome.is_clean for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
