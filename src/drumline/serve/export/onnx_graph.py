"""An ONNX graph that can be cut between any two nodes.

    nodes   0 1 2 │ 3 4 5 6 │ 7 8         in the order in which they run; each names the module that it comes from
                  └ values made before and used behind cross here

A cut takes a stretch of nodes, the weights that they use, what crosses into it as inputs and what crosses out of it as
outputs. A value that only passes through a stage gets a name of its own behind it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

from drumline.serve.wire.manifest import Tensor
from drumline.serve.wire.tensors import DATATYPES

_SCOPES = "pkg.torch.onnx.name_scopes"
CLASSES = "pkg.torch.onnx.class_hierarchy"
_LARGE = 2**20  # bytes of weights from which on they stand in their own file
DATA = "model.onnx.data"


@dataclass(frozen=True, slots=True)
class BoundaryValue:
    """A value that crosses a boundary: as the whole graph calls it, and as it is called here."""

    value: str
    name: str


class Graph:
    """A whole graph, with who makes and uses which value."""

    def __init__(self, path: Path) -> None:
        self.model = onnx.load(str(path))
        graph = self.model.graph
        self.nodes = [node for node in graph.node if node.op_type != "Constant"]
        constants = [_initializer(node) for node in graph.node if node.op_type == "Constant"]
        self.weights = {tensor.name: tensor for tensor in (*graph.initializer, *constants)}
        self.inputs = [tensor.name for tensor in graph.input if tensor.name not in self.weights]
        self.outputs = [tensor.name for tensor in graph.output]
        self._maker: dict[str, int] = dict.fromkeys(self.inputs, -1)
        self._used: dict[str, int] = dict.fromkeys(self.outputs, len(self.nodes))
        for at, node in enumerate(self.nodes):
            for name in node.output:
                self._maker[name] = at
            for name in used_by(node):
                self._used[name] = max(self._used.get(name, -1), at)

    def crossing(self, at: int) -> list[str]:
        """Return the values made before node `at` and used by it or later, in the order in which they are made."""
        if at == 0:
            return list(self.inputs)
        if at == len(self.nodes):
            return list(self.outputs)
        return [name for name, maker in self._maker.items() if maker < at <= self._used.get(name, -1)]

    def starts(self, blocks: Sequence[str]) -> list[tuple[str, int]]:
        """Return the blocks that have nodes, each with its first node; the first begins at node 0."""
        starts_by_name: dict[str, int] = {}
        for at, node in enumerate(self.nodes):
            name = _block_of(node, blocks)
            if name and name not in starts_by_name:
                starts_by_name[name] = at
        listed = sorted(starts_by_name.items(), key=lambda attribute: attribute[1])
        distinct = [pair for number, pair in enumerate(listed) if not number or pair[1] > listed[number - 1][1]]
        return [(name, at if number else 0) for number, (name, at) in enumerate(distinct)]

    def _weights_of(self, first: int, end: int) -> list[Any]:
        used = {name for node in self.nodes[first:end] for name in used_by(node)}
        used |= set(self.outputs) if end == len(self.nodes) else set()
        return [weight for name, weight in self.weights.items() if name in used]

    def write(
        self,
        first: int,
        end: int,
        taken: Sequence[BoundaryValue],
        values: Sequence[BoundaryValue],
        described: dict[str, Tensor],
        path: Path,
    ) -> None:
        """Write a stretch of nodes as its own graph; `described` has the tensors that cross, by name here."""
        names = {boundary_value.value: boundary_value.name for boundary_value in taken}
        nodes = [_renamed(node, names) for node in self.nodes[first:end]]
        for boundary_value in values:
            source = names.get(boundary_value.value, boundary_value.value)
            if source != boundary_value.name:
                nodes.append(helper.make_node("Identity", [source], [boundary_value.name]))
        weights = self._weights_of(first, end)
        graph = helper.make_graph(
            nodes,
            path.parent.name,
            [_value_info(described[boundary_value.name]) for boundary_value in taken],
            [_value_info(described[boundary_value.name]) for boundary_value in values],
            weights,
        )
        model = helper.make_model(graph, opset_imports=self.model.opset_import, functions=self.model.functions)
        model.ir_version = self.model.ir_version
        path.parent.mkdir(parents=True, exist_ok=True)
        large = sum(len(weight.raw_data) for weight in weights) >= _LARGE
        onnx.save(model, str(path), save_as_external_data=large, location=DATA if large else None, size_threshold=1024)


def _initializer(node: Any) -> Any:
    """Return a constant as a weight, so that every stretch that uses it has it."""
    item = next((attribute for attribute in node.attribute if attribute.name == "value"), None)
    if item is not None:
        tensor = TensorProto()
        tensor.CopyFrom(item.t)
    else:
        kinds = {"value_int": TensorProto.INT64, "value_ints": TensorProto.INT64}
        kinds |= {"value_float": TensorProto.FLOAT, "value_floats": TensorProto.FLOAT}
        item = node.attribute[0]
        value = helper.get_attribute_value(item)
        several = item.name.endswith("s")
        tensor = helper.make_tensor(
            "", kinds[item.name], [len(value)] if several else [], value if several else [value]
        )
    tensor.name = node.output[0]
    return tensor


def used_by(node: Any) -> Iterator[str]:
    """Yield the values that a node uses, those of graphs inside it too."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        for graph in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
            own_names = {tensor.name for tensor in (*graph.input, *graph.initializer)}
            for inner in graph.node:
                yield from (name for name in used_by(inner) if name not in own_names)
                own_names.update(inner.output)
            yield from (tensor.name for tensor in graph.output if tensor.name not in own_names)


def _renamed(node: Any, names: dict[str, str]) -> Any:
    """Return a copy of a node that uses other names for some values."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    del copy.metadata_props[:]
    copy.doc_string = ""
    for at, name in enumerate(copy.input):
        copy.input[at] = names.get(name, name)
    for attribute in copy.attribute:
        for graph in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
            inner = [_renamed(value, names) for value in graph.node]
            del graph.node[:]
            graph.node.extend(inner)
    return copy


def note_of(node: Any, key: str) -> str:
    """Return what the exporter noted of a node under a key."""
    return next((str(prop.value) for prop in node.metadata_props if prop.key == key), "")


def _block_of(node: Any, blocks: Sequence[str]) -> str:
    """Return the block of the module that a node comes from, or nothing."""
    text = note_of(node, _SCOPES)
    try:
        scopes = ast.literal_eval(text) if text else []
    except (ValueError, SyntaxError):
        return ""
    paths = {str(scope).removeprefix("model.") for scope in scopes}
    return max((block for block in blocks if block in paths), key=len, default="")


def _value_info(tensor: Tensor) -> Any:
    kind = helper.np_dtype_to_tensor_dtype(DATATYPES[tensor.datatype])
    return helper.make_tensor_value_info(tensor.name, kind, list(tensor.shape))
