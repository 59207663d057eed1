"""Which tests notice a change, of those that reach it: the first, all of them, or those that stay before candidates."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from planting import Change, Planted
from planting_reach import Sites, Test
from planting_trees import ENDING, NO_TESTS, Ran, Trees, run_tests

_FIRST_FILES, _FIRST_SECONDS, _EACH = 8, 10.0, 3.0  # the first batch of tests: few files, soon collected
_GRACE = 20.0  # seconds that a run may take past the end of all


@dataclass
class Outcome:
    """What came of a change: the tests that noticed it, how many ran, and how many that reach it did not."""

    name: str
    file: str
    breaks: str
    noticed_by: list[str]
    ran: int
    not_run: int
    seconds: float
    survives: str = ""
    finished: bool = True
    must_stay: list[str] = field(default_factory=list)  # candidates of which one has to stay


@dataclass
class Noticing:
    """Plants changes and runs the tests that reach them.

    `most` bounds the seconds of tests that are tried for a change, `limit` those of all runs for it. Where the map of
    what reaches what comes from another machine, a test that notices has to pass here without the change.
    """

    trees: Trees
    sites: Sites
    most: float
    limit: float
    deadline: float = float("inf")
    given: Sequence[str] = ()
    _passes: dict[str, bool] = field(default_factory=dict)
    _reaching: dict[str, list[Test]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _number: int = 0

    def first(self, change: Change, tests: Sequence[Test] | None = None) -> Outcome:
        """Run the tests that reach a change, its area's and cheap ones first, until one notices."""
        reaching = self.reaching(change) if tests is None else list(tests)
        began, ran, by = time.monotonic(), 0, ""
        batches = self.batches(change, reaching)
        while batches and not by and self.left(began) > 0:
            batch = [test for test in batches.pop(0) if self._passes.get(test.name, True)]
            while batch and not by and self.left(began) > 0:
                done = self.run(change, batch, self.left(began), first=True)
                by = "" if done.cut else noticed(done)
                ran += len(done.ended)
                if by in self.sites.reach.tests and not self.passes(by):
                    batch, by = [test for test in batch if test.name not in (by, *done.ended)], ""
                else:
                    batch = []
        finished = bool(by) or not batches or time.monotonic() < self.deadline
        return self.told(change, [by] if by else [], ran, len(reaching) - ran, began, finished=finished)

    def all(self, change: Change, tests: Sequence[Test] | None = None) -> Outcome:
        """Run all tests that reach a change, and go on behind those that hang or end the process."""
        waiting = by_file(self.reaching(change) if tests is None else list(tests))
        count, began, ran = len(waiting), time.monotonic(), 0
        found: list[str] = []
        while waiting and self.left(began) > 0:
            done = self.run(change, waiting, self.left(began), first=False)
            found += done.failed
            found += [test.name for test in waiting if test.file in done.uncollected]
            over = {*done.ended, *found}
            if done.unfinished and not done.cut:
                found.append(done.unfinished)
                over.add(done.unfinished)
            ran += sum(test.name in over for test in waiting)
            if not any(test.name in over for test in waiting):
                break  # nothing can be run: the change breaks pytest itself
            waiting = [test for test in waiting if test.name not in over] if done.unfinished else []
        found = [name for name in dict.fromkeys(found) if self.passes(name)]
        cut = time.monotonic() > self.deadline
        return self.told(change, found, ran, count - ran, began, finished=not cut)

    def without(self, change: Change, candidates: set[str]) -> Outcome:
        """Return what of the tests that stay notices a change, and only if nothing does, which candidates do."""
        reaching = self.reaching(change)
        stay = [test for test in reaching if test.name not in candidates]
        found = self.first(change, stay)
        if found.noticed_by or not found.finished:
            return found
        asked = self.all(change, [test for test in reaching if test.name in candidates])
        files = {name.split("::")[0] for name in asked.noticed_by}
        known = {test.name for test in reaching}
        mates = [test for test in self.sites.reach.tests.values() if test.file in files]
        mates = [test for test in mates if test.name not in known | candidates]
        if asked.noticed_by and mates:  # what one test keeps for later ones is reached by the first alone
            again = self.first(change, mates)
            if again.noticed_by:
                return again
        asked.must_stay, asked.noticed_by = asked.noticed_by, []
        asked.seconds += found.seconds
        return asked

    def reaching(self, change: Change) -> list[Test]:
        """Return the tests that reach a change, of the files that are given if any are."""
        if change.name not in self._reaching:
            found = self.sites.tests(change)
            found = [test for test in found if not self.given or test.name.startswith(tuple(self.given))]
            self._reaching[change.name] = found
        return self._reaching[change.name]

    def batches(self, change: Change, tests: Sequence[Test]) -> list[list[Test]]:
        """Return what to run in turn: few likely files, then what is cheap, then the rest up to `most` seconds."""
        rank = {file: at for at, file in enumerate(change.tests())}
        first: list[Test] = []
        seconds = 0.0
        for file in sorted({test.file for test in tests} & rank.keys(), key=lambda name: rank[name])[:_FIRST_FILES]:
            for test in (test for test in tests if test.file == file and test.seconds < _EACH):
                if seconds + test.seconds < _FIRST_SECONDS:
                    first.append(test)
                    seconds += test.seconds
        had = {test.name for test in first}
        found, cheap = [first], list[Test]()
        total, spent = seconds, 0.0
        for test in (test for test in tests if test.name not in had):
            if total + test.seconds > self.most:
                continue
            total += test.seconds
            spent += test.seconds
            cheap.append(test)
            if spent > 6 * _FIRST_SECONDS:
                found, cheap, spent = [*found, cheap], [], 0.0
        return [by_file(batch) for batch in (*found, cheap) if batch]

    def run(self, change: Change, tests: Sequence[Test], limit: float, *, first: bool) -> Ran:
        """Plant a change and run tests."""
        with self._lock:
            self._number += 1
            # Far from now, and no two alike: otherwise Python could take compiled code of another text for this one's.
            moment = 1_000_000_000 + 10.0 * self._number
        with self.trees.free_copy() as tree, Planted(change, tree, moment):
            return self._run(tree, tests, limit, first=first)

    def _run(self, tree: Path, tests: Sequence[Test], limit: float, *, first: bool) -> Ran:
        slower = 1.0 if self.sites.reach.is_from_here else 3.0
        chosen = [(test.name, slower * (20 + 10 * test.seconds)) for test in tests]
        files = list(dict.fromkeys(test.file for test in tests))
        allowed = 60 + slower * (4 * sum(test.seconds for test in tests) + 3 * len(files))
        if not first:
            allowed += 60 * slower
        done = run_tests(tree, files, min(limit, allowed), first=first, chosen=chosen)
        done.cut = done.timed_out and (limit < allowed or ENDING.is_set())
        return done

    def passes(self, name: str) -> bool:
        """Whether a test passes without a change: known of tests that ran on a machine like this one."""
        if self.sites.reach.is_from_here or name not in self.sites.reach.tests:
            return True
        if name not in self._passes:
            with self.trees.free_copy() as tree:
                done = self._run(tree, [self.sites.reach.tests[name]], self.limit, first=True)
            self._passes[name] = not noticed(done)
        return self._passes[name]

    def left(self, began: float) -> float:
        """Return the seconds that are left for a change."""
        return -1.0 if ENDING.is_set() else min(began + self.limit, self.deadline + _GRACE) - time.monotonic()

    def told(
        self, change: Change, by: list[str], ran: int, not_run: int, began: float, *, finished: bool = True
    ) -> Outcome:
        """Return what came of a change."""
        breaks, survives = getattr(change, "breaks", ""), getattr(change, "survives", "")
        spent = round(time.monotonic() - began, 1)
        return Outcome(change.name, change.file, breaks, by, ran, max(not_run, 0), spent, survives, finished)


