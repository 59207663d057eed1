"""Observers of a pipeline's steps: adaptation, recording, capture, checks, and saved state.

    given ── refuse_step ── before ── renewed, followed ── ahead ── the step ── after
        called ── compared ── taken ── begin ── the rows ── end ── tell ── told
                                         └── the rows ── again ──┘   if the update before the step was wrong
    between two steps: moved, took             at any time: close

The code that runs a step calls at each moment the observers that do something then, and knows nothing else about them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from drumline.core.program import Program
from drumline.engine.ranks.agreement import ArgumentPrint
from drumline.engine.ranks.tally import RankReport, Tally
from drumline.runtime.step import CalledWith, Step


class Observer:
    """Does nothing at any of these moments; subclasses override some of them.

    Observers get `end` in reverse order, and everything else in order. Evaluations call only `take_call`,
    `compared`, `tell` and `after_telling`.
    """

    order: ClassVar[int] = 0  # those with a lower one are called earlier, and later at the end of a step

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing to do in any step, until layers move."""
        return False

    def refuse_step(self, step: Step) -> None:
        """Refuse a training step, before any other rank is asked anything."""

    def take_call(self, step: Step, call: CalledWith) -> CalledWith:
        """Return what this process takes of what a step is called with."""
        return call

    def before(self, step: Step) -> None:
        """Change what runs before a training step; all ranks do it alike."""

    def renewed(self) -> None:
        """React to this process having seen a change of the model, which is traced again."""

    def followed(self) -> None:
        """React to ranks having traced the model again, or for other inputs; all ranks of a line are told alike."""

    def ahead(self, step: Step, call: CalledWith, user_call: CalledWith) -> None:
        """Prepare a training step with all ranks; `user_call` is what the user called it with, `call` what is taken."""

    def after(self, step: Step) -> None:
        """React to a training step having been told, with all ranks."""

    def at_call(self, step: Step) -> None:
        """React to the call of a training step; all ranks have reached it."""

    def compared(self, step: Step, fingerprint: Callable[[], ArgumentPrint]) -> None:
        """Compare what the step was called with, of which `fingerprint` returns a fingerprint, with what others got.

        It is called where ranks are in several processes.
        """

    def taken(self, step: Step) -> None:
        """React to the batch being stored, before it is split."""

    def begin(self, step: Step) -> None:
        """React to the batch being split, just before the step runs."""

    def again(self, step: Step) -> None:
        """React to the opening of the step having run in vain, just before the step runs once more."""

    def end(self, step: Step) -> None:
        """React to the end of all rows in this process; everything is sent."""

    def tell(self, step: Step, each: Sequence[RankReport]) -> None:
        """See what the ranks of this process are about to tell all others about the step, and add to it."""

    def after_telling(self, step: Step, tally: Tally, each: Sequence[RankReport]) -> None:
        """React after they have told it; the tally will hold what all ranks tell."""

    def refuse_move(self, *, changes_program: bool) -> None:
        """Refuse to let layers move to another cut, which may change the program; asked before anything moves."""

    def moved(self) -> None:
        """React to layers having moved between ranks since the last step; the stages here are others now."""

    def refuse_program(self, program: Program) -> None:
        """Refuse to run by another program from now on; asked before it is taken up."""

    def took(self, program: Program, number: int) -> None:
        """React to another program, of this number, having been taken up for all steps from now on."""

    def close(self) -> None:
        """End what is under way, before this process leaves the other ranks."""


class Observers:
    """The observers of a pipeline by what each does: who has nothing to do at a moment is not called then.

    >>> class Greets(Observer):
    ...     def at_call(self, step: Step) -> None:
    ...         print("hello")
    >>> observers = Observers([Observer(), Greets()])
    >>> len(observers.each), len(observers.at_call), len(observers.taken)
    (2, 1, 0)
    """

    def __init__(self, each: Iterable[Observer]) -> None:
        self.each = tuple(sorted(each, key=lambda observer: observer.order))
        self.refuse_step: list[Callable[[Step], None]] = self._at("refuse_step")
        self.take_call: list[Callable[[Step, CalledWith], CalledWith]] = self._at("take_call")
        self.before: list[Callable[[Step], None]] = self._at("before")
        self.renewed: list[Callable[[], None]] = self._at("renewed")
        self.followed: list[Callable[[], None]] = self._at("followed")
        self.ahead: list[Callable[[Step, CalledWith, CalledWith], None]] = self._at("ahead")
        self.after: list[Callable[[Step], None]] = self._at("after")
        self.at_call: list[Callable[[Step], None]] = self._at("at_call")
        self.compared: list[Callable[[Step, Callable[[], ArgumentPrint]], None]] = self._at("compared")
        self.taken: list[Callable[[Step], None]] = self._at("taken")
        self.begin: list[Callable[[Step], None]] = self._at("begin")
        self.again: list[Callable[[Step], None]] = self._at("again")
        self.end: list[Callable[[Step], None]] = self._at("end")[::-1]
        self.tell: list[Callable[[Step, Sequence[RankReport]], None]] = self._at("tell")
        self.after_telling: list[Callable[[Step, Tally, Sequence[RankReport]], None]] = self._at("after_telling")
        self.moved: list[Callable[[], None]] = [part.moved for part in self.each]  # after which some are idle no more

    def _at(self, moment: str) -> list[Any]:
        """Return what to call at a moment, in order."""
        nothing = getattr(Observer, moment)
        busy = [observer for observer in self.each if not observer.is_idle]
        return [getattr(observer, moment) for observer in busy if getattr(type(observer), moment) is not nothing]
