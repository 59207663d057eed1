"""Data that a user's `build_data` gives: a Data, (training, validation), or anything that can be gone through again.

What it yields is a `Batch`, or (inputs, target). Whether it can be continued exactly is tried before training begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch import Tensor

from drumline.core.errors import UsageError
from drumline.train.config.settings import TrainSettings
from drumline.train.data.items.batch import Data
from drumline.train.data.own.repeated import FORMS, DataSource, RepeatedStream, batch_of
from drumline.train.data.own.resume_trial import check_resumable, check_state
from drumline.train.models.built import Built
from drumline.train.models.user_function import call_with, named_function, users_code


def data_by_function(settings: TrainSettings, built: Built, *, rank: int, size: int) -> Data:
    """Return what the user's function makes, called with those of settings, built, rank, size, seed that it takes."""
    name = settings.data.function
    seed = settings.run.seed if settings.data.seed is None else settings.data.seed
    offered = {
        "settings": settings,
        "built": built,
        "tokenizer": built.tokenizer,
        "rank": rank,
        "size": size,
        "seed": seed,
    }
    function = named_function(name, key="data.function")
    with users_code(name):
        returned = call_with(function, offered, settings.data.arguments, key="data")
    if isinstance(returned, Data):
        if settings.data.exact:
            _check_stream(returned.training, name)
        return returned
    pair = isinstance(returned, tuple) and len(returned) == 2 and not isinstance(returned[0], Tensor)
    training, held_out = returned if pair else (returned, ())
    if isinstance(training, Iterator) or not isinstance(training, Iterable):
        fix = "return an object whose __iter__ starts again, such as a class with your generator function as __iter__"
        once = isinstance(training, Iterator)
        raise UsageError(f"{name} returned a {type(training).__name__}", expected=FORMS, fix=fix if once else "")
    if settings.failures.elastic and size > 1 and settings.data.exact:
        raise UsageError(
            f"failures.elastic is true, and {name} divides its data by {size} data-parallel ranks",
            expected="data that fewer ranks can continue: those of files can be",
            fix="use failures.restarts without elastic, or set data.exact = false",
        )
    with users_code(name):
        batches = islice(held_out, settings.evaluation.batches if settings.evaluation.every else 0)
        validation = tuple(batch_of(batch, built, name) for batch in batches)
        source = DataSource(training)
        if settings.data.exact:
            check_resumable(source, name)
    return Data(RepeatedStream(source, built, name, exact=settings.data.exact), validation, num_tokens=0)


def _check_stream(stream: Any, name: str) -> None:
    """Refuse a stream of the user's own that cannot say where it is."""
    lacks = [text for text in ("state_dict", "load_state_dict") if not callable(getattr(stream, text, None))]
    if lacks:
        raise UsageError(
            f"{name} returned a Data whose training has no {' and no '.join(lacks)}",
            expected="a stream that can be continued",
            fix="return the batches alone, or set data.exact = false",
        )
    with users_code(name):
        check_state(stream.state_dict(), name)
