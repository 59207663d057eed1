"""A model and settings of a pipeline that somebody else passes on, such as a trainer that decides some of them."""

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
