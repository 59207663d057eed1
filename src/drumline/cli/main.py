"""`drumline`: find the command, run it, and turn errors into exit codes.

::

    0     success; if the command answers a question, the answer is yes
    1     success, but the answer is no
    2     bad input: nothing was run
    3     the run failed, or the output cannot be written
    70    a bug in Drumline
    130   interrupted
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import NoReturn

from drumline.cli.output import check_out, print_error, progress, terminal_width, wrapped
from drumline.core.errors import DrumlineError, RunError, UsageError, nearest
from drumline.core.version import __version__

# One thin module per command; only the one that runs is imported.
VERBS = {
    "demo": "train a small model on two ranks with several schedules, and write a report",
    "show": "draw a schedule in the terminal, or write it to a file",
    "simulate": "print the times, the idle time by cause and the memory of one schedule",
    "replicas": "simulate one step of many copies of a pipeline, and name what is slow",
    "compare": "compare all schedules, or those you name, for one model, best first",
    "search": "find the best schedule within a memory limit, and say how far from optimal it can be",
    "profile": "measure a model's blocks and the links between ranks on this machine",
    "calibrate": "measure this device, kernel by kernel, for forecasts of training steps on it",
    "plan": "choose what to run, for a profiled model on this machine or for a model on a cluster",
    "train": "train a model through a pipeline: a built-in one, a Hugging Face model or your own",
    "check": "prove that a schedule can run, or list every violation",
    "verify": "check that a pipelined run matches single-process training",
    "report": "turn recorded runs into a page: where the time went, and what to change",
    "watch": "follow a run live: loss, throughput, bubble, queues",
    "analyze": "report the bubble of a run with PyTorch's pipelining from its traces",
    "export": "write a model as ONNX stages, cut by measured times and checked against PyTorch",
    "serve": "serve exported stages as a pipeline over gRPC, for any client of KServe's protocol",
    "load": "load a service, and measure latency and throughput",
    "explore": "open schedules with sliders in the browser",
    "completion": "print a script that completes commands, flags and schedules in your shell",
}
FINE, NO, BAD_INPUT, FAILED, BUG, INTERRUPTED = 0, 1, 2, 3, 70, 130


class _Parser(argparse.ArgumentParser):
    """A parser that raises instead of exiting, so that errors look the same everywhere."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, fix=f"run `{self.prog} --help` to list the arguments")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    >>> main(["simulate", "1f1b", "--ranks", "0", "--microbatches", "8", "--json"])
    {
      "error": "the number of ranks is 0",
      "expected": "a whole number of 1 or more",
      "fix": ""
    }
    2
    """
    words = list(sys.argv[1:] if argv is None else argv)
    _open_what_is_closed()
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except DrumlineError as error:
        print_error(error, as_json="--json" in words)
        return FAILED if isinstance(error, RunError) else BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _abandon_stdout()  # the reader (head, less) has closed the pipe
        return FINE
    except OSError as error:
        if error.filename is None:  # an unreadable file has a name, and was reported where it was opened
            _abandon_stdout()
        what = "cannot write the output" if error.filename is None else f"cannot use {error.filename}"
        print(f"drumline: {what}: {error.strerror or error}", file=sys.stderr)
        return FAILED
    except UnicodeEncodeError as error:
        _abandon_stdout()
        print(f"drumline: cannot write the output: {error}", file=sys.stderr)
        return FAILED
    except Exception:
        if argv is not None:  # callers from Python see the error itself
            raise
        traceback.print_exc()
        print("drumline: this is a bug in Drumline; please report it with the lines above", file=sys.stderr)
        return BUG


def _open_what_is_closed() -> None:
    """Open stdin, stdout and stderr where the caller has closed them: other files would get their numbers."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - until the end


def _abandon_stdout() -> None:
    """Keep the interpreter from complaining at exit about output that could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return FINE
    if words[0] in ("-V", "--version"):
        print(f"drumline {__version__}")
        return FINE
    verb = words[0]
    if verb.startswith("-"):
        raise _unknown_flag(words)
    if verb not in VERBS:
        raise UsageError(f"unknown command {verb[:40]!r}", fix=nearest(verb[:40], VERBS))
    module = importlib.import_module(f"drumline.cli.{verb}")
    parser = parser_of(verb)
    _check_flags(parser, words[1:])
    try:
        args = parser.parse_args(words[1:])
    except SystemExit as stop:  # --help
        return int(stop.code or FINE)
    if "formats" in args:
        check_out(args)  # before computing anything
    try:
        code: int = module.run(args)
    finally:
        progress("")
    return code


def _unknown_flag(words: Sequence[str]) -> UsageError:
    """Return the error for a flag in front of the command."""
    flag = words[0][:40]
    verb = next((word for word in words if word in VERBS), None)
    fix = meant(flag, ("--help", "--version")) or "run `drumline --help` to list the commands"
    if verb is not None:
        fix = f"put the command first: drumline {verb} {flag} ..."
    return UsageError(f"unknown flag {flag!r}", expected="a command", fix=fix)


def _check_flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Raise an error for a flag that a command does not have, before one for what is missing because of it."""
    known = parser._option_string_actions
    for word in words:
        flag = word.partition("=")[0]
        if word == "--":
            return
        if flag.startswith("--") and flag not in known:
            fix = meant(flag, known) or f"run `{parser.prog} --help` to list its flags"
            if flag == "--version":
                fix = "run `drumline --version` to print the version"
            raise UsageError(f"{parser.prog.split()[-1]} has no flag {flag[:40]}", fix=fix)


def meant(flag: str, known: Iterable[str]) -> str:
    """Return a phrase that suggests the flag that was meant; nothing if none is like it.

    >>> meant("--rnaks", ["--ranks", "--out"]), meant("--micro", ["--microbatches"]), meant("--devices", ["--gpus"])
    ('did you mean --ranks?', 'did you mean --microbatches?', '')
    """
    words = [name[2:] for name in known if name.startswith("--")]
    said = flag.strip("-").lower()[:40]
    close = [word for word in words if said and word.startswith(said)] or difflib.get_close_matches(said, words, 1, 0.7)
    return f"did you mean {' or '.join(f'--{name}' for name in close[:4])}?" if close else ""


def parser_of(verb: str) -> argparse.ArgumentParser:
    """Return the parser of a command, with an example below its help."""
    module = importlib.import_module(f"drumline.cli.{verb}")
    summary = VERBS[verb]
    parser = _Parser(
        prog=f"drumline {verb}",
        description=wrapped(f"{summary[0].upper()}{summary[1:]}.", terminal_width() - 2),
        epilog=f"example:\n  {module.EXAMPLE}",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    return parser


def _help() -> str:
    lines = [f"  {verb:<10} {summary}" for verb, summary in VERBS.items()]
    below = "`drumline COMMAND --help` lists the flags of a command and shows an example."
    return "\n".join(["usage: drumline COMMAND ...", "", *lines, "", below, "`drumline --version` prints the version."])


if __name__ == "__main__":
    sys.exit(main())
