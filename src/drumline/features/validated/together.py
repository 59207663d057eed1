"""What does not go with updates that are validated after they are made."""

from __future__ import annotations

from drumline.core.settings.clash import Clash, call, fact
from drumline.engine.together import AFTER, axis

_NEEDS_A_VERDICT = {
    fact("precision", "fp16"): "the next step's loss scale depends on the verdict",
    fact("capture"): "a graph cannot stop after its opening",
    fact("zero"): "lines exchange parameters inside of the optimizer's step",
    axis("tp", "ep", "cp"): "only pp and dp were tried",
}
CLASHES = (
    *(
        Clash(AFTER, other, "updates that are validated before", why, ("validated", "before"))
        for other, why in _NEEDS_A_VERDICT.items()
    ),
    Clash(call("clip_grad_norm_"), AFTER, "clipping after the step", "clip_grad_norm_ waits for all ranks",
          fix='pass max_norm={max_norm:g} to pipe.optimizer, together with validated="after"'),
)  # fmt: skip
