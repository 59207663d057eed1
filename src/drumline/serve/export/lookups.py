"""Numbers by which a model looks something up: which ones clients may send, and negative ones inside the graph.

PyTorch refuses a negative index of an embedding; ONNX counts it from the end of the table and answers. So bounds of
inputs are followed from each lookup back to the input, through casts, sums and reshapes, and stand in the manifest. And
the graph makes a negative index, wherever it comes from, one that ONNX Runtime refuses. PyTorch also refuses a number
that is none of the classes of a one-hot vector, and the exporter would write zeros for it; so the vector is looked up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from drumline.serve.export.onnx_graph import CLASSES, note_of

_ATEN = torch.ops.aten
_SAME = (  # operations whose output has the numbers of their first input, all of them
    "_to_copy", "to", "clone", "contiguous", "detach", "alias", "lift_fresh_copy", "view", "reshape", "_unsafe_view",
    "flatten", "unsqueeze", "squeeze", "permute", "transpose", "t", "expand", "expand_as", "broadcast_to", "repeat",
    "view_as",
)  # fmt: skip
_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool)
_REFUSING = ("aten.embedding", "aten.index_select", "aten.gather", "aten.scatter", "aten.take")
_PLACES = {"Gather": 1, "GatherElements": 1, "ScatterElements": 1}  # which input of a node has the indices
_CPU = torch.device("cpu")
_NONE = 2**62  # an index that no table has


class LookupBounds(NamedTuple):
    """The least whole number of an input, and the one that is too large."""

    least: int
    below: int


def with_looked_up_classes(program: Any) -> Any:
    """Change an exported program so that it looks up one-hot vectors among those of all classes; returns it."""
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        count = node.args[1] if len(node.args) > 1 else None
        if getattr(node.target, "overloadpacket", None) is not _ATEN.one_hot or not isinstance(count, int) or count < 1:
            continue
        with graph.inserting_before(node):
            every = graph.call_function(_ATEN.eye.default, (count,), {"dtype": torch.int64, "device": _CPU})
            looked_up = graph.call_function(_ATEN.embedding.default, (every, node.args[0]))
        with node.meta["val"].fake_mode:
            every.meta = {**node.meta, "val": torch.eye(count, dtype=torch.int64, device=_CPU)}
        looked_up.meta = dict(node.meta)
        node.replace_all_uses_with(looked_up)
        program.graph_signature.replace_all_uses(node.name, looked_up.name)
        graph.erase_node(node)
    program.graph_module.recompile()
    return program


def bounds_of(program: Any, names: Sequence[str]) -> dict[str, LookupBounds]:
    """Return the bounds of inputs by which an exported program looks something up."""
    inputs = dict(zip(program.graph_signature.user_inputs, names, strict=True))
    bounds: dict[str, LookupBounds] = {}
    for node in program.graph.nodes:
        for place, count in _lookups(node):
            if (source := _input_of(place, inputs)) is None:
                continue
            name, offset = source
            known = bounds.get(name, LookupBounds(-offset, count - offset))
            bounds[name] = LookupBounds(max(known.least, -offset), min(known.below, count - offset))
    return bounds


def _lookups(node: Any) -> Iterator[tuple[Any, int]]:
    """Yield the indices of a lookup, and how many entries there are."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is _ATEN.embedding:
        table, indices, at = node.args[0], node.args[1], 0
    elif packet is _ATEN.index_select or packet is _ATEN.gather:
        table, at, indices = node.args[:3]
    else:
        return
    count = table.meta["val"].shape[at]
    if isinstance(count, int):
        yield indices, count


def _input_of(node: Any, inputs: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the input that a value is, plus a number; None if it is something else."""
    offset = 0
    while node.op != "placeholder":
        packet, value = getattr(node.target, "overloadpacket", None), node.args[0] if node.args else None
        if not isinstance(value, torch.fx.Node) or "val" not in value.meta or _is_odd(value):
            return None
        if packet in (_ATEN.add, _ATEN.sub):
            number = node.args[1]
            if isinstance(number, bool) or not isinstance(number, int) or node.kwargs:
                return None
            offset += number if packet is _ATEN.add else -number
        elif packet is None or packet.__name__ not in _SAME:
            return None
        node = value
    return (inputs[node.name], offset) if node.name in inputs and not _is_odd(node) else None


def _is_odd(node: Any) -> bool:
    """Whether a value is no tensor of whole numbers with a sign, whose casts and sums keep their order."""
    dtype = getattr(node.meta["val"], "dtype", None)
    return (
        dtype is None
        or dtype.is_floating_point
        or dtype.is_complex
        or (dtype in _UNSIGNED and node.op != "placeholder")
    )


def refuse_negative(path: Path) -> None:
    """Rewrite a written graph so that ONNX Runtime refuses a negative index where PyTorch does."""
    model = onnx.load(str(path), load_external_data=False)
    nodes: list[Any] = []
    for number, node in enumerate(model.graph.node):
        at = _PLACES.get(node.op_type)
        if at is not None and any(name in note_of(node, CLASSES) for name in _REFUSING):
            checked = _checked(node.input[at], f"lookup{number}", node.metadata_props)
            node.input[at] = checked[-1].output[0]
            nodes += checked
        nodes.append(node)
    if len(nodes) == len(model.graph.node):
        return
    for name, value in (("lookup.zero", 0), ("lookup.none", _NONE)):
        model.graph.initializer.append(numpy_helper.from_array(torch.tensor(value).numpy(), name))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, str(path))


def _checked(indices: str, name: str, notes: Any) -> list[Any]:
    """Return nodes that turn negative indices into one that no table has."""
    nodes = [
        helper.make_node("Cast", [indices], [f"{name}.whole"], to=TensorProto.INT64),
        helper.make_node("Less", [f"{name}.whole", "lookup.zero"], [f"{name}.negative"]),
        helper.make_node("Where", [f"{name}.negative", "lookup.none", f"{name}.whole"], [f"{name}.checked"]),
    ]
    for node in nodes:
        node.metadata_props.extend(notes)
    return nodes
