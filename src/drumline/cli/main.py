"""`drumline`: finds the verb, runs it, and turns refusals into exit codes.

Exit codes: 0 fine, 1 the answer is no, 2 bad input, 3 the run failed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from drumline.cli.output import print_error
from drumline.core.errors import DrumlineError, RunError, UsageError, nearest

# One thin module a verb; only the one that runs is imported.
VERBS = {
    "demo": "train a small model by several schedules on two ranks; ends with a report",
    "show": "draw a schedule in the terminal, or write it out",
    "simulate": "times, idle time by cause, and memory of one program",
    "compare": "all schedules for one model on given ranks, best first",
    "search": "the best program under a memory limit, with a bound and the gap",
    "profile": "seconds and bytes of a model's blocks on this device, links between ranks",
    "plan": "what to run: from a profile on this device, or for a model on a cluster",
    "check": "prove that a program can run, or list every violation",
    "verify": "run a model pipelined and in one process, and compare the two",
    "report": "recorded runs as a page: where the time went, and what to change",
    "watch": "a run live in the terminal: loss, throughput, bubble, queues",
    "analyze": "the bubble of somebody else's run, from its profiler traces",
    "explore": "schedules under sliders, in the browser",
}


class _Parser(argparse.ArgumentParser):
    """A parser that raises instead of exiting, so that errors look the same everywhere."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, fix=f"`{self.prog} --help` shows what it takes")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    >>> main(["simulate", "1f1b", "--ranks", "0", "--microbatches", "8", "--json"])
    {
      "error": "--ranks is 0",
      "expected": "a whole number of 1 or more",
      "fix": ""
    }
    2
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except DrumlineError as error:
        print_error(error, as_json="--json" in words)
        return 3 if isinstance(error, RunError) else 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _abandon_stdout()  # the reader (head, less) has seen enough
        return 0
    except OSError as error:
        if error.filename is None:  # a file that cannot be read has a name, and was refused where it was opened
            _abandon_stdout()
        what = "the output cannot be written" if error.filename is None else f"{error.filename} cannot be used"
        print(f"drumline: {what}: {error.strerror or error}", file=sys.stderr)
        return 3
    except UnicodeEncodeError as error:
        _abandon_stdout()
        print(f"drumline: the output cannot be written: {error}", file=sys.stderr)
        return 3


def _abandon_stdout() -> None:
    """Keep the interpreter from complaining at exit about what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if words[0] == "--version":
        from importlib.metadata import version

        print(f"drumline {version('drumline')}")
        return 0
    verb = words[0]
    if verb not in VERBS:
        raise UsageError(f"unknown verb {verb[:40]!r}", fix=nearest(verb[:40], VERBS))
    module = importlib.import_module(f"drumline.cli.{verb}")
    parser = _Parser(prog=f"drumline {verb}", description=VERBS[verb].capitalize() + ".", allow_abbrev=False)
    module.add_arguments(parser)
    try:
        args = parser.parse_args(words[1:])
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    code: int = module.run(args)
    return code


def _help() -> str:
    lines = [f"  {verb:<10} {summary}" for verb, summary in VERBS.items()]
    return "\n".join(["usage: drumline VERB ...", "", *lines, "", "`drumline VERB --help` shows what a verb takes."])


if __name__ == "__main__":
    sys.exit(main())
