"""More losses as ordinary people write them; outputs of shape (rows, 6), float64.

`FAIR` are means, sums or both, over rows or labels: each must be that of the whole batch. `UNFAIR` mix rows: refused.
`DOUBTFUL` decide by values what they compute, and may be refused, but never be wrong. Targets of step 0 have no
padding, those of later steps have, other numbers of it in other rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as nf

ROWS, WIDTH = 19, 6
Loss = Callable[[Any, Any], Any]


def chance(step: int, what: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(100 * step + what)


def numbers(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=chance(step), dtype=torch.float64)


def padded(step: int) -> Tensor:
    """Return -1 where there is no label: nowhere in step 0, then in more of the first rows."""
    made = torch.randint(WIDTH, (ROWS,), generator=chance(step, 1))
    made[torch.rand(ROWS, generator=chance(step, 2)) < torch.linspace(0.9, 0.1, ROWS) * bool(step)] = -1
    return made


def classes(step: int) -> Tensor:
    return torch.randint(WIDTH, (ROWS,), generator=chance(step, 1))


def words(step: int) -> Tensor:
    """Return three words a row, of two kinds, -100 where there is none."""
    made = torch.randint(2, (ROWS, 3), generator=chance(step, 3))
    if step:
        made[torch.rand(ROWS, 3, generator=chance(step, 4)) < torch.linspace(0.1, 0.8, ROWS)[:, None]] = -100
    return made


class Example(NamedTuple):
    y: Tensor
    label: Tensor
    mask: Tensor
    weight: Tensor


def named(step: int) -> Example:
    mask = torch.rand(ROWS, generator=chance(step, 5)) > torch.linspace(0.8, 0.0, ROWS) * bool(step)
    weight = torch.rand(ROWS, generator=chance(step, 6), dtype=torch.float64) + 0.1
    return Example(numbers(step), classes(step), mask.double(), weight)


def listed(step: int) -> dict[str, Any]:
    made = named(step)
    return {"y": made.y, "label": made.label, "extra": [made.mask, {"w": made.weight}], "name": "a batch"}


def lengths(step: int) -> tuple[Tensor, Tensor]:
    made = torch.randint(1, WIDTH + 1, (ROWS,), generator=chance(step, 7)) if step else torch.full((ROWS,), WIDTH)
    return numbers(step), made


def smooth(o: Tensor, t: Tensor) -> Tensor:
    soft = torch.full_like(o, 0.1 / (WIDTH - 1)).scatter_(1, t[:, None], 0.9)
    return torch.mean(torch.sum(-soft * o.log_softmax(dim=-1), dim=-1))


def binary_focal(o: Tensor, t: Example) -> Tensor:
    wanted = (t.y > 0).double()
    each = nf.binary_cross_entropy_with_logits(o, wanted, reduction="none")
    p = torch.sigmoid(o)
    right = p * wanted + (1 - p) * (1 - wanted)
    return (0.25 * (1 - right) ** 2 * each).mean(dim=1).sum() / o.shape[0]


def dice(o: Tensor, t: Tensor) -> Tensor:
    p, wanted = o.sigmoid(), (t > 0).double()
    both = (p * wanted).sum(dim=1)
    return (1 - (2 * both + 1) / (p.sum(dim=1) + wanted.sum(dim=1) + 1)).mean()


def triplet(o: Tensor, t: Tensor) -> Tensor:
    near, far = (o[:, :2] - o[:, 2:4]).pow(2).sum(-1), (o[:, :2] - o[:, 4:]).pow(2).sum(-1)
    return torch.relu(near - far + 1.0).sum() / len(o)


def elbo(o: Tensor, t: Tensor) -> Tensor:
    mean, log_var = o.chunk(2, dim=-1)
    found = nf.binary_cross_entropy(mean.sigmoid(), (t[:, :3] > 0).double(), reduction="sum")
    return (found + 0.5 * (mean**2 + log_var.exp() - 1 - log_var).sum()) / t.size(0)


def ctc(o: Tensor, t: tuple[Tensor, Tensor]) -> Tensor:
    logp = nf.log_softmax(o.view(len(o), 3, 2), dim=-1).permute(1, 0, 2)
    count = len(o)
    return nf.ctc_loss(logp, torch.ones(count, 1, dtype=torch.long), torch.full((count,), 3),
                       torch.ones(count, dtype=torch.long), reduction="sum") / count  # fmt: skip


class Uncertain(nn.Module):
    """Weighs two tasks by variances that it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.log_vars = nn.Parameter(torch.tensor([0.2, -0.3], dtype=torch.float64))

    def forward(self, o: Tensor, t: Example) -> Tensor:
        tensor, two = nf.mse_loss(o[:, :3], t.y[:, :3]), nf.cross_entropy(o[:, 3:], t.label % 3)
        each = torch.stack([tensor, two])
        return (torch.exp(-self.log_vars) * each + self.log_vars).sum()


