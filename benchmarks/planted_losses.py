"""Bugs for `engine/loss/rules` and `engine/loss`: how a loss function is compared with itself on fewer rows."""

from __future__ import annotations

from planting import Bug

LOSSES = (
    Bug(
        "loss-compared-by-value",
        "LossComparison.fits",
        "return error <= self.near * norm and abs(value",
        "return abs(value",
        "Weights that make losses add up, but not their gradients, pass.",
    ),
    Bug(
        "loss-compared-by-gradient",
        "LossComparison._fit.best",
        "                best = product / square if square else 0.0\n",
        "                best = 1.0\n",
        "A mean over rows is taken for no sum of its parts, or the reverse.",
    ),
    Bug(
        "sums-of-nothing-tell",
        "_fitting",
        "    if all(share.is_zero for share in shares):  # sums of nothing tell no rule\n        return "
        "tuple(dict.fromkeys(order))\n",
        "",
        "A microbatch without labels decides that a loss does not count labels.",
    ),
    Bug(
        "norms-in-single-precision",
        "products",
        "(each[at : at + _AT_ONCE].double() for each in flat)",
        "(each[at : at + _AT_ONCE].float() for each in flat)",
        "Fits of gradients in double precision are judged with the precision of float32.",
    ),
    Bug(
        "same-draws-for-all-parts",
        "_rows_of",
        "return whole.narrow(dims[0], first * inside, (end - first) * inside)",
        "return whole.narrow(dims[0], 0, (end - first) * inside)",
        "The second part of the rows draws what the first rows drew.",
    ),
    Bug(
        "gradients-of-other-rows",
        "LinkedRows.rows_of",
        "tensor.narrow(place[0], first * place[1], (end - first) * place[1])",
        "tensor.narrow(place[0], 0, (end - first) * place[1])",
        "A loss that takes gradients gets those of other rows than its own.",
    ),
    Bug(
        "rows-not-stirred",
        "stirred",
        "torch.cat([part.roll(at, -1) for at, part in enumerate(each)], dim)",
        "torch.cat([part for at, part in enumerate(each)], dim)",
        "A loss that picks by its outputs is compared on rows in which it picks alike.",
    ),
    Bug(
        "branches-are-trusted",
        "found_in",
        "not (hidden or whole.picks or shapes_by_values(whole.call))",
        "not (hidden or whole.picks)",
        "A loss that decides by shapes of what a mask selects is not compared again when the mask changes.",
    ),
    Bug(
        "constants-once-for-each",
        "_needs_one",
        "    return not first.adds_to_one or (lines > 1",
        "    return (lines > 1",
        "A penalty on weights beside a sum is added once for every microbatch.",
    ),
    Bug(
        "state-of-losses-changes",
        "_of_module.put",
        "if not _same_bits(tensor, before):",
        "if tensor is before:",
        "Calls that compare leave their trace in buffers of the loss.",
    ),
    Bug(
        "lengths-of-lines-ignored",
        "FnWeight._sizes",
        "        if sizes is not None or self.across is None:\n            return sizes\n",
        "        return sizes\n",
        "Lines with longer sequences count as much as others in a mean over elements.",
    ),
    Bug(
        "rows-of-one-microbatch",
        "Comparing._of_more",
        "best.rules is None or best.comparison.whole.is_clear:",
        "best.rules is None or best.rules.fits:",
        "A loss that takes the hardest five rows is taken for a mean if a microbatch has five.",
    ),
)
