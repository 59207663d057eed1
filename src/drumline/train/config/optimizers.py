"""Which optimizers of torch's can be named, and what each of them takes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from drumline.core.errors import nearest
from drumline.core.parsed import shown
from drumline.train.config.problems import Problem
from drumline.train.config.relations import PlacedSettings, relation
from drumline.train.config.settings import OptimizerSettings

# LBFGS calls the model itself, and SparseAdam takes sparse gradients, which no stage has.
_UNSUITED = ("LBFGS", "SparseAdam", "Optimizer")
_ONLY_MATRICES = ("Muon",)
_GIVEN_BY_US = ("self", "params", "lr")


@relation("optimizer.kind", "optimizer.settings", "optimizer.groups")
def optimizers_exist(judged: PlacedSettings) -> Iterator[Problem]:
    """Yield what is wrong with optimizers' names and arguments."""
    updater = judged.settings.optimizer
    if updater.kind == OptimizerSettings().kind and not updater.settings and not updater.groups:
        return  # AdamW as it comes: importing torch would tell nothing
    if find_spec("torch") is None:
        return  # whoever trains is told what to install
    yield from map(judged.placed, misfits("optimizer", updater.kind, updater.settings))
    if updater.kind in _ONLY_MATRICES:
        yield judged.problem(
            "optimizer.kind", f"is {updater.kind}, which takes matrices alone", "an optimizer for all other parameters",
            f"put {updater.kind} into [[optimizer.groups]] with only_matrices = true",
        )  # fmt: skip
    for index, group in enumerate(updater.groups):
        table = f"optimizer.groups.{index}"
        yield from map(judged.placed, misfits(table, group.kind, group.settings))
        if group.kind in _ONLY_MATRICES and not group.only_matrices:
            where = judged.source.where(("optimizer", "groups", index))
            yield Problem(where, f"{table}.only_matrices", "is false", f"true: {group.kind} takes matrices alone")


def misfits(table: str, kind: str, settings: dict[str, Any]) -> Iterator[Problem]:
    """Yield what is wrong with an optimizer's name, or with its settings; `table` is what the config calls it.

    >>> print(*misfits("optimizer", "Adamw", {}))
    optimizer.kind is 'Adamw'; expected a class of torch.optim; did you mean AdamW?
    """
    import torch

    known = {name: value for name, value in vars(torch.optim).items() if _is_suited(name, value, torch.optim.Optimizer)}
    if kind not in known:
        why = ", which a pipeline cannot run" if kind in _UNSUITED else ""
        fix = nearest(kind[:60], known)
        yield Problem("", f"{table}.kind", f"is {kind!r:.60}{why}", "a class of torch.optim", fix)
        return
    takes = [name for name in inspect.signature(known[kind].__init__).parameters if name not in _GIVEN_BY_US]
    for name in settings:
        if name not in takes:
            fix = f"it has its own key: {table}.lr" if name == "lr" else nearest(name, takes)
            yield Problem("", f"{table}.settings.{name}", f"is no argument of {kind}", fix=fix)
    if all(name in takes for name in settings):
        for name, error, expected in _refused(known[kind], settings):
            yield Problem("", f"{table}.settings" + (f".{name}" if name else ""), error, expected)


def _is_suited(name: str, kind: Any, base: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, base) and name not in _UNSUITED


def _refused(kind: Any, settings: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the settings that an optimizer does not take, each with what is wrong and what was expected."""
    defaults = inspect.signature(kind.__init__).parameters
    unlike = [(name, expected) for name, value in settings.items() if (expected := _unlike(value, defaults[name]))]
    for name, expected in unlike:
        yield name, f"is {shown(settings[name])}", expected
    if unlike or (error := _tried(kind, settings)) is None:
        return
    alone = [name for name in settings if _tried(kind, {key: settings[key] for key in settings if key != name}) is None]
    name = alone[0] if len(alone) == 1 else ""
    said = f"is {shown(settings[name])}" if name else "cannot be taken together"
    yield name, f"{said}: {error}", f"settings of torch.optim.{kind.__name__}"


def _unlike(value: Any, parameter: inspect.Parameter) -> str:
    """Return what a setting should be, if it is of another kind than its default; empty if it may be right."""
    default = parameter.default
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(default, int | float):
        return "" if isinstance(value, int | float) and not isinstance(value, bool) else "a number"
    if isinstance(default, tuple):
        right = isinstance(value, list | tuple) and len(value) == len(default)
        right = right and all(isinstance(number, int | float) and not isinstance(number, bool) for number in value)
        return "" if right else f"{len(default)} numbers, like {list(default)}"
    return ""


def _tried(kind: Any, settings: dict[str, Any]) -> str | None:
    """Return what an optimizer says against its settings; None if it takes them."""
    import torch

    base: Any = torch.optim.Optimizer
    usual = base.add_param_group
    examples = [torch.nn.Parameter(torch.empty(2, 2, device="meta"))]
    try:
        base.add_param_group = getattr(usual, "__wrapped__", usual)  # the usual one imports torch's compiler: a second
        kind([{"params": examples}], **settings)
    except (TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0][:160]
    except RuntimeError:
        return None  # about the device, which is another one here
    finally:
        base.add_param_group = usual
    return None
