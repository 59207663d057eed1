"""A whole graph as a chain of blocks, with what crosses each boundary and real examples of it.

The graph is run at three sizes. Dimensions that change with the rows alone are called `batch`, with the length alone
`length`, and others by the tensor that they are of.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx
import torch
from onnx import helper

from drumline.core.errors import ModelError
from drumline.serve.export.guards import LENGTH
from drumline.serve.export.lookups import LookupBounds
from drumline.serve.export.onnx_graph import BoundaryValue, Graph
from drumline.serve.session import open_session
from drumline.serve.wire.manifest import BATCH, Tensor
from drumline.serve.wire.tensors import Array, Arrays, datatype_of

Example = Callable[[int, int], dict[str, torch.Tensor]]  # inputs by name, of so many rows and so long
ExampleSizes = Sequence[tuple[int, int]]  # (rows, length), then more rows, then another length


@dataclass(frozen=True, slots=True)
class GraphChain:
    """Blocks of a graph: their names, their first nodes with the graph's end behind them, and examples of values."""

    graph: Graph
    blocks: tuple[str, ...]
    ends: tuple[int, ...]
    examples: tuple[Arrays, ...]  # of every value that crosses, at each size
    bounds: Mapping[str, LookupBounds] = field(default_factory=dict)  # of inputs by which something is looked up

    def boundary(self, number: int, stage: int) -> list[BoundaryValue]:
        """Return what crosses before block `number`, as it is called between stages `stage - 1` and `stage`."""
        values = self.graph.crossing(self.ends[number])
        return [
            BoundaryValue(name, name if not stage or name in self._plain else f"s{stage}.{name}") for name in values
        ]

    @property
    def _plain(self) -> set[str]:
        return set(self.graph.outputs)

    def described(self, crossings: Sequence[BoundaryValue]) -> dict[str, Tensor]:
        """Return the tensors that cross, by their names here."""
        table = {item.name: described(item.name, [sizes[item.value] for sizes in self.examples]) for item in crossings}
        bounds = {name: self.bounds[name] for name in table if name in self.bounds}
        return table | {name: replace(table[name], below=below, least=least) for name, (least, below) in bounds.items()}

    def write(self, first: int, end: int, stage: int, path: Path) -> tuple[list[Tensor], list[Tensor]]:
        """Write blocks from `first` to before `end` as stage number `stage`; returns its inputs and outputs."""
        taken, values = self.boundary(first, stage), self.boundary(end, stage + 1)
        tensors = self.described([*taken, *values])
        self.graph.write(self.ends[first], self.ends[end], taken, values, tensors, path)
        return [tensors[boundary_value.name] for boundary_value in taken], [tensors[value.name] for value in values]

    def seconds(self, first: int, stage: int, path: Path, *, runs: int = 25, max_seconds: float = 2.0) -> float:
        """Return the seconds of a written stage in ONNX Runtime, on one thread, at the first size.

        The least of several runs counts: whatever else the machine does only adds to it.
        """
        session = open_session(path)
        arrays = {value.name: self.examples[0][value.value] for value in self.boundary(first, stage)}
        arrays = {tensor.name: arrays[tensor.name] for tensor in session.get_inputs()}
        session.run(None, arrays)
        durations: list[float] = []
        begun = time.perf_counter()
        while len(durations) < runs and (len(durations) < 3 or time.perf_counter() - begun < max_seconds):
            start = time.perf_counter()
            session.run(None, arrays)
            durations.append(time.perf_counter() - start)
        return min(durations)


def chain_of(
    path: Path, blocks: Sequence[str], example: Example, sizes: ExampleSizes, bounds: Mapping[str, LookupBounds]
) -> GraphChain:
    """Return the chain of a written graph; runs it at each size."""
    graph = Graph(path)
    if not graph.nodes:
        raise ModelError("the model computes nothing", expected="a model with at least one operation")
    starts = graph.starts(blocks) or [(path.stem, 0)]
    ends = (*(at for _, at in starts), len(graph.nodes))
    values = list(dict.fromkeys(name for at in ends for name in graph.crossing(at)))
    examples = _values(graph, path, values, [example(*size) for size in sizes])
    return GraphChain(graph, tuple(name for name, _ in starts), ends, tuple(examples), bounds)


def _values(
    graph: Graph, path: Path, values: Sequence[str], inputs: Sequence[Mapping[str, torch.Tensor]]
) -> list[Arrays]:
    """Return values inside a graph, run on several inputs."""
    inner = [value for value in values if value not in graph.inputs and value not in graph.outputs]
    whole = onnx.load(str(path), load_external_data=False)
    whole.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in inner)
    beside = path.with_name("values.onnx")
    onnx.save(whole, str(beside))
    session = open_session(beside)
    names = [output.name for output in session.get_outputs()]
    values_by_example: list[Arrays] = []
    for tensors in inputs:
        arrays: dict[str, Array] = {name: tensor.numpy() for name, tensor in tensors.items()}
        used = {tensor.name for tensor in session.get_inputs()}
        outputs = session.run(names, {name: array for name, array in arrays.items() if name in used})
        values_by_example.append(arrays | dict(zip(names, outputs, strict=True)))
    return values_by_example


def described(name: str, examples: Sequence[Array]) -> Tensor:
    """Return what is known of a tensor from examples at three sizes.

    >>> import numpy as np
    >>> described("x", [np.zeros((4, 8, 3)), np.zeros((5, 8, 3)), np.zeros((4, 2, 3))])
    Tensor(name='x', datatype='FP64', shape=('batch', 'length', 3), below=None, least=0)
    """
    base, wide, long = examples
    shape: list[int | str] = []
    for at, (size, with_rows, with_length) in enumerate(zip(base.shape, wide.shape, long.shape, strict=True)):
        if size == with_rows == with_length:
            shape.append(size)
        elif size == with_rows:
            shape.append(LENGTH)
        elif size == with_length and at == 0:
            shape.append(BATCH)
        else:
            shape.append(f"{name}_{at}")
    try:
        return Tensor(name, datatype_of(base.dtype), tuple(shape))
    except KeyError:
        raise ModelError(
            f"a tensor between blocks has type {base.dtype}", expected="numbers", fix="convert the model to float32"
        ) from None
