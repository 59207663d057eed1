"""Plants single bugs, one at a time, and shows which test notices each; what nothing notices needs a test.

    python benchmarks/planted.py [--jobs N] [--only PATTERN] [--limit SECONDS] [--json FILE]

Every bug is one expression of a function in the place of another, in a copy of the tree (under $TMPDIR); the tests of
its file run until one fails. First all tests run once without a bug: what fails then, or cannot be run here, is left
out and listed. A run that takes longer than it should counts as noticed.

    --only PATTERN    bugs whose name or file matches, as a shell would: "core/*", "*finite*"
    --tests FILE      run this file in place of those that belong to the bug's own; may be given several times
    --no-baseline     leave the run without a bug out, for a tree that is known to be green
    --list            only list the bugs

With a map of which tests reach which code, over the whole suite:

    python benchmarks/planted.py --reach MAP --jobs 14                     runs the suite once, marked, and writes MAP
    python benchmarks/planted.py --reach MAP --random SEED --count 300 --jobs 14 --seconds 480 --json random.jsonl
    python benchmarks/planted.py --reach MAP --all-noticing --jobs 14 --part 1/4 --json all.jsonl
    python benchmarks/planted.py --reach MAP --candidates IDS --jobs 14 --seconds 480 --json stay.jsonl

`--reach MAP` alone runs the test files that are new or changed since MAP was written. With another mode MAP is only
read, or written first if it is missing. MAP may come from another machine: then a test that notices must pass here
without the change, and tests get three times as long. Plain `python3` with PyTorch and pytest will do, without a
virtual environment: copies set PYTHONPATH by themselves. Test files that cannot be collected here are left out.

    --random SEED     plant --count changes drawn from the syntax tree in place of the bugs of the list, --only in some
                      files; the tests that reach each run, its area's and cheap ones first, until one notices
    --at FILE:LINE    plant all changes that the syntax tree admits in a line, such as adapt/measured_step.py:54;
                      may be given several times
    --all-noticing    for every bug run all tests that reach it; the end tells what each test notices alone
    --candidates IDS  a file with a test (or file) a line that is to leave the suite: for every bug run the tests that
                      stay until one notices; only if none does, run the candidates; the end tells which must stay
    --unreached       list the lines of the package that no test of MAP reaches, --only in some files
    --most SECONDS    of tests that are tried for a change before it counts as not noticed (default 90; all for
                      --all-noticing and --candidates)
    --limit SECONDS   for all runs of one bug (default 600)
    --seconds SECONDS start nothing later than this; all ends at most half a minute after
    --part K/N        only every Nth bug, from the Kth on
    --json FILE       lines of JSON, appended as they come; what stands there already is not run again. Join the files
                      of parts with cat, and run the same command with the joined one for the end over all
    --units TEXT      with --reach alone: only test files whose path holds the text; may be given several times
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from planted_bugs import BUGS
from planting import Bug, Change, Planted
from planting_noticing import noticed
from planting_random import drawn, in_line
from planting_trees import ENDING, NO_TESTS, Ran, Trees, run_tests
from planting_ways import unreached, with_reach


@dataclass
class Baseline:
    """What the tests do without a bug: what is left out, and how long each file takes."""

    not_run: list[str] = field(default_factory=list)
    failing: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class Caught:
    """What came of a bug: the test that noticed it, or none."""

    name: str
    file: str
    breaks: str
    caught: bool
    by: str
    seconds: float
    survives: str = ""


def baseline(trees: Trees, pool: ThreadPoolExecutor, files: Sequence[str], limit: float) -> Baseline:
    """Run every test file once, without a bug."""
    found = Baseline()

    def run(file: str) -> tuple[str, Ran]:
        with trees.free_copy() as tree:
            return file, run_tests(tree, [file], limit, first=False)

    for done in as_completed([pool.submit(run, file) for file in files]):
        file, ran = done.result()
        found.seconds[file] = ran.seconds
        if ran.uncollected or ran.timed_out or (ran.code not in (0, NO_TESTS) and not ran.failed):
            found.not_run.append(file)
            lines = [line for line in ran.output.splitlines() if line.strip()]
            print(f"  not run: {file}: {lines[-1][:150] if lines else 'no output'}", flush=True)
        found.failing += ran.failed
        for name in ran.failed:
            print(f"  fails without a bug, left out: {name}", flush=True)
    return found


def caught(bug: Bug, files: Sequence[str], trees: Trees, known: Baseline, limit: float, number: int) -> Caught:
    """Plant a bug and return which test of the files noticed it."""
    if ENDING.is_set():
        return Caught(bug.name, bug.file, bug.breaks, False, "", 0.0, bug.survives)
    tests = [file for file in files if file not in known.not_run]
    allowed = max(limit, 60 + 4 * sum(known.seconds.get(test, 0.0) for test in tests))
    # Far from now, and no two alike: otherwise Python could take compiled code of another text for this one's.
    moment = 1_000_000_000 + 10.0 * number
    with trees.free_copy() as tree, Planted(bug, tree, moment):
        ran = run_tests(tree, tests, allowed, deselect=known.failing, first=True)
    by = noticed(ran)
    return Caught(bug.name, bug.file, bug.breaks, bool(by), by, ran.seconds, bug.survives)


def table(outcomes: Sequence[Caught]) -> str:
    """Return a line for each bug, the shares by folder, and the survivors with the reason."""
    width = max((len(outcome.name) for outcome in outcomes), default=0)
    lines = [f"{outcome.name:<{width}}  {outcome.by if outcome.caught else 'NOT NOTICED'}" for outcome in outcomes]
    folders: dict[str, list[bool]] = {}
    for outcome in outcomes:
        folders.setdefault(outcome.file.partition("/")[0], []).append(outcome.caught)
    lines.append("")
    for folder, known in [*folders.items(), ("all", [outcome.caught for outcome in outcomes])]:
        lines.append(f"{folder:<10} {sum(known):>4} of {len(known):>4} noticed, {sum(known) / max(len(known), 1):.0%}")
    for result in outcomes:
        if not result.caught:
            lines += ["", f"{result.name}, {result.file}: {result.breaks}", f"    {result.survives or 'needs a test'}"]
    return "\n".join(lines)


def chosen(patterns: Sequence[str]) -> list[Bug]:
    """Return the bugs that match any of the patterns, all without one."""
    texts = {bug: (bug.name, bug.file) for bug in BUGS}
    return [bug for bug in BUGS if not patterns or any(fnmatch(text, p) for text in texts[bug] for p in patterns)]


def part(text: str) -> tuple[int, int]:
    """Read K/N."""
    number, _, of = text.partition("/")
    if not (number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected K/N with 1 <= K <= N, such as 2/4")
    return int(number), int(of)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--tests", action="append", default=[])
    parser.add_argument("--limit", type=float, default=600.0)
    parser.add_argument("--no-baseline", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--reach", type=Path, metavar="MAP")
    parser.add_argument("--units", action="append", default=[])
    parser.add_argument("--random", type=int, metavar="SEED")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--at", action="append", default=[], metavar="FILE:LINE")
    parser.add_argument("--all-noticing", action="store_true")
    parser.add_argument("--candidates", type=Path, metavar="IDS")
    parser.add_argument("--unreached", action="store_true")
    parser.add_argument("--most", type=float)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--part", type=part, default=(1, 1), metavar="K/N")
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ENDING.set())
    bugs: Sequence[Bug] = chosen(args.only)
    changes: Sequence[Change] = bugs
    if args.random is not None:
        changes = drawn(args.random, args.count, args.only)
    elif args.at:
        changes = [change for place in args.at for change in in_line(place)]
    if args.unreached and args.reach is not None:
        return unreached(args)
    if not changes:
        parser.error(f"nothing to plant matches {', '.join(args.only or args.at)}")
    if args.list:
        for change in changes:
            print(f"{change.file}: {change.name}: {getattr(change, 'breaks', '')}")
        return 0
    if args.reach is not None:
        return with_reach(args, changes[args.part[0] - 1 :: args.part[1]])
    if args.random is not None or args.at or args.all_noticing or args.candidates:
        parser.error("--random, --at, --all-noticing and --candidates need --reach MAP, the map of what tests reach")
    return by_area(args, bugs)


def by_area(args: argparse.Namespace, bugs: Sequence[Bug]) -> int:
    """Run each bug's own tests until one fails."""
    given: list[str] = args.tests

    def tests_of(bug: Bug) -> Sequence[str]:
        return given or bug.tests()

    with tempfile.TemporaryDirectory(prefix="planted-") as folder, ThreadPoolExecutor(args.jobs) as pool:
        trees = Trees(Path(folder), args.jobs)
        known = Baseline()
        if not args.no_baseline:
            print("without a bug:", flush=True)
            known = baseline(trees, pool, sorted({test for bug in bugs for test in tests_of(bug)}), args.limit)
        began, outcomes = time.monotonic(), dict[str, Caught]()
        runs = [
            pool.submit(caught, bug, tests_of(bug), trees, known, args.limit, number) for number, bug in enumerate(bugs)
        ]
        for done in as_completed(runs):
            item = done.result()
            if ENDING.is_set():
                continue
            outcomes[item.name] = item
            said = f"noticed by {item.by}" if item.caught else "NOT NOTICED"
            print(f"[{len(outcomes)}/{len(bugs)}] {item.name}: {said} ({item.seconds:.0f} s)", flush=True)
            _save(args.json, [outcomes[bug.name] for bug in bugs if bug.name in outcomes], known)
    print(f"\n{table([outcomes[bug.name] for bug in bugs if bug.name in outcomes])}")
    print(f"\n{time.monotonic() - began:.0f} s, {args.jobs} at a time")
    return 0


def _save(path: Path | None, outcomes: Sequence[Caught], known: Baseline) -> None:
    """Write what is known so far: a run that is ended early leaves it behind."""
    if path is not None:
        count = sum(outcome.caught for outcome in outcomes)
        told = {"bugs": len(outcomes), "noticed": count, "baseline": asdict(known)}
        path.write_text(json.dumps({**told, "outcomes": [asdict(outcome) for outcome in outcomes]}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
