"""torch.compile for stages whose backward is split: the backward graph is cut in two, and W's half waits on the tape.

AOTAutograd traces forward and backward ahead of time and hands the backward over as a graph. It is cut (`halves`), and
both halves are compiled. When autograd comes by:

    during I    the input half runs; the weight half, with what it needs, is left on the tape. Autograd gets nothing
                for the parameters
    during B    both halves run, one after the other

Which output belongs to which parameter is read off the graph that autograd is walking: parameters are inputs of
compiled code, and their gradients stand in the order of these inputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from drumline.core.errors import ModelError
from drumline.runtime.backward.halves import halves
from drumline.runtime.backward.tape import Gradients, Owner, OwnerCall, changed_in_place, running

Boxed = Callable[[list[Any]], Sequence[Any]]  # takes its arguments as a list, which it empties
CompileHalf = Callable[[GraphModule, Sequence[Any]], Boxed]


@dataclass(slots=True, eq=False)
class Waiting(OwnerCall):
    """A weight half that waits for W: what it was left, and the parameters that its results are for."""

    parameters: Sequence[nn.Parameter] = ()
    versions: Sequence[int] = ()

    @property
    def reached(self) -> bool:
        """Whether a gradient came back: it did, or there would be no record."""
        return True


class WeightHalf(Owner):
    """The compiled weight half of one piece of code, as the owner of the records that it leaves; it joins none."""

    def __init__(self, run: Callable[[list[Any]], list[Any]]) -> None:
        self.run = run

    def gradients(self, record: OwnerCall) -> Gradients:
        """Run the half with what was left for it."""
        assert isinstance(record, Waiting)
        left, record.inputs = record.inputs, []
        if _versions(left) != record.versions:
            raise changed_in_place("a tensor that a weight gradient needs")
        return list(zip(record.parameters, self.results(left), strict=True))

    def results(self, left: list[Any]) -> list[Tensor]:
        """Return the gradients; what was left is let go of on the way."""
        if torch._C._is_any_autocast_enabled():
            with torch._C._DisableAutocast():  # the graph has its casts
                return self.run(left)
        return self.run(left)


@dataclass(frozen=True, slots=True)
class ParameterPlaces:
    """Where the trainable parameters stand among the inputs of compiled code."""

    num_inputs: int
    tensors: tuple[int, ...]
    parameters: tuple[int, ...]

    @classmethod
    def among(cls, inputs: Sequence[Any]) -> ParameterPlaces:
        """Look at the inputs that code is compiled for."""
        placed = list(enumerate(inputs))
        tensors = tuple(place for place, one in placed if isinstance(one, Tensor))
        trained = (place for place, one in placed if isinstance(one, nn.Parameter) and one.requires_grad)
        return cls(len(placed), tensors, tuple(trained))


def split(whole: GraphModule, examples: Sequence[Any], places: ParameterPlaces, compile_half: CompileHalf) -> Boxed:
    """Return a backward that can be split, for a graph of it."""
    num_outputs = len(whole.graph.output_node().args[0])  # type: ignore[arg-type]
    if not places.parameters or num_outputs != places.num_inputs:
        return compile_half(whole, examples)
    cut = halves(whole, places.parameters)
    if not cut.weights:
        return compile_half(whole, examples)
    given = [node.meta["val"] for node in cut.weight.graph.find_nodes(op="placeholder")]
    input_half, owner = compile_half(cut.input, examples), WeightHalf(_apart(compile_half(cut.weight, given)))
    edges = [places.tensors.index(place) for place in cut.weights]  # autograd counts the tensors alone

    def run(arguments: list[Any]) -> list[Any]:
        tape = running()
        parameters = None if tape is None else _owners(edges, len(places.tensors))
        left = [arguments[place] for place in cut.kept]
        made = input_half(arguments)
        found: list[Any] = [None] * cut.num_outputs
        for place, one in zip(cut.inputs, made, strict=False):
            found[place] = one
        left += made[len(cut.inputs) :]
        if tape is not None and parameters is not None:
            # Records are gone through from the end: what autograd reached first is added first.
            tape.records.insert(0, Waiting(owner, left, (), parameters=parameters, versions=_versions(left)))
        else:
            for place, one in zip(cut.weights, owner.results(left), strict=True):
                found[place] = one
        return found

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _apart(run: Boxed) -> Callable[[list[Any]], list[Any]]:
    """Return what runs a backward and gives every result memory of its own.

    One memory may be the gradient of two parameters, or of a parameter and an input. Compiled code hands it out as
    tensors that do not know of each other, and autograd would take both for `.grad`, and add to both.
    """

    def run_apart(arguments: list[Any]) -> list[Any]:
        given = [(ref(one), _memory(one)) for one in arguments if isinstance(one, Tensor)]
        found = []
        made = run(arguments)
        seen = {memory for one, memory in given if one() is not None}
        for one in made:
            if isinstance(one, Tensor) and one.layout is torch.strided:
                memory = _memory(one)
                found.append(one.clone() if memory in seen or _is_shared(one) else one)
                seen.add(memory)
            else:
                found.append(one)
        return found

    run_apart._boxed_call = True  # type: ignore[attr-defined]
    return run_apart


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_shared(tensor: Tensor) -> bool:
    """Whether somebody else holds the tensor's memory; a plain view's base does, and goes with it."""
    storage = tensor.untyped_storage()
    return tensor._base is None and torch._C._storage_Use_Count(storage._cdata) > 2  # the tensor, and `storage`


def _owners(edges: Sequence[int], num_inputs: int) -> list[nn.Parameter] | None:
    """Return the parameters at some edges of the node that autograd runs; None if the gradients cannot wait."""
    node: Any = torch._C._current_autograd_node()
    following = node.next_functions
    if len(following) != num_inputs:
        return None
    found: list[Any] = [getattr(following[edge][0], "variable", None) for edge in edges]
    # A hook wants to see the gradient when autograd comes by.
    plain = all(isinstance(one, nn.Parameter) and not one._backward_hooks for one in found)
    return found if plain else None


def _versions(values: Sequence[Any]) -> list[int]:
    return [one._version for one in values if isinstance(one, Tensor)]


class _At(threading.local):
    """What runs in this thread, in words: what is compiled now is for it."""

    title = "a block"


at = _At()


def uncompiled(title: str, error: Exception) -> ModelError:
    """Return the refusal of what cannot be compiled."""
    error = getattr(error, "inner_exception", error)
    words = " ".join(str(error).split())
    return ModelError(
        f"{title} cannot be compiled: {type(error).__name__}: {words:.400}",
        fix="use compile=False, which also shows whether the model itself fails",
    )


def _named(title: str, compile_backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return what compiles a backward and, where it cannot, says what of; it may do so as late as the first B or I."""

    def compile_named(*args: Any, **settings: Any) -> Any:
        try:
            return compile_backward(*args, **settings)
        except Exception as error:
            raise uncompiled(f"the backward of {title}", error) from error

    return compile_named


