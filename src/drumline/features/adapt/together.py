"""What does not go with adapting, and with a search for the first program."""

from __future__ import annotations

from drumline.core.settings.clash import Clash, given
from drumline.engine.together import NAMED_PROGRAM

AUTO = "auto"
SEARCHED, UNMEASURED, MEASURED = given("schedule", AUTO), given("record", False), ("record", True)
CLASHES = (
    Clash(given("programs"), SEARCHED, "only one of them", "a search decides by which program steps run"),
    Clash(UNMEASURED, SEARCHED, "steps that are measured", "a search needs their times", MEASURED),
    Clash(UNMEASURED, given("adapt"), "steps that are measured", "decisions need their times", MEASURED),
    Clash(NAMED_PROGRAM, SEARCHED, "one program in all steps", "a search decides which one"),
)
