"""Changes of a running pipeline: all ranks take them at the same step, and training goes on as if there were none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import drumline as dl
from attached import adapting_of
from drumline.adapt.proposal import CUT, NUMBER, PROGRAM, Arrangement, ChangeResult, Proposal
from drumline.core.errors import DrumlineError, MismatchError, ProgramError, UsageError
from drumline.core.measured.measured import Measured
from drumline.core.prove.violation import InvalidProgram
from drumline.pipeline.pipeline import Pipeline
from drumline.report.run.report import report_of
from drumline.report.run.text import report_text
from refused import refused, saying
from some import some

pytestmark = [pytest.mark.torch, pytest.mark.features("adapt")]

WIDTH, BLOCKS = 8, 6


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))


def piped(**settings: Any) -> Pipeline:
    given = {"num_microbatches": 4, "num_ranks": 2, "balance": [3, 3], "timeout": 120, **settings}
    return Pipeline(model(), loss_fn=functional.mse_loss, **given)


def trained(pipe: Pipeline, steps: int, before: Callable[[int], None] = lambda step: None) -> list[float]:
    """Train, and return the losses."""
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-2)
    losses = []
    for step in range(steps):
        before(step)
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = pipe.step(x, target=x.roll(1)).loss
        assert loss is not None
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def program(name: str, number: int = 4) -> dl.Program:
    return dl.generate(name, num_ranks=2, num_microbatches=number)


class Scripted:
    """Decides by a script: what to take before which step."""

    def __init__(self, now: Arrangement, script: dict[int, dict[str, Any]]) -> None:
        self.now, self.script = now, script
        self.judged: list[ChangeResult] = []
        self.seen: list[int] = []
        self.by_hand: list[Arrangement] = []
        self.stays = False

    def see(self, seen: Measured, rows: int | None = None) -> Proposal | None:
        step = seen.records[0].step
        self.seen.append(step)
        given = self.script.get(step + 1)
        if given is None:
            return None
        kind = CUT if "counts" in given else PROGRAM
        after = replace(self.now, **given)
        return Proposal(step, kind, "of the script", self.now, after, 2.0, 1.0)

    def took(self, proposal: Proposal, now: Arrangement, *, seconds: float, num_bytes: int) -> None:
        self.now = now
        self.judged.append(ChangeResult(proposal.step + 1, proposal, 1.5, 2.0, True))

    def changed(self, now: Arrangement) -> None:
        self.now = now
        self.by_hand.append(now)

    def stay(self) -> None:
        self.stays = True

    def stop(self) -> None:
        pass


def scripted(pipe: Pipeline, script: dict[int, dict[str, Any]]) -> Scripted:
    adapting = adapting_of(pipe)
    decider = Scripted(Arrangement(program("1f1b"), (3, 3)), script)
    if adapting._decider is not None:
        setattr(adapting, "_decider", decider)  # noqa: B010 - one that depends on no time
    return decider


SCRIPT: dict[int, dict[str, Any]] = {
    2: {"program": program("gpipe")},
    4: {"counts": (2, 4)},
    5: {"program": program("1f1b")},
    7: {"counts": (3, 3)},
}


def on_two_ranks(folder: str) -> dict[str, Any]:
    """Train with changes and without, and misuse what changes."""
    plain = piped(num_ranks=None)
    found: dict[str, Any] = {"plain": trained(plain, 9)}
    with piped(num_ranks=None, adapt={"program": False}, record=Path(folder)) as pipe:
        decider = scripted(pipe, SCRIPT)
        found["adapted"] = trained(pipe, 9)
        found["seen"], found["moves"] = decider.seen, [move.balance_after for move in pipe.moves]
        found["text"], found["by hand"] = pipe.program.format(), decider.by_hand
    pipe = piped(num_ranks=None)
    wrong: list[tuple[Any, type[DrumlineError]]] = [
        (program("gpipe" if pipe.rank else "1f1b"), MismatchError),
        (program("zb-v"), ProgramError),
        ("gpipe" if pipe.rank else 3, UsageError),
    ]
    told = []
    for given, kind in wrong:
        try:
            pipe.take_program(given)
        except kind as error:
            told.append(str(error))
    found["told"] = told
    pipe.take_program("zb-h1", num_microbatches=2)
    found["after"] = trained(pipe, 1)
    return found


@pytest.mark.features("moving", "record")
def test_ranks_change_together_and_train_as_if_nothing_had_changed(tmp_path: Path) -> None:
    first, second = dl.launch(on_two_ranks, str(tmp_path / "run"), num_ranks=2)
    assert first["plain"] == first["adapted"] == second["adapted"]
    assert first["moves"] == second["moves"] == [(2, 4), (3, 3)]
    assert first["text"] == second["text"] == program("1f1b").format()
    assert first["seen"] == list(range(8))
    assert second["seen"] == []
    assert first["by hand"] == [], "what was decided is no change by hand, which forgets the steps before"
    assert first["told"] == second["told"]
    assert ["different programs" in first["told"][0], "other ranks" in first["told"][1]] == [True, True]
    assert first["after"] == second["after"]
    run = dl.read_run(tmp_path / "run")
    assert [run.program_of(step).format() == program("gpipe").format() for step in run.steps] == [
        step in (2, 3, 4) for step in range(9)
    ]
    changes = report_of(run).changes
    assert [(change["step"], change["kind"]) for change in changes] == [(2, PROGRAM), (4, CUT), (5, PROGRAM), (7, CUT)]
    for change in some(changes):
        assert (change["predicted"], change["real"], change["kept"]) == (1.0, 1.5, True)
        assert (change["pause"] is not None) == (change["kind"] == CUT)
    assert "2 | 4 blocks" in report_text(report_of(run))


@pytest.mark.features("record")
def test_a_program_is_taken_up_between_two_steps_and_losses_stay() -> None:
    plain = trained(piped(), 6)
    pipe = piped()
    orders = {1: "gpipe", 3: "zb-h1", 4: "1f1b"}

    def before(step: int) -> None:
        if step in orders:
            pipe.take_program(orders[step])

    assert trained(pipe, 6, before) == plain
    assert pipe.program == program("1f1b")
    assert pipe.timeline().program.compute_only() == program("1f1b")


@pytest.mark.features("record")
def test_another_number_of_microbatches_is_taken_up() -> None:
    pipe = piped()
    candidate = pipe.take_program("1f1b", num_microbatches=8)
    assert candidate.num_microbatches == pipe.program.num_microbatches == 8
    losses = trained(pipe, 3)
    assert losses == pytest.approx(trained(piped(), 3), rel=1e-5)
    assert pipe.timeline().program.num_microbatches == 8


@pytest.mark.parametrize(
    ("given", "number", "kind", "said"),
    [
        (3, None, UsageError, saying("the program to take up is 3")),
        ("no-such", None, DrumlineError, saying("no-such")),
        (
            "zb-v",
            None,
            ProgramError,
            saying("zb-v cannot use 1 stage per rank", fix=r"Pipeline\(..., schedule='zb-v'\)"),
        ),
        (
            "gpipe",
            0,
            DrumlineError,
            saying("^the number of microbatches is 0", expected="a whole number of 1 or more$"),
        ),
        (program("1f1b"), 8, ProgramError, saying("has 4 microbatches")),
        (dl.Program.parse("0F0,0B0\n1B0,1F0"), None, InvalidProgram, saying("1B0 runs before 1F0")),
        (program("gpipe"), None, InvalidProgram, saying("hold 3 pairs, over the limit of 2")),
    ],
)
def test_what_cannot_be_taken_up_is_refused_and_changes_nothing(
    given: Any, number: Any, kind: Any, said: dict[str, str]
) -> None:
    pipe = piped(adapt={"max_activations": 2})
    with refused(kind, **said):
        pipe.take_program(given, number)
    assert pipe.program == program("1f1b")
    assert trained(pipe, 1) == trained(piped(), 1)


@pytest.mark.features("capture", "record")
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"adapt": 3}, "adapt is 3"),
        ({"adapt": {"rebalance": "all"}}, "rebalance is 'all'"),
        ({"adapt": True, "record": False}, "record is False, and adapt is True"),
        ({"adapt": True, "capture": True}, "capture is True, and adapt is True"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: Any, said: str) -> None:
    with refused(UsageError, said):
        piped(**settings)


@pytest.mark.features("moving")
def test_layers_that_cannot_move_stay_and_training_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    pipe = piped(adapt={"program": False})
    decider = scripted(pipe, {2: {"counts": (2, 4)}})
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for _ in range(4):
        pipe.step(torch.ones(8, WIDTH), target=torch.ones(8, WIDTH))
        optimizer.step()
        optimizer.zero_grad()
    assert decider.stays
    assert "layers stay where they are" in capsys.readouterr().err
    assert pipe.moves == ()


@pytest.mark.features("moving")
def test_a_change_by_hand_is_heard() -> None:
    pipe = piped(adapt={"program": False})
    decider = scripted(pipe, {})
    pipe.repartition(balance=[2, 4])
    assert [now.counts for now in decider.by_hand] == [(2, 4)]


def test_a_real_decider_chooses_the_number_of_microbatches_in_a_run() -> None:
    """Ranks take turns here, so that more microbatches cost more: whatever it takes up, losses agree to rounding."""
    pipe = piped(adapt={"microbatches": "batch", "program": False, "rebalance": "keep", "max_activations": 8})
    assert trained(pipe, 12) == pytest.approx(trained(piped(), 12), rel=1e-4)
    adapting = adapting_of(pipe)
    assert adapting._decider is not None
    assert not adapting._decider._numbers.are_kept
    assert NUMBER == "microbatches"


def of_few_rows(**settings: Any) -> dict[str, Any]:
    """Raise the number of microbatches from 2 to 8, then train and evaluate batches of 16, 3, 16 and 1 rows."""
    pipe = piped(num_microbatches=2, adapt={"microbatches": "batch", "program": False, "rebalance": "keep"}, **settings)
    decider = scripted(pipe, {2: {"program": program("1f1b", 8)}})
    numbers, gradients, losses = [], [], []
    for step, rows in enumerate((16, 16, 16, 3, 16, 1)):
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step))
        result = pipe.step(x, target=x.roll(1))
        assert result.loss is not None
        losses.append(result.loss.item())
        numbers.append(pipe.timeline().program.num_microbatches)
        gradients.append(
            {name: value.grad.clone() for name, value in pipe.named_parameters() if value.grad is not None}
        )
        for value in pipe.parameters():
            value.grad = None
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(9))
    output = pipe.eval_step(x).output
    return {"numbers": numbers, "gradients": gradients, "losses": losses, "seen": decider.seen, "output": output}


def on_two_ranks_with_few_rows() -> dict[str, Any]:
    return of_few_rows(num_ranks=None)


def check_few_rows(found: list[dict[str, Any]]) -> None:
    """Compare with the plain model."""
    assert all(entry["numbers"] == [2, 2, 8, 3, 8, 1] for entry in found)
    plain = model()
    for step, rows in enumerate((16, 16, 16, 3, 16, 1)):
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step))
        plain.zero_grad()
        loss = functional.mse_loss(plain(x), x.roll(1))
        torch.autograd.backward(loss)
        mine = {name: value for entry in found for name, value in entry["gradients"][step].items()}
        assert mine.keys() == dict(plain.named_parameters()).keys()
        for name, value in plain.named_parameters():
            torch.testing.assert_close(mine[name], value.grad)
        assert found[0]["losses"][step] == pytest.approx(loss.item(), rel=1e-5)
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(9))
    torch.testing.assert_close(next(entry["output"] for entry in found if entry["output"] is not None), plain(x))
    assert found[0]["seen"] == [0, 1, 2, 4], "steps of few rows are not judged"


def test_a_batch_of_few_rows_runs_with_the_microbatches_that_it_allows() -> None:
    check_few_rows([of_few_rows()])


def test_ranks_agree_on_the_microbatches_of_few_rows() -> None:
    check_few_rows(list(dl.launch(on_two_ranks_with_few_rows, num_ranks=2)))
