"""What goes with what on a mesh, as data: every cell is run or refused by a test, and the docs show the same table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from drumline.core.settings.clash import clashes_in
from drumline.engine.together import mesh_facts, program_facts
from drumline.pipeline import together
from drumline.schedules import generate

BEGIN, END = "<!-- cells -->", "<!-- end of cells -->"


@dataclass(frozen=True)
class Way:
    """A column of the table: a mesh of two lines beside two ranks of a pipeline, and what else `Pipeline` is given."""

    axis: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class What:
    """A row of the table: a second axis in place of the pipeline's, or something else that a step or a model has.

    `model` changes the model, `given` says which batch the steps get, `after` what happens after the first one.
    """

    axis: str = "pp"
    options: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    given: str = "rows"
    after: str = "update"
    near: float = 1e-5  # how far loss and gradients may be from those of one process


WAYS = {
    "`dp`": Way("dp"),
    "`zero=1`": Way("dp", {"zero": 1}),
    "`zero=3`": Way("dp", {"zero": 3}),
    "`cp`": Way("cp"),
    "`ep`": Way("ep"),
    "`tp`": Way("tp"),
    "`sequence_parallel`": Way("tp", {"sequence_parallel": True}),
}
_BF16 = 2e-2
WHATS = {
    "`dp`": What("dp"),
    "`cp`": What("cp"),
    "`ep`": What("ep"),
    "`tp`": What("tp"),
    "`1f1b`": What(),
    "`interleaved-zb`": What(options={"schedule": "interleaved-zb"}),
    "`zb-v`": What(options={"schedule": "zb-v"}),
    "`dualpipe-v`": What(options={"schedule": "dualpipe-v"}),
    "`dualpipe`, two copies of each stage": What(options={"schedule": "dualpipe"}),
    "`checkpoint=\"full\"`": What(options={"checkpoint": "full", "schedule": "zb-v"}),
    "`merge_weight_gradients`": What(options={"merge_weight_gradients": True, "schedule": "zb-v"}),
    "`precision=\"bf16\"`": What(options={"precision": "bf16"}, near=_BF16),
    "`precision=\"fp16\"`": What(options={"precision": "fp16"}, near=_BF16),
    "`master_weights`": What(options={"master_weights": True}, model={"low": True}, near=_BF16),
    "model on the meta device, `weights`": What(model={"meta": True}),
    "frozen parameters": What(model={"frozen": True}),
    "tied weights": What(model={"tied": True}),
    "`Microbatches` of unequal lengths": What(given="lengths"),
    "`arrange`": What(options={"arrange": True}, given="lengths"),
    "`programs`: buckets of lengths": What(options={"programs": {"few": 2}}, given="buckets"),
    "packed documents": What(given="packed"),
    "several steps for one update": What(after="another step"),
    "whole-matrix optimizers (Adafactor)": What(after="adafactor"),
    "running statistics (BatchNorm)": What(model={"statistics": True}),
    "`compile`": What(options={"compile": "aot_eager"}, near=1e-4),
    "`capture`": What(options={"capture": True}),
}  # fmt: skip

# What is refused because of what a model does: why, and how the error begins. The rest is in the table of clashes.
_MASK = "masks are made for only a part of the sequence", "attention gets a mask, and cp divides its sequence"
_STATISTICS = "each line sees a part of the batch", "block 'statistics' keeps running statistics"
_OF_MODELS = {
    ("packed documents", "`cp`"): _MASK,
    **{("running statistics (BatchNorm)", way): _STATISTICS for way in WAYS if WAYS[way].axis != "tp"},
}


def refusal_of(row: str, column: str) -> tuple[str, str]:
    """Return why a cell is refused, and how; empty if it is not."""
    options = _options(row, column)
    program = generate(options.get("schedule", "1f1b"), num_ranks=2, num_microbatches=4)
    facts = {**options, **mesh_facts(options["mesh"]), **program_facts(program)}
    facts["optimizer"] = "Adafactor" if WHATS[row].after == "adafactor" else ""
    for clash in clashes_in(together.table(), facts):
        return clash.why, clash.refusal(facts).error
    return _OF_MODELS.get((row, column), ("", ""))


def _options(row: str, column: str) -> dict[str, Any]:
    what, way = WHATS[row], WAYS[column]
    mesh = {axis: 2 for axis in ("pp", "dp", "cp", "ep", "tp") if axis in (what.axis, way.axis)}
    return {"mesh": mesh, **way.options, **what.options}


@dataclass(frozen=True)
class Cell:
    """One combination: the mesh and all that goes with it, or why it is refused."""

    name: str
    what: What
    options: dict[str, Any]
    refusal: str = ""


def cells() -> Iterator[Cell]:
    """Yield every combination once."""
    seen: list[tuple[What, dict[str, Any]]] = []
    for row, what in WHATS.items():
        for column, way in WAYS.items():
            if what.axis == way.axis:
                continue
            options = _options(row, column)
            if (what, options) not in seen and not (what.axis != "pp" and (What(way.axis), options) in seen):
                seen.append((what, options))
                yield Cell(f"{row} x {column}".replace("`", ""), what, options, refusal_of(row, column)[1])


def table() -> str:
    """Return the table of the docs, with a numbered note for every reason."""
    notes: list[str] = []
    lines = [f"| | {' | '.join(WAYS)} |", f"|---|{'---|' * len(WAYS)}"]
    for row, what in WHATS.items():
        each = []
        for column, way in WAYS.items():
            why = "" if what.axis == way.axis else refusal_of(row, column)[0]
            if why and why not in notes:
                notes.append(why)
            each.append("" if what.axis == way.axis else f"no ({notes.index(why) + 1})" if why else "yes")
        lines.append(f"| {row} | {' | '.join(each)} |")
    return "\n".join([*lines, "", *(f"{at}. {note[0].upper()}{note[1:]}." for at, note in enumerate(notes, 1))])
