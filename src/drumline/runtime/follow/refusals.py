"""What a followed forward may not do between its blocks, or to them: no piece would do it. And where it did it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError

_ENGINE = (torch.autograd.backward, torch.autograd.grad, Tensor.backward)


def refuse_function(func: Callable[..., Any]) -> None:
    """Refuse functions between blocks whose effect no piece would have."""
    if name_of(func) in ("register_hook", "register_post_accumulate_grad_hook"):
        raise ModelError(
            f"the model's forward puts a hook on a tensor between its blocks{line_here()}",
            expected="hooks on parameters or modules, or inside of a block",
            fix="move it into a block",
        )
    if func in _ENGINE:
        raise ModelError(
            f"the model's forward takes a gradient between its blocks{line_here()}",
            expected="gradients that are taken inside of a block, from what is there",
            fix="move it into a block, with all that the gradient goes through",
        )
    if (name := property_of(func, "__set__")) in ("data", "grad"):
        raise ModelError(
            f"the model's forward sets `.{name}` of a tensor between its blocks{line_here()}",
            expected="tensors that are changed in place: x.copy_(...)",
            fix="move it into a block",
        )


def refuse_changed(name: str, before: Any, after: Any) -> None:
    """Refuse a block that puts something into a list or dict that it is given, or takes something out."""
    (tensors, form), (others, other_form) = before, after
    if form != other_form or [id(one) for one in tensors] != [id(one) for one in others]:
        raise ModelError(
            f"{name!r} changes a list or dict that it is given",
            expected="blocks that leave their arguments as they are",
            fix="return what is new from the block, and put it into the list between the blocks",
        )


def refuse_others(module: nn.Module, name: str, states: Mapping[int, str]) -> None:
    """Refuse a block that is called with other parameters or buffers than those the model has."""
    for key, one in (*module.named_parameters(), *module.named_buffers()):
        if id(one) not in states:
            raise ModelError(
                f"the model's forward calls {name!r} with other parameters or buffers than its own, as {key!r}",
                expected="blocks that are called with what they hold",
                fix="call torch.func.functional_call, or what exchanges them, inside of a block",
            )


def refuse_marked(tensors: Iterable[Tensor], own: Collection[str], what: str) -> None:
    """Refuse attributes that were put on tensors beside their own: they do not travel, and no piece puts them there."""
    for one in tensors:
        marks = [key for key in vars(one) if key not in own and not key.startswith("__")]
        if marks:
            raise ModelError(
                f"{what} a tensor with the attribute {marks[0]!r} on it",
                expected="tensors without attributes of their own",
                fix="pass it beside the tensor",
            )


def draws_on_host() -> ModelError:
    """Return the refusal of random numbers between blocks that nobody seeds."""
    return ModelError(
        "the model's forward draws random numbers of Python's or numpy's between its blocks",
        expected="a forward that does the same in every step, between blocks",
        fix="draw them inside of a block, or switch it off (layerdrop=0, apply_spec_augment=False)",
    )


def changes_variable(name: str) -> ModelError:
    """Return the refusal of a forward whose variables outside of the model change while it runs."""
    return ModelError(
        f"the model's forward, or one of its blocks, changes {name}, which is read between blocks",
        expected="variables outside of the model that stay as they are while the forward runs",
        fix="collect what blocks return in a variable of the forward's own; count outside of the forward",
    )


def name_of(func: Any) -> str:
    """Return the name of a function, where it has one.

    >>> name_of(torch.add)
    'add'
    """
    name: str = getattr(func, "__name__", "")
    return name


def property_of(func: Any, access: str = "__get__") -> str:
    """Return the name of the property of tensors that a function gets or sets, if it does."""
    name: str = getattr(getattr(func, "__self__", None), "__name__", "") if name_of(func) == access else ""
    return name


_OTHERS = (Path(torch.__file__).parent, Path(__file__).parent.parent)


def line_of(error: Exception) -> str:
    """Return the line of the model's own code that an error came up in."""
    return _own_line(traceback.extract_tb(error.__traceback__))


def line_here() -> str:
    """Return the line of the model's own code that runs now."""
    return _own_line(traceback.extract_stack())


def _own_line(frames: traceback.StackSummary) -> str:
    own = [one for one in frames if not any(others in Path(one.filename).parents for others in _OTHERS)]
    frame = own[-1] if own else None
    return "" if frame is None else f", in `{frame.line}` ({Path(frame.filename).name}:{frame.lineno})"
