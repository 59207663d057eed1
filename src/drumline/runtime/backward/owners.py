"""Modules that own parameters, and how their weight gradients are made apart from the rest of the backward.

Linear, LayerNorm and Embedding know their own formulas. Any other module that has parameters with two or more
dimensions and no children with parameters keeps a small graph of its own, cut off from the rest, and W runs that. What
belongs to a module with such children, what is only a vector (the scale of a norm), and any use of a parameter outside
of its owner, is seen by I as an ordinary gradient, is kept, and is added by W: never lost, only early.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.nn import functional

from drumline.runtime.backward.beginnings import begun, leaves_of
from drumline.runtime.backward.inner_gradients import begin_again, transformed
from drumline.runtime.backward.tape import Gradients, Record, Tape
from drumline.runtime.precision import LOW
from drumline.runtime.values import pack, unpack


class Reel:
    """Where owners record at the moment: the records of the tape that runs."""

    __slots__ = ("records",)

    def __init__(self) -> None:
        self.records: list[Record] = []


class ModuleOwner(ABC):
    """A module that owns trainable parameters, and how its weight gradients are made."""

    by_autograd = False  # whether autograd makes the gradients, and runs the parameters' hooks

    def __init__(self, module: nn.Module, reel: Reel) -> None:
        self.module = module
        self.reel = reel

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Stand in for the module's own forward, and leave a record."""

    @abstractmethod
    def gradients(self, record: Record) -> Gradients:
        """Return the weight gradients of one call."""

    def joined(self, records: Sequence[Record]) -> Sequence[Record]:
        """Return fewer records in place of several microbatches', where that makes one larger product."""
        return records

    @property
    @abstractmethod
    def begins(self) -> Sequence[Tensor | None]:
        """What the graph around the owner begins with in place of its parameters."""

    def refresh(self) -> None:  # noqa: B027 - most have nothing to do
        """Follow the parameters if their memory was exchanged since the last step."""


class _WithFormula(ModuleOwner):
    """An owner with a weight and perhaps a bias, whose stand-ins share the parameters' memory."""

    def __init__(self, module: nn.Module, reel: Reel) -> None:
        super().__init__(module, reel)
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

    def _as_it_is(self) -> bool:
        """Whether the module must run as it is: without gradients, with others' parameters, or transformed."""
        own = self.module._parameters
        same = own.get("weight") is self.seen[0] and own.get("bias") is self.seen[1]
        return not same or not torch.is_grad_enabled() or transformed()

    def _checked(self, record: Record, taken: Tensor) -> Tensor:
        if taken._version != record.version:
            raise RuntimeError(
                f"the input of {type(self.module).__name__} was changed in place after it was used, "
                "and its weight gradient needs it"
            )
        return taken


def _stand_in(now: Tensor | None, parameter: nn.Parameter | None) -> tuple[Tensor | None, nn.Parameter | None]:
    """Return a tensor with a parameter's memory, the one there is if it still has, and the parameter if it trains."""
    if parameter is None:
        return None, None
    if now is None or now.data_ptr() != parameter.data_ptr() or now.shape != parameter.shape:
        # One that is frozen wants a gradient all the same, for its layer's output to have a place in the graph.
        now = begun(parameter.detach()).requires_grad_()
    return now, parameter if parameter.requires_grad else None


class LinearOwner(_WithFormula):
    """y = x w^T + b, so that w's gradient is g^T x and b's the sum of g."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - callers may name it
        """Compute with the stand-ins."""
        if self._as_it_is():
            return nn.Linear.forward(cast(nn.Linear, self.module), input)
        input = _as_autocast(input)  # noqa: A001 - what the product takes is what is kept
        made = functional.linear(input, cast(Tensor, self.weight), self.bias)
        self.reel.records.append(Record(self, input, (_place(made),), input._version))
        return made

    def gradients(self, record: Record) -> Gradients:
        """Return the product of gradient and input, and the gradient's sum."""
        taken, gradient = self._checked(record, record.inputs), cast(Tensor, record.gradients[0])
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

    def joined(self, records: Sequence[Record]) -> Sequence[Record]:
        """Return one record with all rows."""
        inputs = [self._checked(record, record.inputs).detach() for record in records]
        gradients = [cast(Tensor, record.gradients[0]) for record in records]
        one = Record(self, torch.cat([taken.reshape(-1, taken.shape[-1]) for taken in inputs]), ())
        one.gradients = (torch.cat([gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]),)
        return [one]


