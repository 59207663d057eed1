"""Schedules without a flush: bit for bit what the papers' rules give in one process, on ranks of any kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drumline.channel.launch.launch import launch
from drumline.channel.rank_names import BY_NUMBER
from drumline.core.action import Op
from drumline.pipeline.pipeline import Pipeline
from matrices import mainly
from some import some
from stream_emulation import Emulated, emulate, version_of

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("settled_products"),
    pytest.mark.features("precision", "record", "stream"),
]
WIDTH, ROWS = 6, 12
SCHEDULES = {"pipedream": "pipedream", "vertical": "pipedream", "2bw": "pipedream-2bw"}


class Steep(nn.Module):
    """Passes on what it gets; where that is large, its slope is not a number."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (x - x.detach()).abs().sqrt() if bool((x.detach().abs() > 100).any()) else x


@dataclass(frozen=True)
class Case:
    """A run: its schedule, model, optimizer and counts."""

    kind: str
    optimizer: str = "SGD"
    num_ranks: int = 2
    num_microbatches: int = 4
    dropout: bool = True
    tied: bool = False
    checkpoint: str = "none"
    num_steps: int = 5
    max_norm: float | None = None
    low: bool = False  # whether the model is in bfloat16, with float32 copies for the optimizers
    autocast: bool = False  # whether forwards run under autocast to bfloat16
    varies: bool = False  # whether the learning rate changes from step to step
    bad: tuple[int, ...] = ()  # steps with a NaN in the input of one microbatch
    steep: int | None = None  # the step in which a block inside gets a NaN in its backward alone

    def blocks(self) -> list[tuple[str, nn.Module]]:
        torch.manual_seed(0)
        first: nn.Module = nn.Embedding(7, WIDTH) if self.tied else nn.Linear(WIDTH, WIDTH)
        inner: list[nn.Module] = []
        for _ in range(2 * self.num_ranks - 1):
            inner += [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3) if self.dropout else nn.Tanh()]
        last = nn.Linear(WIDTH, 7, bias=False) if self.tied else nn.LayerNorm(WIDTH)
        if self.tied:
            last.weight = first.weight  # type: ignore[assignment]
        if self.steep is not None:
            inner[3] = Steep()
        blocks = [first, *inner, last]
        return [(str(at), block.bfloat16() if self.low else block) for at, block in enumerate(blocks)]

    @property
    def balance(self) -> list[int]:
        inner = [4] * (self.num_ranks - 2)
        return [3, *inner, 4 * self.num_ranks - 3 - sum(inner)] if self.num_ranks > 1 else [4]

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        torch.manual_seed(1)
        if self.tied:
            return [(torch.randint(7, (ROWS,)), torch.randint(7, (ROWS,))) for _ in range(self.num_steps)]
        dtype = torch.bfloat16 if self.low else torch.float32
        made = [(torch.randn(ROWS, WIDTH, dtype=dtype), torch.randn(ROWS, WIDTH, dtype=dtype))
                for _ in range(self.num_steps)]  # fmt: skip
        for step in self.bad:
            made[step][0][ROWS // 2] = torch.nan
        if self.steep is not None:
            made[self.steep][0][ROWS // 2] = 1e4
        return made

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (nn.functional.cross_entropy if self.tied else nn.functional.mse_loss)(output, target)

    @property
    def options(self) -> dict[str, Any]:
        return {"schedule": SCHEDULES[self.kind], "vertical_sync": self.kind == "vertical", "balance": self.balance,
                "num_microbatches": self.num_microbatches, "num_ranks": self.num_ranks, "seed": 0,
                "loss_fn": nn.functional.cross_entropy if self.tied else nn.functional.mse_loss,
                "checkpoint": self.checkpoint, "master_weights": self.low,
                "precision": "bf16" if self.autocast else "fp32"}  # fmt: skip

    def emulated(self, first: int = 0) -> Emulated:
        blocks, at, stages = self.blocks(), 0, []
        for size in self.balance:
            stages.append(blocks[at : at + size])
            at += size
        tied = ("0.weight", f"{len(blocks) - 1}.weight") if self.tied else None
        return emulate(stages, self.kind, self.batches(), self.loss, lambda named: optimizers_of(self, named),
                       num_microbatches=self.num_microbatches, tied=tied, max_norm=self.max_norm,
                       dtype=torch.bfloat16 if self.low else torch.float32, autocast=self.autocast,
                       rate=rate_of if self.varies else None)  # fmt: skip


def rate_of(step: int) -> float:
    return 0.01 * (1 + step % 3)


def chosen(case: Case, names: dict[str, torch.Size]) -> list[tuple[type[Optimizer], dict[str, Any], list[str]]]:
    """Return each optimizer's class, settings and parameters."""
    matrices = [name for name, shape in names.items() if len(shape) == 2]
    others = [name for name in names if name not in matrices]
    if case.optimizer == "SGD":
        return [(torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}, list(names))]
    if case.optimizer == "AdamW":
        return [(torch.optim.AdamW, {"lr": 0.01}, list(names))]
    return [(torch.optim.Muon, {"lr": 0.02}, matrices), (torch.optim.AdamW, {"lr": 0.01}, others)]


def optimizers_of(case: Case, named: dict[str, nn.Parameter]) -> list[Optimizer]:
    shapes = {name: param.shape for name, param in named.items()}
    return [kind([named[name] for name in names], **given) for kind, given, names in chosen(case, shapes)]


def pipeline(case: Case, **settings: Any) -> tuple[Pipeline, list[Optimizer]]:
    pipe = Pipeline(nn.Sequential(*(module for _, module in case.blocks())), **{**case.options, **settings})
    each = chosen(case, pipe.parameter_shapes())
    return pipe, [pipe.optimizer(kind, names=names, max_norm=case.max_norm, **given) for kind, given, names in each]


@dataclass
class Ran:
    """What ranks did: losses, weights after a drain, and the versions of every action of every step."""

    losses: list[Tensor]
    weights: dict[str, Tensor]
    versions: list[list[tuple[str, int]]]  # by step and rank
    skipped: dict[int, str]


def trained(case: Case, look: Callable[[Pipeline, int], None] | None = None, **settings: Any) -> Ran:
    pipe, optimizers = pipeline(case, **settings)
    with pipe:
        results, versions = [], []
        for step, (x, y) in enumerate(case.batches()):
            for group in (group for optimizer in optimizers for group in optimizer.param_groups if case.varies):
                group["lr"] = rate_of(step)
            results.append(pipe.step(x, target=y))
            if look is not None:
                look(pipe, step)
            for row, record in zip(pipe.timeline().program.timed_rows, pipe.timeline().records, strict=True):
                versions.append([(str(action), version) for action, version in zip(row, record.versions, strict=True)])
        losses = [result.loss for result in results]
        pipe.drain()
        weights = {name: entry.clone() for name, entry in pipe.state_dict().items()}
        skipped = {step: result.skipped for step, result in enumerate(results) if result.skipped}
        return Ran(losses, weights, versions, skipped)  # type: ignore[arg-type]


def compare(case: Case, ran: Ran, expected: Emulated | None = None) -> None:
    expected = expected or case.emulated()
    for step, (ours, theirs) in enumerate(some(zip(ran.losses, expected.losses, strict=True))):
        assert torch.equal(ours, theirs) or (ours.isnan() and theirs.isnan()), (case, step, ours, theirs)
    every = BY_NUMBER.listed
    assert ran.skipped == {step: every(sorted(bad)) for step, bad in expected.skipped.items()}, case
    for name, weight in some(ran.weights.items()):
        assert torch.equal(weight, expected.weights[name]), (case, name)


def seen(case: Case, ran: Ran) -> Iterator[tuple[str, int, int, int]]:
    """Yield op, stage, microbatch of the run and version of all forwards and backwards that were recorded."""
    for at, row in enumerate(ran.versions):
        step, _ = divmod(at, case.num_ranks)
        parsed = [(generate_action(text), version) for text, version in row]
        newest = max(action.microbatch for action, _ in parsed if action.op is Op.FORWARD)
        for action, version in parsed:
            if action.op is not Op.UPDATE:
                microbatch = (step + 1) * case.num_microbatches - 1 - (newest - action.microbatch)
                yield action.op.name, action.stage, microbatch, version


def generate_action(text: str) -> Any:
    from drumline.core.action import Action

    return Action.parse(text)


def check_versions(case: Case, ran: Ran) -> None:
    for op, stage, microbatch, version in some(seen(case, ran)):
        expected = version_of(case.kind, stage, case.num_ranks, microbatch, case.num_microbatches)
        assert version == expected, (case, op, stage, microbatch)


CASES = [
    Case("pipedream", "SGD", 3, 4, varies=True),
    Case("pipedream", "AdamW", 2, 1, num_steps=8),
    Case("pipedream", "Muon", 4, 2, num_steps=6),
    Case("pipedream", "SGD", 1, 2),
    Case("vertical", "SGD", 3, 4, varies=True),
    Case("vertical", "AdamW", 4, 1, num_steps=9),
    Case("2bw", "SGD", 2, 2, varies=True),
    Case("2bw", "AdamW", 4, 4, max_norm=0.1),
    Case("vertical", "Muon", 3, 2, max_norm=0.05),
    Case("2bw", "Muon", 3, 4),
    Case("2bw", "SGD", 2, 4, checkpoint="full"),
    Case("pipedream", "AdamW", 3, 2, low=True),
    Case("pipedream", "AdamW", 3, 2, checkpoint="full", dropout=False),
    Case("2bw", "AdamW", 3, 4, bad=(2, 4), num_steps=7),
    Case("2bw", "Muon", 3, 3, bad=(0,), max_norm=0.1, varies=True),
    Case("vertical", "SGD", 3, 2, bad=(1, 2, 5), num_steps=6),
    Case("pipedream", "AdamW", 3, 4, bad=(1,), low=True),
    Case("pipedream", "SGD", 3, 4, steep=2),
    Case("2bw", "SGD", 3, 4, steep=2),
    Case("pipedream", "AdamW", 3, 4, autocast=True),
    Case("pipedream", "SGD", 3, 4, autocast=True, checkpoint="full", dropout=False),
    Case("vertical", "AdamW", 3, 2, autocast=True, max_norm=0.1),
    Case("2bw", "AdamW", 3, 3, autocast=True, checkpoint="full"),
    Case("2bw", "Muon", 3, 4, autocast=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_updates_are_those_of_the_papers_rule_bit_for_bit(case: Case) -> None:
    ran = trained(case, transport="in-process")
    compare(case, ran)
    check_versions(case, ran)


# On real ranks: every launch runs several cases.
RANKS_OF_TWO = [
    Case("2bw", "Muon", 2, 3, tied=True, max_norm=0.1),
    Case("2bw", "AdamW", 2, 4, checkpoint="full", max_norm=0.1),
    Case("vertical", "AdamW", 2, 2, tied=True),
    Case("pipedream", "SGD", 2, 2),
    Case("2bw", "AdamW", 2, 2, bad=(1, 4)),
    Case("pipedream", "AdamW", 2, 2, bad=(2,)),
]


def _on_ranks(cases: Sequence[Case], transport: str) -> list[Ran]:
    return [trained(case, None if case.tied else _looked_at, transport=transport) for case in cases]


@mainly("transport", "shared-memory", "gloo")
def test_ranks_in_processes_of_their_own_do_the_same(transport: str) -> None:
    each = launch(_on_ranks, RANKS_OF_TWO, transport, num_ranks=2)
    for at, case in enumerate(RANKS_OF_TWO):
        weights = {name: weight for rank in each for name, weight in rank[at].weights.items()}
        assert each[0][at].skipped == each[1][at].skipped
        ran = Ran(each[0][at].losses, weights, each[0][at].versions, each[0][at].skipped)
        compare(case, ran)
        check_versions(case, ran)


def _looked_at(pipe: Pipeline, step: int) -> None:
    """Evaluate after some steps, which must change nothing."""
    if step in (1, 2):
        pipe.eval_step(torch.ones(ROWS, WIDTH), target=torch.ones(ROWS, WIDTH))


@pytest.mark.features("saving")
@pytest.mark.parametrize("kind", ["pipedream", "vertical", "2bw"])
def test_evaluations_and_checkpoints_do_not_disturb_training_and_runs_go_on_exactly(kind: str, tmp_path: Path) -> None:
    case = Case(kind, "AdamW", 3, 3, num_steps=7, max_norm=None if kind == "pipedream" else 0.1)
    expected = case.emulated()

    def look(pipe: Pipeline, step: int) -> None:
        _looked_at(pipe, step)
        if step in (2, 4):
            pipe.save(tmp_path, wait=True)

    compare(case, trained(case, look, transport="in-process"), expected)
    pipe, _optimizers = pipeline(case, transport="in-process")
    with pipe:
        pipe.load(tmp_path)
        losses = [pipe.step(x, target=y).loss for x, y in case.batches()[5:]]
        pipe.drain()
        assert all(some(torch.equal(a, b) for a, b in zip(losses, expected.losses[5:], strict=True)))  # type: ignore[arg-type]
        for name, entry in some(pipe.state_dict().items()):
            assert torch.equal(entry, expected.weights[name]), name
