"""What does not go with the lines of a mesh, and with what they divide."""

from __future__ import annotations

from drumline.core.errors import RunError
from drumline.core.settings.clash import Clash, Given, fact
from drumline.engine.together import TWO_COPIES, axis, without

_NOT_COMPILED = {
    axis("cp"): "compiled attention would see only a part of the sequence",
    axis("ep"): "exchanges of tokens are not part of compiled code",
    axis("tp"): "exchanges inside divided layers are not part of compiled code",
}
_WHOLE_MATRICES = Given("optimizer", "an optimizer that may need whole matrices", fact("optimizer").holds,
                        "{optimizer} may need whole matrices")  # fmt: skip
_QUANTISED = Given("quantised", "a quantised model", fact("quantised").holds, "the model has quantised weights")
CLASHES = (
    Clash(fact("zero"), without("dp"), "lines along dp", "data-parallel lines divide the state", ("zero", 0)),
    Clash(fact("sequence_parallel"), without("tp"), "lines along tp",
          "tensor-parallel lines divide the tokens between their layers", ("sequence_parallel", False)),
    *(
        Clash(fact("compile"), lines, "stages that are not compiled", why, ("compile", False))
        for lines, why in _NOT_COMPILED.items()
    ),
    Clash(fact("zero", 3), TWO_COPIES, "a schedule with one copy of each stage",
          "each line holds a part of a stage, and its two ranks would need that part at different times", ("zero", 1)),
    Clash(_QUANTISED, fact("zero", 3), "parameters that every line holds",
          "codes and scales of a weight cannot be cut into flat pieces", ("zero", 1)),
    Clash(_QUANTISED, axis("tp"), "layers that are not divided", "codes and scales belong to whole weights",
          fix="use lines along pp or dp"),
    Clash(_WHOLE_MATRICES, fact("zero", 3), "an optimizer that updates each element by itself, such as AdamW",
          "each line holds a flat piece of every matrix", ("zero", 1), kind=RunError),
)  # fmt: skip
