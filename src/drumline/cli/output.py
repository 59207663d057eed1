"""Printing: JSON objects, results, errors, and what is known of the terminal."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drumline.core.errors import DrumlineError, UsageError


def print_json(value: dict[str, Any]) -> None:
    """Print one object."""
    print(json.dumps(value, indent=2, allow_nan=False))


def print_error(error: DrumlineError, *, as_json: bool) -> None:
    """Print a refusal: an object on stdout, or one or two lines on stderr."""
    if as_json:
        print_json({"error": error.error, "expected": error.expected, "fix": error.fix})
        return
    second = "; ".join(part for part in (f"expected {error.expected}" if error.expected else "", error.fix) if part)
    print(f"drumline: {error.error}", file=sys.stderr)
    if second:
        print(f"  {second}", file=sys.stderr)


def save(path: Path, written: str | bytes) -> None:
    """Write what was made to a file; a text ends with a line end."""
    data = written if isinstance(written, bytes) else (written.removesuffix("\n") + "\n").encode()
    try:
        path.write_bytes(data)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", fix="choose another --out") from None


def deliver(args: argparse.Namespace, written: str | bytes, summary: dict[str, Any]) -> None:
    """Hand over what --format asked for: to --out, or to stdout; --json prints the summary there instead."""
    if args.out is not None:
        save(args.out, written)
    elif isinstance(written, bytes) and (args.json or sys.stdout.isatty()):
        raise UsageError(f"a {args.format} file is not text", fix="give --out FILE")
    if args.json:
        print_json(summary)
    elif args.out is not None:
        print(f"wrote {args.out}")
    elif isinstance(written, bytes):
        sys.stdout.buffer.write(written)
    else:
        print(written)


def report(args: argparse.Namespace, text: str, summary: dict[str, Any], *, gap: str = "") -> None:
    """Print a result as text, or as one object, and where a file of it was written to."""
    if args.json:
        print_json(summary if args.out is None else {**summary, "out": str(args.out)})
        return
    print(text)
    if args.out is not None:
        print(f"{gap}wrote {args.out}")


def progress(what: str) -> None:
    """Show on a terminal's last line what is being done; nothing where nobody watches. An empty text clears it."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{what}", end="", file=sys.stderr, flush=True)


def wrapped(text: str, width: int) -> str:
    """Return the text with no line wider than `width`."""
    lines = (textwrap.wrap(line, width) if len(line) > width else [line] for line in text.split("\n"))
    return "\n".join(piece for pieces in lines for piece in pieces)


def terminal_width() -> int:
    """Return the columns to draw in: the terminal's, or 100 where there is none (COLUMNS overrides both)."""
    return max(shutil.get_terminal_size(fallback=(100, 24)).columns, 10)


def colour_wanted() -> bool:
    """Whether stdout takes colour: a terminal, and NO_COLOR is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


@contextmanager
def pytorch(verb: str) -> Iterator[None]:
    """Say what to install where importing what a verb runs finds no PyTorch.

    >>> with pytorch("demo trains a model"):
    ...     raise ModuleNotFoundError(name="torch")
    Traceback (most recent call last):
    drumline.core.errors.UsageError: demo trains a model, and PyTorch is not installed; pip install "drumline[train]"
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise UsageError(f"{verb}, and PyTorch is not installed", fix='pip install "drumline[train]"') from None
