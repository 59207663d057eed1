"""What outputs that are no floating-point numbers are decided by: the values that an argmax or a comparison takes.

Rows that mix seldom change a class or a bool at random, and always what it is decided by. So that is compared too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

from drumline.serve.export.onnx_graph import used_by
from drumline.serve.session import open_session

_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def deciding_session(whole: Path) -> Any | None:
    """Return a session of a written graph that computes what its discrete outputs are decided by, or None."""
    model = onnx.load(str(whole), load_external_data=False)
    names = _deciding(model.graph)
    if not names:
        return None
    del model.graph.output[:]
    model.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
    beside = whole.with_name("deciding.onnx")
    onnx.save(model, str(beside))
    return open_session(beside)


def _deciding(graph: Any) -> list[str]:
    """Return the nearest floating-point values behind the outputs that are none."""
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.value_info, *graph.output)}
    makers = {name: node for node in graph.node for name in node.output}
    values: dict[str, None] = {}
    visited: set[str] = set()
    waiting = [output.name for output in graph.output if kinds[output.name] not in _FLOATS]
    while waiting:
        name = waiting.pop()
        if name in visited or name not in makers:
            continue
        visited.add(name)
        if kinds.get(name) in _FLOATS:
            values[name] = None
        else:
            waiting += used_by(makers[name])
    return list(values)
