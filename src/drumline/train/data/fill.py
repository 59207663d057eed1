"""Batches out of rows: the tensors that a model is called with, and what counts in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drumline.core.errors import ModelError, UsageError
from drumline.runtime.batch import Microbatches
from drumline.train.data.items.batch import Batch
from drumline.train.data.layouts import Unit
from drumline.train.data.samples import Samples
from drumline.train.models.built import IGNORED, Built

Fill = Callable[[Sequence[Sequence[Unit]]], Batch]  # makes a batch of a rank's microbatches
LABELS = ("labels", "targets", "target")  # what models call them that compute their own loss


class TokenFiller:
    """Makes batches of tokens; rows of several documents number these, or their positions, as the model takes it."""

    def __init__(self, samples: Samples, built: Built, how: str, vocabulary: int | None) -> None:
        self.samples, self.how, self.vocabulary = samples, how, vocabulary
        self.inputs = built.inputs
        self.labels = _labels(built)
        self.places = _places(built) if how == "packed" else ""

    def batch(self, microbatches: Sequence[Sequence[Unit]]) -> Batch:
        """Return the batch: whole tensors, or one for each microbatch where these differ in length."""
        if self.how == "padded":
            tensors = [self._rows(microbatch) for microbatch in microbatches]
            values: dict[str, Any] = {name: Microbatches(entry[name] for entry in tensors) for name in tensors[0]}
            padded, bucket = sum(entry["target"].numel() for entry in tensors), 0
            counted = sum(_counted(entry["target"]) for entry in tensors)
        else:
            values = self._rows([unit for microbatch in microbatches for unit in microbatch])
            padded, counted = values["target"].numel(), _counted(values["target"])
            bucket = int(values["target"].shape[1])
        target = values.pop("target")
        if self.labels:
            values[self.labels], target = target, None
        return Batch(values, target, counted, padded, bucket, num_microbatches=len(microbatches))

    def _rows(self, units: Sequence[Unit]) -> dict[str, Tensor]:
        rows = [row for unit in units for row in unit.rows]
        shape = (len(rows), max(unit.width for unit in units))
        tokens, documents = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        places, target = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)
        for at, row in enumerate(rows):
            start = 0
            for number, sample in enumerate(row):
                inputs, targets = self.samples.read(sample)
                stop = start + len(inputs)
                tokens[at, start:stop], target[at, start:stop] = inputs, targets
                documents[at, start:stop], places[at, start:stop] = number, np.arange(len(inputs))
                start = stop
            # What is left over is its own document, in which nothing counts.
            documents[at, start:], places[at, start:] = len(row), np.arange(shape[1] - start)
        self._check(tokens)
        tensors = {self.inputs: torch.from_numpy(tokens), "target": torch.from_numpy(target)}
        beside = {"document_ids": documents, "position_ids": places}
        return tensors | ({self.places: torch.from_numpy(beside[self.places])} if self.places else {})

    def _check(self, tokens: Any) -> None:
        if self.vocabulary is not None and tokens.size and int(tokens.max()) >= self.vocabulary:
            raise UsageError(
                f"the data have the token {int(tokens.max())}, and the model {self.vocabulary} tokens",
                expected="tokens of the model's vocabulary",
                fix="check data.tokenizer, data.token_type and model.vocabulary",
            )


def _counted(target: Tensor) -> int:
    return int((target != IGNORED).sum())


def _labels(built: Built) -> str:
    """Return under which name a model that computes its own loss takes targets; "" where a loss function gets them."""
    if built.loss_fn is not None:
        return ""
    for name in LABELS:
        if name in built.takes:
            return name
    raise ModelError(
        f"{type(built.model).__name__} comes without a loss function and takes no targets",
        expected=f"(module, loss_fn) from build_model, or a model with an argument {', '.join(LABELS[:-1])} or target",
    )


def _places(built: Built) -> str:
    for name in ("document_ids", "position_ids"):
        if name in built.takes:
            return name
    raise ModelError(
        f'lengths.how is "packed", and {type(built.model).__name__} does not learn where documents begin',
        expected="a model that takes document_ids or position_ids",
        fix='use lengths.how = "padded" or "buckets"',
    )
