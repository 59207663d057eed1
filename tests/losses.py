"""Losses as people write them, with what is asked of each: outputs of shape (rows, 6), and a target.

`NAMED` and `RIGHT` are means, sums or both, over rows or labels: none may be refused. `MIXED` compare rows with each
other, or are no mean of anything: they must be refused.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nf

ROWS, WIDTH = 12, 6
Loss = Callable[[Any, Any], Any]


def numbers(step: int) -> Tensor:
    """Return targets of the outputs' shape."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def classes(step: int) -> Tensor:
    """Return classes; from step 1 on some are 0, more in the first rows."""
    made = torch.randint(1, WIDTH, (ROWS,), generator=torch.Generator().manual_seed(step))
    made[: 4 if step else 0] = 0
    return made


def labels(step: int) -> Tensor:
    """Return classes of which some are -100, other numbers in other rows."""
    made = torch.randint(WIDTH, (ROWS,), generator=torch.Generator().manual_seed(step))
    made[: 3 * step] = -100
    return made


def bits(step: int) -> Tensor:
    """Return zeros and ones."""
    return (numbers(step) > 0.3).float()


def chances(step: int) -> Tensor:
    """Return probabilities."""
    return numbers(step).softmax(-1)


def pairs(step: int) -> dict[str, Tensor]:
    """Return several targets, with weights and a mask."""
    mask = torch.rand(ROWS, generator=torch.Generator().manual_seed(step)) > (0.4 if step else -1.0)
    mask[0] = True
    return {"y": numbers(step), "c": classes(step), "w": numbers(step)[:, 0].abs() + 0.1, "mask": mask}


def one_by_one(o: Tensor, t: Tensor) -> Tensor:
    return sum((nf.mse_loss(a, b) for a, b in zip(o, t, strict=True)), torch.zeros(())) / len(t)


def on_the_host(o: Tensor, t: Tensor) -> Tensor:
    kept = [at for at, value in enumerate(t.tolist()) if value != 0]
    return nf.cross_entropy(o[kept], t[kept])


def divided_on_the_host(o: Tensor, t: Tensor) -> Tensor:
    return nf.cross_entropy(o, t, reduction="sum", ignore_index=0) / (t != 0).sum().item()


def filled_in_place(o: Tensor, t: Tensor) -> Tensor:
    t = t.clone()
    t[t == 0] = -100
    return nf.cross_entropy(o, t)


def elbo(o: Tensor, t: Tensor) -> Tensor:
    mean, log_variance = o[:, :3], o[:, 3:]
    kl = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
    return (nf.mse_loss(mean, t[:, :3], reduction="sum") + kl) / len(t)


def elbo_of_mean_and_sum(o: Tensor, t: Tensor) -> Tensor:
    mean, log_variance = o[:, :3], o[:, 3:]
    return nf.mse_loss(mean, t[:, :3]) - 0.5 * torch.sum(1 + log_variance - mean**2 - log_variance.exp())


