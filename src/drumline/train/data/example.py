"""A batch to look at before training: what it is made of, and how large its microbatches are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from drumline.train.data.items.batch import Batch, Bucket, Data


def example_of(data: Data, num_microbatches: int) -> Batch:
    """Return a batch without moving the stream; of buckets, one of so many of the largest microbatches."""
    if data.validation:
        batch = data.validation[0]
    else:
        position = data.training.state_dict()
        batch = next(iter(data.training))
        data.training.load_state_dict(position)
    if not data.buckets:
        return batch
    largest = fullest(data.buckets)[0]
    return sized(batch, replace(largest, num_microbatches=num_microbatches))


def fullest(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return the buckets that may take most memory: of the largest microbatch, and of the largest step.

    >>> fullest([Bucket(128, 4, 8), Bucket(600, 1, 7), Bucket(500, 1, 9)])
    [Bucket(length=600, rows=1, num_microbatches=7), Bucket(length=500, rows=1, num_microbatches=9)]
    """
    if not buckets:
        return []
    microbatch = max(buckets, key=lambda bucket: (bucket.places, bucket.length))
    step = max(buckets, key=lambda bucket: (bucket.places * bucket.num_microbatches, bucket.length))
    return [microbatch] if step == microbatch else [microbatch, step]


def sized(batch: Batch, bucket: Bucket) -> Batch:
    """Return a batch of a bucket's rows and length, its values repeated.

    >>> rows = torch.tensor([[1, 2]])
    >>> sized(Batch({"tokens": rows}, rows, 2, 2), Bucket(3, 2, 1)).target.tolist()
    [[1, 2, 1], [1, 2, 1]]
    """
    rows, length = bucket.rows * bucket.num_microbatches, bucket.length

    def grown(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        return tensor[torch.arange(rows) % len(tensor)][:, torch.arange(length) % tensor.shape[1]]

    inputs = {name: grown(value) for name, value in batch.inputs.items()}
    return Batch(inputs, grown(batch.target), rows * length, rows * length, length, bucket.num_microbatches)
