"""What the ranks of this process hold of the model, each tensor once: named, kept equal, stored and given back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from drumline.pipeline.crew import Crew
from drumline.pipeline.observer import Observer
from drumline.pipeline.state import named as state
from drumline.runtime.executor import Executor, Step
from drumline.runtime.gradients import clip
from drumline.runtime.gradients.exchange import share
from drumline.runtime.weights.copies import Copies
from drumline.runtime.weights.tied import Ties

Named = list[tuple[str, nn.Parameter]]


class Holdings(Observer):
    """The tensors of this process's ranks; `copies` are those of ranks that take turns here."""

    def __init__(self, ties: Ties, crew: Crew, executors: Sequence[Executor], copies: Sequence[Copies]) -> None:
        self.ties = ties
        self.crew = crew
        self.executors = executors
        self.copies = copies
        self._named: Named | None = None
        self._earlier: list[tuple[nn.Parameter, Tensor | None]] = []  # gradients of steps before the one that runs

    def share(self) -> None:
        """Give all copies of whatever several ranks hold the values that its home has."""
        self.follow()
        if not self.crew.alone and any(one.is_copied for one in self.ties.tensors):
            self.crew.drive([share(executor.exchange) for executor in self.executors])

    def follow(self) -> None:
        """Let copies in this process be what they are copies of."""
        for copies in self.copies:
            copies.follow()

    def renew(self) -> None:
        """Look anew: parameters were exchanged."""
        self._named = None

    def named_parameters(self) -> Named:
        """Return the parameters that are the user's; copies in one process are not, since they follow others."""
        if self._named is None:
            each = [self._on(executor, at_home=self.crew.alone) for executor in self.executors]
            self._named = [pair for named in each for pair in named]
        return self._named

    def parameters(self) -> list[nn.Parameter]:
        """Return the same without their names."""
        return [one for _, one in self.named_parameters()]

    def has_gradients(self) -> bool:
        """Return whether any of them has a gradient."""
        return any(one.grad is not None for _, one in self.named_parameters())

    def norms(self, norm_type: float) -> list[dict[str, float]]:
        """Return, rank by rank, the gradient norms of the parameters whose home it is."""
        found = []
        for named in (self._on(executor, at_home=True) for executor in self.executors):
            norms = clip.norms_of([one for _, one in named], norm_type)
            found.append({name: norm for (name, _), norm in zip(named, norms, strict=True) if norm is not None})
        return found

    def named_on(self, executor: Executor) -> Named:
        """Return all parameters of one rank by name, copies included."""
        return self._on(executor, at_home=False)

    def _on(self, executor: Executor, *, at_home: bool) -> Named:
        return state.parameters_on(self.ties, executor.rank, executor.stages, at_home=at_home)

    # ---- gradients of earlier steps ----------------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """Take earlier steps' gradients away from what several ranks hold: only this step's are exchanged."""
        exchanged = [one for executor in self.executors for one in executor.exchange.parameters]
        kept = set(self.parameters()) if exchanged else set()
        self._earlier = [(one, one.grad) for one in exchanged if one in kept]
        for one in exchanged:
            one.grad = None

    def end(self, step: Step) -> None:
        """Add this step's gradients to the earlier ones."""
        for parameter, earlier in self._earlier:
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        self._earlier = []

    # ---- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what this process stores."""
        each = [state.state_on(self.ties, one.rank, one.stages) for one in self.executors]
        return {name: value for found in each for name, value in found.items()}

    def load_state_dict(self, given: Mapping[str, Any]) -> None:
        """Take a state in on all ranks, or raise alike on all of them before anything has changed."""
        problems = [state.problem_with(given, self.ties, one.rank, one.stages) for one in self.executors]
        for problem in self.crew.all_told("state", problems):
            if problem is not None:
                raise problem
        with self.crew.together("load_state_dict"):
            for executor in self.executors:
                state.load_on(given, self.ties, executor.stages)
            self.share()