def masked_words(o: Tensor, t: Tensor) -> Tensor:
    return nf.cross_entropy(o.view(-1, 2), t.view(-1), ignore_index=-100)


def words_by_mask(o: Tensor, t: Tensor) -> Tensor:
    mask = t.ne(-100)
    each = -o.view(-1, 3, 2).log_softmax(-1).gather(-1, t.clamp(min=0)[..., None]).squeeze(-1)
    return (each * mask).sum() / mask.sum()


def means_of_sentences(o: Tensor, t: Tensor) -> Tensor:
    mask = t != -100
    each = nf.cross_entropy(o.view(-1, 3, 2).transpose(1, 2), t, reduction="none")
    return (each.sum(1) / mask.sum(1).clamp(min=1)).mean()


def sums_of_nothing(o: Tensor, t: Tensor) -> Tensor:
    return nf.cross_entropy(o, t, ignore_index=-1, reduction="sum") / max(int((t != -1).sum()), 1)


def clamped_count(o: Tensor, t: Tensor) -> Tensor:
    keep = t >= 0
    return (nf.cross_entropy(o, t.clamp(min=0), reduction="none") * keep).sum() / keep.sum().clamp(min=1)


def z_loss(o: Tensor, t: Tensor) -> Tensor:
    return nf.cross_entropy(o, t, ignore_index=-1) + 1e-2 * torch.logsumexp(o, dim=-1).pow(2).mean()


def distilled(o: Tensor, t: Example) -> Tensor:
    hot = 3.0
    soft = nf.kl_div((o / hot).log_softmax(1), (t.y / hot).softmax(1), reduction="none").sum(1)
    return 0.5 * (soft * hot**2).mean() + 0.5 * nf.cross_entropy(o, t.label)


class Perceptual:
    """Compares features of a frozen network."""

    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh()).double().requires_grad_(False)
        for param, value in zip(self.net.parameters(), (0.3, -0.1), strict=True):
            param.copy_(torch.linspace(-1, value, param.numel(), dtype=torch.float64).view_as(param))

    def __call__(self, o: Tensor, t: Tensor) -> Tensor:
        return nf.l1_loss(self.net(o), self.net(t)) + 0.1 * nf.mse_loss(o, t)


def steepness(o: Tensor, t: Tensor) -> Tensor:
    loss = nf.mse_loss(o, t, reduction="sum")
    (slope,) = torch.autograd.grad(loss, o, create_graph=True)
    return loss / len(t) + 0.1 * (slope.pow(2).sum(1).sqrt() - 1).pow(2).mean()


def by_einsum(o: Tensor, t: Tensor) -> Tensor:
    off = o - t
    return torch.einsum("ij,ij->", off, off) / len(t)


def row_by_row(o: Tensor, t: Tensor) -> Tensor:
    total = torch.zeros((), dtype=o.dtype)
    for value, wanted in zip(o, t, strict=True):
        total = total + (value - wanted).abs().max()
    return total / len(o)


def skipping_rows(o: Tensor, t: Tensor) -> Tensor:
    each = [nf.cross_entropy(o[at : at + 1], t[at : at + 1]) for at in range(len(t)) if int(t[at]) >= 0]
    return torch.stack(each).mean()


def by_numpy(o: Tensor, t: Tensor) -> Tensor:
    keep = torch.from_numpy(t.numpy() >= 0)
    return nf.cross_entropy(o[keep], t[keep])


def of_a_list(o: Tensor, t: dict[str, Any]) -> Tensor:
    mask, weight = t["extra"][0], t["extra"][1]["w"]
    each: Tensor = nf.smooth_l1_loss(o, t["y"], reduction="none").mean(1) * weight * mask
    total: Tensor = (weight * mask).sum()
    return each.sum() / total


def up_to_length(o: Tensor, t: tuple[Tensor, Tensor]) -> Tensor:
    wanted, length = t
    mask = torch.arange(o.size(1)) < length.unsqueeze(1)
    return ((o - wanted) ** 2).masked_fill(~mask, 0.0).sum() / mask.sum()


def up_to_length_in_rows(o: Tensor, t: tuple[Tensor, Tensor]) -> Tensor:
    wanted, length = t
    mask = (torch.arange(o.size(1))[None] < length[:, None]).double()
    return (((o - wanted) ** 2 * mask).sum(1) / length).mean()


def balanced(o: Tensor, t: Example) -> Tensor:
    """Mixture of experts, as most write it: the balance of each row by itself."""
    chances = o.softmax(-1)
    return nf.mse_loss(o, t.y) + 0.01 * (WIDTH * chances.pow(2).sum(-1)).mean()


