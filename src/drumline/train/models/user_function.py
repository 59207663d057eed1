"""Functions that a user names in a config: `package.module:function` or `folder/file.py:function`."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from drumline.core.errors import ConfigError, DrumlineError, RunError, UsageError, nearest
from drumline.train.config.functions import function_named
from drumline.train.models.built import Built
from drumline.train.models.hf import loss_of_logits


def named_function(name: str, *, key: str) -> Callable[..., Any]:
    """Return the function that a config names under `key`.

    >>> named_function("math:gcd", key="model.function")(4, 6)
    2
    >>> named_function("math:gcb", key="model.function")
    Traceback (most recent call last):
    drumline.core.errors.UsageError: model.function: math has no function 'gcb'; expected package.module:function ...
    """
    here, home = str(Path.cwd()), name.rpartition(":")[0]
    if here not in sys.path and not home.endswith(".py"):  # as `python -m` has it
        sys.path.insert(0, here)
    try:
        return function_named(name, users_code)
    except ConfigError as error:
        raise UsageError(f"{key}: {error.error}", expected=error.expected, fix=error.fix) from None
    except RunError as error:
        missing = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
        if missing is None or not (home == missing or home.startswith(f"{missing}.")):
            raise  # the module is there, and fails or imports one that is not
        fix = "start in the folder that holds it, install it, or name the file: path/file.py:function"
        raise UsageError(f"{key} names the module {home}, and there is none", fix=fix) from None


@contextmanager
def users_code(name: str) -> Iterator[None]:
    """Raise what a user's own code raises as a RunError with its traceback; errors of ours pass.

    >>> try:
    ...     with users_code("mine.py:build"):
    ...         raise ValueError("no weights here")
    ... except RunError as error:
    ...     print(error)
    mine.py:build failed with ValueError: no weights here
    """
    try:
        yield
    except DrumlineError:
        raise
    except Exception as error:
        raised = RunError(f"{name} failed with {type(error).__name__}: {error}")
        raised.add_note(f"{name}'s traceback:\n{traceback.format_exc().rstrip()}")
        raise raised from error


def call_with(
    function: Callable[..., Any], offered: Mapping[str, Any], arguments: Mapping[str, Any], *, key: str
) -> Any:
    """Call a user's function with its `arguments`, and with those of the `offered` values that it has names for.

    >>> call_with(lambda width, settings: (width, settings), {"settings": 1, "rank": 0}, {"width": 8}, key="model")
    (8, 1)
    >>> call_with(lambda width: width, {}, {"wide": 8}, key="model")
    Traceback (most recent call last):
    drumline.core.errors.UsageError: the function of model does not take wide; did you mean width?
    """
    parameters = inspect.signature(function).parameters
    if not any(param.kind is param.VAR_KEYWORD for param in parameters.values()):
        for name in arguments:
            if name not in parameters:
                raise UsageError(f"the function of {key} does not take {name}", fix=nearest(name, parameters))
    offered_values = {name: value for name, value in offered.items() if name in parameters} | dict(arguments)
    for name, param in parameters.items():
        open_ended = param.kind in (param.VAR_KEYWORD, param.VAR_POSITIONAL)
        if name not in offered_values and param.default is param.empty and not open_ended:
            fix = f"add it to the table [{key}.arguments]"
            raise UsageError(f"the function of {key} needs {name}", expected=f"one of {', '.join(offered)}", fix=fix)
    return function(**offered_values)


def built_by_user(returned: Any, *, name: str) -> Built:
    """Return what a user's `build_model` made as a Built: a module, (module, loss_fn), or a Built itself."""
    if isinstance(returned, Built):
        return returned
    model, loss_fn = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if isinstance(model, nn.Module) and (loss_fn is None or callable(loss_fn)):
        if loss_fn is None and any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__):
            loss_fn = loss_of_logits  # its own would shift targets that are shifted already
        parameters = inspect.signature(model.forward).parameters
        names = [name for name, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        return Built(model, loss_fn, inputs=names[0] if names else "tokens", takes=frozenset(names[1:]))
    raise UsageError(
        f"{name} returned a {type(returned).__name__}",
        expected="an nn.Module, (module, loss_fn), or a drumline.train.models.built.Built",
    )
