"""The whole model as one ONNX graph, written once by PyTorch's exporter; stages are cut out of it."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drumline.core.errors import ModelError
from drumline.runtime.values import pack
from drumline.serve.wire.manifest import BATCH

LENGTH = "length"
Inputs = Mapping[str, torch.Tensor]


class Whole(nn.Module):
    """A model that takes its inputs in order and returns its tensors in order."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self._names = list(names)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the model: a chain of modules takes its input alone, others by name."""
        if isinstance(self.model, nn.Sequential):
            return output_tensors(self.model(*tensors))
        return output_tensors(self.model(**dict(zip(self._names, tensors, strict=True))))


def output_tensors(value: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a model's output; of Hugging Face's the logits, or what comes first.

    >>> output_tensors({"a": torch.ones(2), "b": [torch.zeros(1)]})
    (tensor([1., 1.]), tensor([0.]))
    """
    if hasattr(value, "to_tuple"):
        value = value["logits"] if "logits" in value else value.to_tuple()[0]
    return pack(value)[0]


def block_names(model: nn.Module) -> list[str]:
    """Return the modules that are blocks: the elements of its outermost lists, and what stands beside these.

    >>> block_names(nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU())))
    ['0', '1']
    """

    def holds_list(module: nn.Module) -> bool:
        return any(isinstance(one, _LISTS) for one in module.modules())

    def opened(module: nn.Module, prefix: str) -> Iterator[str]:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if not isinstance(module, _LISTS) and holds_list(child):
                yield from opened(child, f"{path}.")
            else:
                yield path

    return list(opened(model, ""))


_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def write_whole(
    model: nn.Module, example: Inputs, changing: Mapping[str, Mapping[int, str]], most: Mapping[str, int], path: Path
) -> None:
    """Write a model as one graph; `changing` names the dimensions of inputs that may change."""
    known = {name: torch.export.Dim(name, min=1, max=most.get(name)) for name in (BATCH, LENGTH)}
    shapes = tuple({at: known[name] for at, name in changing[one].items()} for one in example)
    module = Whole(model, list(example)).eval()
    try:
        with _quietly(), torch.no_grad():
            torch.onnx.export(
                module,
                tuple(example.values()),
                str(path),
                dynamo=True,
                input_names=list(example),
                output_names=_output_names(module, example),
                dynamic_shapes=(shapes,),
                external_data=True,
                optimize=True,
                verbose=False,
            )
    except Exception as error:  # whatever the exporter meets in a model
        causes = [str(one) for one in (error.__cause__, error) if one is not None]
        lines = [line for text in causes for line in text.splitlines() if line.strip()] or [type(error).__name__]
        raise ModelError(
            f"PyTorch's ONNX exporter cannot write this model: {lines[0][:300]}",
            expected="a model that torch.export can trace with changing rows and lengths",
        ) from error


def _output_names(module: nn.Module, example: Inputs) -> list[str]:
    count = len(module(*example.values()))
    return ["output"] if count == 1 else [f"output{number}" for number in range(count)]


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep the exporter's progress and warnings to itself."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
