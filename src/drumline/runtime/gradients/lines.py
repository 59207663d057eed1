"""What other lines of a mesh add to running a row, as far as the row's rank must know: sums, and divided parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn


class Summing(Protocol):
    """Gradients that are being summed."""

    ended: int  # when the sums were there, if that is known


class Sums(Protocol):
    """Sums gradients over lines; all lines call it in the same order."""

    def start(self, parameters: Sequence[nn.Parameter], now: Callable[[], int], /) -> Sequence[Summing]:
        """Begin to sum the gradients of these parameters; `now` is the clock by which each notes its end."""

    def finish(self, begun: Sequence[Any], what: str, /) -> None:
        """Wait for sums that have begun, and give them to the parameters."""


class Shards(Protocol):
    """The parameters of some stages, of which every line keeps a piece."""

    @property
    def pieces(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """This line's piece of every divided parameter."""

    def shown(self, parameter: nn.Parameter, /) -> nn.Parameter:
        """Return what this line keeps of a parameter."""

    def drop(self, parameter: Tensor, /) -> None:
        """Forget the piece of a parameter that has left."""

    def take_over(self, parameter: nn.Parameter, value: Tensor, /) -> None:
        """Keep this piece of a parameter that has come."""

    def recut(self, stages: Mapping[int, Sequence[nn.Parameter]], /) -> None:
        """Have these parameters in the stages from now on, of those that are divided."""

    def is_whole(self, stage: int, /) -> bool:
        """Whether a stage's parameters are all there."""

    def unshard(self, stage: int, /) -> None:
        """Begin to gather a stage's parameters."""

    def gathered(self, stage: int, /) -> None:
        """Wait until a stage is gathered."""

    def reshard(self, stage: int, /) -> None:
        """Free the whole parameters of a stage."""

    def renew(self) -> None:
        """Take over values that were loaded into gathered parameters."""

    def start(self, stage: int, /) -> Sequence[Any]:
        """Begin to sum the gradients of a stage's parameters, each line its pieces."""

    def finish(self, sums: Sequence[Any], what: str, /) -> None:
        """Wait for sums that have begun, and give them to the pieces."""
