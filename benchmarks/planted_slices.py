"""Bugs for slices of sequences: `features/slices`, `schedules/slices` and `core/slices`."""

from __future__ import annotations

from planting import Bug

SLICES = (
    Bug(
        "slices-owe-nothing",
        "SliceMemory.settle",
        "total[..., : part.shape[-2], :].add_(part)",
        "total[..., : part.shape[-2], :].copy_(part)",
        "A slice's keys get the gradient of the slice after it alone.",
    ),
    Bug(
        "slices-see-themselves-alone",
        "_pieces",
        "cuts[: 1 + bool(prefix)]",
        "cuts[:1]",
        "A slice does not attend to the slices before it.",
    ),
    Bug(
        "slices-merge-by-half",
        "in_pieces.forward",
        "lse, more = both, (*more, *other_more)",
        "more = (*more, *other_more)",
        "The backward of attention divides by the sum of the diagonal's weights.",
    ),
    Bug(
        "slices-draw-apart",
        "Randomness.seed_for.key",
        "(self.first + microbatch) // self.alike",
        "(self.first + microbatch)",
        "Dropout draws other numbers for every slice.",
    ),
    Bug(
        "slices-drop-the-first-places",
        "SliceCalls._drawn",
        "[:, start:stop]",
        "[:, : stop - start]",
        "Every slice drops the same places.",
    ),
    Bug(
        "slices-begin-at-0",
        "in_units",
        "torch.arange(length, device=lead.device)[None].expand(rows, -1)",
        "(torch.arange(length, device=lead.device) % 2)[None].expand(rows, -1)",
        "Tokens of a slice have other positions.",
    ),
    Bug(
        "slices-forward-order-alone",
        "mirrored",
        "unit - unit % num_slices * 2 + num_slices - 1",
        "unit",
        "Slices go backward in the order in which they went forward.",
    ),
    Bug(
        "slices-any-order",
        "in_order",
        "for ops, step in ((FORWARDS, 1), (BACKWARDS, -1)):",
        "for ops, step in ((FORWARDS, 1), (BACKWARDS, 1)):",
        "A program whose slices go back too early runs.",
    ),
    Bug(
        "slices-traced-are-kept",
        "SliceCalls.__torch_function__",
        "handler is not None and not _are_traced(args) and not _are_traced((kwargs or {}).values())",
        "handler is not None",
        "A model that is traced again in a step leaves tensors without data among the keys.",
    ),
    Bug(
        "slices-flat-dropout",
        "SliceCalls._dropout",
        "elif value.dim() > 1 and value.shape[0] == rows * tokens:",
        "elif value.dim() > 9:",
        "Models that drop out tokens in one dimension are refused.",
    ),
    Bug(
        "slices-weighed-without-owed",
        "SliceMemory.tensors",
        "return [*self.keys.values(), *self.values.values(), *(self.owed or ())]",
        "return []",
        "Weighed steps do not count gradients of keys and values.",
    ),
    Bug(
        "slices-share-by-tokens",
        "slice_shares",
        "attention * (end * end - start * start) / (total * total)",
        "attention * (end - start) / total",
        "Later slices are taken to cost as much as the first.",
    ),
)
