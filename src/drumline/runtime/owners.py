"""Modules that own parameters, and how their weight gradients are made apart from the rest of the backward.

Owners come in three kinds. Linear, LayerNorm and Embedding know their own formulas. Any other module that has
parameters and no children with parameters keeps a small graph of its own, cut off from the rest, and W runs that. What
belongs to a module with such children, and any use of a parameter outside of its owner, is seen by I as an ordinary
gradient, is kept, and is added by W: never lost, only early.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.nn import functional

from drumline.runtime.tape import Gradients, Record, Tape
from drumline.runtime.values import pack, unpack


class Owner(ABC):
    """A module that owns trainable parameters, and how its weight gradients are made."""

    joins = False  # whether the records of several microbatches can be made one

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def joined(self, records: Sequence[Record]) -> Record:
        """Return one record in place of several."""
        raise NotImplementedError

    @abstractmethod
    def recording(self, tape: Tape) -> Callable[..., Any]:
        """Return the forward that stands in for the module's own while `tape` records."""

    @abstractmethod
    def gradients(self, record: Record) -> Gradients:
        """Return the weight gradients of one call."""

    def refresh(self) -> None:  # noqa: B027 - most have nothing to do
        """Follow the parameters if their memory was exchanged since the last step."""


class _WithFormula(Owner):
    """An owner with a weight and perhaps a bias, whose stand-ins share the parameters' memory."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.stand_ins: list[Tensor | None] = []
        self.refresh()

    def refresh(self) -> None:
        """Follow the parameters if their memory was exchanged since the last step."""
        parameters = [self.module._parameters.get(name) for name in ("weight", "bias")]
        fresh = [
            stand is not None and one is not None and stand.data_ptr() == one.data_ptr() and stand.shape == one.shape
            for stand, one in zip(self.stand_ins, parameters, strict=False)
        ]
        if len(fresh) != 2 or not all(same or one is None for same, one in zip(fresh, parameters, strict=True)):
            # A weight that is frozen still needs a place in the graph, for its layer's output to have one.
            self.stand_ins = [None if one is None else one.detach().requires_grad_() for one in parameters]

    def _unchanged(self, record: Record, taken: Tensor) -> Tensor:
        if taken._version != record.version:
            raise RuntimeError(
                f"the input of {type(self.module).__name__} was changed in place after it was used, "
                "and its weight gradient needs it"
            )
        return taken

    def _named(self, weight: Tensor | None, bias: Tensor | None) -> Gradients:
        found: Gradients = []
        for name, gradient in (("weight", weight), ("bias", bias)):
            parameter = self.module._parameters.get(name)
            if parameter is not None and parameter.requires_grad and gradient is not None:
                found.append((parameter, gradient.to(parameter.dtype)))
        return found

    def _wanted(self, name: str) -> bool:
        parameter = self.module._parameters.get(name)
        return parameter is not None and parameter.requires_grad


class LinearOwner(_WithFormula):
    """y = x w^T + b, so that w's gradient is g^T x and b's the sum of g."""

    joins = True

    def joined(self, records: Sequence[Record]) -> Record:
        """Return one record with all rows."""
        inputs = [self._unchanged(record, record.inputs) for record in records]
        gradients = [cast(Tensor, record.gradients[0]) for record in records]
        one = Record(self, torch.cat([taken.reshape(-1, taken.shape[-1]) for taken in inputs]), ())
        one.gradients = (torch.cat([gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]),)
        return one

    def recording(self, tape: Tape) -> Callable[..., Any]:
        """Return a forward that computes with the stand-ins and records."""
        weight, bias = self.stand_ins
        records = tape.records
        assert weight is not None

        def forward(input: Tensor) -> Tensor:  # noqa: A002 - callers may name it
            made = functional.linear(input, weight, bias)
            records.append(Record(self, input.detach(), (_place(made),), input._version))
            return made

        return forward

    def gradients(self, record: Record) -> Gradients:
        """Return the product of gradient and input, and the gradient's sum."""
        taken, gradient = self._unchanged(record, record.inputs), cast(Tensor, record.gradients[0])
        # Autograd sums a bias over what the product saw: rows, or for scattered memory the dimensions themselves.
        dims = tuple(range(gradient.dim() - 1)) if gradient.dim() > 2 and not taken.is_contiguous() else 0
        rows = gradient.reshape(-1, gradient.shape[-1])
        bias = (gradient if dims else rows).sum(dims) if self._wanted("bias") else None
        weight = None
        if self._wanted("weight"):
            inputs = taken.reshape(-1, taken.shape[-1])
            weight = rows.t() @ (inputs if inputs.dtype == rows.dtype else inputs.to(rows.dtype))
        return self._named(weight, bias)


class LayerNormOwner(_WithFormula):
    """Normalises over the last dimensions; keeps mean and deviation for W."""

    def recording(self, tape: Tape) -> Callable[..., Any]:
        """Return a forward that keeps its mean and deviation."""
        module = cast(nn.LayerNorm, self.module)
        weight, bias = self.stand_ins
        records = tape.records
        shape, eps = module.normalized_shape, module.eps

        def forward(input: Tensor) -> Tensor:  # noqa: A002
            made, mean, deviation = torch.native_layer_norm(input, shape, weight, bias, eps)
            kept = (input.detach(), mean.detach(), deviation.detach())
            records.append(Record(self, kept, (_place(made),), input._version))
            return made

        return forward

    def gradients(self, record: Record) -> Gradients:
        """Return what torch's own kernel makes of them."""
        taken, mean, deviation = record.inputs
        weight, bias = self.stand_ins
        mask = [False, self._wanted("weight"), self._wanted("bias")]
        _, to_weight, to_bias = torch.ops.aten.native_layer_norm_backward(
            record.gradients[0],
            self._unchanged(record, taken),
            cast(nn.LayerNorm, self.module).normalized_shape,
            mean,
            deviation,
            None if weight is None else weight.detach(),
            None if bias is None else bias.detach(),
            mask,
        )
        return self._named(to_weight, to_bias)


