"""Cut the backward graph of compiled code in two: what I computes, and what can wait for W.

    tangent ──► gelu' ──┬──► mm with the weight ──► gradient of the input        I
                        └──► mm with the input  ──► gradient of the weight       W

I takes everything that leads to gradients of inputs, and every node with side effects (random numbers, in-place
changes). W takes the rest. What W needs is kept: arguments of the backward, and results of I. Views are recomputed
rather than kept. Some operators compute both kinds of gradient at once and can be told which; they run once per half.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

# Operators with an `output_mask` whose cost depends on the requested outputs. Batch norms are not among them: the
# gradients of their weights are sums that the input's gradient also needs.
_MASKED = frozenset(
    f"aten::{name}_backward" for name in ("convolution", "native_layer_norm", "native_group_norm", "_fused_rms_norm")
)


@dataclass(frozen=True, slots=True)
class Halves:
    """Two graphs that replace one; both refer to the outputs of the whole.

    `input` takes all arguments of the whole. It returns the outputs at positions `inputs`, then the results that it
    keeps. `weight` takes the arguments at positions `kept_at`, then those results, and returns the outputs at positions
    `weights`. All other outputs are None.
    """

    input: GraphModule
    weight: GraphModule
    inputs: tuple[int, ...]
    weights: tuple[int, ...]
    kept_at: tuple[int, ...]
    num_outputs: int


def halves(whole: GraphModule, weights: Collection[int]) -> Halves:
    """Cut a backward graph; `weights` are the positions of the outputs that can wait.

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> whole = make_fx(lambda x, w, g: (g.mm(w), g.t().mm(x)))(torch.ones(1, 2), torch.ones(3, 2), torch.ones(1, 3))
    >>> cut = halves(whole, weights=[1])
    >>> [node.name for node in cut.weight.graph.nodes], cut.kept_at
    (['x_1', 'g_1', 't', 'mm_1', 'output'], (0, 2))
    """
    graph = whole.graph
    outputs: Sequence[Any] = graph.output_node().args[0]  # type: ignore[assignment]
    late = [place for place, output in enumerate(outputs) if isinstance(output, Node) and place in weights]
    soon = [place for place, output in enumerate(outputs) if isinstance(output, Node) and place not in weights]
    acting = [node for node in graph.nodes if node.op.startswith("call_") and node.is_impure()]
    first = _leading_to([*(outputs[place] for place in soon), *acting])
    _separate(graph, first)
    first |= {user for node in first for user in node.users if user.target is operator.getitem}
    arguments = graph.find_nodes(op="placeholder")
    second = _leading_to([outputs[place] for place in late], until=lambda node: node in first and not _is_view(node))
    # Dynamic sizes are numbers among the arguments; the compiler needs them in each half.
    kept_nodes = [node for node in arguments if node in second or isinstance(node.meta.get("val"), torch.SymInt)]
    both = [node for node in graph.nodes if node in first and node in second]
    handed = [node for node in both if node.op not in ("placeholder", "get_attr") and not _is_view(node)]
    return Halves(
        _part(whole, arguments, [*(outputs[place] for place in soon), *handed], first),
        _part(whole, [*kept_nodes, *handed], [outputs[place] for place in late], second),
        tuple(soon),
        tuple(late),
        tuple(arguments.index(node) for node in kept_nodes),
        len(outputs),
    )


def _leading_to(ends: Iterable[Node], until: Any = lambda node: False) -> set[Node]:
    """Return all nodes that the ends depend on, including themselves, stopping where `until` holds."""
    nodes: set[Node] = set()
    todo = list(ends)
    while todo:
        node = todo.pop()
        if node not in nodes:
            nodes.add(node)
            if not until(node):
                todo += node.all_input_nodes
    return nodes


def _is_view(node: Node) -> bool:
    return bool(getattr(node.target, "is_view", False))


def _separate(graph: Graph, first: set[Node]) -> None:
    """Let operators that compute gradients for both halves run in each of them."""
    for node in list(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        late = [user for user in node.users if user.target is operator.getitem and user not in first]
        if node not in first or not late or schema is None or schema.name not in _MASKED:
            continue
        names = [argument.name for argument in schema.arguments]
        place = names.index("output_mask")
        wanted: Sequence[bool] = node.args[place]
        waiting = {user.args[1] for user in late}
        with graph.inserting_after(node):
            twin = graph.node_copy(node, lambda half: half)
        for half, waits in ((node, False), (twin, True)):
            mask = [want and (at in waiting) is waits for at, want in enumerate(wanted)]
            half.args = (*half.args[:place], mask, *half.args[place + 1 :])
            value = half.meta.get("val")
            if value is not None:
                half.meta["val"] = type(value)(
                    part if is_kept else None for part, is_kept in zip(value, mask, strict=True)
                )
        for user in late:
            user.replace_input_with(node, twin)


def _part(whole: GraphModule, nodes: Sequence[Node], wanted: Sequence[Node], needed: set[Node]) -> GraphModule:
    """Return the needed part of a graph, which computes `wanted` from `nodes`."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in nodes:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in whole.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in wanted))
    return GraphModule(whole, graph)
