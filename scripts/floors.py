"""Print the lowest versions that pyproject.toml admits, as requirements: what `make floors` installs and tests.

    python scripts/floors.py > floors.txt

What users install is pinned to its floor, `torch>=2.11` to `torch==2.11.*`. The tools by which Drumline is tested are
for pip to choose, and so is what neither names.

    python scripts/floors.py --check

compares what is installed with the floors instead, and exits 1 if something is newer than its floor.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("dev", "servetest", "notebook")  # extras that nobody needs to use Drumline
# What draws pages and checks types, and a client that fits no grpcio of the floor (the Makefile adds it).
LEFT_OUT = ("furo", "mypy", "myst-parser", "playwright", "ruff", "sphinx", "tritonclient")
_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?P<extras>\[[^]]*\])?>=(?P<floor>[0-9.]+)")


def requirements(project: dict[str, object], *, tools: bool) -> Iterator[tuple[str, str, str]]:
    """Yield name, extras and floor of what users install, or of the tools.

    >>> project = {"dependencies": ["numpy>=1.26"], "optional-dependencies": {"dev": ["mypy>=1.11"], "all": ["x[dev]"]}}
    >>> list(requirements(project, tools=False)), list(requirements(project, tools=True))
    ([('numpy', '', '1.26')], [('mypy', '', '1.11')])
    """
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)
    listed = [item for extra, lines in extras.items() if (extra in TOOLS) == tools for item in lines]
    if not tools:
        plain = project["dependencies"]
        assert isinstance(plain, list)
        listed += plain
    for line in dict.fromkeys(listed):
        if found := _REQUIREMENT.fullmatch(line):
            yield found["name"], found["extras"] or "", found["floor"]


def main() -> int:
    """Print the floors, or compare what is installed with them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="compare what is installed with the floors")
    args = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest = list(requirements(project, tools=False))
    if args.check:
        newer = [f"{name} {version(name)}, not {floor}" for name, _, floor in lowest if not _is(version(name), floor)]
        print("\n".join(newer) or "all at their floors")
        return 1 if newer else 0
    for name, extras, floor in lowest:
        print(f"{name}{extras}=={floor}.*")
    pinned = {name for name, *_ in lowest} | set(LEFT_OUT)
    for name, extras, floor in requirements(project, tools=True):
        if name not in pinned:
            print(f"{name}{extras}>={floor}")
    return 0


def _is(installed: str, floor: str) -> bool:
    """Whether an installed version is one of the floor's."""
    return f"{installed}.".startswith(f"{floor}.")


if __name__ == "__main__":
    sys.exit(main())
