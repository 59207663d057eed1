"""What logits say of labels is what PyTorch's own losses and distributions say of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from drumline.model.loss.label_scores import IGNORED, label_scores
from some import some

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("shifted", [False, True])
def test_scores_are_those_of_pytorchs_cross_entropy_and_distributions(shifted: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 6, 7, generator=generator, requires_grad=True)
    labels = torch.randint(7, (3, 4), generator=generator)  # two rows of a prompt have no labels
    labels[0, 2] = IGNORED
    reported = ["entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "aux_loss"]
    given = (None, labels) if shifted else (labels, None)
    scores = label_scores(logits, *given, reported=reported)
    assert scores.keys() == {"label_mask", "log_probs", *reported[:4]}
    places = 6 if shifted else 5
    assert {tuple(value.shape) for value in scores.values()} == {(3, places)}
    rows = logits[:, 2:] if shifted else logits[:, 1:-1]  # what predicts these labels
    losses = cross_entropy(rows.mT, labels, ignore_index=IGNORED, reduction="none")
    torch.testing.assert_close(-scores["log_probs"][:, -4:], losses)
    assert scores["log_probs"].requires_grad
    counts = labels != IGNORED
    chances: Any = torch.distributions.Categorical(logits=rows)
    wanted = {
        "label_mask": counts, "entropy": chances.entropy() * counts, "mean_logits": rows.mean(-1) * counts,
        "is_top1": (rows.argmax(-1) == labels) & counts,
        "log_sum_sq_probs": chances.probs.square().sum(-1).log() * counts,
    }  # fmt: skip
    for name, value in some(wanted.items()):
        torch.testing.assert_close(scores[name][:, -4:], value)
        assert not scores[name].requires_grad
        assert not scores[name][:, :-4].any()
