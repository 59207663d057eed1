"""What can be found wrong with a run before its ranks start, by building what is cheap to build: see `preflight`.

    model     its numbers; modules, on the meta device, only if names of its parts are asked for: making them takes a
              second, and importing transformers several. config/files looks at a model's folder without it
    cut       names of blocks
    groups    patterns of parameter names
    data      all of them, if they are small; of others the first megabytes. What is left the ranks find, with the same
              words and place

Functions of users are never called here: they may take long, and a device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn

from drumline.core.errors import DrumlineError, ModelError, nearest
from drumline.train.config.files.data_files import check_utf8, matched, records_of
from drumline.train.config.placed import problem_of
from drumline.train.config.problems import Problem, refused
from drumline.train.config.settings import DataSettings, TrainSettings
from drumline.train.config.tables import TableSource
from drumline.train.data.build import build_data
from drumline.train.models.build import outlined
from drumline.train.models.built import Built
from drumline.train.models.tokenizers import BYTES
from drumline.train.tune.build_tuned import build_tuned

_SMALL = 16 << 20  # bytes of text or tokens that are read whole
_FEW = 1 << 20  # bytes of lines that are parsed one by one, and of the beginning of large files
_MOST_FILES = 64  # of which the beginning is looked at


def preflight(settings: TrainSettings, source: TableSource | None = None) -> None:
    """Raise ConfigError with all that is wrong, each with file, line and key; `source` says where keys were given.

    >>> from drumline.train.config.settings import BatchSettings
    >>> preflight(TrainSettings())
    >>> preflight(TrainSettings(batch=BatchSettings(sequences=4096, microbatch=64)))
    Traceback (most recent call last):
    drumline.core.errors.ConfigError: batch.sequences: the data have ... rows, and a step takes 4096; expected ...
    """
    looking = _Looking(settings, source or TableSource())
    built = looking.model()
    if built is not None:
        looking.cut(built.model)
        looking.groups(built.model)
    looking.data(built)
    if looking.problems:
        raise refused(looking.problems)


class _Looking:
    """Looks at the parts of a run, and notes what is wrong."""

    def __init__(self, settings: TrainSettings, source: TableSource) -> None:
        self.settings, self.source = settings, source
        self.problems: list[Problem] = []

    def tried(self, key: str, build: Callable[[], Any]) -> Any:
        """Return what is built, or note why it cannot be."""
        try:
            return build()
        except DrumlineError as error:
            self.problems.append(problem_of(error, self.source, key))
            return None

    def model(self) -> Built | None:
        """Return the model without memory, or only its numbers, if that is cheap."""
        model, data = self.settings.model, self.settings.data
        names = bool(self.settings.pipeline.cuts or self.settings.optimizer.groups)
        if model.kind == "function" or (model.kind == "hf" and not names):
            return None
        if data.tokenizer not in ("", BYTES) and not names:
            return None  # it needs transformers
        key = "model.path" if model.kind == "hf" else "model.vocabulary"
        make = partial(build_tuned, self.settings, device="meta") if names else partial(outlined, self.settings)
        found_model: Built | None = self.tried(key, make)
        return found_model

    def cut(self, model: nn.Module) -> None:
        """Look for the blocks with which stages begin."""
        known = [name for name, _ in model.named_modules() if name]
        for at, name in enumerate(self.settings.pipeline.cuts):
            if name not in known:
                near = [block for block in known if block.count(".") <= 1] or known
                error = ModelError(f"{name!r:.80} is no block of the model", fix=nearest(name, near))
                where = self.source.where(("pipeline", "cuts", at))
                self.problems.append(Problem(where, "pipeline.cuts", error.error, "names of blocks", error.fix))

    def groups(self, model: nn.Module) -> None:
        """Look for the parameters that groups of the optimizer are for."""
        if not self.settings.optimizer.groups:
            return
        from drumline.train.loop.optimizers import shared_out

        shapes = {name: param.shape for name, param in model.named_parameters() if param.requires_grad}
        others: dict[int, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            others.setdefault(id(param), []).append(name)
        aliases = {name: others[id(param)] for name, param in model.named_parameters()}
        self.tried("optimizer.groups", lambda: shared_out(shapes, self.settings.optimizer, others=aliases))

    def data(self, built: Built | None) -> None:
        """Read small data as the ranks will, and the beginning of others."""
        data = self.settings.data
        if data.kind == "function" or self.problems:
            return
        files = [path for name in (*data.files, *data.validation_files) for path in matched(name)]
        lines = data.kind in ("instructions", "points") or any(_is_records(path) for path in files)
        size = sum(os.path.getsize(path) for path in files)
        key = "data.files" if data.files else "batch.sequences"
        if built is not None and size <= (_FEW if lines else _SMALL):
            settings = replace(self.settings, data=replace(data, workers=0))
            data_made = self.tried(key, lambda: build_data(settings, built, rank=0, size=settings.mesh.data))
            if data_made is not None:
                data_made.close()
        else:
            for path in files[:_MOST_FILES]:
                self.tried(key, lambda path=path: _begin(path, data))  # type: ignore[misc]


def _is_records(path: Path) -> bool:
    return path.suffix in (".jsonl", ".ndjson")


def _begin(path: Path, data: DataSettings) -> None:
    """Read the beginning of a file of text or records."""
    if data.kind == "instructions" or (data.kind == "text" and _is_records(path)):
        for _ in islice(records_of(path), 1000):
            pass
    elif data.kind == "text":
        check_utf8(path, most=_FEW)
