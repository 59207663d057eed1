"""Take features away, one at a time, in a copy of the tree: what is left must still be whole.

    python benchmarks/removable.py [FEATURE ...] [--brief] [--json FILE]

A feature goes with its folder under features/ and with its lines in pipeline/attached.py. Then the package must import,
the import contracts and mypy must hold, and the core tests must pass, which no feature is needed for. A feature that
other files name as well cannot be taken away yet: they are listed.

The core tests try fewer combinations there (FEW_CASES): what they compute, they show with all features. With --brief,
those over all schedules try one that goes in one direction and one that goes in two.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = Path("src") / "drumline"
ATTACHED = PACKAGE / "pipeline" / "attached.py"
# What any pipeline does: schedules with the gradients of one process, rows, stages, backwards, tied weights.
CORE = (
    "tests/runtime/test_executor.py",
    "tests/runtime/test_stage.py",
    "tests/runtime/test_split_backward.py",
    "tests/pipeline/test_parity.py",
    "tests/pipeline/test_tied.py",
)
BRIEF = "not (test_parity or test_tied) or (1f1b and not interleaved) or dualpipe"


@dataclass(frozen=True)
class Taken:
    """What came of taking a feature away: who else names it, or what failed without it."""

    feature: str
    named_by: tuple[str, ...]
    failed: str
    seconds: float


def features(root: Path = ROOT) -> list[str]:
    """Return the names of all features."""
    return sorted(path.parent.name for path in (root / PACKAGE / "features").glob("*/__init__.py"))


def named_by(feature: str, root: Path = ROOT) -> tuple[str, ...]:
    """Return the files of the package that import a feature, beside itself and the one that may."""
    pattern = re.compile(
        rf"^\s*(?:from|import) drumline\.features(?:\.{feature}\b| import .*\b{feature}\b)", re.MULTILINE
    )
    found = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        inside = path.relative_to(root / PACKAGE)
        if inside.parts[:2] != ("features", feature) and root / ATTACHED != path and pattern.search(path.read_text()):
            found.append(str(inside))
    return tuple(found)


def without(feature: str, text: str) -> str:
    r"""Return the text of pipeline/attached.py without a feature's lines.

    >>> text = "from drumline.features.tea.options import TeaOptions\nclass All(\n    TeaOptions,\n    Other,\n): ..."
    >>> print(without("tea", text))
    class All(
        Other,
    ): ...
    """
    lines = text.splitlines(keepends=True)
    imports = [line for line in lines if re.match(rf"from drumline\.features\.{feature}\b", line)]
    names = {name for word in imports for name in re.findall(r"(?:import|as) (\w+)$", word.strip())}
    used = re.compile(rf"^\s+\*?(?:{'|'.join(sorted(names))})\b") if names else re.compile(r"$^")
    return "".join(line for line in lines if line not in imports and not used.match(line))


def copied(folder: Path, feature: str) -> Path:
    """Return a copy of the tree without a feature."""
    tree = folder / feature
    ignored = shutil.ignore_patterns("__pycache__", "_build", ".mypy_cache")
    for part in ("src", "tests", "benchmarks"):
        shutil.copytree(ROOT / part, tree / part, ignore=ignored)
    for part in ("pyproject.toml", "conftest.py"):
        shutil.copy(ROOT / part, tree / part)
    if (ROOT / ".mypy_cache").exists():  # what mypy knows of files that stay
        shutil.copytree(ROOT / ".mypy_cache", tree / ".mypy_cache")
    shutil.rmtree(tree / PACKAGE / "features" / feature)
    path = tree / ATTACHED
    path.write_text(without(feature, path.read_text()))
    return tree


def steps(*, brief: bool = False) -> dict[str, list[str]]:
    """Return what must pass without a feature, by what it shows."""
    chosen = ["-k", BRIEF] if brief else []
    python, linter = sys.executable, "from importlinter.cli import lint_imports_command as run; run()"
    return {
        "imports": [
            python,
            "-c",
            "import drumline as dl; dl.Pipeline; dl.verify; dl.profile_model; import drumline.cli",
        ],
        "import contracts": [python, "-c", linter, "--no-cache"],
        "types": [python, "-m", "mypy", "src"],
        "core tests": [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, *CORE],
    }


def taken(feature: str, folder: Path, *, brief: bool = False) -> Taken:
    """Take a feature away, if nothing else names it, and see what still passes."""
    began = time.monotonic()
    others = named_by(feature)
    failed = ""
    if not others:
        tree = copied(folder, feature)
        own = [str(tree / part) for part in ("src", "tests", "benchmarks")]
        paths = os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])
        for what, command in steps(brief=brief).items():
            ran = subprocess.run(
                command, cwd=tree,
                env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "FEW_CASES": "1"},
                capture_output=True, text=True, timeout=900, check=False,
            )  # fmt: skip
            if ran.returncode:
                failed = f"{what}:\n{(ran.stdout + ran.stderr)[-3000:]}"
                break
    return Taken(feature, others, failed, time.monotonic() - began)


def main() -> int:
    """Take away the features that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("feature", nargs="*", help="a folder under features/; all without one")
    parser.add_argument("--brief", action="store_true", help="run the core tests by two schedules alone")
    parser.add_argument("--json", type=Path, help="write what came of it to a file")
    args = parser.parse_args()
    known = features()
    if unknown := set(args.feature) - set(known):
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(known)}")
    found = []
    with tempfile.TemporaryDirectory(prefix="removable-") as folder:
        for feature in args.feature or known:
            item = taken(feature, Path(folder), brief=args.brief)
            found.append(item)
            outcome = f"named by {', '.join(item.named_by)}" if item.named_by else item.failed or "whole without it"
            print(f"{feature:<10} {outcome} ({item.seconds:.0f} s)", flush=True)
    if args.json:
        args.json.write_text(json.dumps([asdict(item) for item in found], indent=1))
    return int(any(item.failed for item in found))


if __name__ == "__main__":
    sys.exit(main())
