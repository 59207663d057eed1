"""Check what a release would hand out: the mechanical part of docs/release.md.

    python scripts/release_check.py [--keep FOLDER]

It builds sdist and wheel, compares the wheel with the source tree, installs it with nothing but numpy into an empty
environment, runs commands there, and compares the version with the changelog. Everything happens in a temporary folder;
pip needs a package index. A line for each check; exit code 1 if one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "src/drumline"
# What `pip install` of the wheel alone brings; pip and setuptools come with the environment.
INSTALLED = {"drumline", "numpy"}
WITH_VENV = {"pip", "setuptools"}
# What is compiled for the wheel's platform, and stands in no source tree.
_COMPILED = re.compile(r"drumline/core/kernel/kernel-[\w.-]+\.shared")
_HEADING = re.compile(r"^## \[?([^\],\s]+)", re.MULTILINE)


def top_of(changelog: str) -> str:
    r"""Return the name of the newest section.

    >>> top_of("# Changelog\n\n## 0.2.0, 2027-01-31\n\n- A.\n\n## 0.1.0\n")
    '0.2.0'
    """
    found = _HEADING.search(changelog)
    return found[1] if found else ""


def differences(wheel: Path, source: Sequence[str]) -> list[str]:
    """Return what a wheel lacks of the source's files, and what it holds beside these, its kernel and its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    wanted = {path.removeprefix("src/") for path in source}
    missing = [f"{name} is missing" for name in sorted(wanted - names)]
    more = sorted(name for name in names - wanted if not _COMPILED.fullmatch(name))
    return missing + [f"{name} is not in the source" for name in more]


def checks(scratch: Path) -> Iterator[tuple[str, str]]:
    """Yield each check and what is wrong with it, in order; nothing if it holds."""
    version = _ran([sys.executable, "-c", "import drumline; print(drumline.__version__)"], PYTHONPATH=str(ROOT / "src"))
    tools = _environment(scratch / "tools", "build")
    _ran([tools, "-m", "build", "--outdir", str(scratch / "dist"), str(ROOT)])
    names = sorted(path.name for path in (scratch / "dist").iterdir())
    wheels = [name for name in names if name.startswith(f"drumline-{version}-py3-none-") and name.endswith(".whl")]
    built = len(wheels) == 1 and names == sorted([*wheels, f"drumline-{version}.tar.gz"])
    yield "sdist and wheel are built", "" if built else f"found {names}, expected one of each"
    pure = wheels[0].endswith("-any.whl")
    yield "the wheel holds the compiled kernel", f"found {wheels[0]}: is there a C compiler?" if pure else ""

    wheel = scratch / "dist" / wheels[0]
    source = _ran(["git", "-C", str(ROOT), "ls-files", PACKAGE]).splitlines()
    yield "the wheel holds the files of the source", "; ".join(differences(wheel, source)[:5])

    python = _environment(scratch / "empty", str(wheel))
    listed = {entry["name"].lower() for entry in json.loads(_ran([python, "-m", "pip", "list", "--format", "json"]))}
    more = listed - WITH_VENV
    yield "it needs numpy and nothing else", "" if more == INSTALLED else f"found {sorted(more)}"

    command = str(Path(python).with_name("drumline"))
    said = _ran([command, "--version"], folder=scratch)
    yield "drumline --version", "" if said == f"drumline {version}" else f"says {said!r}"
    drawn = _ran([command, "show", "zb-h1", "--ranks", "4", "--microbatches", "6"], folder=scratch).splitlines()
    right = drawn[:1] == ["zb-h1: 4 ranks, 4 stages, 6 microbatches"] and len(drawn) == 6
    yield "drumline show", "" if right else f"prints {drawn}"

    top = top_of((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    yield f"the changelog begins with {version}", "" if top == version else f"begins with {top!r}"


def _environment(folder: Path, package: str) -> str:
    """Make an empty environment, install a package there, and return its Python."""
    _ran([sys.executable, "-m", "venv", str(folder)])
    python = str(folder / "bin" / "python")
    _ran([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package])
    return python


def _ran(command: Sequence[str], *, folder: Path | None = None, **variables: str) -> str:
    """Run a command away from this tree's modules, and return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=folder, env=environment | variables, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} exits with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def main() -> int:
    """Run every check and print what holds."""
    parser = argparse.ArgumentParser(description="Check what a release would hand out.")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="build in this folder and leave it there")
    keep = parser.parse_args().keep
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        scratch = keep.resolve() if keep else Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        for name, wrong in checks(scratch):
            print(f"{'FAILS' if wrong else 'holds'}  {name}{': ' if wrong else ''}{wrong}", flush=True)
            failed += bool(wrong)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
