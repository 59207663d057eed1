"""A pytest plugin: runs chosen tests in a given order, ends what hangs, and writes down what came of each.

By variables of the environment; every file is lines of JSON:

    PLANTED_REPORT   file to write: what begins, ends and fails
    PLANTED_CHOSEN   file with [test, seconds]: only these run, in this order, each at most so long
    PLANTED_REACH    folder to write to, one file for each process: which blocks each test reached, and its seconds
"""

from __future__ import annotations

import base64
import json
import os
import signal
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_MAP_SIZE = 1 << 17  # blocks of the package, with room
_REPORT = os.environ.get("PLANTED_REPORT")
_REACH = os.environ.get("PLANTED_REACH")
if _REACH:  # before anything of the package is imported, here and in what this process starts
    _path = Path(_REACH) / f"map-{os.getpid()}"
    _path.write_bytes(bytes(_MAP_SIZE))
    os.environ["PLANTED_MAP"] = str(_path)

import drumline.schedules  # noqa: E402, F401 - by its own name: doctests that import a recipe by its path register it again


def _note(kind: str, name: str) -> None:
    if _REPORT:
        with open(_REPORT, "a", encoding="utf-8") as file:
            file.write(json.dumps([kind, name]) + "\n")


class Limits:
    """Runs chosen tests only, and fails each that takes too long: signals end waits, also those for processes."""

    def __init__(self, chosen: list[tuple[str, float]]) -> None:
        self.seconds = dict(chosen)
        self.order = {name: at for at, (name, _) in enumerate(chosen)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep what is chosen, in its order."""
        left = [item for item in items if item.nodeid not in self.order]
        items[:] = sorted((item for item in items if item.nodeid in self.order), key=lambda i: self.order[i.nodeid])
        config.hook.pytest_deselected(items=left)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        """Fail a test that is not set up in time."""
        with self.limited(item.nodeid):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Fail a test past its limit."""
        with self.limited(item.nodeid):
            return (yield)

    @contextmanager
    def limited(self, name: str) -> Iterator[None]:
        """Let the block fail once the test's seconds are over."""

        def late(*_: object) -> None:
            pytest.fail(f"took longer than {self.seconds[name]:.0f} s", pytrace=False)

        before = signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, self.seconds[name])
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


class Reach:
    """Writes down which blocks each test reaches, and what is set up for several."""

    def __init__(self, folder: Path) -> None:
        import planting_map

        self.map: Any = planting_map.REACHED
        self.file = (folder / f"reach-{os.getpid()}.jsonl").open("w", encoding="utf-8")
        self.spent: dict[str, float] = {}
        self.outcome: dict[str, str] = {}

    def write(self, **told: object) -> None:
        """Write a line."""
        self.file.write(json.dumps(told) + "\n")
        self.file.flush()

    def taken(self) -> bytes:
        """Return the map as one byte a block, and clear it."""
        seen = bytes(self.map)
        self.map[:] = bytes(len(seen))
        return seen

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Write what a test reached in all its phases."""
        self.write(before=packed(self.taken()))
        try:
            return (yield)
        finally:
            self.write(
                test=item.nodeid,
                outcome=self.outcome.get(item.nodeid, "none"),
                seconds=round(self.spent.get(item.nodeid, 0.0), 4),
                uses=list(getattr(item, "fixturenames", ())),
                blocks=packed(self.taken()),
            )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Generator[None, object, object]:
        """Write what is reached while something is set up that several tests share."""
        if fixturedef.scope == "function":
            return (yield)
        before = self.taken()
        try:
            return (yield)
        finally:
            seen = self.taken()
            self.write(fixture=fixturedef.argname, file=request.node.nodeid.split("::")[0], blocks=packed(seen))
            both = int.from_bytes(before, "little") | int.from_bytes(seen, "little")
            self.map[:] = both.to_bytes(len(seen), "little")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a phase's seconds, and how it went."""
        name = report.nodeid
        self.spent[name] = self.spent.get(name, 0.0) + report.duration
        if self.outcome.get(name, "passed") == "passed" and (report.outcome != "passed" or report.when == "call"):
            self.outcome[name] = report.outcome


def packed(seen: bytes) -> str:
    """Return a map as text: a bit a block, compressed."""
    bits = bytearray((len(seen) + 7) // 8)
    at = seen.find(1)
    while at >= 0:
        bits[at // 8] |= 1 << at % 8
        at = seen.find(1, at + 1)
    return base64.b85encode(zlib.compress(bytes(bits).rstrip(b"\0"))).decode()


def pytest_configure(config: pytest.Config) -> None:
    """Add what the environment asks for."""
    if chosen := os.environ.get("PLANTED_CHOSEN"):
        config.pluginmanager.register(Limits(json.loads(Path(chosen).read_text(encoding="utf-8"))))
    if _REACH and not hasattr(config, "workerinput") and getattr(config.option, "numprocesses", None):
        return  # the tests run in other processes, each with a plugin of its own
    if _REACH:
        config.pluginmanager.register(Reach(Path(_REACH)))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write which file cannot be collected."""
    if report.failed:
        _note("collect", report.nodeid)


def pytest_runtest_logstart(nodeid: str) -> None:
    """Write which test begins, so that one that never ends has a name."""
    _note("begin", nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write what failed, and what has ended."""
    if report.failed:
        _note("test", report.nodeid)
    if report.when == "teardown":
        _note("end", report.nodeid)