class LayerNormOwner(_WithFormula):
    """Normalises over the last dimensions; keeps mean and deviation for W."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Compute with the stand-ins."""
        module = cast(nn.LayerNorm, self.module)
        if self._as_it_is():
            return nn.LayerNorm.forward(module, input)
        if input.device.type == "cuda" and torch.is_autocast_enabled("cuda") and input.dtype in LOW:
            input = input.float()  # noqa: A001 - as autocast would, so that what is kept is what the kernel takes
        made, mean, deviation = torch.native_layer_norm(
            input, module.normalized_shape, self.weight, self.bias, module.eps
        )
        self.reel.records.append(Record(self, (input, mean, deviation), (_place(made),), input._version))
        return made

    def gradients(self, record: Record) -> Gradients:
        """Return what torch's own kernel makes of them."""
        taken, mean, deviation = record.inputs
        _, weight, bias = torch.ops.aten.native_layer_norm_backward(
            record.gradients[0],
            self._checked(record, taken),
            cast(nn.LayerNorm, self.module).normalized_shape,
            mean,
            deviation,
            _like(taken, self.weight),
            _like(taken, self.bias),
            [False, self.to_weight is not None, self.to_bias is not None],
        )
        pairs = ((self.to_weight, weight), (self.to_bias, bias))
        return [(parameter, made) for parameter, made in pairs if parameter is not None]


def _like(taken: Tensor, weight: Tensor | None) -> Tensor | None:
    """Return a weight as the kernel took it: autocast gives it an input in full precision, and the weight too."""
    return weight.float() if weight is not None and weight.dtype in LOW and taken.dtype is torch.float32 else weight


class EmbeddingOwner(_WithFormula):
    """Looks rows of its weight up; the gradient of a row is the sum of the gradients where it was used."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Look up in the stand-in."""
        module = cast(nn.Embedding, self.module)
        if self._as_it_is():
            return nn.Embedding.forward(module, input)
        made = functional.embedding(
            input, cast(Tensor, self.weight), module.padding_idx, None, module.norm_type, module.scale_grad_by_freq
        )
        self.reel.records.append(Record(self, input, (_place(made),), input._version))
        return made

    def gradients(self, record: Record) -> Gradients:
        """Return the sums per row."""
        module = cast(nn.Embedding, self.module)
        padding = -1 if module.padding_idx is None else module.padding_idx
        made = torch.ops.aten.embedding_dense_backward(
            record.gradients[0],
            self._checked(record, record.inputs),
            module.num_embeddings,
            padding,
            module.scale_grad_by_freq,
        )
        return [] if self.to_weight is None else [(self.to_weight, made)]


def _as_autocast(tensor: Tensor) -> Tensor:
    """Return what autocast would make of a product's input."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype not in (torch.float32, *LOW):
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


class GeneralOwner(ModuleOwner):
    """Any other module: its forward runs on a graph of its own, through which I and W go one after the other."""

    by_autograd = True

    def __init__(self, module: nn.Module, reel: Reel) -> None:
        super().__init__(module, reel)
        self.parameters = [one for one in module.parameters() if one.requires_grad]
        self.plain = module.forward
        self.looked_at = False  # whether all parameters in its graph are its own
        self.spark = begun(
            torch.zeros((), requires_grad=True)
        )  # an input that wants a gradient, or there would be no graph

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward on a graph apart."""
        if not torch.is_grad_enabled() or transformed():
            return self.plain(*args, **kwargs)
        tensors, form = pack((args, kwargs))

        def run(leaves: Sequence[Tensor]) -> Any:
            given, named = unpack(leaves, form)
            return self.plain(*given, **named)

        own: list[Any] = []  # what the graph apart ends in
        made = _OwnGraph.apply(own, run, self.spark, *tensors)  # type: ignore[no-untyped-call]
        leaves, ends, output_form = own
        reached = [index for index, end in enumerate(ends) if end.requires_grad]
        if not self.looked_at:
            known = {id(one) for one in (*self.parameters, *leaves)}
            if any(id(one) not in known for one in leaves_of([_place(ends[index]) for index in reached])):
                begin_again()  # it uses a tensor that is not among its arguments, whose gradient would be lost here
            self.looked_at = True
        places = tuple(_place(made[index]) for index in reached)
        self.reel.records.append(Record(self, [ends[index] for index in reached], places))
        return unpack(made, output_form)

    @property
    def begins(self) -> Sequence[Tensor | None]:
        """What makes it have a graph."""
        return (self.spark,)

    def gradients(self, record: Record) -> Gradients:
        """Return what autograd finds in the graph that was kept."""
        pairs = [pair for pair in zip(record.inputs, record.gradients, strict=True) if pair[1] is not None]
        found = torch.autograd.grad(
            [end for end, _ in pairs], self.parameters, [given for _, given in pairs], allow_unused=True
        )
        # One tensor may be the gradient of several parameters: each gets its own.
        return [(one, grad.clone()) for one, grad in zip(self.parameters, found, strict=True) if grad is not None]


