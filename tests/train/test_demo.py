"""The demo: every run is told of once, when it has all its steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from drumline.core.errors import RecordError
from drumline.train import demo

pytestmark = pytest.mark.torch


class Stand:
    """Stands in for a run that is read."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps


def test_every_run_of_the_demo_is_told_of_once_when_it_has_all_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[str, int] = {}

    def read_run(folder: Path) -> Stand:
        if folder.name not in written:
            raise RecordError(f"no such folder: {folder}")
        return Stand(written[folder.name])

    monkeypatch.setattr(demo, "read_run", read_run)
    said: list[tuple[int, str]] = []
    told: list[tuple[int, str]] = []
    watch = demo._Progress(
        [Path(name) for name in ("a", "b", "c")],
        10,
        lambda steps, what: told.append((steps, what)),
        lambda at, what: said.append((at, what)),
    )
    watch.look()
    for name, steps in (("a", 4), ("a", 10), ("b", 2), ("b", 10), ("c", 10)):
        written[name] = steps
        watch.look()
    assert said == [(1, "a"), (2, "b"), (3, "c")]
    assert told == [(0, "a"), (4, "a"), (10, "a"), (12, "b"), (20, "b"), (30, "c")]


def test_runs_that_end_between_two_looks_are_told_of_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "read_run", lambda folder: Stand(10))
    monkeypatch.setattr(demo, "_SECONDS_BETWEEN_LOOKS", 600.0)
    said: list[int] = []
    with demo._Progress([Path("a"), Path("b")], 10, lambda *_: None, lambda at, what: said.append(at)).looking():
        assert said == []
    assert said == [1, 2]
