"""Adapters over a frozen base: which share of the weights trains, and the bytes of a weight that does not.

    full training    F  2 operations per weight and token    I  2    W  2
    frozen base      F  2 (1 + s)                            I  2 (1 + s)    W  2 s

With s the trainable share: the parameters of adapters per weight of the layers. A LoRA adapter of rank r of a product
with K inputs and N outputs is two thin products, r (K + N) parameters. Gradients, their exchange and the optimizer's
state are those of the adapters alone. The base is kept in fewer bytes, and written out in 16 bits before each product:

    bf16   2 bytes
    int8   1 byte, and 4 for every output (float8 likewise)
    int4   half a byte, and 4 for every 128 weights
    nf4    half a byte, and 4 for every 64 weights

Embedding, head and norms are neither adapted nor kept in fewer bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from drumline.core.errors import PlanError, nearest


class BaseBytes(NamedTuple):
    """The bytes of a frozen weight: its own, and those of the scale of one output."""

    weight: float
    output: float = 0.0


BASES = {
    "bf16": BaseBytes(2.0),
    "int8": BaseBytes(1.0, 4.0),
    "float8": BaseBytes(1.0, 4.0),
    "int4": BaseBytes(0.5 + 4 / 128),
    "nf4": BaseBytes(0.5 + 4 / 64),
}


@dataclass(frozen=True, slots=True)
class FrozenBase:
    """A base that does not train: parameters of its adapters per weight of its layers, and what a weight is kept in.

    >>> FrozenBase(0.006, "nf4").bytes_of(4096, 14336) / (4096 * 14336)
    0.5625
    """

    trainable_share: float
    kind: str = "bf16"
    rank: int = field(default=0, repr=False)  # of its adapters, if it is known
    targets: tuple[str, ...] = field(default=(), repr=False)  # layers that have them; none named: all linear ones

    def __post_init__(self) -> None:
        if not 0 < self.trainable_share <= 1:
            raise PlanError(f"trainable_share is {self.trainable_share}", expected="more than 0, at most 1")
        if self.kind not in BASES:
            raise PlanError(f"unknown base {self.kind!r:.60}", fix=nearest(self.kind, BASES))

    @property
    def words(self) -> str:
        """What trains beside it, in words.

        >>> FrozenBase(0.006, "nf4", 16).words
        'a LoRA adapter of rank 16 on a frozen base in nf4'
        """
        adapter = f"a LoRA adapter of rank {self.rank}" if self.rank else "adapters"
        return f"{adapter} on a frozen base in {self.kind}"

    @property
    def is_quantised(self) -> bool:
        """Whether weights are written out in 16 bits before each product."""
        return self.kind != "bf16"

    def bytes_of(self, inputs: float, outputs: float) -> float:
        """Return the bytes of the weights of a product with so many inputs and outputs."""
        base = BASES[self.kind]
        return base.weight * inputs * outputs + base.output * outputs

    def rank_of(self, inputs: float, outputs: float) -> float:
        """Return the rank of an adapter that has its share of the weights of a product.

        >>> FrozenBase(0.0078125).rank_of(4096, 4096)
        16.0
        """
        return self.trainable_share * inputs * outputs / (inputs + outputs)