class _OwnGraph(torch.autograd.Function):
    """Runs a module on a graph apart; its backward goes through that for the inputs only, and keeps it for W."""

    @staticmethod
    def forward(ctx: Any, own: list[Any], run: Callable[..., Any], spark: Tensor, *tensors: Tensor) -> Any:
        leaves = [one.detach().requires_grad_(one.requires_grad) for one in tensors]
        with torch.enable_grad():
            ends, form = pack(run(leaves))
        ctx.leaves, ctx.ends = leaves, ends
        own += [leaves, ends, form]
        made = tuple(end.detach() for end in ends)
        ctx.mark_non_differentiable(*(one for one, end in zip(made, ends, strict=True) if not end.requires_grad))
        ctx.set_materialize_grads(False)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        wanted = ctx.needs_input_grad[3:]
        pairs = [pair for pair in zip(ctx.ends, gradients, strict=True) if pair[1] is not None]
        asked = [leaf for leaf, want in zip(ctx.leaves, wanted, strict=True) if want]
        found: Iterator[Tensor | None] = iter(())
        if asked and pairs:
            ends, given = [end for end, _ in pairs], [gradient for _, gradient in pairs]
            found = iter(torch.autograd.grad(ends, asked, given, retain_graph=True, allow_unused=True))
        return None, None, None, *(next(found, None) if want else None for want in wanted)


_FORMULAS: dict[type[nn.Module], type[_WithFormula]] = {
    nn.Linear: LinearOwner,
    nn.LayerNorm: LayerNormOwner,
    nn.Embedding: EmbeddingOwner,
}
# Modules that use their children's parameters without calling the children.
_WHOLE = (nn.MultiheadAttention,)


def owners_in(module: nn.Module, reel: Reel) -> Iterator[ModuleOwner]:
    """Yield the owners in a module's tree.

    >>> [type(one).__name__ for one in owners_in(nn.Sequential(nn.Linear(2, 2), nn.Conv1d(2, 2, 1)), Reel())]
    ['LinearOwner', 'GeneralOwner']

    Modules that own vectors only, as norms do, are none: their gradients are sums, which cost less than keeping a graph
    for them would.
    """
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return
    if formula := _formula(module):
        yield formula(module, reel)
    elif isinstance(module, _WHOLE) or not any(True for child in module.children() for _ in child.parameters()):
        if any(parameter.dim() > 1 for parameter in module.parameters() if parameter.requires_grad):
            yield GeneralOwner(module, reel)
    else:
        for child in dict.fromkeys(module.children()):
            yield from owners_in(child, reel)


def _formula(module: nn.Module) -> type[_WithFormula] | None:
    if type(module) not in _FORMULAS or "forward" in vars(module):
        return None
    if module._parameters.get("weight") is None or any(one.is_complex() for one in module.parameters()):
        return None
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
        return None
    if isinstance(module, nn.LayerNorm) and not module.elementwise_affine:
        return None
    return _FORMULAS[type(module)]


def _place(made: Tensor) -> GradientEdge:
    """Return where in the graph a tensor was made, whatever happens to it in place afterwards.

    A change of a view in place goes around the view's own node, but never around that of the tensor it views.
    """
    base = made if made._base is None else made._base
    return GradientEdge(cast(Node, base.grad_fn), base.output_nr)


class Splitter:
    """All owners of some modules; while it records, their forwards stand in for the modules' own."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.reel = Reel()
        owners = {id(owner.module): owner for module in modules for owner in owners_in(module, self.reel)}
        self.owners = list(owners.values())
        self._device = next((one.device.type for module in modules for one in module.parameters()), "cpu")
        # A module's namespace, what stands in there, and what stood there before: for most modules nothing.
        self._places = [(vars(owner.module), owner.forward, vars(owner.module).get("forward")) for owner in self.owners]
        self._without_norms = [
            place
            for place, owner in zip(self._places, self.owners, strict=True)
            if not isinstance(owner, LayerNormOwner)
        ]

    def refresh(self) -> None:
        """Follow the parameters if their memory was exchanged since the last step."""
        for owner in self.owners:
            owner.refresh()

    @property
    def begins(self) -> list[Tensor]:
        """What the graph of a recorded forward begins with in place of parameters."""
        return [one for owner in self.owners for one in owner.begins if one is not None]

    @contextmanager
    def recording(self, tape: Tape) -> Iterator[None]:
        """Let the owners record on `tape` inside; afterwards the modules have their own forwards back."""
        self.reel.records = tape.records
        # What autocast makes of layer norms is known of these devices; elsewhere their gradients come early.
        unknown = self._device not in ("cpu", "cuda") and torch.is_autocast_enabled(self._device)
        places = self._without_norms if unknown else self._places
        for namespace, forward, _ in places:
            namespace["forward"] = forward
        try:
            yield
        finally:
            for namespace, _, own in self._places:
                if own is not None:
                    namespace["forward"] = own
                else:
                    namespace.pop("forward", None)
