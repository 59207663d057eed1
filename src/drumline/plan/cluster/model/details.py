"""What makes a transformer this model and no other, and decides neither seconds nor bytes here.

Whoever starts a plan needs it: a framework that is told the sizes alone would train another model.
"""

from __future__ import annotations

from dataclasses import dataclass

from drumline.core.errors import PlanError


@dataclass(frozen=True, slots=True)
class Latent:
    """Attention through narrow projections (MLA): their widths, and those of a head with and without positions.

    `queries` is 0 where queries are projected at once.

    >>> Latent(queries=1536, keys_values=512, head=128, rotary_head=64, value_head=128).keys_values
    512
    """

    queries: int
    keys_values: int
    head: int
    rotary_head: int
    value_head: int

    def __post_init__(self) -> None:
        if self.queries < 0 or min(self.keys_values, self.head, self.rotary_head, self.value_head) < 1:
            raise PlanError(
                f"latent attention has the widths {self.queries}, {self.keys_values}, {self.head}, "
                f"{self.rotary_head}, {self.value_head}",
                expected="widths of 1 or more; 0 for queries that are projected at once",
            )

    def __str__(self) -> str:
        narrow = f"queries through {self.queries}, " if self.queries else ""
        return (
            f"latent attention ({narrow}keys and values through {self.keys_values}; heads of {self.head} + "
            f"{self.rotary_head} rotary, values of {self.value_head})"
        )


@dataclass(frozen=True, slots=True)
class Details:
    """Attention, positions and biases beyond sizes; `others` has a phrase for everything that has no field here.

    `rotary_base` is 0 where it is not known. `alibi` models have neither learned nor rotary positions. `qk_norm` ones
    norm queries and keys of every head, `qkv_bias` ones add a bias to queries, keys and values alone.
    """

    latent: Latent | None = None
    alibi: bool = False
    rotary_base: float = 0.0
    qk_norm: bool = False
    qkv_bias: bool = False
    others: tuple[str, ...] = ()


PLAIN = Details()
