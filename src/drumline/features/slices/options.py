"""The options of slices."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drumline.core.errors import ModelError
from drumline.core.settings.rule import Rule
from drumline.core.slices.division import SliceLengths
from drumline.engine.options import FeatureOptions, is_whole, option
from drumline.features.slices.units import BY_SLICES
from drumline.runtime.sequences import positions_of

# Layers that carry a state from token to token, by the names of their classes: kernels of devices hide what they call.
_STATES = re.compile(
    "Mamba|BambaMixer|FalconH1Mixer|Rwkv|RecurrentBlock|DeltaNet|DeltaAttention|LinearAttention|LightningAttention"
    "|ShortConv|RetNet|Hyena|LSTM|GRU"
)
_SLICES = Rule(
    "a number of slices, or the tokens of each: 2 at least",
    lambda value: (
        (is_whole(value) and value >= 1)
        or (isinstance(value, list | tuple) and len(value) > 0 and all(is_whole(each) and each > 1 for each in value))
    ),
)


@dataclass(frozen=True, kw_only=True)
class SliceOptions(FeatureOptions):
    """`slices`: run every microbatch in so many slices of its sequences, or in slices of these lengths."""

    slices: int | Sequence[int] = option(1, _SLICES, alike=True)

    @property
    def division(self) -> SliceLengths:
        """How sequences are divided."""
        return SliceLengths.of(self.slices if isinstance(self.slices, int) else tuple(self.slices))

    def facts(self) -> dict[str, Any]:
        """Return whether there are slices, as a number of them."""
        return super().facts() | {"slices": self.division.num_slices}

    def refuse_model(self, model: Any) -> None:
        """Refuse a model whose sequences cannot be divided."""
        super().refuse_model(model)
        if self.division.num_slices > 1:
            positions_of(model, BY_SLICES)
            refuse_states(model)

    def schedule_settings(self) -> dict[str, Any]:
        """Have the schedule run slices."""
        return super().schedule_settings() | {"slices": self.division.num_slices}


def refuse_states(model: Any) -> None:
    """Refuse a model with layers that carry a state from token to token."""
    names = {type(module).__name__: name for name, module in model.named_modules()}
    for kind, name in names.items():
        if _STATES.search(kind):
            raise ModelError(
                f"{name} ({kind}) carries a state along the sequence, and slices divide it",
                expected="layers in which only scaled_dot_product_attention sees other tokens",
                fix="use slices=1",
            )
