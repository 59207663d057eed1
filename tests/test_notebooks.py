"""The notebooks run from top to bottom, and are what their sources say. `python THIS --update` writes them anew."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from extras import needed

jupytext: Any = needed("jupytext", extra="notebook")
nbmake: Any = needed("nbmake.nb_run", extra="notebook")
needed("matplotlib", extra="viz")

pytestmark = [pytest.mark.torch, pytest.mark.slow]

FOLDER = Path(__file__).parents[1] / "notebooks"
SOURCES = sorted(FOLDER.glob("*.py"))


def made(source: Path) -> Any:
    """Return the notebook of a source, cells numbered instead of named by chance."""
    notebook = jupytext.read(source)
    for at, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{at}"
    return notebook


@pytest.mark.parametrize("source", SOURCES, ids=lambda one: one.stem)
def test_a_notebook_is_what_its_source_says(source: Path) -> None:
    there = jupytext.read(source.with_suffix(".ipynb"))
    wanted = made(source)
    assert [(one.cell_type, one.source) for one in there.cells] == [(one.cell_type, one.source) for one in wanted.cells]
    assert not any(one.get("outputs") for one in there.cells), "outputs are made by running it"


@pytest.mark.parametrize("source", SOURCES, ids=lambda one: one.stem)
def test_a_notebook_runs(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRUMLINE_WIDTH", "32")
    monkeypatch.setenv("DRUMLINE_EPOCHS", "1")
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    path = tmp_path / f"{source.stem}.ipynb"
    jupytext.write(made(source), path)
    result = nbmake.NotebookRun(path, 300, verbose=False).execute()
    assert result.error is None, result.error
    pictures = [
        kind
        for cell in result.nb.cells
        for output in cell.get("outputs", ())
        for kind in output.get("data", ())
        if kind in ("image/png", "text/html")
    ]
    assert pictures.count("image/png") == 3
    assert pictures.count("text/html") >= 4, "timelines draw themselves"


if __name__ == "__main__" and "--update" in sys.argv:
    for one in SOURCES:
        jupytext.write(made(one), one.with_suffix(".ipynb"))
