"""What does not go with captured steps."""

from __future__ import annotations

from drumline.core.settings.clash import Clash, given
from drumline.engine.together import NAMED_PROGRAM, SEVERAL_LINES

CAPTURED, NOT_CAPTURED = given("capture"), ("capture", False)
CLASHES = (
    Clash(given("arrange"), CAPTURED, "one of the two", "captured steps stay as they are", NOT_CAPTURED),
    Clash(CAPTURED, given("adapt"), "one of the two", "the actions of a captured step have no times", NOT_CAPTURED),
    Clash(CAPTURED, SEVERAL_LINES, "one line", "the exchanges between lines are not part of CUDA graphs", NOT_CAPTURED),
    Clash(NAMED_PROGRAM, CAPTURED, "one program in all steps", "graphs are captured of one", NOT_CAPTURED),
)
