"""The settings of an adapter: small matrices beside a model that is frozen, as PEFT makes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drumline.core.settings.rule import COUNT, PART, POSITIVE, one_of
from drumline.core.settings.setting import setting

METHODS = ("lora", "ia3", "loha", "lokr")
PLAIN_BASES = ("fp32", "bf16", "fp16")
QUANTISED_BASES = ("int8", "float8", "nf4", "llm-int8")


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """What is trained instead of the model itself, which is frozen. Without a method, the model is trained."""

    method: str = setting("", "kind of adapter, by PEFT's name", one_of("", *METHODS), empty="the model is trained")
    rank: int = setting(8, "rank of its matrices (lora, loha, lokr)", COUNT)
    alpha: float | None = setting(
        None, "its output is multiplied by alpha / rank (lora, loha, lokr)", POSITIVE, empty="2 x rank"
    )
    dropout: float = setting(0.0, "share of its inputs (lora) or of its weights that are dropped", PART)
    targets: tuple[str, ...] = setting(
        (), "layers with an adapter, by the ends of names; a single one may be a regular expression of a whole name",
        empty="all linear layers except the head; ia3: PEFT's own list for the family",
    )  # fmt: skip
    excluded: tuple[str, ...] = setting((), "layers without an adapter, by the ends of their names")
    modules_to_save: tuple[str, ...] = setting(
        (), "modules that are trained whole and saved with the adapter, like lm_head"
    )
    bias: str = setting("none", "biases that are trained too (lora)", one_of("none", "all", "lora_only"))
    rslora: bool = setting(False, "whether to multiply by alpha / sqrt(rank) instead (lora)")
    dora: bool = setting(False, "whether to train the norms of the weights too, as DoRA does (lora)")
    settings: dict[str, Any] = setting({}, "further arguments of PEFT's configuration: layers_to_transform, ...")
    base: str = setting(
        "", "precision of the frozen model; parts that are not quantised have precision.compute",
        one_of("", *PLAIN_BASES, *QUANTISED_BASES), empty="precision.weights",
    )  # fmt: skip
    start: str = setting(
        "", "folder of an adapter to continue with; its adapter_config.json decides", empty="a new one"
    )
    merge: bool = setting(False, "whether to write the model with the adapter merged into it after the last step")

    @property
    def is_on(self) -> bool:
        """Whether an adapter is trained."""
        return bool(self.method or self.start)
