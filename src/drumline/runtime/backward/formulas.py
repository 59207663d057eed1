"""Modules that own parameters and have formulas for their weight gradients: Linear, LayerNorm and Embedding.

While recording, an owner computes with stand-ins, which share the parameters' memory but are unknown to autograd. From
the owner's input and the gradient at its place in the graph, W computes the weight gradients by a product or a kernel.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.nn import functional

from drumline.model.precision import LOW
from drumline.model.transforms import transformed
from drumline.runtime.backward.facts import widens_norms
from drumline.runtime.backward.guards import begun
from drumline.runtime.backward.tape import Gradients, Owner, OwnerCall, Tape, changed_in_place


class ModuleOwner(Owner):
    """A module that owns trainable parameters, and how to compute its weight gradients.

    It records on `tape`, which holds the records of the current microbatch.
    """

    def __init__(self, module: nn.Module, tape: Tape) -> None:
        self.module = module
        self.tape = tape

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Replace the module's own forward, and leave a record."""

    @property
    @abstractmethod
    def begins(self) -> Sequence[Tensor | None]:
        """The tensors with which the graph begins instead of the owner's parameters."""

    def refresh(self) -> None:
        """Follow the parameters if their memory was replaced since the last step."""


class WithFormula(ModuleOwner):
    """An owner with a weight and perhaps a bias, whose stand-ins share the parameters' memory."""

    def __init__(self, module: nn.Module, tape: Tape) -> None:
        super().__init__(module, tape)
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.to_weight: nn.Parameter | None = None  # receives the gradient; None if frozen
        self.to_bias: nn.Parameter | None = None
        self.refresh()

    def refresh(self) -> None:
        """Follow the parameters if their memory was replaced since the last step."""
        own_parameters = self.module._parameters
        self.parameters_seen = (own_parameters.get("weight"), own_parameters.get("bias"))
        self.weight, self.to_weight = _stand_in(self.weight, self.parameters_seen[0])
        self.bias, self.to_bias = _stand_in(self.bias, self.parameters_seen[1])

    @property
    def begins(self) -> Sequence[Tensor | None]:
        """The stand-ins."""
        return self.weight, self.bias

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - callers may name it
        """Compute with the stand-ins; run plainly without gradients, with replaced parameters, or in a transform."""
        own_parameters = self.module._parameters
        same = (
            own_parameters.get("weight") is self.parameters_seen[0]
            and own_parameters.get("bias") is self.parameters_seen[1]
        )
        if not same or not torch.is_grad_enabled() or transformed():
            output: Tensor = type(self.module).forward(self.module, input)
            return output
        output, kept_tensors = self.computed(input)
        self.tape.records.append(OwnerCall(self, kept_tensors, (place_of(output),), kept_tensors[0]._version))
        return output

    @abstractmethod
    def computed(self, taken: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the stand-ins' output for an input, and what W needs: first the input as it was used."""

    def _input(self, record: OwnerCall) -> Tensor:
        taken: Tensor = record.inputs[0]
        if taken._version != record.version:
            raise changed_in_place(f"the input of {type(self.module).__name__}", "and its weight gradient needs it")
        return taken


def _stand_in(now: Tensor | None, parameter: nn.Parameter | None) -> tuple[Tensor | None, nn.Parameter | None]:
    """Return a tensor with a parameter's memory, reusing `now` if possible, and the parameter if it trains."""
    if parameter is None:
        return None, None
    if now is None or now.data_ptr() != parameter.data_ptr() or now.shape != parameter.shape:
        # A frozen one requires grad too, so that its layer's output has a place in the graph.
        now = begun(parameter.detach()).requires_grad_()
    return now, parameter if parameter.requires_grad else None


class LinearOwner(WithFormula):
    """y = x w^T + b, so that w's gradient is g^T x and b's the sum of g."""

    def computed(self, taken: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the product, and its input."""
        taken = _as_autocast(taken)
        return functional.linear(taken, cast(Tensor, self.weight), self.bias), (taken,)

    def gradients(self, record: OwnerCall) -> Gradients:
        """Return the product of gradient and input, and the gradient's sum."""
        taken, gradient = self._input(record), cast(Tensor, record.gradients[0])
        rows = gradient if gradient.dim() == 2 else gradient.reshape(-1, gradient.shape[-1])
        gradients: Gradients = []
        if self.to_weight is not None:
            inputs = taken if taken.dim() == 2 else taken.reshape(-1, taken.shape[-1])
            gradients.append((self.to_weight, torch.mm(rows.t(), inputs)))
        if self.to_bias is not None:
            # Autograd sums over what the product saw: rows, or the original dimensions if the memory is scattered.
            scattered = gradient.dim() > 2 and not taken.is_contiguous()
            summed = gradient.sum(tuple(range(gradient.dim() - 1))) if scattered else rows.sum(0)
            gradients.append((self.to_bias, summed))
        return gradients

    def joined(self, records: Sequence[OwnerCall]) -> Sequence[OwnerCall]:
        """Return one record with all rows."""
        inputs = [self._input(record).detach() for record in records]
        gradients = [cast(Tensor, record.gradients[0]) for record in records]
        call = OwnerCall(self, (torch.cat([taken.reshape(-1, taken.shape[-1]) for taken in inputs]),), ())
        call.gradients = (torch.cat([gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]),)
        return [call]


class LayerNormOwner(WithFormula):
    """Normalises over the last dimensions; keeps mean and deviation for W."""

    def computed(self, taken: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the normalised values, and the kernel's inputs and statistics."""
        module = cast(nn.LayerNorm, self.module)
        if widens_norms(taken.device) and taken.dtype in LOW:
            taken = taken.float()  # as autocast would, to keep exactly what the kernel takes
        output, *tensors = torch.native_layer_norm(taken, module.normalized_shape, self.weight, self.bias, module.eps)
        return output, (taken, *tensors)

    def gradients(self, record: OwnerCall) -> Gradients:
        """Return the gradients that torch's own kernel computes."""
        taken, (_, mean, deviation) = self._input(record), record.inputs
        arguments = (record.gradients[0], taken, cast(nn.LayerNorm, self.module).normalized_shape, mean, deviation)
        weights = (_like(taken, self.weight), _like(taken, self.bias))
        wanted = [False, self.to_weight is not None, self.to_bias is not None]
        _, weight, bias = torch.ops.aten.native_layer_norm_backward(*arguments, *weights, wanted)
        pairs = ((self.to_weight, weight), (self.to_bias, bias))
        return [(parameter, gradient) for parameter, gradient in pairs if parameter is not None]


def _like(taken: Tensor, weight: Tensor | None) -> Tensor | None:
    """Return a weight in the dtype that the kernel took: autocast converts the input and the weight to float32."""
    return weight.float() if weight is not None and weight.dtype in LOW and taken.dtype is torch.float32 else weight


class EmbeddingOwner(WithFormula):
    """Looks up rows of its weight; the gradient of a row is the sum of the gradients where it was used."""

    def computed(self, taken: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the rows of the stand-in, and their indices."""
        module, weight = cast(nn.Embedding, self.module), cast(Tensor, self.weight)
        settings = (module.padding_idx, None, module.norm_type, module.scale_grad_by_freq)
        return functional.embedding(taken, weight, *settings), (taken,)

    def gradients(self, record: OwnerCall) -> Gradients:
        """Return the sum of gradients for each row."""
        module = cast(nn.Embedding, self.module)
        padding = -1 if module.padding_idx is None else module.padding_idx
        arguments = (record.gradients[0], self._input(record), module.num_embeddings, padding)
        gradient = torch.ops.aten.embedding_dense_backward(*arguments, module.scale_grad_by_freq)
        return [] if self.to_weight is None else [(self.to_weight, gradient)]


def _as_autocast(tensor: Tensor) -> Tensor:
    """Return a product's input as autocast would cast it."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype not in (torch.float32, *LOW):
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


def place_of(tensor: Tensor) -> GradientEdge:
    """Return the place in the graph where a tensor was created, unaffected by later in-place changes.

    An in-place change of a view replaces the view's own node, but never that of its base.
    """
    base = tensor if tensor._base is None else tensor._base
    return GradientEdge(cast(Node, base.grad_fn), base.output_nr)
