"""How a step of a model is run on one device: its rows, number format, loss, optimizer and recomputation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drumline.core.errors import PlanError, nearest
from drumline.plan.cluster.transformer import Transformer

LOSS_ROWS = 1024  # tokens whose logits a fused loss holds at a time
WIDTHS = {"bf16": 2, "fp32": 4, "tf32": 4}  # bytes of a number; tf32 are float32 numbers, multiplied in fewer bits
LOSSES = ("plain", "fused")
OPTIMIZERS = ("adamw", "adamw-foreach", "adamw-loop", "muon")
RECOMPUTE = ("none", "full")


@dataclass(frozen=True, slots=True)
class StepSetting:
    """What decides a step besides the model. A fused loss makes logits and their gradients by pieces of the tokens.

    `adamw` is torch's fused one. With `muon`, the matrices of layers are updated by Muon and the rest by fused AdamW.
    Parameters, gradients and the optimizer's states are in `dtype`.

    >>> StepSetting(rows=4, dtype="fp16")
    Traceback (most recent call last):
    drumline.core.errors.PlanError: dtype is 'fp16'; did you mean bf16?
    """

    rows: int
    dtype: str = "bf16"
    loss: str = "plain"
    optimizer: str = "adamw"
    recompute: str = "none"

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise PlanError(f"rows is {self.rows}", expected="1 or more sequences in a step")
        known: dict[str, Any] = {"dtype": WIDTHS, "loss": LOSSES, "optimizer": OPTIMIZERS, "recompute": RECOMPUTE}
        for name, values in known.items():
            if (value := getattr(self, name)) not in values:
                raise PlanError(f"{name} is {value!r}", fix=nearest(str(value)[:60], values))

    @property
    def width(self) -> int:
        """The bytes of a number."""
        return WIDTHS[self.dtype]


def refuse_others(model: Transformer) -> None:
    """Raise an error for a model whose layers the forecast has no list of operations for.

    >>> refuse_others(Transformer("gpt", 2, 64, 4, vocabulary=100, sequence=8))
    Traceback (most recent call last):
    drumline.core.errors.PlanError: gpt has LayerNorm or no gate, biases, dropout, learned positions; expected a ...
    """
    details = model.details
    reasons = {
        "experts": model.experts is not None,
        "latent attention": model.latent is not None,
        "adapters": model.frozen_base is not None,
        "LayerNorm or no gate": not model.gated or details.norm not in ("", "RMSNorm"),
        "biases": model.biased or details.qkv_bias,
        "dropout": model.dropout,
        "learned positions": model.learned_positions,
        "ALiBi": details.alibi,
        "norms of queries and keys": details.qk_norm,
        "heads of an odd width": model.head_width % 2 == 1,
        **dict.fromkeys(details.others, True),
    }
    if wrong := [reason for reason, is_so in reasons.items() if is_so]:
        raise PlanError(
            f"{model.name} has {', '.join(wrong)}",
            expected="a dense model like Llama: RMSNorm, rotary positions, gated layers, no biases",
            fix="name hardware like h200 for a plan by data sheet",
        )
