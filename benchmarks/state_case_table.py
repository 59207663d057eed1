"""The table of the matrix of state: each kind, its model, what a refusal of it names, and where it is refused."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

import hook_models as hooks
import state_models as models
import table_models as tables
from state_kinds import ATTRIBUTES, Keeps

# dualpipe and chimera have two copies of each stage.
WAYS: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "zb-h1": {"schedule": "zb-h1"},
    "zb-v": {"schedule": "zb-v"},
    "gpipe": {"schedule": "gpipe", "checkpoint": "full"},
    "dualpipe": {"schedule": "dualpipe"},
    "chimera": {"schedule": "chimera"},
}
COPIES = frozenset({"dualpipe", "chimera"})
SUMMED = "gradient of '"
RECOMPUTED = frozenset({"gpipe"})
EVERYWHERE = frozenset(WAYS)


@dataclass(frozen=True)
class Kind:
    """A kind of state: four blocks that have it, or a model with something between its blocks.

    Where it is refused by name, `refused` has the way, or the form and the way. `refused_apart` kinds may be refused
    between processes, where another has what is shared.
    """

    name: str
    make: models.Make
    names: str = r"(block|of|in|because) '[\w.]+'"
    refused: frozenset[str] = frozenset()
    refused_apart: bool = False
    forms: tuple[str, ...] = ("chain", "traced")
    whole: Callable[[nn.Sequential], nn.Module] = models.Around
    turn: Callable[[nn.Module, int], object] = lambda model, step: None
    merges: bool = False  # weight gradients, where the schedule splits backwards

    def __str__(self) -> str:
        return self.name

    def options(self, way: str) -> dict[str, Any]:
        """Return further arguments of a pipeline."""
        return {"merge_weight_gradients": True} if self.merges and way in ("zb-h1", "zb-v") else {}


def each(block: Callable[[], Keeps]) -> models.Make:
    """Return what makes four such blocks."""
    return lambda: nn.Sequential(*(block() for _ in range(4)))


def last(block: Callable[[], Keeps]) -> models.Make:
    """Return what makes four blocks, the last of them such a one."""
    return lambda: models.row(block())


def taking(values: Callable[[], Any], take: Callable[[Any], Any] = next) -> models.Make:
    """Return what makes four blocks that take from something of their own."""
    return each(lambda: models.Takes(values(), take))


KEPT_BETWEEN = r"(attribute|buffer|parameter) '[\w.]+'"


def between(name: str, whole: Callable[[nn.Sequential], nn.Module], **options: Any) -> Kind:
    """Return a kind of state that a traced model has between its blocks."""
    return Kind(f"{name} between blocks", models.layers, forms=("traced",), whole=whole, names=KEPT_BETWEEN, **options)


USED_UP = COPIES | RECOMPUTED
TRACED = frozenset(f"traced {way}" for way in WAYS)  # a trace runs on copies
KINDS = (
    *(Kind(kind.__name__, each(kind), refused=COPIES) for kind in ATTRIBUTES),
    Kind("list's iterator", taking(lambda: iter([0.5, 1.0, 1.5] * 100)), refused=USED_UP),
    Kind("cycle", taking(lambda: itertools.cycle([0.5, 1.0, 1.5])), refused=USED_UP),
    Kind("python generator", taking(models.numbers), refused=USED_UP | TRACED),
    Kind("loader's iterator", taking(models.loader, models.following), refused=USED_UP | TRACED),
    Kind("file", taking(models.lines, models.read), refused=USED_UP),
    Kind("system's chance", taking(random.SystemRandom, models.nothing_of), refused=USED_UP | TRACED),
    Kind("lock", each(models.Locked), refused=COPIES | TRACED),
    Kind("teacher", each(models.Teacher), refused=COPIES, names="teacher"),
    Kind("teacher in a list", each(models.HiddenTeacher), refused=COPIES),
    Kind("buffer in place", each(models.BufferInPlace), refused=COPIES, names="'*mean"),
    Kind("buffer replaced", each(models.BufferReplaced), refused=COPIES, names="'*mean"),
    Kind("behind a property", each(models.Behind), refused=COPIES),
    Kind("weak reference", each(models.ByReference), refused=COPIES),
    Kind("closure", each(models.InAClosure), refused=COPIES),
    Kind("global of all blocks", each(models.InAGlobal), refused=EVERYWHERE),
    Kind("global of a block", last(models.InAGlobal), refused=COPIES),
    Kind("context variable of all", each(models.InAVariable), refused=EVERYWHERE),
    Kind("context variable of a block", last(models.InAVariable), refused=COPIES),
    Kind("class of all blocks", each(models.InTheClass), refused=EVERYWHERE),
    Kind("class of a block", last(models.InTheClass), refused=COPIES),
    Kind("generator of two stages", models.one_generator, refused=EVERYWHERE),
    Kind("table of a function", each(tables.Rotates)),
    Kind("table in a dict", each(tables.InADict)),
    Kind("masks in a dict", each(tables.Masks)),
    Kind("table of the class", each(tables.OfTheClass)),
    Kind("table of a shared module", tables.sharing),
    Kind("table of the first batch", each(tables.Begins), refused=EVERYWHERE),
    Kind("table changed in place", each(tables.Doubles), refused=EVERYWHERE),
    Kind("weight in an attribute", models.weight_in_an_attribute, refused=COPIES, refused_apart=True),
    Kind("function replaced", each(models.ActsBy), turn=models.another_function),
    Kind("variable set anew", each(models.ReadsAVariable), turn=models.another_value),
    Kind("setting of torch", each(models.ReadsASetting), turn=models.another_value),
    Kind("tensor that appears", each(models.ReadsWhatIsThere), turn=models.another_tensor),
    between("mean", models.MeanBetween, refused=COPIES),
    between("mean replaced", models.MeanReplacedBetween, refused=EVERYWHERE),
    between("mean in a list", models.MeanInAListBetween, refused=EVERYWHERE),
    between("iterator", models.TakesBetween, refused=EVERYWHERE),
    between("counter", models.CountsBetween, refused=EVERYWHERE),
    between("generator", models.DrawsBetween, refused=EVERYWHERE),
    between("teacher", models.TeacherBetween, refused=COPIES),
    between("function replaced", models.ActsBetween, turn=models.another_function),
    between("variable set anew", models.ReadsBetween, turn=models.another_value),
    between("tensor that appears", models.ReadsBetween, turn=models.another_tensor),
    Kind("tied by data", hooks.tied_by_data, refused_apart=True, names="share memory"),
    Kind("tied by data, transposed", hooks.tied_transposed, refused_apart=True, names="share memory"),
    Kind("part of a weight", hooks.part_of_a_weight, refused_apart=True, names="share memory"),
    Kind("buffer over a bias", hooks.buffer_over_a_bias, refused_apart=True, names="share memory"),
    Kind("tensor's class at a cut", hooks.marked),
    Kind("hooks before sums", hooks.changed(hooks.halved_before), refused=COPIES),
    Kind("hooks after sums", hooks.changed(hooks.halved_after), refused=COPIES),
    Kind("hooks that nobody holds", hooks.changed(hooks.halved_by_nobody)),
    Kind("hooks put in a forward", hooks.halving_inside, refused=EVERYWHERE),
    Kind("hooks that clamp", hooks.changed(hooks.clamped)),
    Kind("hooks that clamp, merged", hooks.changed(hooks.clamped), merges=True),
    Kind("hooks that count", hooks.changed(hooks.counted), refused=COPIES),
    Kind("hooks that cap sums", hooks.changed(hooks.capped), refused=COPIES, names=SUMMED),
    Kind("hooks that cap sums, merged", hooks.changed(hooks.capped), refused=COPIES, names=SUMMED, merges=True),
    Kind("hooks that step", hooks.changed(hooks.stepping), refused=EVERYWHERE, names="hook calls SGD.step"),
    Kind("hooks of backwards", hooks.changed(hooks.counting_backwards), refused=COPIES),
    Kind("hooks of forwards", hooks.changed(hooks.counting_forwards), refused=COPIES),
    Kind("hooks of tensors", hooks.counting_gradients, refused=COPIES),
    Kind("reentrant checkpoint", hooks.checkpoints),
    Kind("reentrant checkpoint counts", hooks.counting_checkpoints, refused=EVERYWHERE),
    Kind("old weight_norm", hooks.changed(hooks.weight_normed)),
    Kind("pruning", hooks.changed(hooks.pruned)),
    Kind("left out of copies", hooks.forgetting, refused=COPIES | TRACED),
    Kind("skip by hooks", hooks.changed(hooks.skipped), refused=EVERYWHERE, names="block|'3'"),
    Kind("branch inside of a block", hooks.branching),
)
