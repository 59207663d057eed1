"""Cases of the fuzzer of meshes: each is made from a seed and a number alone, with its data and what it must say."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from drumline.core.errors import DrumlineError
from drumline.schedules import generate, schedules
from mesh_models import IGNORED, LOSSES, PLAN, WORDS, Loss, model

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_NEAR, _ROUTED = 1e-10, 1e-6  # experts weigh tokens in float32
_RATE = 0.1  # of a mean
_OWN = ("", "", "one", "two")
# By the number of processes; one process runs all ranks of a pipeline in turn, without a mesh.
MESHES: dict[int, list[dict[str, int]]] = {
    1: [{"pp": 1}, {"pp": 2}, {"pp": 3}, {"pp": 4}],
    2: [{"dp": 2}, {"cp": 2}, {"tp": 2}, {"ep": 2}, {"pp": 2}],
    4: [
        {"pp": 2, "dp": 2}, {"pp": 2, "cp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "ep": 2}, {"dp": 2, "cp": 2},
        {"dp": 2, "tp": 2}, {"dp": 2, "ep": 2}, {"cp": 2, "tp": 2}, {"cp": 2, "ep": 2}, {"ep": 2, "tp": 2}, {"dp": 4},
        {"pp": 4},
    ],
}  # fmt: skip
PATTERNS = (
    "all", "some", "some", "one label", "first microbatch empty", "last microbatch empty", "a microbatch of one line",
    "all but one microbatch", "an empty line", "empty rows", "nothing",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One pipeline on one mesh, and two steps."""

    seed: int
    number: int
    ranks: int  # processes
    mesh: dict[str, int]
    kind: str  # chain, decoder or experts
    own: str  # the model's own loss, if it has one
    tied: bool
    frozen: bool
    groups: int  # heads of keys and values
    loss: str
    dtype: str
    rows: tuple[tuple[int, ...], ...]  # of every step and line
    length: int
    patterns: tuple[str, ...]  # of every step
    updates: bool  # after the first step; else gradients add up
    evaluates: bool
    apart: bool  # whether microbatches are given apart, with different lengths
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def lines(self) -> int:
        """How many lines get different rows."""
        return self.mesh.get("dp", 1) * self.mesh.get("ep", 1)

    @property
    def num_microbatches(self) -> int:
        """Of each line."""
        return int(self.options["num_microbatches"])

    @property
    def function(self) -> Loss:
        """The loss."""
        return LOSSES["cross-entropy" if self.own else self.loss]

    @property
    def near(self) -> float | None:
        """How far results may be from those of plain torch, of their size; None where rounding must be measured."""
        if self.dtype != "float64":
            return None
        return max(_NEAR, self.function.near, _ROUTED if self.kind == "experts" else 0.0)

    @property
    def rate(self) -> float:
        """The learning rate: smaller for a sum, which would leave every bound behind."""
        return _RATE / (sum(self.rows[0]) * self.length * WORDS) if self.function.count is None else _RATE

    def counted(self, step: int) -> float:
        """Return what the loss averages over in a step, in all; 1 of a sum."""
        count = self.function.count
        return 1.0 if count is None else sum(count(y) for line in self.microbatches(step) for _, y in line)

    @property
    def refusal(self) -> str:
        """How the error must begin, or what it must contain, if the case cannot run; else empty."""
        return next(iter(self.refusals), "")

    @property
    def refusals(self) -> list[str]:
        """All such texts, of which an error may tell any."""
        return [text for text, holds in _refusals(self) if holds]

    @property
    def again(self) -> str:
        """The command that runs this case alone."""
        return f"python benchmarks/fuzz_mesh.py --seed {self.seed} --first {self.number} --cases 1"

    @property
    def kinds(self) -> list[str]:
        """By what cases are counted: the axes of the mesh, and what else of it may be wrong by itself."""
        options = self.options
        found = [name for name, size in self.mesh.items() if size > 1] or ["one rank"]
        found += [f"zero={options['zero']}"] if options.get("zero") else []
        found += ["sequence parallel"] if options.get("sequence_parallel") else []
        found += [f"{self.dtype}, precision" if "precision" in options else self.dtype]
        counts = self.function.is_labels and any("empty" in pattern or "one" in pattern for pattern in self.patterns)
        found += ["empty microbatches or lines"] if counts else []
        found += ["short batches"] if len({number for each in self.rows for number in each}) > 1 else []
        return found

    def described(self) -> str:
        """Return the case in a line."""
        mesh = " x ".join(f"{name}{size}" for name, size in self.mesh.items())
        given = ", ".join(f"{name}={option!r}" for name, option in self.options.items())
        what = [self.kind, *(name for name in ("tied", "frozen", "apart") if getattr(self, name))]
        what += [f"own loss {self.own}" if self.own else self.loss, self.dtype, f"kv heads {self.groups}"]
        return f"{mesh}; {', '.join(what)}; {given}; rows {self.rows} x {self.length}; {' then '.join(self.patterns)}"

    def model(self, *, plain: bool, exact: bool = False) -> Any:
        """Return the model, or its plain twin; `exact` has the same values in float64."""
        given: dict[str, Any] = {"tied": self.tied, "frozen": self.frozen, "groups": self.groups, "own": self.own}
        made = model(self.kind, DTYPES[self.dtype], plain=plain, **given)
        return made.double() if exact else made

    def microbatches(self, step: int) -> list[list[tuple[Tensor, Tensor]]]:
        """Return the microbatches of every line: tokens, and labels or numbers."""
        chance = torch.Generator().manual_seed(1000 * self.number + step)
        found = [
            [self._made(*pair, chance) for pair in zip(self._each(rows), self.lengths, strict=True)]
            for rows in self.rows[step]
        ]
        if self.function.is_labels:
            _thin_out(found, self.patterns[step], random.Random(f"{self.seed} {self.number} {step}"))
        return found

    @property
    def lengths(self) -> list[int]:
        """How long the sequences of each microbatch are."""
        shorter = self._unit if self.apart else 0
        return [self.length - shorter * (at % 2) for at in range(self.num_microbatches)]

    @property
    def _unit(self) -> int:
        """Of what lengths are multiples."""
        return self.mesh.get("cp", 1) * (self.mesh.get("tp", 1) if self.options.get("sequence_parallel") else 1)

    def _each(self, rows: int) -> list[int]:
        """Return the rows of each microbatch: as even as can be, the larger ones first."""
        low, more = divmod(rows, self.num_microbatches)
        return [low + (at < more) for at in range(self.num_microbatches)]

    def _made(self, rows: int, length: int, chance: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randint(WORDS, (rows, length), generator=chance)
        if self.function.is_labels:
            return x, torch.randint(WORDS, (rows, length), generator=chance)
        numbers = torch.randn(rows, length, WORDS, generator=chance, dtype=torch.float64)
        return x, numbers.to(DTYPES[self.dtype])


def _thin_out(lines: list[list[tuple[Tensor, Tensor]]], pattern: str, chance: random.Random) -> None:
    """Let some labels not count."""
    every = [y for line in lines for _, y in line]
    if pattern == "some":
        for tensor in every:
            left_out = [chance.random() < 0.4 for _ in range(tensor.numel())]
            tensor[torch.tensor(left_out, dtype=torch.bool).view(tensor.shape)] = IGNORED
    elif pattern == "one label":
        kept = chance.choice([tensor for tensor in every if tensor.numel()])
        place, value = divmod(chance.randrange(kept.numel()), kept.shape[1]), chance.randrange(WORDS)
        for tensor in every:
            tensor.fill_(IGNORED)
        kept[place] = value
    elif pattern == "empty rows":
        for tensor in every:
            tensor[::2] = IGNORED
    else:
        for tensor in _empty(lines, pattern, chance):
            tensor.fill_(IGNORED)


def _empty(lines: list[list[tuple[Tensor, Tensor]]], pattern: str, chance: random.Random) -> list[Tensor]:
    """Return the labels of the microbatches in which none shall count."""
    every = [y for line in lines for _, y in line]
    kept, line = chance.randrange(len(every)), chance.choice(lines)
    return {
        "all": [],
        "nothing": every,
        "first microbatch empty": [row[0][1] for row in lines],
        "last microbatch empty": [row[-1][1] for row in lines],
        "a microbatch of one line": [every[kept]],
        "all but one microbatch": [tensor for at, tensor in enumerate(every) if at != kept],
        "an empty line": [y for _, y in line],
    }[pattern]


def _refusals(case: Case) -> list[tuple[str, bool]]:
    """Return what cannot run, and whether this case is of that kind."""
    options, mesh, counted = case.options, case.mesh, case.counted(0)
    return [
        ("sequence_parallel is True, and the mesh has no tp",
         bool(options.get("sequence_parallel")) and mesh.get("tp", 1) == 1),
        ("zero is 3, and", options.get("zero") == 3 and options["schedule"] in ("dualpipe", "chimera")),
        ("tp = 2 leaves each line", mesh.get("tp", 1) > case.groups),
        ("tokens are divided over cp", bool(case.length % mesh.get("cp", 1))),
        ("is divided by 2 (tp) along dimension 1",
         bool(options.get("sequence_parallel")) and bool(case.length // mesh.get("cp", 1) % 2)),
        # Each line tells of its own rows.
        *((text, min(case.rows[0]) < case.num_microbatches)
          for text in (["has an empty tensor"] if case.apart else [" row for ", " rows for "])),
        ("has an empty tensor", min(case.lengths) < 1),
        ("is NaN or infinite", counted == 0.0 and case.num_microbatches == 1 and mesh.keys() <= {"pp", "tp"}),
        ("loss weights are", counted == 0.0),
    ]  # fmt: skip


def drawn(seed: int, number: int) -> Case:
    """Return the case with a number."""
    chance = random.Random(f"{seed} {number}")
    ranks = chance.choice([1, 2, 2, 4, 4])
    mesh = chance.choice(MESHES[ranks])
    pick, odds = chance.choice, chance.random
    kind = "experts" if "ep" in mesh else "decoder" if {"cp", "tp"} & mesh.keys() or odds() < 0.15 else "chain"
    options: dict[str, Any] = _schedule(mesh.get("pp", 1), chance, few=kind != "chain")
    if mesh.get("dp", 1) > 1:
        options["zero"] = pick([0, 0, 1, 3])
    if odds() < (0.4 if "tp" in mesh else 0.02):
        options["sequence_parallel"] = True
    if "tp" in mesh:
        options["tensor_parallel"] = PLAN
    if odds() < 0.2:
        options["checkpoint"] = "full"
    if odds() < 0.1:
        options["merge_weight_gradients"] = True
    if odds() < 0.3:
        options["check_model"] = False
    dtype = pick(["float64"] * 7 + ["float32", "bfloat16", "bfloat16"])
    if dtype == "float32" and odds() < 0.4:
        options["precision"] = "bf16"
    own = pick(_OWN) if kind != "chain" else ""
    apart = not own and "ep" not in mesh and odds() < 0.1
    length = pick([4, 4, 4, 8, 6, 5])
    lines, count = mesh.get("dp", 1) * mesh.get("ep", 1), options["num_microbatches"]
    full = count * pick([1, 2, 2, 3])
    rows = [tuple(_rows(full, count, chance) for _ in range(lines)) for _ in range(2)]
    if odds() < 0.02 and count > 1:  # fewer rows than microbatches
        rows[0] = tuple(chance.randint(1, count - 1) for _ in range(lines))
    patterns = [pick(PATTERNS) for _ in range(2)]
    if lines == 1 and odds() < 0.9:  # else nothing counts
        patterns = ["some" if pattern in ("an empty line", "nothing") else pattern for pattern in patterns]
    case = Case(
        seed, number, ranks, mesh, kind, own, tied=odds() < 0.2, frozen=odds() < 0.1,
        groups=1 if "tp" in mesh and odds() < 0.05 else 2, loss=pick(list(LOSSES)), dtype=dtype,
        rows=(rows[0], rows[1]), length=length, patterns=(patterns[0], patterns[1]),
        updates=odds() < 0.6, evaluates=odds() < 0.3, apart=apart, options=options,
    )  # fmt: skip
    # The first step may be refused, the second must count something.
    return case if case.counted(1) else replace(case, patterns=(patterns[0], "all"))


def _rows(full: int, count: int, chance: random.Random) -> int:
    """Return a line's rows: all, or those of a short batch."""
    draw = chance.random()
    if draw < 0.6:
        return full
    return chance.randint(count, full + count - 1)


def _schedule(num_ranks: int, chance: random.Random, *, few: bool) -> dict[str, Any]:
    """Return a schedule that exists for these ranks, and its counts."""
    named = [name for name, recipe in schedules().items() if name not in ("pipedream", "pipedream-2bw", "forward-only")]
    while True:
        name, count, each = chance.choice(named), chance.randint(1, 6), chance.choice([None, None, 2])
        try:
            program = generate(name, num_ranks=num_ranks, num_microbatches=count, stages_per_rank=each)
        except DrumlineError:
            continue
        if program.num_stages <= (4 if few else 8) and not program.num_updates:
            more = {} if each is None else {"stages_per_rank": each}
            return {"schedule": name, "num_microbatches": count, **more}


def example(case: Case) -> Tensor:
    """Return tokens of the shape that the first line gets."""
    return torch.zeros(max(case.rows[0][0], case.num_microbatches), case.length, dtype=torch.long)
