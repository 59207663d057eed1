"""How many bytes an answer will have, before anything is computed: from the manifest's shapes, and from answers so far.

Dimensions that inputs have as well are known from the request. Others count as 1 until an answer of that shape has
come; from then on the prediction is as much larger as that answer was.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TypeVar

from drumline.serve.front.tickets import Signature
from drumline.serve.wire.manifest import BATCH, Manifest, Tensor
from drumline.serve.wire.tensors import DATATYPES, Arrays

T = TypeVar("T")
_MOST_SHAPES = 256
_HEAD = 4096  # bytes of a message beside its tensors


@dataclass(slots=True)
class AnswerSizes:
    """Predicts answers of a model, and how many rows may travel together, by the largest message."""

    manifest: Manifest
    max_bytes: int
    _factors: OrderedDict[Signature, float] = field(default_factory=OrderedDict)
    _rows: OrderedDict[Signature, dict[str, int]] = field(default_factory=OrderedDict)  # bytes of a row of each output
    _most_rows: OrderedDict[Signature, int] = field(default_factory=OrderedDict)

    def predicted(self, signature: Signature, rows: int, names: Collection[str]) -> int:
        """Return the bytes of the named outputs."""
        each = self._row(signature)
        return int(rows * sum(each[name] for name in names) * self._factors.get(signature, 1.0))

    def came(self, signature: Signature, rows: int, outputs: Arrays) -> None:
        """Take in the whole answer to a request."""
        static = rows * sum(self._row(signature).values())
        factor = sum(output.nbytes for output in outputs.values()) / max(static, 1)
        if factor > self._factors.get(signature, 1.0):
            _keep(self._factors, signature, factor)
            self._most_rows.pop(signature, None)

    def most_rows(self, signature: Signature) -> int:
        """Return how many rows of a shape fit into one message, between any two stages; at least 1."""
        if (known := self._most_rows.get(signature)) is not None:
            return known
        each = sum(self._row(signature).values()) * self._factors.get(signature, 1.0)
        between = [self._of_row(signature, stage.inputs) for stage in self.manifest.stages]
        most = max(1, int((self.max_bytes - _HEAD) / max(1.0, each, *between)))
        _keep(self._most_rows, signature, most)
        return most

    def _row(self, signature: Signature) -> dict[str, int]:
        """Return the bytes of one row of each output."""
        if (known := self._rows.get(signature)) is None:
            known = {output.name: self._of_row(signature, [output]) for output in self.manifest.outputs}
            _keep(self._rows, signature, known)
        return known

    def _of_row(self, signature: Signature, tensors: Sequence[Tensor]) -> int:
        """Return the bytes of one row."""
        shapes = dict(signature)
        sizes = {
            name: size
            for tensor in self.manifest.inputs
            for name, size in zip(tensor.shape[1:], shapes[tensor.name], strict=True)
            if isinstance(name, str)
        }
        sizes[BATCH] = 1
        return sum(
            DATATYPES[tensor.datatype].itemsize
            * prod(size if isinstance(size, int) else sizes.get(size, 1) for size in tensor.shape)
            for tensor in tensors
        )


def _keep(table: OrderedDict[Signature, T], signature: Signature, value: T) -> None:
    """Note a value, and forget the oldest beyond a bound."""
    table[signature] = value
    while len(table) > _MOST_SHAPES:
        table.popitem(last=False)
