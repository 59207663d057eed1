"""A plan: everything that was decided for one model on given ranks, and what it is predicted to take.

`Pipeline(model, plan=...)` runs it. As a file it is JSON, with the program in its text form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from drumline.core.errors import DrumlineError, PlanError
from drumline.core.program import Program
from drumline.plan.model_profile import Identity, read_text

FORMAT = "drumline plan"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Seconds:
    """A step, each second in one item; the mean over ranks where they differ.

    `compute` is F and the backward once, `recompute` the forwards that run again, `executor` what it adds to actions,
    `bubble` waiting for other ranks, `communication` what the step would be shorter if messages took no time, `around`
    what comes before the first action and behind the last.
    """

    compute: float
    recompute: float
    executor: float
    communication: float
    bubble: float
    around: float

    @property
    def total(self) -> float:
        """The seconds of the step."""
        return float(sum(getattr(self, one.name) for one in fields(self)))


@dataclass(frozen=True, slots=True)
class RankBytes:
    """What a rank holds at its peak; `received` is what came from other stages and is kept for a backward."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    received: float

    @property
    def total(self) -> float:
        """The peak."""
        return float(sum(getattr(self, one.name) for one in fields(self)))

    @property
    def stash(self) -> float:
        """What is held for backwards to come."""
        return self.activations + self.received


@dataclass(frozen=True)
class Plan:
    """Cuts, placement, schedule, microbatches and checkpointing, with the predicted step and every rank's peak.

    `counts` are the blocks of each stage, `cuts` the names of those with which stages 1, 2, ... begin. `checkpoint`
    says of each stage whether it is recomputed. `limits` are the bytes that each rank may hold, None without any.
    """

    model: Identity
    program: Program
    counts: tuple[int, ...]
    cuts: tuple[str, ...]
    batch: int
    microbatch_size: int
    checkpoint: tuple[bool, ...]
    seconds: Seconds
    rank_bytes: tuple[RankBytes, ...]
    limits: tuple[float, ...] | None = None
    optimizer: str = "adam"
    searched: bool = False

    @property
    def schedule(self) -> str:
        """The program's name."""
        return self.program.name

    @property
    def num_ranks(self) -> int:
        """How many ranks it is for."""
        return self.program.num_ranks

    @property
    def num_microbatches(self) -> int:
        """How many microbatches a step has."""
        return self.program.num_microbatches

    @property
    def stages_per_rank(self) -> int:
        """How many stages the rank with most of them holds."""
        return max(len(self.program.placement.stages_of(rank)) for rank in range(self.num_ranks))

    @property
    def step_seconds(self) -> float:
        """The predicted step."""
        return self.seconds.total

    @property
    def bubble(self) -> float:
        """The share of the step that ranks wait for each other."""
        return self.seconds.bubble / self.seconds.total if self.seconds.total else 0.0

    @cached_property
    def pipeline_settings(self) -> dict[str, Any]:
        """What `Pipeline` is given."""
        full = {stage: "full" for stage, again in enumerate(self.checkpoint) if again}
        return {"schedule": self.program, "balance": self.counts, "checkpoint": full or "none"}

    def summary(self) -> dict[str, Any]:
        """Return it as plain values, without the program's text."""
        placement = self.program.placement
        return {
            "schedule": self.schedule,
            "searched": self.searched,
            "ranks": self.num_ranks,
            "stages": self.program.num_stages,
            "stages_per_rank": self.stages_per_rank,
            "placement": [list(placement.stages_of(rank)) for rank in range(self.num_ranks)],
            "batch": self.batch,
            "microbatches": self.num_microbatches,
            "microbatch_size": self.microbatch_size,
            "counts": list(self.counts),
            "cuts": list(self.cuts),
            "checkpoint": ["full" if again else "none" for again in self.checkpoint],
            "optimizer": self.optimizer,
            "step_seconds": self.step_seconds,
            "bubble": self.bubble,
            "seconds": asdict(self.seconds),
            "rank_bytes": [{**asdict(one), "total": one.total} for one in self.rank_bytes],
            "limits": None if self.limits is None else list(self.limits),
        }

    def to_json(self) -> str:
        """Return it as the text of a JSON file."""
        head = {"format": FORMAT, "version": VERSION, "model": asdict(self.model)}
        return json.dumps({**head, **self.summary(), "program": self.program.format().split("\n")}, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Return the plan that `to_json` wrote; raises PlanError with what is wrong."""
        try:
            table = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise PlanError(f"not JSON: {error}", expected=_EXPECTED) from None
        if not isinstance(table, dict) or table.get("format") != FORMAT:
            raise PlanError("not a plan", expected=_EXPECTED)
        if table.get("version") != VERSION:
            raise PlanError(
                f"a plan of version {table.get('version')!r}",
                expected=f"version {VERSION}",
                fix="plan again with this drumline",
            )
        try:
            return _read(table)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise PlanError(f"a damaged plan: {what}", expected=_EXPECTED) from None

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan from a file."""
        try:
            return Plan.from_json(read_text(path))
        except PlanError as error:
            raise PlanError(f"{path}: {error.error}", expected=_EXPECTED, fix=error.fix) from None

    def save(self, path: str | Path) -> None:
        """Write it to a file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")


_EXPECTED = "a JSON file that `drumline plan PROFILE.json --out PLAN.json` wrote"


def _read(table: Mapping[str, Any]) -> Plan:
    program = Program.parse("\n".join(table["program"]), str(table["schedule"]))
    counts, checkpoint = tuple(map(int, table["counts"])), tuple(one == "full" for one in table["checkpoint"])
    if not len(counts) == len(checkpoint) == program.num_stages or min(counts) < 1:
        raise DrumlineError(f"counts {list(counts)} and a program of {program.num_stages} stages")
    return Plan(
        Identity(**table["model"]),
        program,
        counts,
        tuple(map(str, table["cuts"])),
        int(table["batch"]),
        int(table["microbatch_size"]),
        checkpoint,
        Seconds(**table["seconds"]),
        tuple(RankBytes(**{name: one[name] for name in _ITEMS}) for one in table["rank_bytes"]),
        None if table["limits"] is None else tuple(map(float, table["limits"])),
        str(table["optimizer"]),
        bool(table["searched"]),
    )


_ITEMS = tuple(one.name for one in fields(RankBytes))
