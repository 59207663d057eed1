"""What `planted.py` does with a map of which tests reach which code: three ways, and what it says of each."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path

from planting import PACKAGE, ROOT, Change
from planting_noticing import Noticing, Outcome, must_stay, only_noticing, shares, work
from planting_reach import Reach, Sites, read, sources, this_machine
from planting_suite import extend
from planting_trees import Trees

_START = 8.0  # seconds that a run of pytest takes beside its tests


def with_reach(args: argparse.Namespace, changes: Sequence[Change]) -> int:
    """Run the tests that reach each change, in one of three ways."""
    deadline = time.monotonic() + args.seconds
    alone = args.random is None and not args.at and not args.all_noticing and args.candidates is None
    if alone or not args.reach.exists():
        reach = extend(args.reach, args.jobs, args.limit, deadline, args.units)
    else:
        reach = read(args.reach)
    told(reach)
    if alone:
        return 0
    candidates = {test.name for test in reach.tests.values()} & named(args.candidates, reach)
    whole = args.all_noticing or args.candidates is not None
    if whole:  # what no test can notice says nothing of tests
        changes = [change for change in changes if not getattr(change, "survives", "")]
    most = args.most if args.most is not None else float("inf") if whole else 90.0
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        trees = Trees(Path(folder), args.jobs)
        noticing = Noticing(trees, Sites(reach), most, args.limit, deadline, args.tests)
        ways: dict[bool, Callable[[Change], Outcome]] = {True: noticing.all, False: noticing.first}
        way = ways[args.all_noticing]
        if args.candidates is not None:
            way = lambda change: noticing.without(change, candidates)  # noqa: E731
        estimate(noticing, changes, args)
        outcomes = work(changes, way, args.jobs, deadline, args.json)
    print(f"\n{shares(outcomes)}")
    if args.all_noticing:
        print("\nnoticed by one test alone:")
        for name, alone_of in sorted(only_noticing(outcomes).items()):
            print(f"  {name}: {', '.join(alone_of)}")
    if args.candidates is not None:
        stay = must_stay(outcomes, {name: test.seconds for name, test in reach.tests.items()})
        print(f"\n{len(stay)} of {len(candidates)} candidates must stay:", *stay, sep="\n  ")
    return 0


def unreached(args: argparse.Namespace) -> int:
    """Print what no test reaches."""
    sites, count = Sites(read(args.reach)), 0
    told(sites.reach)
    for path in sources():
        file = path.removeprefix(f"{PACKAGE}/")
        if not args.only or any(fnmatch(file, pattern) for pattern in args.only):
            lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
            for line in sites.unreached(path):
                count += 1
                print(f"{file}:{line}: {lines[line - 1].strip()}")
    print(f"{count} blocks that no test reaches")
    return 0


def named(path: Path | None, reach: Reach) -> set[str]:
    """Return the tests that a file names: a test, all cases of one, or all tests of a file a line."""
    if path is None:
        return set()
    found: set[str] = set()
    for line in filter(None, (line.strip() for line in path.read_text(encoding="utf-8").splitlines())):
        some = {test for test in reach.tests if test == line or test.startswith((f"{line}[", f"{line}::"))}
        if not some:
            print(f"no test that passed is called {line}; it is no candidate", flush=True)
        found |= some
    return found


def told(reach: Reach) -> None:
    """Say what is known of the tests."""
    seconds = sum(test.seconds for test in reach.tests.values())
    print(f"{len(reach.tests)} tests that pass without a change, {seconds:.0f} s in all, from {reach.machine}")
    if not reach.is_from_here:
        print(f"this machine is another: {this_machine()}; what notices is confirmed here")
    for name, why in sorted(reach.left_out.items()):
        print(f"  left out: {name}: {why}")
    sys.stdout.flush()


def estimate(noticing: Noticing, changes: Sequence[Change], args: argparse.Namespace) -> None:
    """Say how much there is to do at most."""
    counts, seconds = [], 0.0
    for change in changes:
        tests = noticing.reaching(change)
        counts.append(len(tests))
        seconds += _START + min(sum(test.seconds for test in tests), noticing.most, noticing.limit)
    middle = sorted(counts)[len(counts) // 2]
    most = f"at most {seconds / args.jobs / 60:.0f} minutes with {args.jobs} at a time"
    print(
        f"{len(changes)} changes; half of them are reached by {middle} tests or more, {counts.count(0)} by none; {most}"
    )
    sys.stdout.flush()