def ordinal(o: Tensor, t: Tensor) -> Tensor:
    over = (t[:, None] > torch.arange(WIDTH)).double()
    return nf.binary_cross_entropy_with_logits(o, over, reduction="none").sum(1).mean(0)


def quantiles(o: Tensor, t: Tensor) -> Tensor:
    at = torch.linspace(0.1, 0.9, WIDTH, dtype=o.dtype)
    off = t - o
    return torch.max(at * off, (at - 1) * off).mean(dim=0).sum()


def student(o: Tensor, t: Tensor) -> Tensor:
    spread: Any = torch.distributions.StudentT(4.0, o[:, :3], nf.softplus(o[:, 3:]) + 0.1)
    found: Tensor = spread.log_prob(t[:, :3])
    return -found.sum(dim=-1).mean()


def mixture(o: Tensor, t: Tensor) -> Tensor:
    scores, means = o[:, :3].log_softmax(-1), o[:, 3:]
    each = -0.5 * (t[:, :1] - means) ** 2 - 0.5 * math.log(2 * math.pi)
    return -torch.logsumexp(scores + each, dim=1).mean()


def hinges(o: Tensor, t: Tensor) -> Tensor:
    return nf.multi_margin_loss(o, t, margin=0.7)


def advantage(o: Tensor, t: Example) -> Tensor:
    policy = -(o.log_softmax(-1)[torch.arange(len(o)), t.label] * t.y[:, 0]).mean()
    value = (o.mean(-1) - t.y[:, 1]).pow(2).mean()
    chances = o.softmax(-1)
    return policy + 0.5 * value + 0.01 * (chances * chances.log()).sum(-1).mean()


def listwise(o: Tensor, t: Tensor) -> Tensor:
    order = t.argsort(dim=1, descending=True)
    found = o.gather(1, order)
    rest = torch.logcumsumexp(found.flip(1), dim=1).flip(1)
    return (rest - found).sum(1).mean()


def arc(o: Tensor, t: Tensor) -> Tensor:
    near = nf.normalize(o, dim=1).clamp(-0.99, 0.99)
    moved = torch.where(nf.one_hot(t, WIDTH).bool(), torch.cos(torch.acos(near) + 0.2), near)
    return nf.cross_entropy(8.0 * moved, t)


def rare_first(o: Tensor, t: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2.0, WIDTH, dtype=o.dtype)
    return (weight[t] * nf.cross_entropy(o, t, reduction="none")).mean()


def by_class_weight(o: Tensor, t: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2.0, WIDTH, dtype=o.dtype)
    each = weight[t]
    return (each * nf.cross_entropy(o, t, reduction="none")).sum() / each.sum()


def charbonnier(o: Tensor, t: Tensor) -> Tensor:
    return torch.sqrt((o - t) ** 2 + 1e-6).sum().mul(1.0 / o.numel())


def total_variation(o: Tensor, t: Tensor) -> Tensor:
    return nf.mse_loss(o, t) + 0.1 * (o[:, 1:] - o[:, :-1]).abs().sum() / o.shape[0]


def sparse(o: Tensor, t: Tensor) -> Tensor:
    return nf.mse_loss(o, t, reduction="sum") + 0.3 * o.abs().flatten(1).sum(1).sum()


def in_halves(o: Tensor, t: Example) -> Tensor:
    kept = t.mask > 0
    with_label, without = o[kept], o[~kept]
    loss = nf.cross_entropy(with_label, t.label[kept])
    if len(without):
        loss = loss + 0.1 * without.pow(2).sum()
    return loss


def scaled_later(o: Tensor, t: Tensor) -> Tensor:
    loss = nf.l1_loss(o, t, reduction="sum")
    loss /= t.shape[0]
    loss *= 0.5
    return loss + 0.0


