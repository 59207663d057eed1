"""Lines of a mesh that weigh a loss function together, each in a thread: shares as of one mean over all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as nf

from drumline.core.errors import ModelError
from drumline.engine.loss.fn_loss import FnWeight
from refused import refused

pytestmark = pytest.mark.torch
WIDTH = 4


class Together:
    """Adds up what several threads tell."""

    def __init__(self, lines: int) -> None:
        self.told: list[list[float]] = [[] for _ in range(lines)]
        self.barrier = threading.Barrier(lines, timeout=60)

    def across(self, line: int) -> Callable[[list[Any]], list[Any]]:
        def added(counts: list[Any]) -> list[Any]:
            self.told[line] = [float(count) for count in counts]
            self.barrier.wait()
            found = [sum(each) for each in zip(*self.told, strict=True)]
            self.barrier.wait()
            return found

        return added


def shares(loss_fn: Any, lines: Sequence[Sequence[tuple[Tensor, Tensor]]], sizes: bool) -> list[list[float]]:
    """Return every line's shares of its microbatches, each an output and a target."""
    together = Together(len(lines))

    def weighed(line: int) -> list[float]:
        weight = FnWeight(loss_fn, torch.device("cpu"))
        weight.across = together.across(line)
        targets = [target for _, target in lines[line]]
        rows = [len(target) for target in targets]
        try:
            found = weight.resolve(
                lines[line][0][0], 0, targets, rows, [target.numel() for target in targets] if sizes else None
            )
            again = weight(targets, rows, [target.numel() for target in targets] if sizes else None)
        except BaseException:
            together.barrier.abort()
            raise
        assert not found.factors
        if again is not None:
            assert [float(share) for share in again.shares] == pytest.approx([float(share) for share in found.shares])
        return [float(share) for share in found.shares]

    with ThreadPoolExecutor(len(lines)) as pool:
        return [future.result() for future in [pool.submit(weighed, line) for line in range(len(lines))]]


def microbatches(*sizes: tuple[int, int]) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return [(torch.randn(rows, length, WIDTH), torch.randn(rows, length, WIDTH)) for rows, length in sizes]


ELEMENTS = {
    "mse_loss": nf.mse_loss,
    "mean": lambda o, t: (o - t).abs().mean(),
    "sum / numel": lambda o, t: (o - t).pow(2).sum() / t.numel(),
}


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("sizes", [False, True])
def test_means_over_elements_of_other_lengths_on_other_lines(name: str, sizes: bool) -> None:
    lines = [microbatches((3, 6), (3, 6)), microbatches((3, 2), (4, 2))]
    found = shares(ELEMENTS[name], lines, sizes)
    total = sum(target.numel() for line in lines for _, target in line)
    for line, each in zip(lines, found, strict=True):
        assert each == pytest.approx([target.numel() / total for _, target in line])


@pytest.mark.parametrize("sizes", [False, True])
def test_sums_divided_by_rows_of_other_lengths_on_other_lines(sizes: bool) -> None:
    lines = [microbatches((3, 6), (3, 6)), microbatches((3, 2), (4, 2))]
    assert shares(lambda o, t: (o - t).pow(2).sum() / len(t), lines, sizes) == [
        pytest.approx([3 / 13, 3 / 13]), pytest.approx([3 / 13, 4 / 13])
    ]  # fmt: skip


def test_a_line_that_counts_otherwise_is_refused() -> None:
    def loss_fn(o: Tensor, t: Tensor) -> Tensor:
        return nf.mse_loss(o, t) if o.shape[1] == 3 else nf.mse_loss(o, t, reduction="sum")

    weight = FnWeight(loss_fn, torch.device("cpu"))
    weight.across = lambda counts: [2 * float(count) for count in counts]
    (output, target), (other, wanted) = microbatches((5, 3), (5, 2))
    weight.resolve(output, 0, [target, target], [5, 5], None)
    weight.verify(output, target, 5)
    with refused(ModelError, "averages over different things"):
        weight.verify(other, wanted, 5)
