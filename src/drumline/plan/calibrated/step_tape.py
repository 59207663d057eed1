"""What a step launches and keeps, in its order: a work for every kernel, and the bytes that live between them.

::

    tape.new(gate=2048)            a tensor is there from here
    tape.run("silu", 1024)         a kernel runs; the bytes that it needs meanwhile come on top
    tape.free("gate")              nobody holds the tensor any more
    tape.peak                      the most bytes that were there at once
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from drumline.plan.calibrated.setting import WIDTHS

UNALIGNED = "-unaligned"  # ends the kind of a product whose rows in memory begin at odd places


class Work(NamedTuple):
    """A kernel, or a few that always run together: what it does, on which numbers, and its sizes."""

    kind: str
    dtype: str
    shape: tuple[int, ...]


class StepTape:
    """Works and live bytes. `rounding` is the unit of the allocator; `workspace` says what a work needs meanwhile.

    Where rows in memory are no multiple of `alignment` bytes, fast kernels for products cannot run: such products are
    another kind.

    >>> tape = StepTape("fp32", workspace=lambda work: 100)
    >>> tape.new(a=40, b=60)
    >>> tape.run("add", 10)
    >>> tape.free("a")
    >>> tape.live, tape.peak, dict(tape.works)
    (60, 200, {Work(kind='add', dtype='fp32', shape=(10,)): 1})
    """

    def __init__(
        self,
        dtype: str,
        *,
        rounding: int = 1,
        alignment: int = 1,
        workspace: Callable[[Work], float] = lambda work: 0.0,
    ) -> None:
        self.dtype = dtype
        self.works: Counter[Work] = Counter()
        self.live = 0
        self.peak = 0
        self.standing = 0  # bytes that are there from step to step, gradients apart
        self._rounding, self._alignment, self._workspace = rounding, alignment, workspace
        self._sizes: dict[str, int] = {}
        self._needs: dict[Work, int] = {}

    def run(self, kind: str, *shape: int, dtype: str = "") -> None:
        """Add a work."""
        usual = "fp32" if self.dtype == "tf32" and not kind.startswith("product") else self.dtype
        work = Work(kind, dtype or usual, shape)
        if kind.startswith("product"):
            work = aligned(work, self._alignment)
        self.works[work] += 1
        if work not in self._needs:
            self._needs[work] = int(self._workspace(work))
        self.peak = max(self.peak, self.live + self._needs[work])

    def new(self, **sizes: int) -> None:
        """Add tensors of so many bytes."""
        for name, size in sizes.items():
            assert name not in self._sizes, f"{name} is there already"
            rounded = -(-size // self._rounding) * self._rounding
            self._sizes[name] = rounded
            self.live += rounded
        self.peak = max(self.peak, self.live)

    def free(self, *names: str) -> None:
        """Take tensors away."""
        for name in names:
            self.live -= self._sizes.pop(name)

    def rename(self, **names: str) -> None:
        """Give tensors other names: `rename(old="new")`."""
        for old, name in names.items():
            self._sizes[name] = self._sizes.pop(old)

    def holds(self, name: str) -> bool:
        """Whether a tensor is there."""
        return name in self._sizes


def aligned(product: Work, alignment: int) -> Work:
    """Return a product, of another kind if rows in memory are no multiple of so many bytes.

    >>> [aligned(Work("product", "bf16", (7, words, 64)), 16).kind for words in (1000, 1001)]
    ['product', 'product-unaligned']
    >>> aligned(Work("product-weight", "bf16", (64, 64, 7)), 16).kind
    'product-weight'
    """
    rows, columns, depth = product.shape
    lengths = (rows, columns) if product.kind == "product-weight" else (columns, depth)
    if any(length * WIDTHS[product.dtype] % alignment for length in lengths):
        return product._replace(kind=product.kind + UNALIGNED)
    return product
