"""Tests side by side in processes that are forked once all are collected: `pytest --forks 2`.

Processes that start by themselves, as those of xdist, import everything and collect all tests again, each of them.

    collect ──► fork ──┬──► process: test, test, test ... ──┬──► reports, in one output
                       └──► process: test, test, test ... ──┘

Tests of a file stay in one process, so that what they share is made once. Where no file is left, a process takes half
of what another one has left of its file, unless they share something. If a process dies, its test has failed, and
another process goes on.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections import deque
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import pytest

_AHEAD = 3  # so many tests a process knows of: the one that runs, the next one, and one while this process is busy


class Specs:
    """What others may do in the processes."""

    def pytest_forked(self) -> None:
        """A process that will run tests was forked; this is called there."""


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Add `pytest_forked`."""
    pluginmanager.add_hookspecs(Specs)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the number of processes."""
    parser.addoption(
        "--forks", type=int, default=0, metavar="N", help="run tests in N processes, forked when collected"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Run tests by processes where they are asked for."""
    if config.getoption("forks") and not config.getoption("collectonly"):
        config.pluginmanager.register(Forks(config))


class Process:
    """A process that runs tests, by their numbers."""

    def __init__(self, number: int, connection: Connection, pid: int) -> None:
        self.number, self.connection, self.pid = number, connection, pid
        self.sent = deque[int]()  # what it knows of; it runs the first
        self.file = deque[int]()  # what is left of its file


class Forks:
    """Gives tests to processes, and collects their reports."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.items: list[pytest.Item] = []
        self.files = deque[deque[int]]()
        self.processes: list[Process] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run all tests in processes, unless some could not be collected."""
        if session.testsfailed:
            return None
        self.items = session.items
        order = groupby(range(len(self.items)), key=lambda at: self.items[at].path)
        self.files.extend(deque(numbers) for _, numbers in order)
        try:
            for number in range(self.config.getoption("forks")):
                self.start(session, number)
            while self.processes:
                connections = {process.connection: process for process in self.processes}
                for connection in wait(list(connections)):
                    assert isinstance(connection, Connection)
                    self.hear(session, connections[connection])
                    if session.shouldfail or session.shouldstop:
                        raise session.Interrupted(session.shouldfail or session.shouldstop)
        finally:
            for process in self.processes:
                os.kill(process.pid, signal.SIGKILL)
                os.waitpid(process.pid, 0)
        return True

    def start(self, session: pytest.Session, number: int) -> None:
        """Fork a process, and give it something to do."""
        folder = self.config._tmp_path_factory.getbasetemp() / f"process-{number}"  # type: ignore[attr-defined]
        folder.mkdir(exist_ok=True)
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            self.config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
            for connection in [ours, *(process.connection for process in self.processes)]:
                connection.close()
            be(session, theirs)
        theirs.close()
        self.processes.append(Process(number, ours, pid))
        self.feed(self.processes[-1])

    def feed(self, process: Process) -> None:
        """Let a process know of enough tests; of -1 behind the last one."""
        while len(process.sent) < _AHEAD:
            if not process.file:
                process.file = self.taken()
            process.sent.append(process.file.popleft() if process.file else -1)
            try:
                process.connection.send(process.sent[-1])
            except OSError:  # it died, which is heard next
                return

    def taken(self) -> deque[int]:
        """Return the next file, or half of what is left of another process's."""
        if self.files:
            return self.files.popleft()
        divisible = [process.file for process in self.processes if not any(map(self.shares, process.file))]
        longest = max(divisible, key=len, default=deque[int]())
        return deque(reversed([longest.pop() for _ in range((len(longest) + 1) // 2)]))

    def shares(self, number: int) -> bool:
        """Whether a test uses something that is made once for the tests of its file."""
        item: Any = self.items[number]
        known = getattr(item, "_fixtureinfo", None)
        made = [each for fixtures in known.name2fixturedefs.values() for each in fixtures] if known else []
        file = item.nodeid.partition("::")[0]
        return any(each.scope in ("module", "class") and each.baseid.partition("::")[0] == file for each in made)

    def hear(self, session: pytest.Session, process: Process) -> None:
        """Take a report, or the end of a test or of the process."""
        try:
            told = process.connection.recv()
        except (EOFError, OSError):
            self.ended(session, process)
            return
        if isinstance(told, int):
            assert process.sent.popleft() == told
            self.feed(process)
        else:
            report = self.config.hook.pytest_report_from_serializable(config=self.config, data=told)
            self.config.hook.pytest_runtest_logreport(report=report)

    def ended(self, session: pytest.Session, process: Process) -> None:
        """If it died in a test, report that as a failure, and let another process go on."""
        self.processes.remove(process)
        process.connection.close()
        code = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
        how = f"the process that ran it ended with {signal.Signals(-code).name if code < 0 else f'code {code}'}"
        left = deque(number for number in [*process.sent, *process.file] if number >= 0)
        if not left:
            assert not code, how.replace("it", "the last tests")
            return
        item = self.items[left.popleft()]
        dead = pytest.TestReport(item.nodeid, item.location, {}, "failed", how, "call")
        self.config.hook.pytest_runtest_logreport(report=dead)
        if left:
            self.files.appendleft(left)
        if self.files:
            self.start(session, process.number)


class Reports:
    """Sends the reports of a process."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self.config, self.connection = config, connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send a report to the process that shows it."""
        told: Any = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.connection.send(told)


def be(session: pytest.Session, connection: Connection) -> NoReturn:
    """Be a process that runs the tests that it is told to."""
    status = 1
    try:
        run(session, connection)
        status = 0
    except EOFError:  # nobody is interested any more
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def run(session: pytest.Session, connection: Connection) -> None:
    """Run tests by the numbers that come, until -1 comes."""
    config = session.config
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # its files are those of the process that forked this one
    capture.start_global_capturing()
    capture.suspend_global_capture()
    terminal: Any = config.pluginmanager.getplugin("terminalreporter")
    terminal._tw._file = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - it is open as long as the process
    config.pluginmanager.register(Reports(config, connection))
    config.hook.pytest_forked()
    number = connection.recv()
    while number >= 0:
        following = connection.recv()
        after = session.items[following] if following >= 0 else None
        config.hook.pytest_runtest_protocol(item=session.items[number], nextitem=after)
        connection.send(number)
        number = following
    config._ensure_unconfigure()  # tells what went wrong while garbage was collected
