"""Rows for a forecast where the data cannot be read yet: drawn tokens, in rows that are full."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from drumline.train.config.settings import TrainSettings
from drumline.train.data.build import vocabulary_of
from drumline.train.data.items.batch import Data
from drumline.train.data.items.documents import Documents
from drumline.train.data.items.unready import Unready
from drumline.train.models.built import Built

BuildData = Callable[..., Data]
_FEWEST_TOKENS = 2  # where a model does not say how many it knows, any tokens must be among its own


def data_or_drawn(
    build_data: BuildData, settings: TrainSettings, built: Built, *, rank: int, size: int
) -> tuple[Data, Unready | None]:
    """Return the data of a run; or drawn ones of the same shapes, and why a run would be refused.

    A file that is missing or broken is refused here too.
    """
    try:
        return build_data(settings, built, rank=rank, size=size), None
    except Unready as error:
        trained = replace(settings, evaluation=replace(settings.evaluation, every=0))
        documents = drawn_documents(settings, vocabulary_of(settings, built) or _FEWEST_TOKENS)
        return build_data(trained, built, rank=rank, size=size, documents=documents), error


def drawn_documents(settings: TrainSettings, vocabulary: int) -> Documents:
    """Return a document for every row of an optimizer step: as many tokens as fill it.

    >>> from drumline.train.config.settings import BatchSettings
    >>> documents = drawn_documents(TrainSettings(batch=BatchSettings(sequences=3, microbatch=1, sequence=5)), 10)
    >>> documents.lengths.tolist()
    [6, 6, 6]
    """
    width = max(settings.lengths.buckets, default=0) or settings.batch.sequence
    tokens = np.random.default_rng(settings.run.seed).integers(vocabulary, size=(settings.batch.sequences, width + 1))
    return Documents.of(tokens.tolist())
