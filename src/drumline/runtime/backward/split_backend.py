"""torch.compile for stages with split backwards: cut the backward graph in two, and leave W's half on the tape.

AOTAutograd traces forward and backward ahead of time and passes the backward as a graph. `halves` cuts it, and both
halves are compiled. When autograd reaches it:

    during I    the input half runs; the weight half, with what it needs, stays on the tape. Autograd gets nothing
                for the parameters
    during B    both halves run, one after the other

The graph that autograd is walking shows which output belongs to which parameter: parameters are inputs of compiled
code, and their gradients come in the order of these inputs.
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
class DeferredWeights(OwnerCall):
    """A weight half that waits for W: what it needs, and the parameters that its results belong to."""

    parameters: Sequence[nn.Parameter] = ()
    versions: Sequence[int] = ()

    @property
    def reached(self) -> bool:
        """Whether a gradient came back: always, because there would be no record otherwise."""
        return True


class WeightHalf(Owner):
    """The compiled weight half of a piece of code, as the owner of its records; it merges none."""

    def __init__(self, run: Callable[[list[Any]], list[Any]]) -> None:
        self.run = run

    def gradients(self, record: OwnerCall) -> Gradients:
        """Run the half with what was left for it."""
        assert isinstance(record, DeferredWeights)
        left, record.inputs = record.inputs, []
        if _versions(left) != record.versions:
            raise changed_in_place("a tensor that a weight gradient needs")
        return list(zip(record.parameters, self.results(left), strict=True))

    def results(self, left: list[Any]) -> list[Tensor]:
        """Return the gradients, and free what was left on the way."""
        if torch._C._is_any_autocast_enabled():
            with torch._C._DisableAutocast():  # the graph already contains its casts
                return self.run(left)
        return self.run(left)


@dataclass(frozen=True, slots=True)
class ParameterPlaces:
    """The positions of the trainable parameters among the inputs of compiled code."""

    num_inputs: int
    tensors: tuple[int, ...]
    parameters: tuple[int, ...]

    @classmethod
    def among(cls, inputs: Sequence[Any]) -> ParameterPlaces:
        """Find them among the inputs for which code is compiled."""
        placed = list(enumerate(inputs))
        tensors = tuple(place for place, value in placed if isinstance(value, Tensor))
        trained = (place for place, param in placed if isinstance(param, nn.Parameter) and param.requires_grad)
        return cls(len(placed), tensors, tuple(trained))


def split(whole: GraphModule, examples: Sequence[Any], places: ParameterPlaces, compile_half: CompileHalf) -> Boxed:
    """Return a backward that can be split, for its graph."""
    num_outputs = len(whole.graph.output_node().args[0])  # type: ignore[arg-type]
    if not places.parameters or num_outputs != places.num_inputs:
        return compile_half(whole, examples)
    cut = halves(whole, places.parameters)
    if not cut.weights:
        return compile_half(whole, examples)
    entries = [node.meta["val"] for node in cut.weight.graph.find_nodes(op="placeholder")]
    input_half, owner = (
        compile_half(cut.input, examples),
        WeightHalf(_with_own_memory(compile_half(cut.weight, entries))),
    )
    edges = [places.tensors.index(place) for place in cut.weights]  # autograd counts only the tensors

    def run(arguments: list[Any]) -> list[Any]:
        tape = running()
        parameters = None if tape is None else _owners(edges, len(places.tensors))
        left = [arguments[place] for place in cut.kept_at]
        results = input_half(arguments)
        gradients: list[Any] = [None] * cut.num_outputs
        for place, value in zip(cut.inputs, results, strict=False):
            gradients[place] = value
        left += results[len(cut.inputs) :]
        if tape is not None and parameters is not None:
            # Records are processed from the end: what autograd reached first is added first.
            tape.records.insert(0, DeferredWeights(owner, left, (), parameters=parameters, versions=_versions(left)))
        else:
            for place, result in zip(cut.weights, owner.results(left), strict=True):
                gradients[place] = result
        return gradients

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _with_own_memory(run: Boxed) -> Callable[[list[Any]], list[Any]]:
    """Return a function that runs a backward and gives every result its own memory.

    Two parameters, or a parameter and an input, may have the same memory as their gradient. Compiled code returns it as
    unrelated tensors, and autograd would use both as `.grad` and add to both.
    """

    def run_apart(arguments: list[Any]) -> list[Any]:
        memories = [(ref(argument), _memory(argument)) for argument in arguments if isinstance(argument, Tensor)]
        separate_results = []
        results = run(arguments)
        seen_memories = {memory for reference_type, memory in memories if reference_type() is not None}
        for tensor in results:
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                memory = _memory(tensor)
                separate_results.append(tensor.clone() if memory in seen_memories or _is_shared(tensor) else tensor)
                seen_memories.add(memory)
            else:
                separate_results.append(tensor)
        return separate_results

    run_apart._boxed_call = True  # type: ignore[attr-defined]
    return run_apart


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_shared(tensor: Tensor) -> bool:
    """Whether something else holds the tensor's memory; the base of a plain view does, and is freed with it."""
    storage = tensor.untyped_storage()
    return tensor._base is None and torch._C._storage_Use_Count(storage._cdata) > 2  # the tensor, and `storage`


