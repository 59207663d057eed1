"""The options of captured steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from drumline.channel.lines import grid
from drumline.core.errors import UsageError
from drumline.engine.options import SWITCH, FeatureOptions, option


@dataclass(frozen=True, kw_only=True)
class CaptureOptions(FeatureOptions):
    """`capture`: record each step's actions once as CUDA graphs, and replay them while steps stay the same."""

    ALIKE: ClassVar[tuple[str, ...]] = ("capture",)
    capture: bool = option(False, SWITCH)

    def check_together(self, others: Mapping[str, Any]) -> None:
        """Refuse steps that may differ, and exchanges that are not part of graphs."""
        super().check_together(others)
        if not self.capture:
            return
        if others.get("arrange"):
            raise UsageError(
                "arrange is True and capture is True", expected="one of the two: captured steps stay as they are"
            )
        if others.get("adapt") not in (None, False):
            raise UsageError(
                "capture is True and adapt is set",
                expected="one of the two: the actions of a captured step have no times",
            )
        sizes = {} if others.get("mesh") is None else grid.described(others["mesh"])[0]
        if any(size > 1 for axis, size in sizes.items() if axis != "pp"):
            raise UsageError(
                f"capture is True and the mesh is {grid.shown(sizes)}",
                expected="one line: the exchanges between lines are not part of CUDA graphs",
                fix="use capture=False",
            )
