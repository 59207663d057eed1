"""`search` of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from drumline.engine.site import Methods
from drumline.features.lengths.arrange import Arranging, SearchedSizes


class LengthMethods(Methods):
    """Programs for microbatches of unequal sizes."""

    def search(self, sizes: Iterable[Any], *, seconds: float = 2.0, num_steps: int = 1000) -> SearchedSizes:
        """Search a program for steps whose microbatches have these sizes: lengths, or (rows, length) for each.

        Costs are fitted to the steps with `Microbatches` so far. Rank 0 searches for so many seconds, in the memory of
        the pipeline's own program, and all ranks call this alike. `program` of what is returned is None unless it saves
        more in so many steps than the search took; pass it to `step`.

        >>> from torch import nn
        >>> import drumline as dl
        >>> pipe = dl.Pipeline([nn.Linear(1, 1), nn.Linear(1, 1)], num_microbatches=4, num_ranks=2)
        >>> pipe.search([100, 30, 50, 20], seconds=0.1).arranged.name
        'longest in the middle'
        """
        self._site.settle("search")
        arranging = next(observer for observer in self._site.observers.each if isinstance(observer, Arranging))
        return arranging.search(list(sizes), seconds=seconds, num_steps=num_steps)
