"""Batches whose microbatches run in an order that is chosen for their sizes."""

from __future__ import annotations

from collections.abc import Callable

from drumline.engine.stages.intake import Intake
from drumline.engine.stages.sizes import Size
from drumline.runtime.step import Step


class OrderedIntake(Intake):
    """Splits batches as ever, then puts their microbatches in the order that `order_of` finds best for their sizes."""

    order_of: Callable[[tuple[Size, ...]], tuple[int, ...]]

    def cut(self, step: Step) -> None:
        """Choose the order, on ranks that have microbatches; a wrong number of these is refused where they are cut."""
        holds = step.batch is not None or step.target is not None
        if step.is_split and step.train and holds and len(step.sizes) == self.num_microbatches:
            step.order = self.order_of(tuple(step.sizes))
        super().cut(step)