def by_file(tests: Iterable[Test]) -> list[Test]:
    """Order tests so that those of a file run together, files with little to run first."""
    sums: dict[str, float] = {}
    listed = list(tests)
    for test in listed:
        sums[test.file] = sums.get(test.file, 0.0) + test.seconds
    return sorted(listed, key=lambda item: (sums[item.file], item.file, item.seconds, item.name))


def noticed(ran: Ran) -> str:
    """Return what noticed a change in a run, nothing if nothing did."""
    by = next(iter([*ran.failed, *ran.uncollected]), "")
    if not by and ran.timed_out:
        by = ran.unfinished or f"the time limit, {ran.seconds:.0f} s"
    elif not by and ran.code not in (0, NO_TESTS):
        last = (ran.output.strip().splitlines() or [""])[-1][:80]
        by = ran.unfinished or f"pytest itself, exit code {ran.code}: {last}"
    return by


def work(
    changes: Sequence[Change], function: Callable[[Change], Outcome], jobs: int, deadline: float, kept: Path | None
) -> list[Outcome]:
    """Go through changes, several at a time; append each outcome to a file, and skip what stands there."""
    known = outcomes_in(kept)
    had = [known[change.name] for change in changes if change.name in known]
    left = [change for change in changes if change.name not in known]
    if had:
        print(f"{len(had)} of {len(changes)} are known already", flush=True)
    began, found = time.monotonic(), list(had)

    def run(change: Change) -> Outcome | None:
        return function(change) if time.monotonic() < deadline and not ENDING.is_set() else None

    with ThreadPoolExecutor(jobs) as pool:
        for number, done in enumerate(as_completed([pool.submit(run, change) for change in left]), 1):
            outcome = done.result()
            if outcome is None or not outcome.finished or ENDING.is_set():
                continue
            found.append(outcome)
            if kept is not None:
                with kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(vars(outcome)) + "\n")
            said = ", ".join(outcome.noticed_by[:1]) or "NOT NOTICED"
            said += f" and {len(outcome.noticed_by) - 1} more" if len(outcome.noticed_by) > 1 else ""
            said += f"; one of {', '.join(outcome.must_stay)} must stay" if outcome.must_stay else ""
            rest = f"{outcome.ran} run, {outcome.not_run} not, {outcome.seconds:.0f} s"
            spent = time.monotonic() - began
            print(f"[{number}/{len(left)}, {spent:.0f} s] {outcome.name}: {said} ({rest})", flush=True)
    if len(found) < len(changes):
        print(f"{len(changes) - len(found)} of {len(changes)} were not tried: the time was over", flush=True)
    return found


