"""The order of unequal microbatches, and programs that are searched for them: the same gradients, in less time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import drumline as dl
from drumline.core.costs import Costs
from drumline.core.errors import BatchError, UsageError
from drumline.core.simulate.simulate import simulate
from drumline.engine.stages.sizes import Size, SizeCosts, fit, fitted, sizes_given
from drumline.features.lengths.arrange import arranged, orders
from drumline.pipeline.pipeline import Pipeline
from drumline.runtime.batch import Microbatches
from refused import refused
from some import some
from torch_models import WIDTH, Reference, mlp, programs

pytestmark = [pytest.mark.torch, pytest.mark.features("lengths")]
LENGTHS = (40, 3, 64, 5, 50, 9)


def unequal() -> tuple[Microbatches, Microbatches]:
    torch.manual_seed(0)
    pairs = [torch.randn(2, 2, length, WIDTH) for length in LENGTHS]
    return Microbatches(pair[0] for pair in pairs), Microbatches(pair[1] for pair in pairs)


def in_order(values: Microbatches, order: tuple[int, ...]) -> Microbatches:
    return Microbatches(values[at] for at in order)


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_step_runs_in_the_order_that_the_simulator_prefers(name: str) -> None:
    (program,) = programs(name, 2, (6,))
    model = mlp(dropout=0.2)
    x, y = unequal()
    sizes = tuple(Size(2, length) for length in LENGTHS)
    order = arranged(program, SizeCosts(program.num_stages), sizes).order
    assert order != tuple(range(6))
    reference = Reference(model, program, functional.mse_loss, loss_weight=Tensor.numel)
    pipe = Pipeline(model, loss_fn=functional.mse_loss, schedule=program, num_ranks=2, arrange=True)
    result = pipe.step(x, target=y, outputs=True)
    assert result.loss is not None
    assert torch.equal(result.loss, reference.step(in_order(x, order), in_order(y, order)))
    reference.compare(pipe, exact=True)
    assert [value.shape[1] for value in result.output] == list(LENGTHS)  # as they were given
    assert [value.shape[1] for value in pipe.eval_step(x).output] == list(LENGTHS)
    equal = torch.randn(12, WIDTH)
    assert pipe.step(equal, target=equal).loss is not None  # what is cut is never rearranged


def test_orders_hold_every_microbatch_once_and_the_best_is_never_worse_than_the_given() -> None:
    weights = [5.0, 1.0, 8.0, 2.0, 7.0]
    assert all(sorted(order) == [0, 1, 2, 3, 4] for order in some(orders(weights).values()))
    program = dl.generate("zb-h1", num_ranks=2, num_microbatches=5)
    found = arranged(program, SizeCosts(2), sizes_given([500, 100, 800, 200, 700]))
    factors = [weights[at] / 4.6 for at in found.order]
    assert found.makespan == pytest.approx(simulate(program, Costs(microbatch_factor=factors)).makespan)
    assert found.gain > 0
    equal = arranged(program, SizeCosts(2), sizes_given([9] * 5))
    assert (equal.name, equal.order, equal.gain) == ("as given", (0, 1, 2, 3, 4), 0.0)


def test_costs_are_fitted_by_place_and_length() -> None:
    sizes = [Size(rows, length) for rows in (1, 2, 4) for length in (3, 17, 64)]
    wanted = (0.5, 0.02, 0.001)
    seconds = [sum(part * term for part, term in zip(wanted, size.terms, strict=True)) for size in sizes]
    assert fit(sizes, seconds) == pytest.approx(wanted)
    assert fit([Size(2, 8)], [4.0]) == (0.0, 0.25, 0.0)
    assert fit([Size(1, 1), Size(1, 9)], [3.0, 3.0]) == pytest.approx((3.0, 0.0, 0.0), abs=1e-9)


@pytest.mark.features("record")
def test_a_search_is_cached_and_its_program_runs() -> None:
    x, y = unequal()
    pipe = Pipeline(mlp(), loss_fn=functional.mse_loss, schedule="zb-h1", num_microbatches=6, num_ranks=2)
    for _ in range(3):
        loss = pipe.step(x, target=y).loss
    found = pipe.search([(2, length) for length in LENGTHS], seconds=0.2)
    assert found.is_measured
    assert found.bound <= found.predicted <= found.arranged.makespan * 1.0001
    assert found is pipe.search([(2, length) for length in LENGTHS], seconds=0.2)
    assert found.program is None or 1 - found.predicted / found.arranged.makespan >= 0.01
    brought = dl.generate("1f1b", num_ranks=2, num_microbatches=6) if found.program is None else found.program
    torch.testing.assert_close(pipe.step(x, target=y, program=brought).loss, loss)
    timeline, sizes = pipe.timeline(), [Size(2, length) for length in LENGTHS]
    costs = fitted([(timeline, sizes)], 2)
    assert costs.is_measured
    assert costs.of(sizes).factors(6)[2] == max(costs.of(sizes).factors(6))


@pytest.mark.features("capture")
@pytest.mark.parametrize(
    ("sizes", "said"),
    [([1, 2], "2 sizes are given"), ([0] * 4, "0 is given as a size"), ([(1, "a")] * 4, "is given as")],
)
def test_sizes_that_do_not_fit_are_refused(sizes: Any, said: str) -> None:
    pipe = Pipeline(mlp(), loss_fn=functional.mse_loss, num_microbatches=4, num_ranks=2)
    with refused(BatchError, said):
        pipe.search(sizes)
    with refused(UsageError, "arrange is True, and capture is True"):
        Pipeline(mlp(), loss_fn=functional.mse_loss, num_microbatches=4, num_ranks=2, arrange=True, capture=True)
