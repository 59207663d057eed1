"""Parameters that no loss reaches: their gradient stays None, as in one process, and training goes on.

An expert that gets no tokens in one step may get some in the next. So only those are named, and once, that the model's
forward never uses, and those that no loss has reached in any of the first steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence

from drumline.core.errors import ModelError
from drumline.runtime.blocks.cut import Block
from drumline.runtime.blocks.pieces import Piece

_NUM_STEPS = 10  # for which it is looked at what is reached


class Unused:
    """What is known of parameters without gradient; `mode` is "warn", "raise" or "ignore".

    `known` are those that the forward never uses; None on ranks that stay quiet.
    """

    def __init__(self, mode: str, known: Collection[str] | None = None) -> None:
        self.mode = mode
        self.known = known
        self.begin()

    def begin(self) -> None:
        """Look anew, for other parameters are trained."""
        self._never: set[str] | None = None
        self._num_steps = 0
        self._named: set[str] = set()

    @property
    def looks(self) -> bool:
        """Whether ranks should still say which of their parameters got no gradient."""
        return self._num_steps < _NUM_STEPS and self.mode != "ignore"

    def hear(self, unreached: Collection[str] | None) -> None:
        """Take in which parameters got no gradient in a step."""
        if unreached is None:
            return
        self._never = set(unreached) if self._never is None else self._never & set(unreached)
        self._num_steps += 1
        if self.mode == "raise" and self._num_steps == 1 and unreached:
            raise ModelError(
                f"no loss reaches {_listed(sorted(unreached))}",
                expected='a gradient for every trainable parameter, for unused is "raise"',
                fix="freeze what the loss does not use: parameter.requires_grad_(False)",
            )
        if self.mode != "warn" or self.known is None:
            return
        never = self._never if self._num_steps == _NUM_STEPS else self._never & set(self.known)
        if fresh := never - self._named:
            self._named |= fresh
            how = "in any step so far" if self._num_steps == _NUM_STEPS else "and the forward never uses it"
            warnings.warn(
                f"no loss reaches {_listed(sorted(fresh))}, {how}: it stays as it is. Freeze it to save its memory, or"
                ' pass unused="ignore"',
                stacklevel=2,
            )


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:4])}{' and others' if len(names) > 4 else ''}"


def unused_in(stages: Sequence[Sequence[Block]]) -> frozenset[str]:
    """Return the names of parameters that a followed model's forward never uses."""
    last = stages[0][0].module
    return last.script.unused if isinstance(last, Piece) else frozenset()
