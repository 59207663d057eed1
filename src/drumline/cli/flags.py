"""Flags with the same meaning in every command, and what they produce: programs, costs, limits."""

from __future__ import annotations

import argparse
import atexit
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from drumline.cli.output import FROM_STDIN
from drumline.core.channel import STRICTEST, Queues
from drumline.core.costs import Costs
from drumline.core.errors import UsageError
from drumline.core.files import FileKind, is_regular, opened
from drumline.core.placement import Placement
from drumline.core.program import Program
from drumline.core.timeline.idle import Limit

PLACEMENTS = ("linear", "loop", "v", "bidirectional")
CHANNELS = tuple(str(queues) for queues in Queues)
# The defaults of show, simulate, compare and check.
RANKS, MICROBATCHES = 4, 8
_MOST_OF_STDIN = 2**30
_T = TypeVar("_T")


def whole_number(text: str) -> int:
    """Parse a count; the error names the value."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number") from None


def number(text: str) -> float:
    """Parse a time or a size; the error names the value."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number")
    return value


def listed(kind: Callable[[str], _T]) -> Callable[[str], tuple[_T, ...]]:
    """Return what parses values of a kind, separated by commas.

    >>> listed(number)("0.5,2")
    (0.5, 2.0)
    """
    return lambda text: tuple(kind(part) for part in text.split(","))


_UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def size(text: str) -> float:
    """Parse bytes, as a number or with a unit; the error names the value.

    >>> size("2e9"), size("1.5GiB")
    (2000000000.0, 1610612736.0)
    """
    unit = next((unit for unit in sorted(_UNITS, key=len, reverse=True) if text.upper().endswith(unit)), "")
    value = number(text[: len(text) - len(unit)]) * _UNITS.get(unit, 1)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not more than 0")
    return value


def names(text: str) -> tuple[str, ...]:
    """Parse words separated by commas.

    >>> names("1f1b, zb-h1")
    ('1f1b', 'zb-h1')
    """
    return tuple(part.strip() for part in text.split(",") if part.strip())


def mesh(text: str) -> dict[str, int]:
    """Parse the axes of a mesh with their sizes; the error names the part that is wrong.

    >>> mesh("pp=2,dp=2")
    {'pp': 2, 'dp': 2}
    """
    numbers: dict[str, int] = {}
    for part in names(text):
        axis, _, size = part.partition("=")
        if not size.isdecimal() or int(size) < 1 or axis in numbers:
            raise argparse.ArgumentTypeError(f"{part[:40]!r} is not an axis and its size, each once, like dp=2")
        numbers[axis] = int(size)
    if not numbers:
        raise argparse.ArgumentTypeError("the mesh has no axis; write it like pp=2,dp=2")
    return numbers


def file(text: str) -> str:
    """Return the name of a file to read; for `-`, a temporary file with the contents of stdin.

    Files are read strictly and must not be pipes, so the contents of stdin are copied to a file first.
    """
    if text != "-":
        return text
    home = tempfile.mkdtemp(prefix="drumline-")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    data = sys.stdin.buffer.read(_MOST_OF_STDIN)
    if not data:
        raise argparse.ArgumentTypeError("- reads from stdin, but stdin is empty")
    path = Path(home, "stdin.json" if data.lstrip()[:1] in (b"{", b"[") else "stdin.csv")
    path.write_bytes(data)
    FROM_STDIN.add(str(path))
    return str(path)


def require(args: argparse.Namespace, *names: str, example: str) -> None:
    """Raise an error if a required flag is missing."""
    for name in names:
        if getattr(args, name) is None:
            raise UsageError(f"{_flag(name)} is missing", fix=f"for example: drumline {example}")


