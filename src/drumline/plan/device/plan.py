"""A plan: all decisions for one model on given ranks, and the predicted costs.

`Pipeline(model, plan=...)` runs it. As a file it is JSON that contains the program's text.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

from drumline.core.errors import PlanError, ProgramError
from drumline.core.files import MIB, FileKind
from drumline.core.parsed import LARGEST, Parsed
from drumline.core.program import Program
from drumline.plan.device.model_profile import Identity, Saved, identity_from


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """A step, each second in one item; the mean over ranks if they differ.

    `compute` is F and the backward once, `recompute` the forwards that run again, `executor` its overhead per action,
    `bubble` waiting for other ranks. `communication` is what the step would save if messages took no time, `around` the
    time before the first action and after the last.
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
        return float(sum(getattr(self, field.name) for field in fields(self)))


@dataclass(frozen=True, slots=True)
class RankBytes:
    """What a rank holds at its peak; `received` is input from other stages, kept for a backward."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    received: float

    @property
    def total(self) -> float:
        """The peak."""
        return float(sum(getattr(self, field.name) for field in fields(self)))

    @property
    def stash(self) -> float:
        """The bytes held for later backwards."""
        return self.activations + self.received


@dataclass(frozen=True)
class Plan(Saved):
    """Cuts, placement, schedule, microbatches and checkpointing, with the predicted step and every rank's peak.

    `counts` are the blocks of each stage, `cuts` the names of the blocks that begin stages 1, 2, ... `checkpoint` says
    which stages are recomputed. `limits` are the bytes that each rank may hold, None without a limit.
    """

    model: Identity
    program: Program
    counts: tuple[int, ...]
    cuts: tuple[str, ...]
    batch: int
    microbatch_size: int
    checkpoint: tuple[bool, ...]
    seconds: StepSeconds
    rank_bytes: tuple[RankBytes, ...]
    limits: tuple[float, ...] | None = None
    optimizer: str = "adam"
    searched: bool = False
    slices: tuple[int, ...] = ()  # the tokens of each slice of a sequence; none: whole sequences

    KIND = FileKind("plan", PlanError, "a JSON file that `drumline plan PROFILE.json --out PLAN.json` wrote", 16 * MIB)
    HEAD: ClassVar = {"format": "drumline plan", "version": 1}
    AGAIN = "plan again"

    @property
    def schedule(self) -> str:
        """The program's name."""
        return self.program.name

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self.program.num_ranks

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches per step."""
        return self.program.num_microbatches

    @property
    def stages_per_rank(self) -> int:
        """The largest number of stages on one rank."""
        return max(len(self.program.placement.stages_of(rank)) for rank in range(self.num_ranks))

    @property
    def step_seconds(self) -> float:
        """The predicted step."""
        return self.seconds.total

    @property
    def bubble(self) -> float:
        """The share of the step in which ranks wait for each other."""
        return self.seconds.bubble / self.seconds.total if self.seconds.total else 0.0

    @cached_property
    def pipeline_settings(self) -> dict[str, Any]:
        """The arguments for `Pipeline`."""
        full = {stage: "full" for stage, again in enumerate(self.checkpoint) if again}
        settings = {"schedule": self.program, "balance": self.counts, "checkpoint": full or "none"}
        return settings | ({"slices": self.slices} if self.slices else {})

    def summary(self) -> dict[str, Any]:
        """Return the plan as plain values, without the program's text."""
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
            "rank_bytes": [{**asdict(rank_bytes), "total": rank_bytes.total} for rank_bytes in self.rank_bytes],
            "limits": None if self.limits is None else list(self.limits),
            **({"slices": list(self.slices)} if self.slices else {}),
        }

    def to_json(self) -> str:
        """Return the text of a JSON file."""
        head = {**self.HEAD, "model": asdict(self.model)}
        return json.dumps({**head, **self.summary(), "program": self.program.format().split("\n")}, indent=1)

    @classmethod
    def _read(cls, table: Parsed) -> Plan:
        program = _program_from(table["program"], table["schedule"].text())
        counts = tuple(entry.whole(1) for entry in table["counts"].each())
        checkpoint = tuple(_is_full(entry) for entry in table["checkpoint"].each())
        cuts = tuple(entry.text() for entry in table["cuts"].each())
        peaks = ({name: entry[name].number() for name in _ITEMS} for entry in table["rank_bytes"].each())
        rank_bytes = tuple(RankBytes(**peak) for peak in peaks)
        limits = None if table["limits"].value is None else tuple(float(e.number()) for e in table["limits"].each())
        stages, ranks = (program.num_stages, "stages"), (program.num_ranks, "ranks")
        for name, values, (wanted, of) in (
            ("counts", counts, stages),
            ("checkpoint", checkpoint, stages),
            ("cuts", (*cuts, ""), stages),
            ("rank_bytes", rank_bytes, ranks),
            ("limits", limits, ranks),
        ):
            if values is not None and len(values) != wanted:
                raise cls.KIND.refuse(f"a damaged plan: {name} has {len(values)} items for {wanted} {of}")
        seconds = table["seconds"].only(_SECONDS)
        return cls(
            identity_from(table["model"]),
            program,
            counts,
            cuts,
            table["batch"].whole(1),
            table["microbatch_size"].whole(1),
            checkpoint,
            StepSeconds(*(seconds[name].number(least=-LARGEST) for name in _SECONDS)),
            rank_bytes,
            limits,
            table["optimizer"].text(),
            table["searched"].flag(),
            _lengths_of(table, program),
        )


def _program_from(rows: Parsed, name: str) -> Program:
    lines = [row.text() for row in rows.each()]
    try:
        return Program.parse("\n".join(lines), name)
    except ProgramError as error:
        raise PlanError(f"a damaged plan: its program: {error.error}", expected=error.expected) from None


def _lengths_of(table: Parsed, program: Program) -> tuple[int, ...]:
    """Return the lengths of a plan's slices, as many as its program has."""
    listed = table.get("slices")
    lengths = () if listed is None else tuple(entry.whole(1) for entry in listed.each())
    if (len(lengths) or 1) != program.num_slices:
        wrong = f"slices has {len(lengths)} items for {program.num_slices} slices"
        raise Plan.KIND.refuse(f"a damaged plan: {wrong}")
    return lengths


def _is_full(how: Parsed) -> bool:
    if how.value not in ("full", "none"):
        raise how.refuse("full or none")
    return bool(how.value == "full")


_ITEMS = tuple(field.name for field in fields(RankBytes))
_SECONDS = tuple(field.name for field in fields(StepSeconds))
