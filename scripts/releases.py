"""Install the releases of other frameworks whose config classes the tests ask, each in a folder of its own.

    python scripts/releases.py [FOLDER]       default: `releases` in this environment

They come without what they depend on: their config classes need PyTorch alone. Where the index has none for this
machine, it says so, and the tests that ask it are skipped; in CI they fail.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FACTS = Path(__file__).parents[1] / "src" / "drumline" / "plan" / "launch" / "facts"


def packages() -> list[str]:
    """Return the packages of all releases that we have facts of, as requirements."""
    return sorted(json.loads(path.read_text(encoding="utf-8"))["package"] for path in FACTS.glob("*.json"))


def main(folder: Path) -> None:
    """Install what is not there yet."""
    for package in packages():
        target = folder / package.replace("==", "-")
        if target.is_dir():
            continue
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--only-binary",
            ":all:",
        ]
        ran = subprocess.run([*pip, "--no-deps", "--target", str(target), package], check=False)
        print(f"{package}: {'installed in ' + str(target) if ran.returncode == 0 else 'not available here'}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(sys.prefix, "releases")))
