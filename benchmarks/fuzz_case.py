"""One case of a fuzzer: a file is read and used as its user would, through a verb where there is one.

A refusal is a DrumlineError, or exit code 2; whatever else is raised is a traceback.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from drumline.cli.main import main
from drumline.core.errors import DrumlineError
from fuzz_mutations import damaged

Case = Callable[[random.Random], None]


@dataclass(frozen=True, slots=True)
class Target:
    """A parser: makes its seeds in a folder, and then runs one case after the other there."""

    name: str
    begin: Callable[[Path], Case]


class Refused(DrumlineError):
    """A command that ended with exit code 2."""


def command(*words: object) -> str:
    """Run a verb as its user does, and return what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(word) for word in words])
    if code == 2:
        assert "cannot write" not in err.getvalue(), err.getvalue()
        raise Refused(err.getvalue() or out.getvalue())
    assert code in (0, 1), f"exit code {code}: {err.getvalue()}"
    if "--json" in words:
        json.loads(out.getvalue(), parse_constant=_not_json)
    return out.getvalue()


def _not_json(word: str) -> None:
    raise AssertionError(f"{word} is printed, which is no JSON")


def put(path: Path, text: str, chance: random.Random) -> Path:
    path.write_bytes(damaged(text.encode(errors="surrogatepass"), chance))
    return path