def focal(o: Tensor, t: Tensor) -> Tensor:
    each = nf.cross_entropy(o, t, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def smoothed(o: Tensor, t: Tensor) -> Tensor:
    logp = nf.log_softmax(o, -1)
    return (0.9 * nf.nll_loss(logp, t, reduction="none") - 0.1 * logp.mean(-1)).sum() / t.size(0)


def ppo(o: Tensor, t: dict[str, Tensor]) -> Tensor:
    ratio = (nf.log_softmax(o, -1).gather(1, t["c"][:, None]).squeeze(1) + math.log(WIDTH)).exp()
    gain = torch.min(ratio * t["w"], ratio.clamp(0.8, 1.2) * t["w"])
    entropy = -(nf.softmax(o, -1) * nf.log_softmax(o, -1)).sum(-1)
    return -gain.mean() + 0.5 * nf.mse_loss(o[:, 0], t["y"][:, 0]) - 0.01 * entropy.mean()


def policy(o: Tensor, t: dict[str, Tensor]) -> Tensor:
    chosen: Tensor = torch.distributions.Categorical(logits=o).log_prob(t["c"])  # type: ignore[no-untyped-call]
    return -(chosen * (t["w"] - 0.5)).sum() / len(t["c"])


def distilled(o: Tensor, t: dict[str, Tensor]) -> Tensor:
    soft = nf.kl_div(nf.log_softmax(o / 2, -1), nf.softmax(t["y"] / 2, -1), reduction="batchmean") * 4
    return 0.3 * nf.cross_entropy(o, t["c"]) + 0.7 * soft


def preferred(o: Tensor, t: dict[str, Tensor]) -> Tensor:
    return -nf.logsigmoid(0.1 * ((o[:, 0] - o[:, 1]) - (t["y"][:, 0] - t["y"][:, 1]))).mean()


def ctc(o: Tensor, t: Tensor) -> Tensor:
    logp = o.view(len(o), 3, 2).log_softmax(-1).transpose(0, 1)
    ones = torch.ones(len(o), dtype=torch.long)
    return nf.ctc_loss(logp, ones[:, None], 3 * ones, ones)


def noisy(o: Tensor, t: Tensor) -> Tensor:
    return nf.mse_loss(nf.dropout(o, 0.5) + torch.randn_like(o), t) + (torch.rand(len(o)) * o[:, 0]).sum() / len(o)


def hubers(o: Tensor, t: Tensor) -> Tensor:
    off = (o - t).abs()
    return torch.where(off < 1, 0.5 * off**2, off - 0.5).sum()


def hinge(o: Tensor, t: Tensor) -> Tensor:
    right = o.gather(1, t[:, None])
    return (nf.relu(1 + o - right).sum() - len(t)) / len(t)


def weighted(o: Tensor, t: dict[str, Tensor]) -> Tensor:
    return (nf.cross_entropy(o, t["c"], reduction="none") * t["w"]).sum() / t["w"].sum()


def masked(o: Tensor, t: dict[str, Tensor]) -> Tensor:
    return (o - t["y"])[t["mask"]].pow(2).mean()


def several(o: Tensor, t: dict[str, Tensor]) -> Tensor:
    tensor = nf.cross_entropy(o, t["c"], ignore_index=0)
    two = (nf.l1_loss(o, t["y"], reduction="none").mean(-1) * t["mask"]).sum() / t["mask"].sum().clamp(min=1)
    return tensor + 0.5 * two + 0.01 * o.pow(2).sum() + 0.1 * (o.mean(-1) ** 2).mean()


def gathered(o: Tensor, t: Tensor) -> Tensor:
    found = nf.cross_entropy(o, t, reduction="none")
    return found[(t != 0).nonzero().squeeze(1)].mean()


def noting() -> Loss:
    noted: list[float] = []

    def loss_fn(o: Tensor, t: Tensor) -> Tensor:
        loss = (o - t).square().sum() / t.shape[0]
        noted.append(loss.item())
        noted.append(float((o.argmax(-1) == t.argmax(-1)).float().mean()))
        return loss

    return loss_fn


class Learned(nn.Module):
    """Has a parameter and a buffer of its own."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, o: Tensor, t: Tensor) -> Tensor:
        self.calls += 1
        return ((o - t).square() * torch.exp(-self.log_scale)).sum() / len(t) + self.log_scale


class Trainer:
    """Has its loss as a method."""

    weight = 0.5

    def loss(self, o: Tensor, t: Tensor) -> Tensor:
        return self.weight * nf.smooth_l1_loss(o, t, reduction="sum") / o.shape[0]


def ce(**settings: Any) -> Loss:
    return lambda o, t: nf.cross_entropy(o, t, **settings)


def spread(o: Tensor) -> Tensor:
    return nf.log_softmax(o, -1)


# Those of the issue.
NAMED: dict[str, tuple[Loss, Callable[[int], Any]]] = {
    "sum / len": (lambda o, t: (o - t).pow(2).sum() / len(t), numbers),
    "sum / shape[0]": (lambda o, t: (o - t).pow(2).sum() / t.shape[0], numbers),
    "sum / size(0)": (lambda o, t: (o - t).pow(2).sum() / o.size(0), numbers),
    "sum / numel": (lambda o, t: (o - t).pow(2).sum() / t.numel(), numbers),
    "reduction=sum / len": (lambda o, t: nf.cross_entropy(o, t, reduction="sum") / len(t), classes),
    "* (1 / len)": (lambda o, t: (o - t).pow(2).sum() * (1 / len(t)), numbers),
    ".div(len)": (lambda o, t: (o - t).pow(2).sum().div(len(t)), numbers),
    "ELBO": (elbo, numbers),
    "masked_select": (
        lambda o, t: nf.cross_entropy(o, t, reduction="none").masked_select(t != 0).mean(),
        classes,
    ),
    "reduction=none, sum / len": (
        lambda o, t: nf.cross_entropy(o, t, reduction="none").sum() / len(t),
        classes,
    ),
    "logp[range(n), t]": (lambda o, t: -spread(o)[range(len(t)), t].sum() / len(t), classes),
    "mean + sum": (lambda o, t: nf.mse_loss(o, t) + 0.1 * o.abs().sum(), numbers),
}

RIGHT: dict[str, tuple[Loss, Callable[[int], Any]]] = {
    "label smoothing": (ce(label_smoothing=0.1), classes),
    "label smoothing by hand": (smoothed, classes),
    "focal": (focal, classes),
    "Hubers, added up": (hubers, numbers),
    "KL, batchmean": (lambda o, t: nf.kl_div(spread(o), t, reduction="batchmean"), chances),
    "KL, summed, / len": (lambda o, t: nf.kl_div(spread(o), t, reduction="sum") / len(o), chances),
    "soft labels": (ce(), chances),
    "CTC": (ctc, numbers),
    "triplet": (lambda o, t: nf.triplet_margin_loss(o[:, :2], o[:, 2:4], o[:, 4:]), numbers),
    "class weights": (ce(weight=torch.linspace(0.2, 1.4, WIDTH)), classes),
    "NLL with class weights": (
        lambda o, t: nf.nll_loss(spread(o), t, weight=torch.linspace(0.2, 1.4, WIDTH)),
        classes,
    ),
    "gaussian NLL": (lambda o, t: nf.gaussian_nll_loss(o[:, :3], t[:, :3], o[:, 3:].exp()), numbers),
    "ELBO, mean + sum": (elbo_of_mean_and_sum, numbers),
    "masked LM": (ce(ignore_index=-100), labels),
    "token weights": (weighted, pairs),
    "means of means": (lambda o, t: (o - t).pow(2).mean(-1).mean(), numbers),
    "BCE with pos_weight": (
        lambda o, t: nf.binary_cross_entropy_with_logits(o, t, pos_weight=torch.full((WIDTH,), 2.0)),
        bits,
    ),
    "BCE of chances": (
        lambda o, t: nf.binary_cross_entropy(torch.sigmoid(o), t, reduction="sum") / len(t),
        bits,
    ),
    "PPO": (ppo, pairs),
    "REINFORCE": (policy, pairs),
    "distillation": (distilled, pairs),
    "DPO": (preferred, pairs),
    "four tasks": (several, pairs),
    "float64": (lambda o, t: (o.double() - t).pow(2).sum() / len(t), numbers),
    "bfloat16": (lambda o, t: nf.mse_loss(o, t).bfloat16(), numbers),
    "logging": (noting(), numbers),
    "a mask of the target": (masked, pairs),
    "rows one by one": (one_by_one, numbers),
    "rows chosen on the host": (on_the_host, classes),
    "divided by item()": (divided_on_the_host, classes),
    "labels filled in place": (filled_in_place, classes),
    "indices of a mask": (gathered, classes),
    "multi-class hinge": (hinge, classes),
    "dropout and noise": (noisy, numbers),
    "a mean times the rows": (lambda o, t: nf.l1_loss(o, t) * len(t), numbers),
    "a module with state": (Learned(), numbers),
    "a method": (Trainer().loss, numbers),
    "log-cosh": (lambda o, t: torch.log(torch.cosh(o - t)).sum(-1).mean(), numbers),
    "cosine": (lambda o, t: (1 - nf.cosine_similarity(o, t)).sum() / o.shape[0], numbers),
    "a mean less a number": (lambda o, t: (nf.mse_loss(o, t) - 0.1) * 2, numbers),
    "elements / len before sum": (lambda o, t: ((o - t) ** 2 / len(t)).sum(), numbers),
    "constant mask": (lambda o, t: ((o - t) ** 2 * torch.eye(WIDTH)[0]).sum() / (len(t) * 1.0), numbers),
}

MIXED: dict[str, tuple[Loss, Callable[[int], Any]]] = {
    "contrastive": (lambda o, t: nf.cross_entropy(o @ o.t(), torch.arange(len(o))), numbers),
    "var(0)": (lambda o, t: o.var(0).sum(), numbers),
    "mse / mse.detach()": (lambda o, t: nf.mse_loss(o, t) / nf.mse_loss(o, t).detach(), numbers),
    "RMSE": (lambda o, t: nf.mse_loss(o, t).sqrt(), numbers),
    "dice over the batch": (lambda o, t: 1 - 2 * (o.sigmoid() * t).sum() / (o.sigmoid().sum() + t.sum()), bits),
    "hardest half": (
        lambda o, t: nf.mse_loss(o, t, reduction="none").mean(-1).topk(len(o) // 2).values.mean(),
        numbers,
    ),
    "softmax over rows": (lambda o, t: -(o.softmax(0) * t).sum(), numbers),
    "permuted rows": (lambda o, t: nf.mse_loss(o[torch.randperm(len(o))], t), numbers),
    "picked by outputs": (
        lambda o, t: nf.mse_loss(o, t, reduction="none")[nf.mse_loss(o, t, reduction="none") > 0.5].mean(),
        numbers,
    ),
    "sum / sqrt(len)": (lambda o, t: (o - t).pow(2).sum() / math.sqrt(len(t)), numbers),
    "focal of the mean": (
        lambda o, t: (1 - torch.exp(-nf.cross_entropy(o, t))) ** 2 * nf.cross_entropy(o, t),
        classes,
    ),
    "a coin": (lambda o, t: nf.mse_loss(o, t) * len(t) ** random.choice([2, 3]), numbers),
}


@dataclasses.dataclass
class Output:
    """What a model may return instead of a tensor."""

    logits: Tensor
    hidden: tuple[Tensor, Tensor]
