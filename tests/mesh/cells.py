"""What goes with what on a mesh, as data: every cell is run or refused by a test, and the docs show the same table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

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

# What is refused: the words of the table's note, and how the error begins.
_COPIES = "each line holds a part of a stage, and two ranks of it would need it at different times"
_MATRICES = "each line holds a flat piece of every matrix"
_MASK = "masks are made for a part of the sequence only"
_STATISTICS = "each line sees a part of the batch"
_COMPILED = "the exchanges inside layers are not part of compiled code"
_CAPTURED = "exchanges between lines are not part of CUDA graphs"
REFUSED: dict[tuple[str, str], tuple[str, str]] = {
    ("`dualpipe`, two copies of each stage", "`zero=3`"): (_COPIES, "zero is 3, and dualpipe holds each stage on two"),
    ("whole-matrix optimizers (Adafactor)", "`zero=3`"): (_MATRICES, "Adafactor may look at whole matrices, and with"),
    ("packed documents", "`cp`"): (_MASK, "attention gets a mask, and cp divides its sequence"),
    **{
        ("running statistics (BatchNorm)", way): (_STATISTICS, "block 'statistics' keeps running statistics")
        for way in ("`dp`", "`zero=1`", "`zero=3`", "`cp`", "`ep`")
    },
    **{("`compile`", way): (_COMPILED, "compile is 'aot_eager'") for way in WAYS if WAYS[way].axis != "dp"},
    **{("`capture`", way): (_CAPTURED, "capture is True and the mesh is pp2 x") for way in WAYS},
}


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
            mesh = {axis: 2 for axis in ("pp", "dp", "cp", "ep", "tp") if axis in (what.axis, way.axis)}
            options = {"mesh": mesh, **way.options, **what.options}
            if (what, options) not in seen and not (what.axis != "pp" and (What(way.axis), options) in seen):
                seen.append((what, options))
                yield Cell(f"{row} x {column}".replace("`", ""), what, options, REFUSED.get((row, column), ("", ""))[1])


def table() -> str:
    """Return the table of the docs, with a numbered note for every reason."""
    notes = list(dict.fromkeys(note for note, _ in REFUSED.values()))
    lines = [f"| | {' | '.join(WAYS)} |", f"|---|{'---|' * len(WAYS)}"]
    for row, what in WHATS.items():
        each = []
        for column, way in WAYS.items():
            refused = REFUSED.get((row, column))
            each.append(
                "" if what.axis == way.axis else "yes" if refused is None else f"no ({notes.index(refused[0]) + 1})"
            )
        lines.append(f"| {row} | {' | '.join(each)} |")
    return "\n".join([*lines, "", *(f"{at}. {note[0].upper()}{note[1:]}." for at, note in enumerate(notes, 1))])
