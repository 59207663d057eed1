"""What a schedule without a flush has in checkpoints: where it is, and the updates that are due."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from drumline.core.errors import UsageError
from drumline.engine.ranks.observer import Observer
from drumline.engine.state.keeper import Keeper, Named
from drumline.features.stream.stream import Stream, check_goes_on


@dataclass(frozen=True, eq=False)
class StreamKeeper(Observer, Keeper):
    """Saves and loads a stream; without one, it refuses checkpoints with updates that are due."""

    stream: Stream | None
    pause: Callable[[str], None]

    def asked(self, what: str) -> None:
        """Run what is in flight, unless that is to be left because a step has failed."""
        if self.stream is not None and not (what == "load" and self.stream.is_broken):
            self.pause(what)

    def refuse_move(self, *, changes_program: bool) -> None:
        """Refuse to move layers while microbatches are in flight."""
        if self.stream is not None:
            raise UsageError(
                f"repartition: {self.stream.name} has no flush",
                expected="a flushed schedule: between its steps no microbatch is in flight",
            )

    def described(self) -> dict[str, Any]:
        """Return where the stream is; None if nothing is due."""
        return {"stream": None if self.stream is None or self.stream.is_empty else self.stream.described()}

    def due(self, named: Named) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """Return the gradients of updates that are due, and what is no tensor about them."""
        return ({}, []) if self.stream is None else self.stream.due(named)

    def refuse_stored(self, content: Mapping[str, Any]) -> None:
        """Refuse updates that are due, unless the schedule goes on here."""
        if content.get("stream") is not None:
            check_goes_on(content["stream"], self.stream)

    def loading(self) -> None:
        """Forget all that is in flight and due."""
        if self.stream is not None:
            self.stream.restart()

    def take(self, content: Mapping[str, Any], tensors: Mapping[str, Tensor], named: Named) -> None:
        """Go on from where the stream was."""
        if self.stream is not None and content.get("stream") is not None:
            self.stream.take(content["stream"], content["due"], tensors, named)
