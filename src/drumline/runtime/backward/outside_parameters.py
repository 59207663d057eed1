"""Parameters that a block uses without holding them: its gradient would go where nobody looks, so it is refused.

A head that reaches its embedding through a list or a closure hides that the two share a weight. In one process that
works; on another rank the weight would be a copy that nothing keeps up to date. The graph of a first forward shows it.

So does a tensor that another stage made and left in an attribute, such as a router's loss that is read by `loss_fn`: by
then it may be that of another microbatch, and its gradient has no way back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from drumline.core.errors import ModelError


def begun(tensor: Tensor) -> Tensor:
    """Mark a tensor as the beginning of a stage's graph, where a gradient ends that belongs to this stage alone."""
    tensor.__dict__["is_beginning"] = True
    return tensor


def leaves_of(roots: Sequence[GradientEdge]) -> Iterator[Tensor]:
    """Yield the tensors that a graph begins with.

    >>> from torch.autograd.graph import get_gradient_edge
    >>> x = nn.Parameter(nn.Linear(2, 2).weight)
    >>> [one is x for one in leaves_of([get_gradient_edge(x * 3)])]
    [True]
    """
    seen: set[Node] = set()
    todo: list[Node | None] = [root.node for root in roots]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            yield leaf
        todo += [one for one, _ in node.next_functions]


def refuse_foreign(
    roots: Sequence[GradientEdge], own: Iterable[nn.Parameter], names: Sequence[str], begins: Iterable[Tensor]
) -> None:
    """Refuse a graph that begins with a parameter which is not among `own`, or with what others begin with.

    `names` are the blocks that made it, `begins` what their graph may begin with.
    """
    known = {id(one) for one in (*own, *begins)}
    for leaf in leaves_of(roots):
        if id(leaf) in known:
            continue
        one_of = f"one of the blocks {', '.join(names)}" if names else "the loss"
        if isinstance(leaf, nn.Parameter):
            raise ModelError(
                f"{one_of} uses a parameter of shape {tuple(leaf.shape)} that it does not hold",
                expected="every parameter as an attribute of the module that uses it, tied or not",
                fix="tie it openly: head.weight = embedding.weight; a tensor that another block made from it is to "
                "be returned by that block",
            )
        if getattr(leaf, "is_beginning", False):
            raise ModelError(
                f"{one_of}, or the loss, uses a tensor that blocks of another stage made and did not return",
                expected="blocks and a loss that take all they use from what the block before returns",
                fix="return it from the block that makes it, as (x, aux), and hand it on",
            )
