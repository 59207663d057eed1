"""The whole model as one ONNX graph, written once by PyTorch's exporter; stages are cut out of it."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import UserError
from torch.export.dynamic_shapes import refine_dynamic_shapes_from_suggested_fixes

from drumline.core.errors import ModelError
from drumline.model.blocks.pieces import LISTS, opened
from drumline.model.values import pack
from drumline.serve.export.guards import LENGTH
from drumline.serve.export.lookups import refuse_negative, with_looked_up_classes
from drumline.serve.wire.manifest import BATCH

Inputs = Mapping[str, torch.Tensor]


class OrderedModel(nn.Module):
    """A model that takes its inputs in order and returns its tensors in order."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self._names = list(names)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the model, and return its tensors."""
        return output_tensors(self.plain(*tensors))

    def plain(self, *tensors: torch.Tensor) -> Any:
        """Return what the model itself returns: a chain of modules takes its input alone, others by name."""
        if isinstance(self.model, nn.Sequential):
            return self.model(*tensors)
        return self.model(**dict(zip(self._names, tensors, strict=True)))


def output_tensors(value: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a model's output; of Hugging Face's the logits, or what comes first.

    >>> output_tensors({"a": torch.ones(2), "b": [torch.zeros(1)]})
    (tensor([1., 1.]), tensor([0.]))
    """
    return pack(_useful(value))[0]


def output_names(value: Any, inputs: Collection[str]) -> list[str]:
    """Return what clients call the tensors of a model's output: as a flat dict or class does, else by number.

    >>> output_names({"logits": torch.ones(2), "loss": None, "mean": torch.zeros(2)}, ["x"])
    ['logits', 'mean']
    >>> output_names((torch.ones(2), torch.ones(2)), ["x"]), output_names(torch.ones(2), ["x"])
    (['output0', 'output1'], ['output'])
    """
    tensors, form = pack(_useful(value))
    names = [item for item, part in _named_parts(form) if not (isinstance(part, tuple) and part[0] == "plain")]
    usable = all(isinstance(name, str) and name.isidentifier() and name not in inputs for name in names)
    if usable and [part for _, part in _named_parts(form) if isinstance(part, int)] == list(range(len(tensors))):
        return names
    return ["output"] if len(tensors) == 1 else [f"output{number}" for number in range(len(tensors))]


def _useful(value: Any) -> Any:
    if hasattr(value, "to_tuple"):
        return value["logits"] if "logits" in value else value.to_tuple()[0]
    return value


def _named_parts(form: Any) -> list[tuple[Any, Any]]:
    """Return the parts of a form that has names, each with its own."""
    match form:
        case ("dict", names, *parts) | ("fields" | "mapping", _, names, *parts):
            return list(zip(names, parts, strict=True))
        case ("named", kind, *parts):
            return list(zip(kind._fields, parts, strict=True))
    return []


def block_names(model: nn.Module) -> list[str]:
    """Return the modules that are blocks, as in training; of a list, its elements.

    >>> block_names(nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU())))
    ['0', '1']
    """
    inside = {""} if isinstance(model, LISTS) else opened(model)
    named = [name for name, _ in model.named_modules(remove_duplicate=False) if name not in inside]
    return [name for name in named if name.rpartition(".")[0] in inside]


Changing = Mapping[str, Mapping[int, str]]


def traced(model: nn.Module, example: Inputs, changing: Changing, most: Mapping[str, int]) -> Any:
    """Return a model as PyTorch's exporter sees it; `changing` names the dimensions of inputs that may change."""
    known = {name: torch.export.Dim(name, min=1, max=most.get(name)) for name in (BATCH, LENGTH)}
    shapes: Any = (tuple({at: known[name] for at, name in changing[name].items()} for name in example),)
    module = OrderedModel(model, list(example)).eval()
    run_once(module, example)
    try:
        with _quietly(), torch.no_grad():
            try:
                return _program(module, example, shapes)
            except UserError as error:  # it says which ranges it assumed; guards.py holds them against what is asked
                refined = refine_dynamic_shapes_from_suggested_fixes(error.msg, shapes)
                return _program(module, example, refined)
    except Exception as error:  # whatever the exporter meets in a model
        raise _not_written(error) from error


def _program(module: nn.Module, example: Inputs, shapes: Any) -> Any:
    """Return an exported program, in which every assumption about sizes is an assertion or a range."""
    program = torch.export.export(
        module,
        tuple(example.values()),
        dynamic_shapes=shapes,
        strict=False,
        prefer_deferred_runtime_asserts_over_guards=True,
    )
    return with_looked_up_classes(program)


def write_whole(model: nn.Module, program: Any, example: Inputs, path: Path) -> None:
    """Write an exported program as one graph."""
    names = output_names(run_once(OrderedModel(model, list(example)).eval(), example), example)
    try:
        with _quietly(), torch.no_grad():
            written = torch.onnx.export(
                program, (), dynamo=True, input_names=list(example), output_names=names, optimize=True, verbose=False
            )
            assert written is not None  # as the dynamo exporter returns it
            _name_apart(written.model.graph)
            written.save(str(path), external_data=True)
    except Exception as error:  # whatever the exporter meets in a model
        raise _not_written(error) from error
    refuse_negative(path)


def _not_written(error: Exception) -> ModelError:
    return ModelError(
        f"PyTorch's ONNX exporter cannot write this model: {_first_line(error)}",
        expected="a model that torch.export can trace with changing rows and lengths",
    )


def run_once(module: OrderedModel, example: Inputs) -> Any:
    """Run the model once as it is, and return its output."""
    try:
        with torch.no_grad():
            return module.plain(*example.values())
    except Exception as error:  # whatever the model raises
        raise model_failed(example, error) from error


def model_failed(example: Inputs, error: Exception) -> ModelError:
    """Return the error that says for which shapes PyTorch itself fails."""
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in example.items())
    return ModelError(
        f"the model itself fails for inputs of shape {shapes}: {_first_line(error)}",
        expected="a model that takes any number of rows, and tokens of any length up to --length",
        fix="pass a shorter --length if the model has fewer positions",
    )


def _first_line(error: Exception) -> str:
    causes = [str(cause) for cause in (error.__cause__, error) if cause is not None]
    lines = [line for text in causes for line in text.splitlines() if line.strip()] or [type(error).__name__]
    return lines[0][:300]


def _name_apart(graph: Any) -> None:
    """Rename values inside the graph that have the name of an input or output, as an `add` or `mean` may."""
    ends = [*graph.inputs, *graph.outputs]
    taken, known = {end.name for end in ends}, {id(end) for end in ends}
    inner = [*graph.initializers.values(), *(value for node in graph.all_nodes() for value in node.outputs)]
    for value in inner:
        if value.name in taken and id(value) not in known:
            value.name = f"inner.{value.name}"


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep the exporter's progress and warnings to itself."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    unheard = io.StringIO()
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(unheard),
            contextlib.redirect_stderr(unheard),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
