"""What a trainer of another library passes on: a model, settings of which it decides some, methods to override."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from drumline.core.errors import nearest, refuse
from drumline.pipeline.pipeline import Pipeline

_WRAPPERS = (Pipeline, nn.parallel.DistributedDataParallel, nn.DataParallel)


def settings_for(model: Any, settings: Any, decided: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of a pipeline for a model; refuse those that no pipeline has, or that another decides.

    `decided` says by name what decides a setting. A model that something else has wrapped is refused as well.

    >>> settings_for(nn.ReLU(), {"schedule": "1f1b"}, {"precision": "bf16=True"})
    {'schedule': '1f1b'}
    >>> settings_for(nn.ReLU(), {"precision": "bf16"}, {"precision": "bf16=True"})
    Traceback (most recent call last):
    drumline.core.errors.UsageError: pipeline has the setting precision; expected none: bf16=True decides it; ...
    """
    known = inspect.signature(Pipeline).parameters
    refuse(
        (isinstance(model, _WRAPPERS) or hasattr(model, "_orig_mod"), f"the model is wrapped: a {type(model).__name__}",
         "the model itself", 'pass the model, and pipeline={...} with settings such as "compile"'),
        (settings is not None and not isinstance(settings, Mapping), f"pipeline is {settings!r:.60}",
         "a dict of settings of dl.Pipeline", 'pass pipeline={"num_ranks": 2}, say, or leave it out'),
    )  # fmt: skip
    for name in settings or ():
        decides = decided.get(name, "")
        refuse(
            (decides, f"pipeline has the setting {name}", f"none: {decides} decides it", "leave it out"),
            (name not in known, f"pipeline has the setting {name!r}", "settings of dl.Pipeline", nearest(name, known)),
        )
    return dict(settings or {})


def missing_method(owner: type, wanted: Mapping[str, str]) -> str:
    """Return the first method that a class lacks, or that lacks one of the parameters wanted; else nothing.

    >>> class Trainer:
    ...     def log(self, logs): ...
    >>> missing_method(Trainer, {"log": "logs"})
    ''
    >>> missing_method(Trainer, {"log": "logs start_time"})
    'Trainer.log(logs, start_time)'
    """
    for name, parameters in wanted.items():
        function = getattr(owner, name, None)
        known = inspect.signature(function).parameters if callable(function) else {}
        if function is None or not known.keys() >= set(parameters.split()):
            return f"{owner.__name__}.{name}({', '.join(parameters.split())})"
    return ""