class EmbeddingOwner(_WithFormula):
    """Looks rows of its weight up; the gradient of a row is the sum of the gradients where it was used."""

    def recording(self, tape: Tape) -> Callable[..., Any]:
        """Return a forward that looks up in the stand-in and records."""
        module = cast(nn.Embedding, self.module)
        weight, _ = self.stand_ins
        records = tape.records
        assert weight is not None

        def forward(input: Tensor) -> Tensor:  # noqa: A002
            made = functional.embedding(
                input, weight, module.padding_idx, None, module.norm_type, module.scale_grad_by_freq
            )
            records.append(Record(self, input.detach(), (_place(made),), input._version))
            return made

        return forward

    def gradients(self, record: Record) -> Gradients:
        """Return the sums per row."""
        module = cast(nn.Embedding, self.module)
        padding = -1 if module.padding_idx is None else module.padding_idx
        gradient = torch.ops.aten.embedding_dense_backward(
            record.gradients[0],
            self._unchanged(record, record.inputs),
            module.num_embeddings,
            padding,
            module.scale_grad_by_freq,
        )
        return self._named(gradient, None)


class GeneralOwner(Owner):
    """Any other module: its forward runs on a graph of its own, through which I and W go one after the other."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.parameters = [one for one in module.parameters() if one.requires_grad]

    def recording(self, tape: Tape) -> Callable[..., Any]:
        """Return a forward that runs the module's own on a graph apart."""
        plain = self.module.forward
        spark = torch.zeros((), requires_grad=True)  # without an input that wants a gradient there would be no graph

        def forward(*args: Any, **kwargs: Any) -> Any:
            tensors, form = pack((args, kwargs))

            def run(leaves: Sequence[Tensor]) -> Any:
                given, named = unpack(leaves, form)
                return plain(*given, **named)

            own: list[Any] = []  # what the graph apart ends in
            made = _OwnGraph.apply(own, run, spark, *tensors)  # type: ignore[no-untyped-call]
            ends, output_form = own
            reached = [index for index, end in enumerate(ends) if end.requires_grad]
            places = tuple(_place(made[index]) for index in reached)
            tape.records.append(Record(self, [ends[index] for index in reached], places))
            return unpack(made, output_form)

        return forward

    def gradients(self, record: Record) -> Gradients:
        """Return what autograd finds in the graph that was kept."""
        pairs = [pair for pair in zip(record.inputs, record.gradients, strict=True) if pair[1] is not None]
        found = torch.autograd.grad(
            [end for end, _ in pairs], self.parameters, [given for _, given in pairs], allow_unused=True
        )
        return [(one, grad) for one, grad in zip(self.parameters, found, strict=True) if grad is not None]


class _OwnGraph(torch.autograd.Function):
    """Runs a module on a graph apart; its backward goes through that for the inputs only, and keeps it for W."""

    @staticmethod
    def forward(ctx: Any, own: list[Any], run: Callable[..., Any], spark: Tensor, *tensors: Tensor) -> Any:
        leaves = [one.detach().requires_grad_(one.requires_grad) for one in tensors]
        with torch.enable_grad():
            ends, form = pack(run(leaves))
        ctx.leaves, ctx.ends = leaves, ends
        own += [ends, form]
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


def owners_in(module: nn.Module) -> Iterator[Owner]:
    """Yield the owners in a module's tree.

    >>> [type(one).__name__ for one in owners_in(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))]
    ['LinearOwner', 'GeneralOwner']
    """
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return
    if formula := _formula(module):
        yield formula(module)
    elif isinstance(module, _WHOLE) or not any(True for child in module.children() for _ in child.parameters()):
        yield GeneralOwner(module)
    else:
        for child in dict.fromkeys(module.children()):
            yield from owners_in(child)


def _formula(module: nn.Module) -> type[_WithFormula] | None:
    if type(module) not in _FORMULAS or "forward" in vars(module):
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
    """All owners of a stage's blocks; while it records, their forwards are exchanged for recording ones."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        owners = {id(owner.module): owner for module in modules for owner in owners_in(module)}
        self.owners = list(owners.values())
        self._replaced: list[tuple[nn.Module, Any]] = []

    def refresh(self) -> None:
        """Follow the parameters if their memory was exchanged since the last step."""
        for owner in self.owners:
            owner.refresh()

    def start(self, tape: Tape) -> None:
        """Let the owners record on `tape` until `stop`."""
        simple = not torch.is_autocast_enabled(_device_type(self.owners))
        for owner in self.owners:
            if simple or not isinstance(owner, LayerNormOwner):
                module = owner.module
                recording = owner.recording(tape)
                self._replaced.append((module, vars(module).get("forward")))
                module.forward = recording

    def stop(self) -> None:
        """Give the owners their own forwards back."""
        for module, own in self._replaced:
            if own is None:
                del vars(module)["forward"]
            else:
                module.forward = own
        self._replaced.clear()


def _device_type(owners: Sequence[Owner]) -> str:
    return next((one.device.type for owner in owners for one in owner.module.parameters()), "cpu")
