"""What does not go with updates that are validated after they are made."""

from __future__ import annotations

from drumline.core.settings.clash import Clash, called, given
from drumline.engine.together import AFTER, BEFORE, axis

CLASHES = (
    Clash(AFTER, given("precision", "fp16"), "bf16 or fp32", "verdicts set the next step's loss scale", BEFORE),
    Clash(AFTER, given("capture"), "steps that are not captured", "a graph cannot be left after its opening", BEFORE),
    Clash(
        AFTER,
        given("zero"),
        "state that is not divided",
        "lines exchange parameters inside of the optimizer's step",
        BEFORE,
    ),
    Clash(AFTER, axis("tp", "ep", "cp"), "the axes pp and dp alone", "others were not tried", BEFORE),
    Clash(
        called("clip_grad_norm_"),
        AFTER,
        "clipping after the step",
        "it waits for all ranks",
        fix='pass max_norm={max_norm:g} to pipe.optimizer, beside validated="after"',
    ),
)
