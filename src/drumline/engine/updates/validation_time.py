"""When the updates of an optimizer are validated: before they are made, or after, where a feature takes them back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from drumline.core.errors import UsageError


class Validates:
    """Validates all updates before they are made; a subclass lets them run ahead of what all ranks decide."""

    is_on = False

    def handles(self, number: int, ranks: str) -> bool:
        """Take note of ranks with a NaN in a step, by name; return whether nobody else needs to."""
        return False

    def turn_on(self, max_norm: float | None) -> None:
        """Validate the updates of all optimizers afterwards."""
        raise UsageError(
            "validated is 'after', and nothing is attached that takes updates back", fix="use validated='before'"
        )

    def turn_off(self) -> None:
        """Validate the updates of the next optimizers before they are made; all ranks call it alike."""

    def keeping(self, optimizer: Optimizer) -> Any:
        """Return what keeps the state of an optimizer."""

    def step(
        self,
        kept_optimizer: Any,
        parameters: Sequence[nn.Parameter],
        apply: Callable[[], None],
        follow: Callable[[], None],
    ) -> None:
        """Let an optimizer step."""

    def forget(self) -> None:
        """Record that gradients were set to zero."""


def check(validated: object, max_norm: float | None) -> bool:
    """Return whether to validate afterwards; refuse other values.

    >>> check("before", None), check("after", 1.0)
    (False, True)
    >>> check("never", None)
    Traceback (most recent call last):
    drumline.core.errors.UsageError: validated is 'never'; expected "before" or "after" the optimizer's step
    """
    if validated not in ("before", "after"):
        raise UsageError(f"validated is {validated!r:.60}", expected='"before" or "after" the optimizer\'s step')
    if validated == "before" and max_norm is not None:
        raise UsageError(
            f"max_norm is {max_norm!r:.60}, and updates are validated before they are made",
            expected='validated="after" beside it',
            fix="call pipe.clip_grad_norm_(max_norm) before optimizer.step()",
        )
    return validated == "after"