FAIR: dict[str, tuple[Loss, Callable[[int], Any]]] = {
    "label smoothing by scatter": (smooth, classes),
    "binary focal": (binary_focal, named),
    "dice of each row": (dice, numbers),
    "Huber": (nn.HuberLoss(delta=0.5), numbers),
    "triplet of each row": (triplet, numbers),
    "KL to a teacher": (lambda o, t: (t.softmax(-1) * (t.log_softmax(-1) - o.log_softmax(-1))).sum(-1).mean(), numbers),
    "ELBO with BCE": (elbo, numbers),
    "CTC, summed": (ctc, lengths),
    "log-variances": (Uncertain(), named),
    "masked words": (masked_words, words),
    "words by a mask": (words_by_mask, words),
    "means of sentences": (means_of_sentences, words),
    "sum / max(count, 1)": (sums_of_nothing, padded),
    "sum / count.clamp(1)": (clamped_count, padded),
    "z-loss": (z_loss, padded),
    "distillation": (distilled, named),
    "perceptual": (Perceptual(), numbers),
    "steepness": (steepness, numbers),
    "einsum": (by_einsum, numbers),
    "a loop over rows": (row_by_row, numbers),
    "numpy": (by_numpy, padded),
    "a list in a dict": (of_a_list, listed),
    "up to a length": (up_to_length, lengths),
    "up to a length, by rows": (up_to_length_in_rows, lengths),
    "experts' balance": (balanced, named),
    "ordinal": (ordinal, classes),
    "quantiles": (quantiles, numbers),
    "Student's t": (student, numbers),
    "a mixture": (mixture, numbers),
    "margins": (hinges, classes),
    "actor and critic": (advantage, named),
    "listwise": (listwise, numbers),
    "angular margin": (arc, classes),
    "weights of classes, mean": (rare_first, classes),
    "weights of classes, normalised": (by_class_weight, classes),
    "Charbonnier": (charbonnier, numbers),
    "total variation": (total_variation, numbers),
    "L1 of outputs": (sparse, numbers),
    "in place": (scaled_later, numbers),
    "sample weights, summed": (lambda o, t: ((o - t.y).pow(2).mean(1) * t.weight).sum(), named),
    "sample weights, mean": (lambda o, t: ((o - t.y).pow(2).mean(1) * t.weight).mean(), named),
    "sample weights, normalised": (lambda o, t: (o - t.y).pow(2).mean(1) @ t.weight / t.weight.sum(), named),
    "mean(dim=0).sum()": (lambda o, t: (o - t).abs().mean(dim=0).sum(), numbers),
    "torch.mean of sums": (lambda o, t: torch.mean(torch.sum((o - t) ** 2, dim=(1,))), numbers),
    "np.prod of a shape": (lambda o, t: (o - t).pow(2).sum() / math.prod(t.shape), numbers),
    "average": (lambda o, t: torch.dot((o - t).flatten(), (o - t).flatten()) / o.shape[0], numbers),
}  # fmt: skip


def pearson(o: Tensor, t: Tensor) -> Tensor:
    a, b = o[:, 0] - o[:, 0].mean(), t[:, 0] - t[:, 0].mean()
    return 1 - (a * b).sum() / (a.pow(2).sum().sqrt() * b.pow(2).sum().sqrt())


def info_nce(o: Tensor, t: Tensor) -> Tensor:
    tensor, two = nf.normalize(o[:, :3], dim=1), nf.normalize(o[:, 3:], dim=1)
    return nf.cross_entropy(tensor @ two.T / 0.1, torch.arange(len(o)))


def whitened(o: Tensor, t: Tensor) -> Tensor:
    z = (o - o.mean(0)) / o.std(0)
    return (z.T @ z / len(o) - torch.eye(WIDTH, dtype=o.dtype)).pow(2).sum()


def experts(o: Tensor, t: Tensor) -> Tensor:
    """Balance over the batch, as the Switch Transformer has it."""
    chances = o.softmax(-1)
    chosen = nf.one_hot(chances.argmax(-1), WIDTH).double().mean(0)
    return nf.mse_loss(o, t) + 0.01 * WIDTH * (chosen * chances.mean(0)).sum()


def hardest(o: Tensor, t: Tensor) -> Tensor:
    each = (o - t).pow(2).mean(1)
    return each.sort(descending=True).values[:5].mean()


UNFAIR: dict[str, tuple[Loss, Callable[[int], Any]]] = {
    "RMSE": (lambda o, t: torch.sqrt(nf.mse_loss(o, t) + 1e-8), numbers),
    "Pearson": (pearson, numbers),
    "InfoNCE": (info_nce, numbers),
    "whitening": (whitened, numbers),
    "experts over the batch": (experts, numbers),
    "hardest five": (hardest, numbers),
    "norm of all": (lambda o, t: (o - t).norm(), numbers),
    "maximum": (lambda o, t: (o - t).abs().max(), numbers),
    "median": (lambda o, t: (o - t).abs().mean(1).median(), numbers),
    "log of a mean": (lambda o, t: torch.log(nf.mse_loss(o, t)), numbers),
    "R squared": (lambda o, t: (o - t).pow(2).sum() / (t - t.mean(0)).pow(2).sum(), numbers),
    "sum over rows squared": (lambda o, t: (o - t).sum(0).pow(2).mean(), numbers),
    "neighbours": (lambda o, t: nf.mse_loss(o, t) + (o[1:] - o[:-1]).pow(2).mean(), numbers),
    "MMD": (lambda o, t: torch.cdist(o, o).exp().mean() - 2 * torch.cdist(o, t).exp().mean(), numbers),
}

DOUBTFUL: dict[str, tuple[Loss, Callable[[int], Any]]] = {
    "a loop that skips rows": (skipping_rows, padded),
    "labelled and not": (in_halves, named),
}