def check_counts(args: argparse.Namespace, *names: str) -> None:
    """Raise an error for counts below 1."""
    for name in names:
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"{_flag(name)} is {getattr(args, name)}", expected="a whole number of 1 or more")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def adder(parser: argparse.ArgumentParser, group: str = "") -> partial[None]:
    """Return a function that adds arguments to a parser, or to a group of that title: see `_add`."""
    return partial(_add, parser.add_argument_group(group) if group else parser)


def _add(
    to: argparse._ActionsContainer,
    shown: str,
    meaning: str,
    kind: Callable[[str], Any] | Sequence[str] = str,
    default: Any = None,
    **more: Any,
) -> None:
    """Add an argument as the help shows it: `-r --ranks P`, `--json`, `URL`.

    `kind` parses the text, or lists the choices. The help ends with the default, unless its text says more about it.
    """
    words = shown.split()
    names = [word for word in words if word.startswith("-")]
    if default not in (None, []) and "default" not in meaning:
        meaning += f" (default {default:g})" if isinstance(default, float) else f" (default {default})"
    more |= {"default": default, "help": meaning}
    if isinstance(kind, Sequence):
        more["choices"] = kind
    elif names == words:
        more |= {"action": "store_true", "default": False}
    else:
        more |= {"type": kind, "metavar": words[-1]}
    to.add_argument(*(names or [words[-1].lower()]), **more)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    adder(parser)("--json", "print one JSON object instead of text")


def add_out(parser: argparse.ArgumentParser, formats: Mapping[str, str], meaning: str = "") -> None:
    """Add --out, which may be repeated: the extension of each name determines the format."""
    parser.set_defaults(formats=formats)
    meaning = meaning or f"write a file; its extension determines the format: {' '.join(formats)}"
    adder(parser)("-o --out FILE", f"{meaning}. May be repeated; - means stdout", Path, [], action="append")


def add_format(parser: argparse.ArgumentParser, formats: Sequence[str], meaning: str) -> None:
    """Add --format: what to print, and what to write to --out whatever the extension."""
    adder(parser)("--format", f"the format of what is printed, or written to --out: {meaning}", formats)


