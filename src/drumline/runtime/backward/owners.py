"""Modules that own parameters, and how to compute their weight gradients separately from the rest of the backward.

Linear, LayerNorm and Embedding have their own formulas. Any other module that has parameters with two or more
dimensions, and no children with parameters, keeps a small separate graph, and W runs that graph. Three cases remain:
parameters of a module with such children, vectors (the scale of a norm), and any use of a parameter outside its owner.
I sees these as ordinary gradients and keeps them, and W adds them: never lost, only early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drumline.model.transforms import transformed
from drumline.model.values import pack, unpack
from drumline.runtime.backward.facts import knows_autocast
from drumline.runtime.backward.formulas import (
    EmbeddingOwner,
    LayerNormOwner,
    LinearOwner,
    ModuleOwner,
    WithFormula,
    place_of,
)
from drumline.runtime.backward.guards import begin_again, begun, leaves_of
from drumline.runtime.backward.tape import Gradients, OwnerCall, Tape


class GeneralOwner(ModuleOwner):
    """Any other module: its forward runs on a separate graph, through which first I and then W go."""

    by_autograd = True

    def __init__(self, module: nn.Module, tape: Tape) -> None:
        super().__init__(module, tape)
        self.parameters = [param for param in module.parameters() if param.requires_grad]
        self.plain = module.forward
        self.looked_at = False  # whether it was checked that its graph has only its own parameters
        self.spark = begun(torch.zeros((), requires_grad=True))  # requires grad, or there would be no graph

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward on a separate graph."""
        if not torch.is_grad_enabled() or transformed():
            return self.plain(*args, **kwargs)
        tensors, form = pack((args, kwargs))

        def run(leaves: Sequence[Tensor]) -> Any:
            values, named = unpack(leaves, form)
            return self.plain(*values, **named)

        graph: list[Any] = []  # the outputs of the separate graph
        outputs = _OwnGraph.apply(graph, run, self.spark, *tensors)  # type: ignore[no-untyped-call]
        leaves, ends, output_form = graph
        reached = [index for index, end in enumerate(ends) if end.requires_grad]
        if not self.looked_at:
            known = {id(param) for param in (*self.parameters, *leaves)}
            if any(id(leaf) not in known for leaf in leaves_of([place_of(ends[index]) for index in reached])):
                begin_again()  # it uses a tensor besides its arguments, whose gradient would be lost here
            self.looked_at = True
        places = tuple(place_of(outputs[index]) for index in reached)
        self.tape.records.append(OwnerCall(self, [ends[index] for index in reached], places))
        return unpack(outputs, output_form)

    @property
    def begins(self) -> Sequence[Tensor | None]:
        """The tensor because of which it has a graph."""
        return (self.spark,)

    def gradients(self, record: OwnerCall) -> Gradients:
        """Return the gradients that autograd finds in the kept graph."""
        pairs = [pair for pair in zip(record.inputs, record.gradients, strict=True) if pair[1] is not None]
        gradients = torch.autograd.grad(
            [end for end, _ in pairs], self.parameters, [gradient for _, gradient in pairs], allow_unused=True
        )
        # One tensor may be the gradient of several parameters: each needs its own copy.
        return [
            (param, grad.clone()) for param, grad in zip(self.parameters, gradients, strict=True) if grad is not None
        ]


