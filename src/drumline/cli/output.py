"""Print and write: results, files, errors, and what the terminal can show.

Every command with `--out` gives `deliver` a function that makes each of its formats. The extension of a file name
selects the format, unless --format does; the name `-` is stdout.
"""

from __future__ import annotations

import argparse
import errno
import gc
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.core.errors import ConfigError, DrumlineError, NotInstalled, UsageError

STDOUT = Path("-")
_TRACEBACK = "'s traceback:\n"  # in the notes of errors that `launch` raises

# What extensions mean; each command supports some of these.
TEXTS = {".txt": "text", ".json": "json"}
PICTURES = {".svg": "svg", ".html": "html", ".htm": "html"}
TRACES = {".gz": "perfetto", ".pftrace": "perfetto"}
PROGRAMS = {".csv": "csv"}
_BINARY = ("perfetto", "png")
# The files that hold what came by stdin, which no user has ever heard of.
FROM_STDIN: set[str] = set()
_SHOWN: list[str] = []  # what progress shows on the last line of the terminal


@dataclass(frozen=True, slots=True)
class Paper:
    """What a text is drawn on: the number of columns, and whether in colour."""

    width: int
    colour: bool = False


FILE = Paper(200)
_OTHER = "choose another --out"


def print_json(value: dict[str, Any]) -> None:
    """Print one object."""
    progress("")
    print(_spelled(value))


def print_result(args: argparse.Namespace, value: dict[str, Any], text: str) -> None:
    """Print a result that is no file: as one object with --json, else as text; a reader of a pipe sees it at once."""
    progress("")
    print(_spelled(value) if args.json else text, flush=True)


def _spelled(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, allow_nan=False)


def print_error(error: DrumlineError, *, as_json: bool) -> None:
    """Print an error: an object on stdout, or one or two lines on stderr."""
    what, expected, fix = map(_as_given, (error.error, error.expected, error.fix))
    if as_json:
        problem: dict[str, Any] = {"error": what, "expected": expected, "fix": fix}
        if isinstance(error, ConfigError):
            problem["problems"] = list(error.problems)
        print_json(problem)
        return
    second = "; ".join(part for part in (f"expected {expected}" if expected else "", fix) if part)
    print(f"{_traceback_of(error)}drumline: {what}", file=sys.stderr)
    if second:
        print(f"  {second}", file=sys.stderr)


def _traceback_of(error: DrumlineError) -> str:
    """Return the traceback of what the user's own code raised on a rank; errors of ours say enough by themselves."""
    if " failed with " not in error.error or isinstance(error.__cause__, DrumlineError):
        return ""
    notes = getattr(error, "__notes__", ())
    return next((f"{note.partition(_TRACEBACK)[2]}\n" for note in notes if _TRACEBACK in note), "")


def _as_given(text: str) -> str:
    """Return a message that calls the temporary file of stdin what the user knows: stdin."""
    for path in FROM_STDIN:
        text = text.replace(f"drumline plan {path}", "drumline plan -").replace(path, "stdin")
    return text


def save(path: Path, written: str | bytes) -> None:
    """Write a result to a file; a text ends with a newline."""
    data = written if isinstance(written, bytes) else (written.removesuffix("\n") + "\n").encode()
    try:
        path.write_bytes(data)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", fix=_OTHER) from None


def files_of(args: argparse.Namespace) -> list[tuple[Path, str]]:
    """Return the files of --out with their formats; raise an error for an unknown extension.

    >>> files_of(argparse.Namespace(out=[Path("a.svg"), STDOUT], formats=PICTURES))
    [(PosixPath('a.svg'), 'svg')]
    >>> files_of(argparse.Namespace(out=[Path("a.doc")], formats=PICTURES))
    Traceback (most recent call last):
    drumline.core.errors.UsageError: --out is a.doc; expected a name that ends in .svg, .html or .htm
    """
    chosen = getattr(args, "format", None)
    files = []
    for path in args.out:
        form = chosen or args.formats.get(path.suffix.lower())
        if path != STDOUT and form is None:
            *others, last = args.formats
            expectation = f"a name that ends in {', '.join(others)} or {last}"
            fix = "or choose the format with --format" if "format" in args else ""
            raise UsageError(f"--out is {path}", expected=expectation, fix=fix)
        if path != STDOUT:
            files.append((path, str(form)))
    return files


