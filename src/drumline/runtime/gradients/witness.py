"""What one microbatch of a step did on one rank: its part of each gradient, and the output that the loss took."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from drumline.runtime.stage import Stage
from drumline.runtime.values import mapped


class Witness:
    """Watches a rank's stages at one microbatch; the step goes on as ever."""

    def __init__(self, microbatch: int) -> None:
        self.microbatch = microbatch
        self.gradients: dict[nn.Parameter, Tensor] = {}
        self.output: Any = None

    def adding(self, stage: Stage, run: Callable[..., Any], *given: Any) -> Any:
        """Run what adds to a stage's gradients, and note what was added."""
        before = {one: None if one.grad is None else one.grad.detach().clone() for one in stage.parameters}
        made = run(*given)
        for one, earlier in before.items():
            if one.grad is not None:
                added = one.grad.detach().clone() if earlier is None else one.grad.detach() - earlier
                on_host = added.cpu()  # where there is room for it until the step has ended
                self.gradients[one] = self.gradients[one] + on_host if one in self.gradients else on_host
        return made

    def listening(self, stage: Stage, run: Callable[..., Any], *given: Any) -> Any:
        """Run a stage's forward, and note what its loss is computed of."""
        loss = stage.loss
        if loss is None:
            return run(*given)

        def noted(output: Any, target: Any) -> Tensor | None:
            self.output = mapped(output, lambda one: one.detach().to("cpu", copy=True))
            return loss(output, target)

        stage.loss = noted
        try:
            return run(*given)
        finally:
            stage.loss = loss
