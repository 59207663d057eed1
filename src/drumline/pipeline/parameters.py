"""What a pipeline says of its parameters and does with them: optimizers, gradients, and state by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import refuse
from drumline.engine.site import Methods
from drumline.engine.state.keeper import Keeper
from drumline.engine.state.name_patterns import grouped
from drumline.engine.updates.whole_matrices import by_element
from drumline.runtime.gradients import clip


class ParameterMethods(Methods):
    """Parameters of this process, by their names in the unsplit model."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of all ranks so that their global norm is at most `max_norm`; return the norm before."""
        clip.check(max_norm, norm_type)
        self._site.refuse(call="clip_grad_norm_", max_norm=max_norm)
        with self._site.recording.between.during("clip"):
            self._site.settle("settle")
            with self._site.crew.together("clip_grad_norm_"):
                own_norms = self._site.holdings.norms(norm_type)
                answers = self._site.crew.all_told("norms", own_norms)
            total = self._site.engine.assembly.total_norm(answers, norm_type)
            clip.scale(self.parameters(), total, max_norm)
            self._site.recording.note(grad_norm=total)
            return total

    def optimizer(
        self,
        kind: type[torch.optim.Optimizer],
        *,
        names: str | Sequence[str] | None = None,
        groups: Sequence[Mapping[str, Any]] = (),
        validated: str = "before",
        max_norm: float | None = None,
        **settings: Any,
    ) -> torch.optim.Optimizer:
        """Create a torch optimizer over this process's trainable parameters, or their float32 copies.

        With `names`, it updates only parameters that match: names of the whole model, or patterns like `"*.bias"`. Its
        `state_dict` uses parameter names. Merge the states of all ranks to load them with any schedule and cut.

        With `groups`, it has parameter groups with settings of their own: `[{"names": "*.bias", "weight_decay": 0.0}]`.
        A group without names has all parameters that no other group has.

        With a schedule without a flush, it steps inside of `step`, and `max_norm` clips all gradients of every update
        together; with others, call `clip_grad_norm_`.

        With `validated="after"`, its step does not wait for other ranks. All ranks agree in the next step whether the
        norm of all gradients was at most `max_norm` and all were finite. If not, they take the update back and make it
        with clipped gradients, or leave it out: `pipe.verdict` says what was decided.
        """
        whole = kind.__name__ if isinstance(kind, type) and not by_element(kind) else ""
        self._site.refuse(optimizer=whole, validated=validated, max_norm=max_norm)
        self._site.flow.clips(validated, max_norm)
        refuse((bool(groups) and names is not None, "names and groups are both given", "one of the two", "name groups"))
        trained = [(name, param) for name, param in self.named_parameters() if param.requires_grad]
        listed: list[tuple[list[nn.Parameter], dict[str, Any]]] = [([param for _, param in trained], {})]
        if groups or names is not None:
            chosen = grouped(groups or [{"names": names}], self.parameter_shapes(), others=self.parameter_aliases())
            listed = [([param for name, param in trained if name in each], group) for each, group in chosen]
        return self._site.updates.optimizer(kind, listed, settings, self.named_master_weights)

    def parameter_shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the whole model's trainable parameters by name, those of other ranks too.

        >>> import drumline as dl
        >>> pipe = dl.Pipeline([nn.Linear(4, 2)], loss_fn=nn.functional.mse_loss, num_microbatches=1)
        >>> pipe.parameter_shapes()
        {'0.weight': torch.Size([2, 4]), '0.bias': torch.Size([2])}
        """
        return dict(self._site.engine.assembly.trained)

    def parameter_aliases(self) -> dict[str, tuple[str, ...]]:
        """Return all names of each tied tensor of the whole model, by the first of them."""
        return {
            tensor.name: tensor.names for tensor in self._site.engine.assembly.ties.tensors if len(tensor.names) > 1
        }

    def named_master_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that optimizers update: float32 copies with `master_weights`, else the parameters."""
        return self._site.updates.named(self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this process's parameters by their names in the unsplit model; a tied one once, by its first name."""
        return iter(self._site.holdings.named_parameters())

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield this process's parameters."""
        return iter(self._site.holdings.parameters())

    def zero_grad(self) -> None:
        """Clear this process's gradients."""
        for param in self.parameters():
            param.grad = None
        self._site.updates.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return this process's parameters and persistent buffers by their names in the unsplit model.

        Together, all processes return what the unsplit model's `state_dict` has. One rank returns a tied tensor, under
        all of its names. In a mesh each line returns all of it; tensors of which lines hold parts come whole, so that
        all ranks must call this. With a schedule without a flush, call `drain` first.
        """
        self._site.flow.need_drained("state_dict")
        self._settle_update()
        return self._site.holdings.whole_state_dict()

    def load_state_dict(self, mapping: Mapping[str, Any]) -> None:
        """Load parameters and buffers by their names in the unsplit model; call it on every rank.

        Names of other stages are ignored. A tied tensor may have any of its names, and reaches all ranks that hold it.
        """
        self._site.flow.need_drained("load_state_dict")
        self._settle_update()
        self._site.holdings.load_state_dict(mapping)
        for observer in self._site.observers.each:
            if isinstance(observer, Keeper):
                observer.loaded(mapping, {})

    def _settle_update(self) -> None:
        """Wait for the verdict on an update that was made ahead of it."""
        if self._site.updates.validation.is_on:
            self._site.settle("settle")