class _OwnGraph(torch.autograd.Function):
    """Runs a module on a separate graph; its backward computes only input gradients, and keeps the graph for W."""

    @staticmethod
    def forward(ctx: Any, graph: list[Any], run: Callable[..., Any], spark: Tensor, *tensors: Tensor) -> Any:
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        with torch.enable_grad():
            ends, form = pack(run(leaves))
        ctx.leaves, ctx.ends = leaves, ends
        graph += [leaves, ends, form]
        outputs = tuple(end.detach() for end in ends)
        ctx.mark_non_differentiable(
            *(tensor for tensor, end in zip(outputs, ends, strict=True) if not end.requires_grad)
        )
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        wanted = ctx.needs_input_grad[3:]
        pairs = [pair for pair in zip(ctx.ends, gradients, strict=True) if pair[1] is not None]
        asked = [leaf for leaf, want in zip(ctx.leaves, wanted, strict=True) if want]
        tensors: Iterator[Tensor | None] = iter(())
        if asked and pairs:
            ends, given_tensors = [end for end, _ in pairs], [gradient for _, gradient in pairs]
            tensors = iter(torch.autograd.grad(ends, asked, given_tensors, retain_graph=True, allow_unused=True))
        return None, None, None, *(next(tensors, None) if want else None for want in wanted)


_FORMULAS: dict[type[nn.Module], type[WithFormula]] = {
    nn.Linear: LinearOwner,
    nn.LayerNorm: LayerNormOwner,
    nn.Embedding: EmbeddingOwner,
}
# Modules that use their children's parameters without calling the children.
_WHOLE = (nn.MultiheadAttention,)


def owners_in(module: nn.Module, tape: Tape) -> Iterator[ModuleOwner]:
    """Yield the owners in a module's tree.

    >>> [type(owner).__name__ for owner in owners_in(nn.Sequential(nn.Linear(2, 2), nn.Conv1d(2, 2, 1)), Tape())]
    ['LinearOwner', 'GeneralOwner']

    Modules that own only vectors, as norms do, are not owners: their gradients are sums, which cost less than keeping a
    graph for them.
    """
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return
    if formula := _formula(module):
        yield formula(module, tape)
    elif isinstance(module, _WHOLE) or not any(True for child in module.children() for _ in child.parameters()):
        if any(parameter.dim() > 1 for parameter in module.parameters() if parameter.requires_grad):
            yield GeneralOwner(module, tape)
    else:
        for child in dict.fromkeys(module.children()):
            yield from owners_in(child, tape)


def _formula(module: nn.Module) -> type[WithFormula] | None:
    if type(module) not in _FORMULAS or "forward" in vars(module):
        return None
    if module._parameters.get("weight") is None or any(param.is_complex() for param in module.parameters()):
        return None
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
        return None
    if isinstance(module, nn.LayerNorm) and not module.elementwise_affine:
        return None
    return _FORMULAS[type(module)]


class Splitter:
    """All owners of some modules; while it records, their forwards replace the modules' own."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.tape = Tape()
        owners = {id(owner.module): owner for module in modules for owner in owners_in(module, self.tape)}
        self.owners = list(owners.values())
        self._device = next((param.device.type for module in modules for param in module.parameters()), "cpu")
        # A module's namespace, the replacement there, and what it replaces: for most modules nothing.
        self._places = [(vars(owner.module), owner.forward, vars(owner.module).get("forward")) for owner in self.owners]

    def refresh(self) -> None:
        """Follow the parameters if their memory was replaced since the last step."""
        for owner in self.owners:
            owner.refresh()

    @property
    def begins(self) -> list[Tensor]:
        """The tensors with which the graph of a recorded forward begins instead of parameters."""
        return [tensor for owner in self.owners for tensor in owner.begins if tensor is not None]

    def start(self, tape: Tape) -> None:
        """Let the owners record on `tape` until `stop`."""
        self.tape.records = tape.records
        # We know how autocast treats layer norms on these devices; elsewhere their gradients come early.
        unknown = not knows_autocast(self._device) and torch.is_autocast_enabled(self._device)
        for owner, (namespace, forward, _) in zip(self.owners, self._places, strict=True):
            if not (unknown and isinstance(owner, LayerNormOwner)):
                namespace["forward"] = forward

    def stop(self) -> None:
        """Restore the modules' own forwards."""
        for namespace, _, own_call in self._places:
            if own_call is not None:
                namespace["forward"] = own_call
            else:
                namespace.pop("forward", None)
