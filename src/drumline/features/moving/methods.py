"""`repartition` of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from drumline.adapt.move import Move
from drumline.engine.site import Methods
from drumline.features.moving.mover import Mover


class MovingMethods(Methods):
    """Layers that move between running ranks."""

    @property
    def moves(self) -> tuple[Move, ...]:
        """What `repartition` has moved so far."""
        movers = (observer for observer in self._site.observers.each if isinstance(observer, Mover))
        return tuple(next(movers).moves)

    def repartition(
        self, cuts: Sequence[str] | str | None = None, *, balance: Sequence[int] | str | None = None
    ) -> Move:
        """Cut the model elsewhere and move layers between ranks, in the running processes; call it on every rank.

        Pass `cuts`, the names of the first blocks of stages 1, 2, ..., or `balance`, the number of blocks in each
        stage or "even", as to `Pipeline`. Call it between two steps. Parameters, buffers, gradients, float32 copies and
        the state of optimizers from `pipe.optimizer` move with their blocks, and training continues as if nothing had
        moved. Parameters that `parameters()` returned before may have left this rank: do not keep them.

        >>> from torch import nn
        >>> import drumline as dl
        >>> blocks = [nn.Linear(1, 1) for _ in range(4)]
        >>> pipe = dl.Pipeline(blocks, loss_fn=nn.functional.mse_loss, num_microbatches=2, num_ranks=2)
        >>> move = pipe.repartition(["3"])
        >>> move.before, move.after, pipe.blocks
        (('2',), ('3',), [['0', '1', '2'], ['3']])
        """
        return self._site.move(cuts, balance=balance)
