"""One pipeline on this process, with everything that observes its steps: what features attach to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from drumline.adapt.move import Move
from drumline.core.errors import RunError
from drumline.core.program import Program
from drumline.engine.choice import ProgramChoice
from drumline.engine.flow import Flow
from drumline.engine.ground import Ground
from drumline.engine.ranks.observer import Observer, Observers
from drumline.engine.ranks.tally import Tally
from drumline.runtime.step import CalledWith, Step


def _stay(*_: Any, **__: Any) -> Move:
    raise RunError("layers cannot move: nothing is attached that moves them", expected='adapt={"rebalance": "keep"}')


def _undivided(programs: Mapping[int, Program]) -> tuple[list[int], str]:
    return [], "nothing is attached that divides sequences"


@dataclass(eq=False)
class Site(Ground):
    """A pipeline on this process."""

    flow: Flow
    choice: ProgramChoice
    observers: Observers
    cut: Callable[[Step], None]  # splits the batch of a step into microbatches
    run_rows: Callable[[Step], None]  # runs the rows of this process's ranks
    move: Callable[..., Move] = _stay  # moves layers between ranks
    # By which programs steps like the last one run, by the numbers of slices of their sequences, and why by no others.
    slicings: Callable[[Mapping[int, Program]], tuple[list[int], str]] = _undivided

    def evaluate(self, step: Step, call: CalledWith) -> Tally:
        """Run the forwards of a step alone; what runs steps knows how."""
        raise NotImplementedError

    def observe(self, each: Iterable[Observer]) -> None:
        """Have steps observed by these from now on."""
        self.observers = self.choice.observers = Observers(each)

    def attend(self) -> None:
        """Call observers from the next step on that were idle, and leave out those that are idle now."""
        self.observe(self.observers.each)

    def settle(self, what: str) -> None:
        """Wait for the outcome of all steps so far on all ranks, before something else that they do alike."""
        self.flow.pause(what)
        self.recording.settle()


class Methods:
    """A part of `Pipeline`: public methods of a feature, which work on what runs the pipeline here."""

    _site: Site

    def _finish(self, most_seconds: float | None) -> None:
        """Finish what is under way before ranks disconnect; `most_seconds`, if given, bounds that, without an error."""
