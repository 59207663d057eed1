"""What does not go with a scaled loss."""

from __future__ import annotations

from drumline.core.errors import ModelError
from drumline.core.settings.clash import Clash, Given, fact

_LOW = Given("parameters", "parameters in bf16 or fp16, without `master_weights`",
             lambda facts: bool(facts.get("parameters")) and not facts.get("master_weights"),
             "the model has parameters in {parameters}")  # fmt: skip
CLASHES = (
    Clash(_LOW, fact("precision", "fp16"), "float32 parameters", "gradients in float32 can be unscaled without loss",
          ("master_weights", True), kind=ModelError),
)  # fmt: skip
