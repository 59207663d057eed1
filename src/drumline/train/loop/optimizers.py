"""Optimizers by name: each of torch's over its own parameters, chosen by the names of the whole model.

    [[optimizer.groups]]                             transformer.*.weight     Muon
    kind = "Muon", names = ["transformer.*"],        all else                 what [optimizer] says
    only_matrices = true

The first group that matches takes a parameter; what none takes goes to the optimizer of the table itself. So every
parameter has exactly one. Names and shapes are the whole model's, so all ranks choose alike and refuse alike; a rank
without any parameter of a group has an optimizer with nothing to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from drumline.core.errors import UsageError
from drumline.engine.state.name_patterns import matching
from drumline.pipeline.pipeline import Pipeline
from drumline.train.config.optimizers import misfits
from drumline.train.config.settings import OptimizerGroup, OptimizerSettings


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Some parameters, and what updates them."""

    group: OptimizerGroup
    kind: type[Optimizer]
    lr: float
    names: tuple[str, ...]


class Optimizers:
    """All optimizers of a run on this rank, stepped as one.

    >>> from torch import nn
    >>> pipe = Pipeline([nn.Linear(4, 4), nn.Linear(4, 2)], loss_fn=nn.functional.mse_loss, num_microbatches=1)
    >>> muon = OptimizerGroup(kind="Muon", only_matrices=True, lr=0.02)
    >>> optimizers = Optimizers(pipe, OptimizerSettings(kind="AdamW", lr=1e-3, groups=(muon,)))
    >>> [(value.kind.__name__, value.lr, value.names) for value in optimizers.chosen]
    [('Muon', 0.02, ('0.weight', '1.weight')), ('AdamW', 0.001, ('0.bias', '1.bias'))]
    >>> optimizers.set_rate(0.5); [group["lr"] for value in optimizers.each for group in value.param_groups]
    [0.01, 0.0005]
    """

    def __init__(self, pipe: Pipeline, settings: OptimizerSettings) -> None:
        self.chosen = choose(pipe.parameter_shapes(), settings, others=pipe.parameter_aliases())
        self.run_ahead = settings.validated == "after"
        how: dict[str, Any] = {"max_norm": settings.clip_norm or None}  # what the pipeline itself clips
        if self.run_ahead:
            how["validated"] = "after"
        elif not pipe.steps_in_flight:  # gradients are clipped between a step and its update
            how = {}
        self.each = [
            pipe.optimizer(row.kind, names=row.names, lr=row.lr, **how, **row.group.settings) for row in self.chosen
        ]

    def set_rate(self, share: float) -> None:
        """Let every optimizer have this share of its full rate."""
        for chosen, optimizer in zip(self.chosen, self.each, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = chosen.lr * share

    def step(self) -> None:
        """Update all parameters."""
        for optimizer in self.each:
            optimizer.step()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for optimizer in self.each:
            optimizer.zero_grad()


def choose(
    shapes: Mapping[str, torch.Size],
    settings: OptimizerSettings,
    *,
    others: Mapping[str, Sequence[str]] | None = None,
) -> list[ParameterGroup]:
    """Return which parameters each optimizer gets; raises alike on all ranks, before any is made.

    `others` has further names of tied parameters, by which patterns find them too.
    """
    chosen = []
    for group, names, where in shared_out(shapes, settings, others=others):
        chosen.append(_checked(group, settings, names, shapes, where))
    return chosen


def shared_out(
    shapes: Mapping[str, torch.Size],
    settings: OptimizerSettings,
    *,
    others: Mapping[str, Sequence[str]] | None = None,
) -> list[tuple[OptimizerGroup, tuple[str, ...], str]]:
    """Return every group with its parameters and what errors call it, the table itself last if any are left for it."""
    left, shares = dict(shapes), []
    for number, group in enumerate(settings.groups):
        where = f"optimizer.groups[{number}]"
        names = _matched(group, shapes, where, others)
        mine = tuple(name for name in names if name in left)
        if not mine:
            raise UsageError(
                f"{where} gets no parameter: earlier groups take all that match {', '.join(group.names)}",
                expected="at least one parameter in every group",
                fix="put the narrower patterns first",
            )
        shares.append((group, mine, where))
        left = {name: shape for name, shape in left.items() if name not in mine}
    if left:
        rest = OptimizerGroup(kind=settings.kind, settings=settings.settings)
        shares.append((rest, tuple(left), "optimizer"))
    return shares


def _matched(
    group: OptimizerGroup, shapes: Mapping[str, torch.Size], where: str, others: Mapping[str, Sequence[str]] | None
) -> list[str]:
    try:
        names = matching(group.names, shapes, others=others)
    except UsageError as error:
        raise UsageError(f"{where}: {error.error}", expected=error.expected, fix=error.fix) from None
    if not names:
        raise UsageError(f"{where} has no names", expected='patterns of parameter names, such as names = ["*"]')
    if group.only_matrices:
        names = [name for name in names if len(shapes[name]) == 2]
        if not names:
            raise UsageError(
                f"{where} is for matrices only, and none of {', '.join(group.names)} has two dimensions",
                fix="leave only_matrices out, or choose other names",
            )
    return names


def _checked(
    group: OptimizerGroup,
    settings: OptimizerSettings,
    names: tuple[str, ...],
    shapes: Mapping[str, torch.Size],
    where: str,
) -> ParameterGroup:
    """Return a group's choice, tried on a tensor without memory: torch's own refusals come alike on all ranks."""
    for problem in misfits(where, group.kind, group.settings):
        raise UsageError(problem.headline, expected=problem.expected, fix=problem.fix)
    other = next((name for name in names if len(shapes[name]) != 2), None)
    if group.kind == "Muon" and other is not None:
        raise UsageError(
            f"{where}: Muon got {other!r} of the shape {tuple(shapes[other])}",
            expected="matrices: Muon updates parameters with two dimensions",
            fix="set only_matrices = true; the other parameters go to the optimizer of the table",
        )
    return ParameterGroup(group, getattr(torch.optim, group.kind), settings.lr if group.lr is None else group.lr, names)
