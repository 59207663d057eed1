"""`slices` of a pipeline."""

from __future__ import annotations

from drumline.engine.site import Methods


class SliceMethods(Methods):
    """In how many slices a pipeline runs sequences."""

    @property
    def slices(self) -> int:
        """The number of slices of every sequence; 1 if they are not divided.

        >>> import drumline as dl
        >>> from torch import nn
        >>> dl.Pipeline([nn.Linear(1, 1)], loss_fn=nn.functional.mse_loss, num_microbatches=1).slices
        1
        """
        return self._site.frozen.program.num_slices