def _owners(edges: Sequence[int], num_inputs: int) -> list[nn.Parameter] | None:
    """Return the parameters at some edges of the node that autograd runs; None if the gradients cannot wait."""
    node: Any = torch._C._current_autograd_node()
    following = node.next_functions
    if len(following) != num_inputs:
        return None
    owners: list[Any] = [getattr(following[edge][0], "variable", None) for edge in edges]
    # A hook needs to see the gradient when autograd reaches it.
    plain = all(isinstance(param, nn.Parameter) and not param._backward_hooks for param in owners)
    return owners if plain else None


def _versions(values: Sequence[Any]) -> list[int]:
    return [value._version for value in values if isinstance(value, Tensor)]


class _At(threading.local):
    """What runs in this thread, in words: code compiled now is for it."""

    title = "a block"


at = _At()


def uncompiled(title: str, error: Exception) -> ModelError:
    """Return the error for code that cannot be compiled."""
    error = getattr(error, "inner_exception", error)
    words = " ".join(str(error).split())
    return ModelError(
        f"{title} cannot be compiled: {type(error).__name__}: {words:.400}",
        fix="use compile=False, which also shows whether the model itself fails",
    )


def _named(title: str, compile_backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that compiles a backward, and names it if that fails, perhaps only at the first B or I."""

    def compile_named(*args: Any, **settings: Any) -> Any:
        try:
            return compile_backward(*args, **settings)
        except Exception as error:
            raise uncompiled(f"the backward of {title}", error) from error

    return compile_named


@dataclass(frozen=True)
class AotEager:
    """The backend `aot_eager`, which runs graphs operator by operator; on request its backward can be split.

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
            return _with_own_memory(plain(whole, examples))

        compiled: Any = aot_autograd(
            fw_compiler=plain,
            bw_compiler=_named(at.title, backward),
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )
        return compiled(graph, inputs)


@dataclass(frozen=True)
class Inductor:
    """The backend `inductor` with some of its options; on request its backward can be split."""

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
            # Tensors passed from half to half are read with the strides in the graph.
            output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # type: ignore[arg-type]
            function: Boxed = inner(part, examples, **settings)
            return function

        def backward(whole: GraphModule, examples: Sequence[Any], **settings: Any) -> Any:
            if not self.can_split:
                return _with_own_memory(inner(whole, examples, **settings))
            compile_fx.fake_tensor_prop(whole, examples)  # with the forward's real strides
            settings["static_input_idxs"] = ()
            return split(whole, examples, places, partial(half, **settings))

        named = _named(at.title, backward)

        def either(part: GraphModule, examples: Sequence[Any], **settings: Any) -> Any:
            return (named if settings.get("is_backward") else inner)(part, examples, **settings)

        # I must not overwrite what W may need, and a backward from torch's cache would be whole.
        with config.patch(donated_buffer=False, enable_autograd_cache=False):
            return compile_fx.compile_fx(graph, inputs, inner_compile=either, config_patches=self.patches)
