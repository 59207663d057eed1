"""Parameters that a block uses without holding them: its gradient would go where nobody looks, so it is refused.

A head that reaches its embedding through a list or a closure hides that the two share a weight. In one process that
works; on another rank the weight would be a copy that nothing keeps up to date. The graph of a first forward shows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from torch.autograd.graph import GradientEdge, Node

from drumline.core.errors import ModelError


def refuse_foreign(roots: Sequence[GradientEdge], own: Iterable[nn.Parameter], names: Sequence[str]) -> None:
    """Refuse a graph that reaches a parameter which is not among `own`, those of the blocks called `names`."""
    known = {id(one) for one in own}
    seen: set[Node] = set()
    todo: list[Node | None] = [root.node for root in roots]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in known:
            one_of = f"one of the blocks {', '.join(names)}"
            raise ModelError(
                f"{one_of} uses a parameter of shape {tuple(leaf.shape)} that it does not hold",
                expected="every parameter as an attribute of the module that uses it, tied or not",
                fix="tie it openly: head.weight = embedding.weight",
            )
        todo += [one for one, _ in node.next_functions]
