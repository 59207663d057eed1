"""Modules that own parameters and know their own formulas for weight gradients: Linear, LayerNorm and Embedding.

While it records, an owner computes with stand-ins, which share the parameters' memory and are none to autograd. From
what it took and the gradient at its place in the graph, W makes the weight gradients by a product or a kernel.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.nn import functional

from drumline.runtime.backward.guards import begun, transformed
from drumline.runtime.backward.tape import Gradients, Owner, OwnerCall, Tape, changed_in_place
from drumline.runtime.precision import LOW


class ModuleOwner(Owner):
    """A module that owns trainable parameters, and how its weight gradients are made.

    It records on `tape`, which has the records of the microbatch that runs.
    """

    def __init__(self, module: nn.Module, tape: Tape) -> None:
        self.module = module
        self.tape = tape

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Stand in for the module's own forward, and leave a record."""

    @property
    @abstractmethod
    def begins(self) -> Sequence[Tensor | None]:
        """What the graph around the owner begins with in place of its parameters."""

    def refresh(self) -> None:
        """Follow the parameters if their memory was exchanged since the last step."""


class WithFormula(ModuleOwner):
    """An owner with a weight and perhaps a bias, whose stand-ins share the parameters' memory."""

    def __init__(self, module: nn.Module, tape: Tape) -> None:
        super().__init__(module, tape)
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.to_weight: nn.Parameter | None = None  # where the gradients go; None for what is frozen
        self.to_bias: nn.Parameter | None = None
        self.refresh()

    def refresh(self) -> None:
        """Follow the parameters if their memory was exchanged since the last step."""
        own = self.module._parameters
        self.seen = (own.get("weight"), own.get("bias"))
        self.weight, self.to_weight = _stand_in(self.weight, self.seen[0])
        self.bias, self.to_bias = _stand_in(self.bias, self.seen[1])

    @property
    def begins(self) -> Sequence[Tensor | None]:
        """The stand-ins."""
        return self.weight, self.bias

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - callers may name it
        """Compute with the stand-ins; as it is without gradients, with others' parameters, or transformed."""
        own = self.module._parameters
        same = own.get("weight") is self.seen[0] and own.get("bias") is self.seen[1]
        if not same or not torch.is_grad_enabled() or transformed():
            made: Tensor = type(self.module).forward(self.module, input)
            return made
        made, kept = self.computed(input)
        self.tape.records.append(OwnerCall(self, kept, (place_of(made),), kept[0]._version))
        return made

    @abstractmethod
    def computed(self, taken: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return what the stand-ins make of an input, and what W needs: first the input as it was used."""

    def _input(self, record: OwnerCall) -> Tensor:
        taken: Tensor = record.inputs[0]
        if taken._version != record.version:
            raise changed_in_place(f"the input of {type(self.module).__name__}", "and its weight gradient needs it")
        return taken


def _stand_in(now: Tensor | None, parameter: nn.Parameter | None) -> tuple[Tensor | None, nn.Parameter | None]:
    """Return a tensor with a parameter's memory, the one there is if it still has, and the parameter if it trains."""
    if parameter is None:
        return None, None
    if now is None or now.data_ptr() != parameter.data_ptr() or now.shape != parameter.shape:
        # One that is frozen wants a gradient all the same, for its layer's output to have a place in the graph.
        now = begun(parameter.detach()).requires_grad_()
    return now, parameter if parameter.requires_grad else None


class LinearOwner(WithFormula):
    """y = x w^T + b, so that w's gradient is g^T x and b's the sum of g."""

    def computed(self, taken: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the product, and what it took."""
        taken = _as_autocast(taken)
        return functional.linear(taken, cast(Tensor, self.weight), self.bias), (taken,)

    def gradients(self, record: OwnerCall) -> Gradients:
        """Return the product of gradient and input, and the gradient's sum."""
        taken, gradient = self._input(record), cast(Tensor, record.gradients[0])
        rows = gradient if gradient.dim() == 2 else gradient.reshape(-1, gradient.shape[-1])
        found: Gradients = []
        if self.to_weight is not None:
            inputs = taken if taken.dim() == 2 else taken.reshape(-1, taken.shape[-1])
            found.append((self.to_weight, torch.mm(rows.t(), inputs)))
        if self.to_bias is not None:
            # Autograd sums over what the product saw: rows, or for scattered memory the dimensions themselves.
            scattered = gradient.dim() > 2 and not taken.is_contiguous()
            summed = gradient.sum(tuple(range(gradient.dim() - 1))) if scattered else rows.sum(0)
            found.append((self.to_bias, summed))
        return found

    def joined(self, records: Sequence[OwnerCall]) -> Sequence[OwnerCall]:
        """Return one record with all rows."""
        inputs = [self._input(record).detach() for record in records]
        gradients = [cast(Tensor, record.gradients[0]) for record in records]
        one = OwnerCall(self, (torch.cat([taken.reshape(-1, taken.shape[-1]) for taken in inputs]),), ())
        one.gradients = (torch.cat([gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]),)
        return [one]


class LayerNormOwner(WithFormula):
    """Normalises over the last dimensions; keeps mean and deviation for W."""

    def computed(self, taken: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return what is normalised, and what the kernel took and found."""
        module = cast(nn.LayerNorm, self.module)
        if taken.device.type == "cuda" and torch.is_autocast_enabled("cuda") and taken.dtype in LOW:
            taken = taken.float()  # as autocast would, so that what is kept is what the kernel takes
        made, *kept = torch.native_layer_norm(taken, module.normalized_shape, self.weight, self.bias, module.eps)
        return made, (taken, *kept)

    def gradients(self, record: OwnerCall) -> Gradients:
        """Return what torch's own kernel makes of them."""
        taken, (_, mean, deviation) = self._input(record), record.inputs
        given = (record.gradients[0], taken, cast(nn.LayerNorm, self.module).normalized_shape, mean, deviation)
        weights = (_like(taken, self.weight), _like(taken, self.bias))
        wanted = [False, self.to_weight is not None, self.to_bias is not None]
        _, weight, bias = torch.ops.aten.native_layer_norm_backward(*given, *weights, wanted)
        pairs = ((self.to_weight, weight), (self.to_bias, bias))
        return [(parameter, made) for parameter, made in pairs if parameter is not None]


def _like(taken: Tensor, weight: Tensor | None) -> Tensor | None:
    """Return a weight as the kernel took it: autocast gives it an input in full precision, and the weight too."""
    return weight.float() if weight is not None and weight.dtype in LOW and taken.dtype is torch.float32 else weight


class EmbeddingOwner(WithFormula):
    """Looks rows of its weight up; the gradient of a row is the sum of the gradients where it was used."""

    def computed(self, taken: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the rows of the stand-in, and which they are."""
        module, weight = cast(nn.Embedding, self.module), cast(Tensor, self.weight)
        settings = (module.padding_idx, None, module.norm_type, module.scale_grad_by_freq)
        return functional.embedding(taken, weight, *settings), (taken,)

    def gradients(self, record: OwnerCall) -> Gradients:
        """Return the sums per row."""
        module = cast(nn.Embedding, self.module)
        padding = -1 if module.padding_idx is None else module.padding_idx
        given = (record.gradients[0], self._input(record), module.num_embeddings, padding)
        made = torch.ops.aten.embedding_dense_backward(*given, module.scale_grad_by_freq)
        return [] if self.to_weight is None else [(self.to_weight, made)]


def _as_autocast(tensor: Tensor) -> Tensor:
    """Return what autocast would make of a product's input."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype not in (torch.float32, *LOW):
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


def place_of(made: Tensor) -> GradientEdge:
    """Return where in the graph a tensor was made, whatever happens to it in place afterwards.

    A change of a view in place goes around the view's own node, but never around that of the tensor it views.
    """
    base = made if made._base is None else made._base
    return GradientEdge(cast(Node, base.grad_fn), base.output_nr)