@dataclass(frozen=True)
class AotEager:
    """The backend `aot_eager`, where graphs run operator by operator; where asked for, its backward can be split.

    >>> torch.compile(nn.Linear(2, 2), backend=AotEager(can_split=True))(torch.ones(1, 2)).shape
    torch.Size([1, 2])
    """

    can_split: bool

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Any:
        """Compile a graph that was traced for these inputs."""
        from torch._dynamo.backends.common import aot_autograd
        from torch._dynamo.backends.debugging import boxed_nop
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        places = ParameterPlaces.among(inputs)
        plain: Any = boxed_nop

        def backward(whole: GraphModule, examples: Sequence[Any]) -> Boxed:
            if self.can_split:
                return split(whole, examples, places, plain)
            return _apart(plain(whole, examples))

        compiled: Any = aot_autograd(
            fw_compiler=plain,
            bw_compiler=_named(at.title, backward),
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )
        return compiled(graph, inputs)


@dataclass(frozen=True)
class Inductor:
    """The backend `inductor` with some of its options; where asked for, its backward can be split."""

    patches: dict[str, Any]
    can_split: bool

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Any:
        """Compile a graph that was traced for these inputs."""
        from torch._functorch import config
        from torch._inductor import compile_fx

        inner: Any = compile_fx.compile_fx_inner
        places = ParameterPlaces.among(inputs)

        def half(part: GraphModule, examples: Sequence[Any], **settings: Any) -> Boxed:
            output = part.graph.output_node()
            # What goes from half to half is read with the strides that the graph says.
            output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # type: ignore[arg-type]
            made: Boxed = inner(part, examples, **settings)
            return made

        def backward(whole: GraphModule, examples: Sequence[Any], **settings: Any) -> Any:
            if not self.can_split:
                return _apart(inner(whole, examples, **settings))
            compile_fx.fake_tensor_prop(whole, examples)  # with the strides that the forward really makes
            settings["static_input_idxs"] = ()
            return split(whole, examples, places, partial(half, **settings))

        named = _named(at.title, backward)

        def either(part: GraphModule, examples: Sequence[Any], **settings: Any) -> Any:
            return (named if settings.get("is_backward") else inner)(part, examples, **settings)

        # What W may need must not be overwritten by I, and a backward from torch's cache would be whole.
        with config.patch(donated_buffer=False, enable_autograd_cache=False):
            return compile_fx.compile_fx(graph, inputs, inner_compile=either, config_patches=self.patches)