def add_channel(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Add --channel; the default is the strictest, because the reader of a file may run it there."""
    adder(parser)("--channel", meaning, CHANNELS, str(STRICTEST))


def add_counts(parser: argparse.ArgumentParser, help_text: str = "(default {})", ranks: int = RANKS) -> None:
    """Add the counts that a recipe needs; `help_text` describes the default."""
    add = adder(parser)
    add("-r --ranks P", f"number of ranks {help_text.format(ranks)}", whole_number)
    add("-m --microbatches M", f"number of microbatches in a step {help_text.format(MICROBATCHES)}", whole_number)
    add("--stages-per-rank V", "number of stages on each rank (default: the schedule's own)", whole_number)


def add_schedule(parser: argparse.ArgumentParser, *, optional: str = "", ranks: int = RANKS) -> None:
    """Add SCHEDULE and the counts that its recipe needs; `optional` says what happens without a SCHEDULE."""
    meaning = "the name of a schedule, a CSV file (- reads stdin), or FILE.py[:NAME] that registers a schedule"
    adder(parser)("SCHEDULE", meaning + optional, file, nargs="?" if optional else None)
    add_counts(parser, "(default {}; a CSV file has its own)", ranks)


def add_slices(parser: argparse.ArgumentParser) -> None:
    """Add --slices and what they cost; `slices_of` and `costs_of` read them."""
    add = adder(parser, "slices of the sequences of a microbatch")
    add(
        "--slices S",
        "how many, or the tokens of each, like 700,500,448,400 (default 1; a CSV file has its own)",
        listed(whole_number),
    )
    add("--attention A", "part of the time of F and B that attention takes, which grows with the slices before", number)
    add("--key-value-bytes K", "bytes of a microbatch's keys and values, among its activations (default 0)", number)


def slices_of(args: argparse.Namespace) -> int | tuple[int, ...]:
    """Return the number of slices, or their lengths.

    >>> slices_of(argparse.Namespace(slices=(8,))), slices_of(argparse.Namespace(slices=(3, 1)))
    (8, (3, 1))
    """
    counts: tuple[int, ...] = getattr(args, "slices", None) or (1,)
    if min(counts) < 1:
        raise UsageError(f"--slices has {min(counts)}", expected="a number of slices, or the tokens of each, from 1 on")
    return counts if len(counts) > 1 else counts[0]


def add_frozen(parser: argparse.ArgumentParser) -> None:
    """Add --frozen, the stages that do not train."""
    adder(parser)("--frozen STAGES", "stages without trainable parameters, like 0-2,5", ranges)


def ranges(text: str) -> frozenset[int]:
    """Parse numbers and ranges; the error names the value."""
    counts: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers = [int(name) for name in (first, last or first) if name.isascii() and name.isdigit() and len(name) <= 6]
        if len(numbers) < 2 or numbers[0] > numbers[1]:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a list of stages like 0-2,5")
        counts.update(range(numbers[0], numbers[1] + 1))
    return frozenset(counts)


def pruned(program: Program, args: argparse.Namespace) -> Program:
    """Return the program without the backwards that the --frozen stages do not need."""
    if args.frozen is None:
        return program
    if not args.frozen <= set(range(program.num_stages)):
        raise UsageError(f"--frozen names stage {max(args.frozen)}", expected=f"stages 0 to {program.num_stages - 1}")
    from drumline.core.prove.frozen import prune

    return prune(program, [stage not in args.frozen for stage in range(program.num_stages)])


def add_costs(parser: argparse.ArgumentParser) -> None:
    """Add the costs of a stage."""
    add = adder(parser, "costs of one stage, all times in the same unit")
    add("--forward T", "time of the forward pass, F (default 1)", number)
    add("--backward-input T", "time of the input-gradient half, I (default 1)", number)
    add("--backward-weight T", "time of the weight-gradient half, W (default 1)", number)
    add("--comm T", "time of a message between two ranks (default 0)", number)
    add("--overlapped T", "time of a fused F and B (default: the sum of both)", number)
    add("--activation-bytes A", "bytes that a microbatch holds from F on (default: none)", number)
    add("--held-until-weight-bytes G", "bytes of these that stay from I to W (default: all)", number)
    add("--costs FILE", "read these and more costs from a JSON file; flags override it", file)


def add_limit(parser: argparse.ArgumentParser, *, finer: str = "") -> None:
    """Add what a rank may hold; `finer` says when v stages per rank count as one."""
    add = adder(parser, "memory limit of a rank (default: none)")
    add("--max-activations N", f"the most (stage, microbatch) pairs that a rank may hold{finer}", number)
    add("--max-bytes N", "the most bytes that a rank may hold; needs --activation-bytes", number)


def costs_of(args: argparse.Namespace) -> Costs:
    """Return the costs from the flags and the file."""
    costs = Costs.load(args.costs) if args.costs is not None else Costs()
    times = ("forward", "backward_input", "backward_weight", "comm", "overlapped")
    sizes = ("activation_bytes", "held_until_weight_bytes")
    names = (*times, *sizes, "attention", "key_value_bytes")
    wanted: dict[str, Any] = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    slices = slices_of(args)
    if isinstance(slices, tuple):
        wanted["slice_lengths"] = slices
    return replace(costs, **wanted)


def limit_of(args: argparse.Namespace, costs: Costs) -> Limit | None:
    """Return the limit from the flags, or None."""
    if args.max_bytes is not None and costs.activation_bytes is None:
        raise UsageError("--max-bytes needs to know what a stage holds", fix="add --activation-bytes or --costs")
    for flag, value in (("--max-activations", args.max_activations), ("--max-bytes", args.max_bytes)):
        if value is not None and value <= 0:
            raise UsageError(f"{flag} is {value:g}", expected="more than 0")
    limit = Limit(args.max_activations, args.max_bytes)
    return limit or None


def program_of(args: argparse.Namespace, ranks: int = RANKS) -> Program:
    """Return the program for SCHEDULE: generated, on `ranks` unless --ranks is given, or read from a file."""
    from drumline.schedules import find

    name = named(args.schedule)
    if isinstance(name, Program):
        return _with_counts(name, args)
    ranks = ranks if args.ranks is None else args.ranks
    microbatches = MICROBATCHES if args.microbatches is None else args.microbatches
    return find(name).build(ranks, microbatches, args.stages_per_rank, slices=slices_of(args))


def named(text: str, ran: dict[str, tuple[str, ...]] | None = None) -> str | Program:
    """Return what SCHEDULE refers to: a name, which a Python file may register, or the program in a CSV file.

    `ran` maps the Python files that ran before to the names they registered; this call adds to it.
    """
    path, _, recipe = text.partition(":")
    if path.endswith(".py"):
        ran = {} if ran is None else ran
        if path not in ran:
            ran[path] = _added_by(path)
        return _meant(path, recipe, ran[path])
    if text.lower().endswith(".csv") or "/" in text or is_regular(text):
        return Program.load(text)
    return text


def _meant(path: str, wanted: str, added: Sequence[str]) -> str:
    """Return the requested one of the schedules that a Python file registers."""
    if wanted in added:
        return wanted
    if len(added) == 1 and not wanted:
        return added[0]
    listed = ", ".join(added) or "none"
    raise UsageError(
        f"{path} registers {listed}" + (f", not {wanted}" if wanted and added else ""),
        expected="one schedule, or a name after a colon, like mine.py:name",
    )


def _added_by(path: str) -> tuple[str, ...]:
    """Run a Python file, and return the names of the schedules it registers."""
    import runpy

    from drumline.schedules import schedules

    before = schedules()
    with opened(path, FileKind("schedule", UsageError, "a Python file that registers a schedule")):
        pass
    try:
        runpy.run_path(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", expected="a Python file that registers a schedule") from None
    except Exception as error:
        raise UsageError(
            f"{path} failed with {type(error).__name__}: {error}", fix="make sure that the file runs on its own"
        ) from error
    return tuple(name for name in schedules() if name not in before)


def _with_counts(program: Program, args: argparse.Namespace) -> Program:
    """Return a file's program; raise if --ranks or other counts differ from it."""
    from drumline.schedules.slices import number_of

    slices = number_of(slices_of(args)) if getattr(args, "slices", None) else None
    stages_per_rank = max(len(program.placement.stages_of(rank)) for rank in range(program.num_ranks))
    for flag, wanted, actual in (
        ("--ranks", args.ranks, program.num_ranks),
        ("--microbatches", args.microbatches, program.num_microbatches),
        ("--stages-per-rank", args.stages_per_rank, stages_per_rank),
        ("--slices", slices, program.num_slices),
    ):
        if wanted is not None and wanted != actual:
            raise UsageError(
                f"{flag} is {wanted}, but {args.schedule} has {actual}", fix=f"omit {flag}: the file determines it"
            )
    return program


def placement_of(name: str | None, program: Program) -> Placement | None:
    """Return the named placement for the program's counts, or None if none was requested."""
    if name is None:
        return None
    per_rank, rest = divmod(program.num_stages, program.num_ranks)
    if name == "bidirectional":
        half = (program.num_microbatches + 1) // 2
        return Placement.bidirectional(program.num_ranks, mirrored=range(half, program.num_microbatches))
    if rest or per_rank < 1 or (name == "linear" and per_rank != 1):
        raise UsageError(
            f"--placement is {name}, but the program has {program.num_stages} stages on {program.num_ranks} ranks",
            expected="as many stages as ranks" if name == "linear" else "a multiple of the ranks as stages",
        )
    maker = Placement.v if name == "v" else Placement.loop
    return maker(program.num_ranks, stages_per_rank=per_rank)
