"""What a traced forward must not do between its blocks or to them, because no piece would do it; and where it does it.

Each call records whether gradients are on and what autocast does, and the pieces repeat this. Anything else that a
forward switches on around its blocks would be missing when the pieces run, so it is refused by name.

When the pieces run, blocks have the hooks that they had before. So a hook that the forward registers on a block while
it runs, such as one that collects features, may read the block's outputs. They are traced like everything else. It must
not change it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from drumline.core.errors import ModelError
from drumline.model.hooks import BACKWARD, FORWARD, HOOKS
from drumline.model.transforms import transformed

_HARMLESS = ("torch.utils.checkpoint", "torch.autograd.graph")  # these restore exactly what they save


def around() -> list[str]:
    """Return, in words, what is switched on here that a piece would not repeat.

    >>> with torch.autograd.graph.saved_tensors_hooks(print, print):
    ...     around()
    ['torch.autograd.graph.saved_tensors_hooks']
    """
    lines = []
    if transformed():
        lines.append("a torch.func transform, such as torch.vmap")
    saved: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if saved is not None and getattr(saved[0], "__module__", "") not in _HARMLESS:
        lines.append("torch.autograd.graph.saved_tensors_hooks")
    if parametrize._cache_enabled:
        lines.append("torch.nn.utils.parametrize.cached")
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]  # type: ignore[no-untyped-call]
    lines += [f"the mode {type(mode).__name__}" for mode in modes if not isinstance(mode, DeviceContext)]
    if torch.get_default_dtype() is not torch.float32:
        lines.append(f"the default dtype {torch.get_default_dtype()}")
    return lines


def refuse_around(block: str, known: Collection[str]) -> None:
    """Refuse a call of a block with more switched on around it than when tracing began."""
    more = [name for name in around() if name not in known]
    if more:
        raise ModelError(
            f"the model's forward calls {block!r} inside {more[0]}",
            expected="blocks that are called directly",
            fix="call it directly, or move the surrounding code into the block",
        )


def refuse_backward_hooks(model: nn.Module, inside: frozenset[str]) -> None:
    """Refuse backward hooks on modules that are traced inside: no piece is that module and could see its gradients."""
    shared = nn.modules.module
    if shared._global_backward_hooks or shared._global_backward_pre_hooks:
        raise ModelError(
            "a global module backward hook is registered",
            expected="no global hook: it would not run on the model itself and its containers, which are in no stage",
            fix="register it on the blocks: block.register_full_backward_hook(...)",
        )
    for name, module in model.named_modules(remove_duplicate=False):
        if name in inside and any(getattr(module, kind) for kind in BACKWARD):
            where = f"the container {name!r}" if name else "the model itself"
            raise ModelError(
                f"there is a backward hook on {where}, a {type(module).__name__}",
                expected="backward hooks on blocks, or on modules and parameters inside them",
                fix="register it on the last block for the output's gradient, or on the first for the input's",
            )


class LocalHooks:
    """The original hooks of a model's modules; hooks added later are checked."""

    def __init__(self, model: nn.Module) -> None:
        self._before = {
            module: {kind: dict(vars(module)[kind]) for kind in HOOKS if isinstance(vars(module).get(kind), dict)}
            for module in model.modules()
        }

    def look_after(self, block: nn.Module, name: str) -> None:
        """Allow hooks that the forward puts on a block to read only, and refuse other changes of its hooks."""
        for module in block.modules():
            for kind, before in self._before.get(module, {}).items():
                now = vars(module)[kind]
                if now.keys() == before.keys():
                    continue
                if kind not in FORWARD or not before.keys() <= now.keys():
                    raise _refusal(name)
                for key in now.keys() - before.keys():
                    if not isinstance(now[key], _Looks):
                        now[key] = _Looks(now[key], name)


class _Looks:
    """A hook that must return nothing."""

    def __init__(self, hook: Callable[..., Any], name: str) -> None:
        self.hook = hook
        self.name = name

    def __call__(self, *args: Any) -> None:
        if self.hook(*args) is not None:
            raise _refusal(self.name)


def _refusal(name: str) -> ModelError:
    return ModelError(
        f"the model's forward adds or removes a hook on {name!r} that changes what the block does",
        expected="hooks registered before the forward, or hooks that only read what blocks return",
        fix="register it outside the forward, or do its work between the blocks",
    )


