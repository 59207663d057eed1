"""What all ranks told of a step: each of them counts, whichever it is."""

from __future__ import annotations

import pytest
import torch

from drumline.core.errors import MismatchError, ModelError, NonFiniteError
from drumline.core.measured.record import Record
from drumline.core.program import Program
from drumline.engine.ranks.tally import RankReport, Tally, TallyLedger
from drumline.features.precision.scaler import LossScaler
from drumline.runtime.step import Step
from drumline.schedules import generate
from refused import refused

pytestmark = [pytest.mark.torch, pytest.mark.features("precision")]

NUM_RANKS = 3
PROGRAM: Program = generate("1f1b", num_ranks=NUM_RANKS, num_microbatches=4)
each_rank = pytest.mark.parametrize("rank", range(NUM_RANKS))


def tally(rank: int, odd: RankReport, *, number: int = 3, scaler: LossScaler | None = None) -> Tally:
    """Return what is heard where one rank tells something else than the others."""
    told = [RankReport() for _ in range(NUM_RANKS)]
    told[rank] = odd
    return Tally(number, lambda: told, PROGRAM, scaler)


@each_rank
def test_what_is_not_finite_is_named_by_its_rank(rank: int) -> None:
    with refused(NonFiniteError, f"step 3: a loss or gradient on rank {rank} is NaN or infinite"):
        tally(rank, RankReport(finite=False)).check()
    with refused(NonFiniteError, f"on rank {rank} is"):
        tally(rank, RankReport(finite=torch.tensor(False))).check()


@each_rank
def test_an_overflow_on_any_rank_lowers_the_scale(rank: int) -> None:
    scaler = LossScaler(init_scale=8.0)
    scaler.end(Step(3))
    tally(rank, RankReport(finite=False), scaler=scaler).check()
    assert not scaler.decide()
    assert scaler.scale == 4.0


@each_rank
def test_parameters_that_no_loss_reaches_are_named_whoever_holds_them(rank: int) -> None:
    told = [RankReport(unreached=[]) for _ in range(NUM_RANKS)]
    told[rank].unreached = ["4.weight", "4.bias"]
    ledger = TallyLedger("raise")
    ledger.add(Tally(3, lambda: told, PROGRAM), trained=True, alone=False)
    with refused(ModelError, r"no loss reaches 4\.bias, 4\.weight"):
        ledger.settle(until=None, gradients_left=lambda: True)


@each_rank
def test_a_scale_that_differs_on_any_rank_is_refused(rank: int) -> None:
    told = [RankReport(scale=8.0) for _ in range(NUM_RANKS)]
    told[rank].scale = 4.0
    with refused(MismatchError, "ranks scaled the loss by 4, 8"):
        Tally(3, lambda: told, PROGRAM).check()


def test_parts_of_the_loss_are_added_in_the_order_of_microbatches() -> None:
    parts = [1e8, 1.0, -1e8, 1.0]
    told = [RankReport(), RankReport([3, 1], [parts[3], parts[1]]), RankReport([2, 0], [parts[2], parts[0]])]
    total = torch.tensor(parts[0])
    for part in parts[1:]:
        total = total + torch.tensor(part)
    assert torch.equal(Tally(3, lambda: told, PROGRAM).loss, total)  # type: ignore[arg-type]
    assert total != sum(torch.tensor(part) for part in reversed(parts))


@each_rank
def test_a_step_that_was_refused_stays_so_as_long_as_its_gradients_are_there(rank: int) -> None:
    ledger = TallyLedger()
    ledger.add(tally(rank, RankReport(finite=False)), trained=True, alone=False)
    for _ in range(2):
        with pytest.raises(NonFiniteError):
            ledger.settle(until=None, gradients_left=lambda: True)
    ledger.settle(until=None, gradients_left=lambda: False)


@each_rank
def test_a_record_that_was_told_late_takes_no_other_ones_place(rank: int) -> None:
    first, second = ([Record(number, step) for number in range(NUM_RANKS)] for step in range(2))
    told = [RankReport(record=record) for record in first]
    told[rank].record = None
    after = [RankReport(record=record, late=first[at]) for at, record in enumerate(second)]
    step_tally, other = Tally(0, lambda: told, PROGRAM), Tally(1, lambda: after, PROGRAM)
    assert step_tally.known_records is None
    step_tally.following = other
    assert other.reports
    assert step_tally.known_records == tuple(first)
    after[rank - 1].late = second[rank - 1]  # what was told in time counts
    assert step_tally.known_records == tuple(first)
