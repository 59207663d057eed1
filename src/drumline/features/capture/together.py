"""What does not go with captured steps."""

from __future__ import annotations

from drumline.core.settings.clash import Clash, fact
from drumline.engine.together import NAMED_PROGRAM, SEVERAL_LINES

_CAPTURED, _NOT = fact("capture"), ("capture", False)
CLASHES = (
    Clash(fact("arrange"), _CAPTURED, "one of the two", "captured steps cannot change their order", _NOT),
    Clash(_CAPTURED, fact("adapt"), "one of the two", "the actions of a captured step have no times", _NOT),
    Clash(_CAPTURED, SEVERAL_LINES, "one line", "exchanges between lines are not part of CUDA graphs", _NOT),
    Clash(NAMED_PROGRAM, _CAPTURED, "one program in all steps", "graphs hold one program", _NOT),
)
