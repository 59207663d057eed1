"""Every kind of state that blocks keep, on every way to run: plain training's numbers, or one refusal by name.

`python benchmarks/state_matrix.py` runs all cells; here each kind is tried on one way in one process and on two.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from torch import Tensor

import state_matrix
from matrices import chosen, matrix
from some import some
from state_case_table import KINDS, WAYS, Kind
from state_matrix import FORMS, OUTCOMES, Cell, Result, Trained, judged, on_two_processes, table, together

pytestmark = pytest.mark.torch
GOOD = ("right", "refused")
APART = [kind for kind in KINDS if kind.name.startswith(("table", "hooks of forwards", "hooks of backwards"))]
COUNTER = next(kind for kind in KINDS if kind.name == "Counter")


def cell_of(kind: Kind, way: tuple[str, str]) -> Cell:
    form, schedule = way
    return Cell(kind, form if form in kind.forms else kind.forms[0], schedule)


@matrix("kind, way", KINDS, list(product(FORMS, WAYS)), times=1)
def test_state_is_plain_trainings_or_refused_by_name(kind: Kind, way: tuple[str, str]) -> None:
    result = judged(cell_of(kind, way), is_alone=True)
    assert result.came_to in GOOD, result.how


def test_so_it_is_between_processes() -> None:
    """The kinds that share something, and a few of the others."""
    kinds = [kind for kind in KINDS if kind.refused_apart] + list(KINDS[::4])
    between = next(kind for kind in KINDS if kind.name == "mean between blocks")
    cells = [Cell(between, "traced", "1f1b"), Cell(between, "traced", "gpipe")]
    cells += [Cell(kind, "traced", way) for kind in APART for way in ("1f1b", "zb-v")]
    cells += [cell_of(*pair) for pair in chosen(kinds, list(product(FORMS, WAYS))[::-1], times=1)]
    outcomes = {cell.title: result for cell, result in on_two_processes(list(dict.fromkeys(cells)))}
    assert [(title, result) for title, result in some(outcomes.items()) if result.came_to not in GOOD] == []
    assert {result.came_to for result in outcomes.values()} == set(GOOD)


def test_cells_come_to_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that called everything right would prove nothing."""
    assert judged(Cell(COUNTER, "chain", "1f1b"), is_alone=True).came_to == "right"
    assert judged(Cell(COUNTER, "chain", "dualpipe"), is_alone=True).came_to == "refused"
    strict = replace(COUNTER, refused=frozenset())
    assert judged(Cell(strict, "chain", "dualpipe"), is_alone=True).came_to == "alarm"
    strange = replace(COUNTER, names="nobody says this")
    assert judged(Cell(strange, "chain", "dualpipe"), is_alone=True).came_to == "vague"
    plainly = state_matrix.plainly

    def otherwise(cell: Cell) -> Trained:
        trained = plainly(cell)
        first: dict[str, Tensor] = trained.gradients[0]
        trained.gradients[0] = {name: gradient * 1.01 for name, gradient in first.items()}
        return trained

    monkeypatch.setattr(state_matrix, "plainly", otherwise)
    assert judged(Cell(COUNTER, "chain", "1f1b"), is_alone=True).came_to == "wrong"


def test_ranks_that_disagree_are_wrong() -> None:
    refused, heard, right = Result("refused", "x"), Result("other", "y"), Result("right")
    assert together([refused, heard]) == refused
    assert together([refused, right]).came_to == "wrong"
    assert together([right, Result("wrong", "z")]).came_to == "wrong"
    assert together([heard, heard]).came_to == "raw"
    assert "right" in table({("one process", "chain"): Counter({"right": 2})})
    assert OUTCOMES[:2] == GOOD
