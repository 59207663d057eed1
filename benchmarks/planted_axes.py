"""Bugs for `runtime/axes`: what counts as experts, which divided layers belong together."""

from __future__ import annotations

from planting import Bug

AXES = (
    Bug(
        "one-stacked-weight-makes-experts",
        "is_experts",
        "or any(one.dim() < 2 or one.shape[0] != number for one in own)",
        "or all(one.dim() < 2 or one.shape[0] != number for one in own)",
        "A module with one stacked weight among others is divided as experts.",
    ),
    Bug(
        "traced-counts-below-zero",
        "Sorted.of.each",
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
        "_Latent.after",
        "if not self._tensors.is_on or is_traced(made):",
        "if not self._tensors.is_on and is_traced(made):",
        "A model that is traced, or run as a whole, exchanges gradients with other lines.",
    ),
)