_ENGINE = (torch.autograd.backward, torch.autograd.grad, Tensor.backward)


def refuse_function(func: Callable[..., Any]) -> None:
    """Refuse functions between blocks whose effect no piece would have."""
    if name_of(func) in ("register_hook", "register_post_accumulate_grad_hook"):
        raise ModelError(
            f"the model's forward registers a hook on a tensor between its blocks{line_here()}",
            expected="hooks on parameters or modules, or inside a block",
            fix="move it into a block",
        )
    if func in _ENGINE:
        raise ModelError(
            f"the model's forward takes a gradient between its blocks{line_here()}",
            expected="gradients taken inside a block, of what that block computes",
            fix="move it into a block, with everything that the gradient flows through",
        )
    if (name := property_of(func, "__set__")) in ("data", "grad"):
        raise ModelError(
            f"the model's forward assigns to `.{name}` of a tensor between its blocks{line_here()}",
            expected="in-place changes: x.copy_(...)",
            fix="move it into a block",
        )


def refuse_own_generator(values: Iterable[Any]) -> None:
    """Refuse a draw from a generator between blocks: it would go on for the trace alone."""
    if any(isinstance(value, torch.Generator) for value in values):
        raise ModelError(
            f"the model's forward draws from a generator of its own between its blocks{line_here()}",
            expected="a forward that does the same between its blocks in every step",
            fix="draw it inside a block: a block may have generators of its own",
        )


def refuse_changed(name: str, before: Any, after: Any) -> None:
    """Refuse a block that adds to or removes from a list or dict among its arguments."""
    (tensors, form), (others, other_form) = before, after
    if form != other_form or [id(tensor) for tensor in tensors] != [id(other) for other in others]:
        raise ModelError(
            f"{name!r} changes a list or dict among its arguments",
            expected="blocks that leave their arguments unchanged",
            fix="return the new items from the block, and add them to the list between the blocks",
        )


def refuse_others(module: nn.Module, name: str, states: Mapping[int, str]) -> None:
    """Refuse a block that is called with parameters or buffers other than the model's."""
    for key, param in (*module.named_parameters(), *module.named_buffers()):
        if id(param) not in states:
            raise ModelError(
                f"the model's forward calls {name!r} with parameters or buffers that are not its own, such as {key!r}",
                expected="blocks that use their own parameters and buffers",
                fix="call torch.func.functional_call, or whatever replaces them, inside a block",
            )


def refuse_marked(tensors: Iterable[Tensor], own_names: Collection[str], what: str) -> None:
    """Refuse custom attributes on tensors: they do not travel, and no piece sets them."""
    for tensor in tensors:
        marks = [key for key in vars(tensor) if key not in own_names and not key.startswith("__")]
        if marks:
            raise ModelError(
                f"{what} a tensor with the attribute {marks[0]!r} on it",
                expected="tensors without custom attributes",
                fix="pass the value next to the tensor, as another argument",
            )


def name_of(func: Any) -> str:
    """Return the name of a function, if it has one.

    >>> name_of(torch.add)
    'add'
    """
    name: str = getattr(func, "__name__", "")
    return name


def property_of(func: Any, access: str = "__get__") -> str:
    """Return the name of the tensor property that a function gets or sets, if any."""
    name: str = getattr(getattr(func, "__self__", None), "__name__", "") if name_of(func) == access else ""
    return name


_OTHERS = (Path(torch.__file__).parent, Path(__file__).parent.parent)


def line_of(error: Exception) -> str:
    """Return the line of the model's own code that raised an error."""
    return _own_line(traceback.extract_tb(error.__traceback__))


def line_here() -> str:
    """Return the line of the model's own code that is running."""
    return _own_line(traceback.extract_stack())


def _own_line(frames: traceback.StackSummary) -> str:
    own_frame_summaries = [
        summary for summary in frames if not any(others in Path(summary.filename).parents for others in _OTHERS)
    ]
    frame = own_frame_summaries[-1] if own_frame_summaries else None
    return "" if frame is None else f", in `{frame.line}` ({Path(frame.filename).name}:{frame.lineno})"
