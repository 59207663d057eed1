"""Writes constraints.txt: every package that the extras resolve to, its version, and which packages ask for it.

    python scripts/pin_constraints.py              keeps the versions that stand in the file
    python scripts/pin_constraints.py --upgrade    takes the newest ones

pip resolves and installs nothing. Run it where torch resolves to its CPU build: the CUDA build asks for libraries that
the tested set does not have.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_ROOT = Path(__file__).parents[1]
_FILE = _ROOT / "constraints.txt"
_HEAD = """\
# The exact set that is tested: what the extras of pyproject.toml, which carry only floors, resolve to. After every
# package stand those that ask for it. `python scripts/pin_constraints.py` writes this file. torch is the CPU build
# where one is offered.
"""


def resolved(extras: list[str], *, upgrade: bool) -> list[dict[str, Any]]:
    """Return the metadata of everything that pip would install for the extras."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        held = [] if upgrade else ["--constraint", str(_FILE)]
        wanted = [f"{_ROOT}[{','.join(extras)}]", "--report", str(report), *held]
        options = ["--quiet", "--dry-run", "--ignore-installed", "--disable-pip-version-check"]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *wanted], check=True)
        return [value["metadata"] for value in json.loads(report.read_text(encoding="utf-8"))["install"]]


def asked_for(packages: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Return who asks for every package, by its plain name; the project itself asks by the names of its extras."""
    requires = {
        canonicalize_name(p["name"]): [Requirement(each) for each in p.get("requires_dist", [])] for p in packages
    }
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    own = canonicalize_name(project["name"])
    by: dict[str, set[str]] = defaultdict(set)
    tables: dict[str, list[str]] = {own: project["dependencies"]}
    tables |= {f"{own}[{extra}]": wanted for extra, wanted in project["optional-dependencies"].items()}
    due = [(who, Requirement(text), "") for who, table in tables.items() for text in table]
    opened: set[tuple[str, str]] = set()
    while due:
        who, wanted, extra = due.pop()
        name = canonicalize_name(wanted.name)
        if name == own or not (wanted.marker is None or wanted.marker.evaluate({"extra": extra})):
            continue
        by[name].add(who)
        for more in {"", *wanted.extras} - {more for text, more in opened if text == name}:
            opened.add((name, more))
            due += [(name, require, more) for require in requires[name]]
    return by


def main() -> None:
    """Resolve, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    args = parser.parse_args()
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    packages = resolved(sorted(project["optional-dependencies"]), upgrade=args.upgrade)
    by = asked_for(packages)
    lines = []
    for package in sorted(packages, key=lambda package: canonicalize_name(package["name"])):
        name = canonicalize_name(package["name"])
        if name != canonicalize_name(project["name"]):
            version = package["version"].partition("+")[0]  # without the build: +cpu
            lines.append(f"{package['name']}=={version}  # via {', '.join(sorted(by[name]))}\n")
    _FILE.write_text(_HEAD + "".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
