"""Which parameters no loss reaches.

If no loss reaches a parameter, its gradient stays None, as in one process, and training continues. An expert without
tokens in one step may get some in the next. So the warning comes once, and names only parameters that the forward never
uses and those that no loss reaches in any of the first steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence

from drumline.core.errors import ModelError
from drumline.engine.ranks.agreement import plan_of
from drumline.model.block import Block

_NUM_STEPS = 10  # steps in which to look for unreached parameters


class UnusedParameters:
    """Tracks parameters without gradient; `mode` is "warn", "raise" or "ignore".

    `known` are those that the forward never uses; None on ranks that do not warn.
    """

    def __init__(self, mode: str, known: Collection[str] | None = None) -> None:
        self.mode = mode
        self.known = known
        self.begin()

    def begin(self) -> None:
        """Start again, because other parameters train now."""
        self._never: set[str] | None = None
        self._num_steps = 0
        self._named: set[str] = set()

    @property
    def looks(self) -> bool:
        """Whether ranks should still report which of their parameters got no gradient."""
        return self._num_steps < _NUM_STEPS and self.mode != "ignore"

    def hear(self, unreached: Collection[str] | None) -> None:
        """Record which parameters got no gradient in a step."""
        if unreached is None:
            return
        self._never = set(unreached) if self._never is None else self._never & set(unreached)
        self._num_steps += 1
        if self.mode == "raise" and self._num_steps == 1 and unreached:
            raise ModelError(
                f"no loss reaches {_listed(sorted(unreached))}",
                expected='a gradient for every trainable parameter, because unused is "raise"',
                fix="freeze the parameters that the loss does not use: parameter.requires_grad_(False)",
            )
        if self.mode != "warn" or self.known is None:
            return
        never = self._never if self._num_steps == _NUM_STEPS else self._never & set(self.known)
        if fresh := never - self._named:
            self._named |= fresh
            how = "in any step so far" if self._num_steps == _NUM_STEPS else "and the forward never uses them"
            warnings.warn(
                f"no loss reaches {_listed(sorted(fresh))}, {how}: they will not change. Freeze them to save memory, or"
                ' pass unused="ignore"',
                stacklevel=2,
            )


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:4])}{' and others' if len(names) > 4 else ''}"


def unused_in(stages: Sequence[Sequence[Block]]) -> frozenset[str]:
    """Return the names of parameters that a traced model's forward never uses."""
    script = plan_of(stages[0])
    return frozenset() if script is None else script.unused
