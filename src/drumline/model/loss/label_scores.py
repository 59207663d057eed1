"""What logits say of labels: their log-probabilities, and what trainers of language models report beside them."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

IGNORED = -100  # a label that does not count

# Without gradients, by name: of scores, their log-probabilities and the labels.
_REPORTED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "entropy": lambda scores, chances, labels: -(chances.exp() * chances).sum(-1),
    "log_sum_sq_probs": lambda scores, chances, labels: (2 * chances).logsumexp(-1),
    "mean_logits": lambda scores, chances, labels: scores.mean(-1),
    "is_top1": lambda scores, chances, labels: scores.argmax(-1) == labels,
}


def label_scores(
    logits: Tensor, labels: Tensor | None, shift_labels: Tensor | None = None, *, reported: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return the labels' log-probabilities, the mask of labels that count, and what else is to be reported.

    Each token's logits predict the next of the `labels`, or the same of `shift_labels`. Rows that a prompt adds in
    front have no labels. All is zero where a label does not count.

    >>> scores = label_scores(torch.zeros(1, 3, 4), torch.tensor([[1, 2, IGNORED]]), reported=["entropy"])
    >>> {name: value.tolist() for name, value in scores.items()}
    {'label_mask': [[True, False]], 'log_probs': [[-1.3862943649291992, 0.0]], 'entropy': [[1.3862943649291992, 0.0]]}
    """
    targets = labels if shift_labels is None else shift_labels
    assert targets is not None
    targets = nn.functional.pad(targets, (logits.shape[1] - targets.shape[1], 0), value=IGNORED)
    scores = logits.float()
    if shift_labels is None:
        targets, scores = targets[:, 1:], scores[:, :-1]
    mask, chosen = targets != IGNORED, targets.clamp(min=0)
    chances = scores.log_softmax(-1)
    values = {"log_probs": chances.gather(-1, chosen[..., None])[..., 0]}
    with torch.no_grad():
        values |= {name: _REPORTED[name](scores, chances, chosen) for name in reported if name in _REPORTED}
    return {"label_mask": mask, **{name: value.masked_fill(~mask, 0) for name, value in values.items()}}
