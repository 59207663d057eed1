"""Seconds of a processor by folder of tests, with all processes that tests start: `pytest -p processor_times`.

How long a test takes depends on what else the machine does; how long it computes does so less.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

TOLD = "processor seconds"
_TICKS = os.sysconf("SC_CLK_TCK")
_began: dict[str, float] = {}
_seconds: dict[str, float] = {}  # by folder
_longest: dict[str, float] = {}  # by test


def spent() -> float:
    """Return the seconds of this process, of those it has started, and of those that they have started.

    >>> before = spent()
    >>> sum(range(10**6)) > 0 and spent() >= before
    True
    """
    total, left = 0, [os.getpid()]
    while left:
        process = left.pop()
        try:
            with open(f"/proc/{process}/stat", encoding="utf-8") as file:
                total += sum(map(int, file.read().rpartition(")")[2].split()[11:15]))
            for thread in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{thread}/children", encoding="utf-8") as file:
                    left += map(int, file.read().split())
        except OSError:  # it has ended meanwhile
            continue
    return total / _TICKS


def folder_of(test: str) -> str:
    """Return what a test is counted with.

    >>> folder_of("tests/core/test_action.py::test_a[1]"), folder_of("tests/test_docs.py::test_b")
    ('core', 'tests/*.py')
    >>> folder_of("src/drumline/core/action.py::drumline.core.action.Action")
    'doctests'
    """
    first, *rest = test.partition("::")[0].split("/")
    if first == "src":
        return "doctests"
    return rest[0] if len(rest) > 1 else "tests/*.py"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note when a test begins."""
    _began[item.nodeid] = spent()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Tell with the last report of a test what it took: the process that shows it is another one."""
    if call.when == "teardown":
        item.user_properties.append((TOLD, spent() - _began.pop(item.nodeid)))
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up."""
    for name, value in report.user_properties:
        if name == TOLD and report.when == "teardown":
            folder, seconds = folder_of(report.nodeid), float(str(value))
            _seconds[folder] = _seconds.get(folder, 0.0) + seconds
            _longest[report.nodeid] = seconds


def most(seconds: dict[str, float]) -> list[tuple[str, float]]:
    """Return what took longest first.

    >>> most({"core": 1.0, "mesh": 2.0})
    [('mesh', 2.0), ('core', 1.0)]
    """
    return sorted(seconds.items(), key=lambda item: -item[1])


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show the folders, and the tests that took longest."""
    terminalreporter.section(f"{sum(_seconds.values()):.0f} s of a processor, {time.strftime('%Y-%m-%d %H:%M')}")
    terminalreporter.line("   ".join(f"{name} {seconds:.0f}" for name, seconds in most(_seconds)))
    for name, seconds in most(_longest)[:40]:
        terminalreporter.line(f"{seconds:6.1f} {name}")