def outcomes_in(path: Path | None) -> dict[str, Outcome]:
    """Read the outcomes that a file holds."""
    if path is None or not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {value["name"]: Outcome(**value) for value in (json.loads(line) for line in lines if line.endswith("}"))}


def shares(outcomes: Sequence[Outcome]) -> str:
    """Return the shares by folder, and what nothing noticed."""
    folders: dict[str, list[bool]] = {}
    for outcome in outcomes:
        folders.setdefault(outcome.file.partition("/")[0], []).append(bool(outcome.noticed_by or outcome.must_stay))
    lines = []
    for folder, caught in [*sorted(folders.items()), ("all", [flag for listed in folders.values() for flag in listed])]:
        share = sum(caught) / max(len(caught), 1)
        lines.append(f"{folder:<12} {sum(caught):>4} of {len(caught):>4} noticed, {share:.0%}")
    for outcome in outcomes:
        if not outcome.noticed_by and not outcome.must_stay:
            lines += ["", f"{outcome.name}: {outcome.ran} tests ran, {outcome.not_run} that reach it did not"]
            lines += [f"    {outcome.survives}"] if outcome.survives else []
    return "\n".join(lines)


def only_noticing(outcomes: Sequence[Outcome]) -> dict[str, list[str]]:
    """Return, for each test, the changes that it alone notices."""
    found: dict[str, list[str]] = {}
    for outcome in outcomes:
        if len(outcome.noticed_by) == 1:
            found.setdefault(outcome.noticed_by[0], []).append(outcome.name)
    return found


def must_stay(outcomes: Sequence[Outcome], seconds: dict[str, float]) -> list[str]:
    """Return few and cheap candidates that notice what only candidates notice.

    >>> found = {"x": ["a", "b"], "y": ["b"]}
    >>> outcomes = [Outcome(name, "", "", [], 0, 0, 0.0, must_stay=by) for name, by in found.items()]
    >>> must_stay(outcomes, {"a": 1.0, "b": 5.0})
    ['b']
    """
    left = [set(outcome.must_stay) for outcome in outcomes if outcome.must_stay]
    found: list[str] = []
    while left:
        every = {name for names in left for name in names}
        forced = {next(iter(names)) for names in left if len(names) == 1}
        worth = {name: sum(name in names for names in left) / (0.1 + seconds.get(name, 0.0)) for name in every}
        best = max(sorted(forced or every), key=lambda name: worth[name])
        found.append(best)
        left = [names for names in left if best not in names]
    return found
