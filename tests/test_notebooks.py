"""The notebooks run from top to bottom, and are what their sources say, with the outputs of a run.

`python THIS --update` runs them and writes them anew.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from extras import needed
from matrices import long

jupytext: Any = needed("jupytext", extra="notebook")
nbformat: Any = needed("nbformat", extra="notebook")
nbmake: Any = needed("nbmake.nb_run", extra="notebook")
needed("matplotlib", extra="viz")

pytestmark = [pytest.mark.torch, pytest.mark.slow]

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
SOURCES = sorted(FOLDER.glob("*.py"))


def made(source: Path) -> Any:
    """Return the notebook of a source, cells numbered instead of named by chance."""
    notebook = jupytext.read(source)
    for at, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{at}"
    return notebook


@pytest.mark.parametrize("source", SOURCES, ids=lambda value: value.stem)
def test_a_notebook_is_what_its_source_says(source: Path) -> None:
    there = jupytext.read(source.with_suffix(".ipynb"))
    wanted = made(source)
    assert [(i.cell_type, i.source) for i in there.cells] == [(item.cell_type, item.source) for item in wanted.cells]
    shown = [output.get("data", {"text": ""}) for item in there.cells for output in item.get("outputs", ())]
    kinds = [kind for value in shown for kind in value]
    assert kinds.count("image/png") == 3, "a reader on the web sees what it draws"
    assert kinds.count("text/html") >= 4
    assert "text" in kinds
    assert not [output for cell in there.cells for output in cell.get("outputs", ()) if output.output_type == "error"]


@long
@pytest.mark.parametrize("source", SOURCES, ids=lambda value: value.stem)
def test_a_notebook_runs(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRUMLINE_WIDTH", "32")
    monkeypatch.setenv("DRUMLINE_EPOCHS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("PYTHONSTARTUP", str(Path(__file__).with_name("warm_notebook.py")))
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
    for file in SOURCES:
        path = file.with_suffix(".ipynb")
        jupytext.write(made(file), path)
        notebook = nbmake.NotebookRun(path, 600, verbose=False).execute().nb
        for at, cell in enumerate(notebook.cells):
            cell["id"], cell["metadata"] = f"cell-{at}", {}
        nbformat.write(notebook, path)
