"""Bugs for meshes: what counts as experts, which divided layers belong together, losses and rounding of lines."""

from __future__ import annotations

from planting import Bug

AXES = (
    Bug(
        "one-stacked-weight-makes-experts",
        "is_experts",
        "or any(param.dim() < 2 or param.shape[0] != number for param in own_parameters)",
        "or all(param.dim() < 2 or param.shape[0] != number for param in own_parameters)",
        "A module with one stacked weight among others is divided as experts.",
    ),
    Bug(
        "traced-counts-below-zero",
        "SortedPairs.of.each",
        "each = flat.numel() // num_experts",
        "each = flat.numel() * num_experts",
        "Traced experts have counts below zero, by which nothing can be split.",
    ),
    Bug(
        "the-whole-model-is-a-module-like-others",
        "_depth",
        'return len(scope.split(".")) if scope else 0',
        'return len(scope.split("."))',
        "A layer by columns is paired with one by rows of another module, which has its own.",
    ),
    Bug(
        "latent-outputs-of-plain-runs",
        "LayerExchanges.after_latent",
        "if not self.is_on or is_traced(output):",
        "if not self.is_on and is_traced(output):",
        "A model that is traced, or run as a whole, exchanges gradients with other lines.",
    ),
    Bug(
        "a-line-without-labels-has-its-own-dtype",
        "summed_losses",
        "return total[: len(parts)].to(widest(dtypes_told) or parts.dtype)",
        "return total[: len(parts)].to(widest(dtypes) or parts.dtype)",
        "A line that counts no label returns a loss of another dtype than the other lines do.",
    ),
    Bug(
        "nothing-is-nudged",
        "Nudge._moved",
        "if tensor.dtype not in LOW or not count",
        "if tensor.dtype in LOW or not count",
        "No rounding is measured, so that right models in bfloat16 are refused on meshes.",
    ),
    Bug(
        "the-nearest-nudged-run-counts",
        "Rounding.between",
        "param: max(norm_of(each.double()",
        "param: min(norm_of(each.double()",
        "Right models in bfloat16 are refused where one nudged run is near by luck.",
    ),
    Bug(
        "every-nudged-run-is-alike",
        "Nudge.__init__",
        "drawn = random.Random(seed)",
        "drawn = random.Random(0)",
        "Right models in bfloat16 are refused where the one nudged run is near by luck.",
    ),
    Bug(
        "experts-are-compared-with-a-part",
        "together",
        "if slice_of(param) is None",
        "if slice_of(param) is not param",
        "Experts of a model on the meta device are refused, since no line finds what is wanted of them.",
    ),
    Bug(
        "experts-round-nothing",
        "Trial._add_up",
        "norm_of(other.double() - total.double()) for other",
        "norm_of(other.double() + total.double()) for other",
        "Any gradient of experts passes for rounding in bfloat16.",
    ),
    Bug(
        "no-gradient-tells-no-length",
        "_kind_of_share",
        "if not squares and not others:",
        "if not squares and others:",
        "A sum is refused where no microbatch of different lengths counts a label.",
    ),
    Bug(
        "targets-of-other-lengths-are-not-joined",
        "alike",
        "if short == max(lengths) or None in dims:",
        "if short != max(lengths) or None in dims:",
        "A sum is refused where a microbatch without labels has another length than those that count.",
    ),
)
