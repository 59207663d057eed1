"""What does not go with adapting, and with a search for the first program."""

from __future__ import annotations

from drumline.core.settings.clash import Clash, fact
from drumline.engine.together import AUTO, NAMED_PROGRAM

_SEARCHED, _UNMEASURED, _MEASURED = fact("schedule", AUTO), fact("record", False), ("record", True)
CLASHES = (
    Clash(fact("programs"), _SEARCHED, "only one of them", "a search decides which program steps run"),
    Clash(_UNMEASURED, _SEARCHED, "steps that are measured", "a search needs the times of steps", _MEASURED),
    Clash(_UNMEASURED, fact("adapt"), "steps that are measured", "decisions need the times of steps", _MEASURED),
    Clash(NAMED_PROGRAM, _SEARCHED, "one program in all steps", "a search decides which program steps run"),
)
