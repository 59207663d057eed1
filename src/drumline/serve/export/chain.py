"""A model as a chain of blocks with everything that crosses each boundary, ready to be written as ONNX.

The chain is run on examples of several sizes. Dimensions that change with the rows are called `batch`, with the length
`length`, and with both or otherwise by the tensor they are of. A plain value that changes with the size would be frozen
into the graph, so such a model is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from drumline.core.errors import ModelError
from drumline.pipeline.model.blocks import blocks_for, evaluating, inputs_for, is_chain
from drumline.runtime.blocks.cut import Block
from drumline.runtime.values import pack, plain_in, unpack
from drumline.serve.wire.manifest import BATCH, Tensor
from drumline.serve.wire.tensors import DATATYPES, datatype_of

LENGTH = "length"
Tensors = tuple[torch.Tensor, ...]
Example = Callable[[int, int], dict[str, torch.Tensor]]  # inputs by name, of so many rows and so long


@dataclass(frozen=True, slots=True)
class Boundary:
    """What crosses a boundary: how tensors are put together, the tensors by name, and examples of them."""

    form: Any
    tensors: tuple[Tensor, ...]
    example: Tensors


@dataclass(frozen=True, slots=True)
class Chain:
    """Blocks, and the boundaries before, between and behind them."""

    blocks: tuple[Block, ...]
    boundaries: tuple[Boundary, ...]
    has_length: bool

    def stage(self, first: int, end: int) -> StageModule:
        """Return the blocks from `first` to before `end` as one module that takes and returns tensors."""
        return StageModule(self.blocks[first:end], self.boundaries[first].form)


class StageModule(nn.Module):
    """Consecutive blocks as a module that takes tensors and returns tensors."""

    def __init__(self, blocks: Sequence[Block], form: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block.module for block in blocks])
        self._form = form

    def forward(self, *tensors: torch.Tensor) -> Tensors:
        """Run the blocks; what the next stage does not need is left out."""
        value = unpack(tensors, self._form)
        for block in self.blocks:
            value = block(value)
        seal = getattr(self.blocks[-1], "seal", None)
        return output_tensors(value if seal is None else seal(value))


def output_tensors(value: Any) -> Tensors:
    """Return the tensors of a value; an output of transformers gives its logits, or what it has first."""
    if hasattr(value, "to_tuple"):
        value = value["logits"] if "logits" in value else value.to_tuple()[0]
    return pack(value)[0]


def chain_of(model: nn.Module, example: Example, sizes: Sequence[tuple[int, int]]) -> Chain:
    """Return the chain of a model; `sizes` are three pairs of rows and lengths, of which two differ in each."""
    model.eval()
    first = example(*sizes[0])
    given = _given(model, first)
    blocks = blocks_for(model, _example(model, first), torch.device("cpu"), num_microbatches=1)
    with torch.no_grad(), evaluating([block.module for block in blocks]):
        runs = [_values(blocks, _given(model, example(*size))) for size in sizes]
    del given
    has_length = any(one.dim() > 1 for one in first.values()) and _differ(runs[0][0], runs[2][0])
    named = [list(first)] + [[] for _ in blocks]
    boundaries = [_boundary(number, each, named[number]) for number, each in enumerate(zip(*runs, strict=True))]
    return Chain(tuple(blocks), tuple(boundaries), has_length)


def _example(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Any:
    return next(iter(inputs.values())) if is_chain(model) else dict(inputs)


def _given(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Any:
    if is_chain(model):
        return inputs_for(tuple(inputs.values()), {}, is_chain=True)
    return inputs_for((), dict(inputs), is_chain=False)


def _values(blocks: Sequence[Block], value: Any) -> list[tuple[Any, Tensors]]:
    """Return form and tensors at every boundary, as if a stage ended at each."""
    found = [_packed(value)]
    for block in blocks:
        value = block.module(value)
        seal = getattr(block.module, "seal", None)
        sealed = value if seal is None else seal(value)
        last = block is blocks[-1]
        found.append((None, output_tensors(sealed)) if last else _packed(sealed))
    return found


def _packed(value: Any) -> tuple[Any, Tensors]:
    tensors, form = pack(value)
    return form, tensors


def _differ(one: tuple[Any, Tensors], other: tuple[Any, Tensors]) -> bool:
    return any(a.shape != b.shape for a, b in zip(one[1], other[1], strict=True))


def _boundary(number: int, runs: Sequence[tuple[Any, Tensors]], names: Sequence[str]) -> Boundary:
    """Return a boundary from what crossed it at three sizes: (rows, length), more rows, greater length."""
    (form, tensors), (_, by_rows), (_, by_length) = runs
    for other, _ in runs[1:]:
        if _plain(other) != _plain(form):
            raise ModelError(
                f"a value that is no tensor crosses boundary {number}, and depends on the size of the input",
                expected="tensors, and plain values that are the same for every size",
                fix="choose other cuts, or let the model make it a tensor",
            )
    if not all(len(one) == len(tensors) for one in (by_rows, by_length)):
        raise ModelError(f"as many tensors as rows cross boundary {number}", expected="the same number at every size")
    made = []
    for at, (one, wide, long) in enumerate(zip(tensors, by_rows, by_length, strict=True)):
        name = names[at] if at < len(names) else f"x{number}_{at}"
        made.append(_tensor(name, one, wide, long))
    return Boundary(form, tuple(made), tensors)


def _plain(form: Any) -> list[str]:
    return [repr(one) if isinstance(one, bool | int | float | str | type(None)) else "" for one in plain_in(form)]


def _tensor(name: str, one: torch.Tensor, wide: torch.Tensor, long: torch.Tensor) -> Tensor:
    """Return what is known of a tensor: its type, and names for dimensions that change with rows or length."""
    shape: list[int | str] = []
    for at, (size, with_rows, with_length) in enumerate(zip(one.shape, wide.shape, long.shape, strict=True)):
        if size == with_rows == with_length:
            shape.append(size)
        elif at == 0 and with_rows != size == with_length:
            shape.append(BATCH)
        else:
            shape.append(LENGTH if with_length != size == with_rows else f"{name}_{at}")
    try:
        datatype = datatype_of(one.numpy().dtype)
    except (StopIteration, TypeError):
        raise ModelError(
            f"a tensor between blocks has type {one.dtype}",
            expected=", ".join(str(kind) for kind in DATATYPES.values()),
            fix="convert the model to float32",
        ) from None
    return Tensor(name, datatype, tuple(shape))