def check_out(args: argparse.Namespace) -> None:
    """Raise an error for a file of --out that cannot be written, before a command has worked for it.

    >>> check_out(argparse.Namespace(out=[Path("nofolder/a.svg")], formats=PICTURES))
    Traceback (most recent call last):
    drumline.core.errors.UsageError: cannot write nofolder/a.svg: No such file or directory; ...
    """
    for path, _ in files_of(args):
        folder = path.parent
        number = 0
        if not folder.is_dir():
            number = errno.ENOTDIR if folder.exists() else errno.ENOENT
        elif path.is_dir():
            number = errno.EISDIR
        elif not os.access(path if path.exists() else folder, os.W_OK):
            number = errno.EACCES
        if number:
            fix = f"create the folder {folder}, or choose another --out" if number == errno.ENOENT else _OTHER
            raise UsageError(f"cannot write {path}: {os.strerror(number)}", fix=fix)


def check_out_folder(folder: Path) -> None:
    """Raise an error for a folder of --out that can neither be written nor made, before a command has worked for it.

    >>> check_out_folder(Path("/dev/null/demo"))
    Traceback (most recent call last):
    drumline.core.errors.UsageError: cannot write to /dev/null/demo: Not a directory; choose another --out
    """
    path = next((parent for parent in (folder, *folder.absolute().parents) if parent.exists()), folder)
    if not path.is_dir():
        raise UsageError(f"cannot write to {folder}: {os.strerror(errno.ENOTDIR)}", fix=_OTHER)
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write to {folder}: {os.strerror(errno.EACCES)}", fix=_OTHER)


def deliver(
    args: argparse.Namespace,
    make: Callable[[str, Paper], str | bytes],
    summary: Callable[[], dict[str, Any]],
    *,
    instead: bool = False,
    gap: str = "",
) -> None:
    """Write every file of --out, and print the text, or what --format selects; --json prints the summary.

    With `instead`, a text that was written to files is not printed. A line names each written file.
    """
    files = files_of(args)
    chosen = getattr(args, "format", None)
    to_stdout = STDOUT in args.out
    if chosen in _BINARY and (to_stdout or not files) and (args.json or sys.stdout.isatty()):
        raise UsageError(f"{chosen} is not text, so it cannot be printed", fix="add --out FILE")
    figures = summary() if args.json or "json" in (form for _, form in files) else {}
    progress("")
    for path, form in files:
        save(path, _spelled(figures) if form == "json" else make(form, FILE))
    names = [str(path) for path, _ in files]
    if args.json:
        out = {"out": names[0] if len(names) == 1 else names} if names else {}
        print_json({**out, **figures} if "out" in figures else {**figures, **out})
        return
    if to_stdout or not (instead and files):
        form = chosen if chosen and (to_stdout or not files) else "text"
        written = make(form, Paper(terminal_width(), colour_wanted()))
        if isinstance(written, bytes):
            sys.stdout.flush()
            sys.stdout.buffer.write(written)
        else:
            print(written)
    for at, name in enumerate(names):
        print(f"{'' if at else gap}wrote {name}", file=sys.stderr if to_stdout else sys.stdout)


def progress(what: str) -> None:
    """Show progress on the last line of a terminal; print nothing elsewhere. An empty text clears the line.

    What a command prints, and its end, clear the line too.
    """
    if sys.stderr.isatty() and (what or _SHOWN):
        _SHOWN[:] = [what] if what else []
        print(f"\r\x1b[2K{what}", end="", file=sys.stderr, flush=True)


def wrapped(text: str, width: int) -> str:
    """Return the text with no line wider than `width`."""
    lines = (textwrap.wrap(line, width) if len(line) > width else [line] for line in text.split("\n"))
    return "\n".join(piece for pieces in lines for piece in pieces)


def terminal_width() -> int:
    """Return the number of columns: the terminal's, or 100 without one (COLUMNS overrides both)."""
    return max(shutil.get_terminal_size(fallback=(100, 24)).columns, 10)


def colour_wanted() -> bool:
    """Whether stdout takes colour: yes on a terminal, never with NO_COLOR, and always with FORCE_COLOR."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Let the collector look seldom: it takes an eighth of the time, and finds next to nothing in programs."""
    usual = gc.get_threshold()
    gc.set_threshold(100_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


@contextmanager
def pytorch(verb: str) -> Iterator[None]:
    """Say what to install if PyTorch is missing when a command imports it.

    >>> with pytorch("demo trains a model"):
    ...     raise ModuleNotFoundError(name="torch")
    Traceback (most recent call last):
    drumline.core.errors.NotInstalled: demo trains a model, which needs PyTorch; in your clone of Drumline, run: ...
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise NotInstalled.torch(f"{verb}, which needs PyTorch") from None
