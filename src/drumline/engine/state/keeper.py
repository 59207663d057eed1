"""What a feature has in checkpoints, beside the model and its optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

Named = Mapping[str, nn.Parameter]


class Keeper:
    """Has nothing in a checkpoint; subclasses override some of it. All processes call everything here alike.

    What is `described` is the same on all processes, numbers and texts alone. What is `due` is this process's own.
    """

    def asked(self, what: str) -> None:
        """React to "save" or "load" being called, before anything is saved or loaded."""

    def described(self) -> dict[str, Any]:
        """Return what the checkpoint says about it, by key."""
        return {}

    def due(self, named: Named) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """Return tensors to store, by name, and what is due."""
        return {}, []

    def refuse_stored(self, content: Mapping[str, Any]) -> None:
        """Raise if training cannot continue from what a checkpoint says, before anything is loaded."""

    def loading(self) -> None:
        """React to parameters and buffers being about to be loaded."""

    def loaded(self, model: Mapping[str, Tensor], whole: Mapping[str, Any]) -> None:
        """React to parameters and buffers having been loaded: those of this process, and where to find all others."""

    def take(self, content: Mapping[str, Any], tensors: Mapping[str, Tensor], named: Named) -> None:
        """Continue from what was stored; not called where the model alone is loaded."""
