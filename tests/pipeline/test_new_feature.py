"""Whoever adds a feature writes a folder and a few lines: the example of the docs, in a copy of the tree.

The way back is `benchmarks/removable.py`: `make test` takes one feature away, `make bench` every one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from removable import ATTACHED, PACKAGE, ROOT, features, named_by
from test_docs import blocks

pytestmark = [pytest.mark.torch, pytest.mark.slow]
PAGE = ROOT / "docs" / "design-features.md"


def patched(text: str, changes: list[str]) -> str:
    """Return a text with lines added behind those that they follow: ` line`, then `+ added`."""
    lines, at = text.splitlines(), 0
    for change in changes:
        if change.startswith("+"):
            at += 1
            lines.insert(at, change[1:])
        else:
            at = lines.index(change[1:], at)
    return "\n".join(lines) + "\n"


def test_the_example_of_the_docs_is_a_feature(tmp_path: Path) -> None:
    parts = [(block.kind, block.lines) for block in blocks(PAGE.read_text(encoding="utf-8").splitlines())]
    (_, _), (_, written), (_, changes), (_, script), (_, printed) = parts
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    folder = tmp_path / PACKAGE / "features" / "nans"
    folder.mkdir()
    (folder / "__init__.py").write_text('"""NaN gradients, counted by stage."""\n')
    (folder / "nans.py").write_text("\n".join(written) + "\n")
    attached = tmp_path / ATTACHED
    attached.write_text(patched(attached.read_text(), changes))
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "src"), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (ran.stdout.splitlines(), ran.returncode) == (printed, 0), ran.stderr


def test_one_file_names_every_feature() -> None:
    assert len(features()) >= 11
    assert {name: named_by(name) for name in features()} == dict.fromkeys(features(), ())
