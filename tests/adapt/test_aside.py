"""A search beside training: how long it is waited for, on a clock that the test sets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from drumline.adapt import repair
from drumline.adapt.repair import Aside
from drumline.core.costs import Costs
from drumline.core.timeline.idle import Limit
from drumline.schedules import generate


class Clock:
    """Stands in for `time`."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(repair, "time", made)
    return made


@pytest.fixture
def endless(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Aside]:
    """A search of at most 10 seconds whose process never ends by itself."""
    code = "import sys; sys.stdin.read()"
    started = subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    monkeypatch.setattr(Aside, "_started", staticmethod(lambda told: started))
    program = generate("1f1b", num_ranks=2, num_microbatches=2)
    yield Aside(Costs(), program, Limit(max_activations=2), seconds=10.0)
    assert started.stdin is not None
    started.stdin.close()
    started.kill()
    started.wait()


def test_a_search_has_its_seconds_and_those_to_start(endless: Aside, clock: Clock) -> None:
    assert endless.result() is None
    clock.now += 10.0 + repair._SECONDS_TO_START - 0.1
    assert endless.result() is None
    clock.now += 0.2
    assert endless.result() == "the search did not end in time"
    assert endless._process is not None
    assert endless._process.poll() is not None


def test_a_search_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(told: bytes) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(Aside, "_started", staticmethod(refused))
    beside = Aside(Costs(), generate("1f1b", num_ranks=2, num_microbatches=2), Limit(max_activations=2), seconds=10.0)
    assert beside.result() == "the search could not start: no more processes"
    beside.stop()
