"""Checkpoints of schedules without a flush, where the pipeline's own schedule has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drumline.engine.ranks.observer import Observer
from drumline.engine.state.keeper import Keeper
from drumline.features.stream.stream import cannot_go_on


class NoStream(Observer, Keeper):
    """Refuses checkpoints with updates that are due."""

    def described(self) -> dict[str, Any]:
        """Return that nothing is due."""
        return {"stream": None}

    def refuse_stored(self, content: Mapping[str, Any]) -> None:
        """Refuse updates that are due: no schedule here makes them."""
        if content.get("stream") is not None:
            raise cannot_go_on(content["stream"])
