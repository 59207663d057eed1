"""Flags that mean the same in every verb, and what they make: programs, costs, limits."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from drumline.core.channel import STRICTEST, Queues
from drumline.core.costs import Costs
from drumline.core.errors import UsageError
from drumline.core.files import Kind, is_regular, opened
from drumline.core.placement import Placement
from drumline.core.program import Program
from drumline.core.timeline.idle import Limit

PLACEMENTS = ("linear", "loop", "v", "bidirectional")
CHANNELS = tuple(str(queues) for queues in Queues)


def whole_number(text: str) -> int:
    """Parse a count; the message names the value."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number") from None


def number(text: str) -> float:
    """Parse a time or a size; the message names the value."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number")
    return value


def numbers(text: str) -> tuple[float, ...]:
    """Parse numbers with commas between.

    >>> numbers("0.5,2")
    (0.5, 2.0)
    """
    return tuple(number(part) for part in text.split(","))


_UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def size(text: str) -> float:
    """Parse bytes, as a number or with a unit; the message names the value.

    >>> size("2e9"), size("1.5GiB")
    (2000000000.0, 1610612736.0)
    """
    unit = next((unit for unit in sorted(_UNITS, key=len, reverse=True) if text.upper().endswith(unit)), "")
    value = number(text[: len(text) - len(unit)]) * _UNITS.get(unit, 1)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not more than 0")
    return value


def names(text: str) -> tuple[str, ...]:
    """Parse words with commas between.

    >>> names("1f1b, zb-h1")
    ('1f1b', 'zb-h1')
    """
    return tuple(part.strip() for part in text.split(",") if part.strip())


def require(args: argparse.Namespace, *names: str, example: str) -> None:
    """Refuse a command without a flag that it needs."""
    for name in names:
        if getattr(args, name) is None:
            raise UsageError(f"{_flag(name)} missing", fix=f"for example: drumline {example}")


def check_counts(args: argparse.Namespace, *names: str) -> None:
    """Refuse counts below 1."""
    for name in names:
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"{_flag(name)} is {getattr(args, name)}", expected="a whole number of 1 or more")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_format(parser: argparse.ArgumentParser, formats: Sequence[str], meaning: str) -> None:
    """Add --format and --out."""
    parser.add_argument("--format", choices=formats, default="text", help=meaning)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write there instead of printing")


def add_channel(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Add --channel, which is the strictest unless given: whoever reads a file may run it there."""
    parser.add_argument("--channel", choices=CHANNELS, default=str(STRICTEST), help=meaning)


def add_counts(parser: argparse.ArgumentParser) -> None:
    """Add the counts that a recipe needs."""
    parser.add_argument("--ranks", type=whole_number, metavar="P", help="number of ranks")
    parser.add_argument("--microbatches", type=whole_number, metavar="M", help="number of microbatches in a step")
    parser.add_argument("--stages-per-rank", type=whole_number, metavar="V", help="number of stages on each rank")


def add_schedule(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add SCHEDULE and the counts that its recipe needs."""
    nargs: Any = "?" if optional else None
    parser.add_argument(
        "schedule",
        nargs=nargs,
        metavar="SCHEDULE",
        help="a schedule's name, a CSV file, or FILE.py[:NAME] that registers it",
    )
    add_counts(parser)


def add_frozen(parser: argparse.ArgumentParser) -> None:
    """Add which stages are not trained."""
    parser.add_argument(
        "--frozen", type=ranges, metavar="STAGES", help="stages without trainable parameters, like 0-2,5"
    )


def ranges(text: str) -> frozenset[int]:
    """Parse numbers and ranges of them; the message names the value."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers = [int(one) for one in (first, last or first) if one.isascii() and one.isdigit() and len(one) <= 6]
        if len(numbers) < 2 or numbers[0] > numbers[1]:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a list of stages like 0-2,5")
        found.update(range(numbers[0], numbers[1] + 1))
    return frozenset(found)


def pruned(program: Program, args: argparse.Namespace) -> Program:
    """Return the program without the backwards that the stages named by --frozen do not need."""
    if args.frozen is None:
        return program
    if not args.frozen <= set(range(program.num_stages)):
        raise UsageError(f"--frozen names stage {max(args.frozen)}", expected=f"stages 0 to {program.num_stages - 1}")
    from drumline.core.prove.frozen import prune

    return prune(program, [stage not in args.frozen for stage in range(program.num_stages)])


def add_costs(parser: argparse.ArgumentParser) -> None:
    """Add the costs of a stage."""
    group = parser.add_argument_group("costs of one stage, in any one unit of time")
    group.add_argument("--forward", type=number, metavar="T", help="F, the forward (default 1)")
    group.add_argument("--backward-input", type=number, metavar="T", help="I, the input-gradient half (default 1)")
    group.add_argument("--backward-weight", type=number, metavar="T", help="W, the weight-gradient half (default 1)")
    group.add_argument("--comm", type=number, metavar="T", help="latency of an edge between ranks (default 0)")
    group.add_argument("--overlapped", type=number, metavar="T", help="a fused F and B (default F + B)")
    group.add_argument("--activation-bytes", type=number, metavar="A", help="bytes a microbatch holds from F on")
    group.add_argument(
        "--held-until-weight-bytes", type=number, metavar="G", help="of which stay from I to W (default all)"
    )
    group.add_argument("--costs", type=Path, metavar="FILE", help="all of these and more, as JSON; flags override it")


def add_limit(parser: argparse.ArgumentParser) -> None:
    """Add what a rank may hold."""
    group = parser.add_argument_group("what a rank may hold")
    group.add_argument("--max-activations", type=number, metavar="N", help="(stage, microbatch) pairs")
    group.add_argument("--max-bytes", type=number, metavar="N", help="bytes")


def costs_of(args: argparse.Namespace) -> Costs:
    """Return the costs that the flags and the file say."""
    costs = Costs.load(args.costs) if args.costs is not None else Costs()
    times = ("forward", "backward_input", "backward_weight", "comm", "overlapped")
    sizes = ("activation_bytes", "held_until_weight_bytes")
    return replace(costs, **{name: value for name in (*times, *sizes) if (value := getattr(args, name)) is not None})


def limit_of(args: argparse.Namespace, costs: Costs) -> Limit | None:
    """Return the limit that the flags say, or None."""
    if args.max_bytes is not None and costs.activation_bytes is None:
        raise UsageError("--max-bytes without bytes to hold against it", fix="give --activation-bytes or --costs")
    for flag, value in (("--max-activations", args.max_activations), ("--max-bytes", args.max_bytes)):
        if value is not None and value <= 0:
            raise UsageError(f"{flag} is {value:g}", expected="more than 0")
    limit = Limit(args.max_activations, args.max_bytes)
    return limit or None


def program_of(args: argparse.Namespace) -> Program:
    """Return the program that SCHEDULE names: generated, or read from a CSV file."""
    from drumline.schedules import find

    name: str = args.schedule
    path, _, recipe = name.partition(":")
    if path.endswith(".py"):
        name = _registered_by(path, recipe)
    elif name.lower().endswith(".csv") or "/" in name or is_regular(name):
        return _loaded(args)
    schedule = find(name)
    if args.ranks is None or args.microbatches is None:
        missing = " and ".join(
            flag for flag, value in (("--ranks", args.ranks), ("--microbatches", args.microbatches)) if value is None
        )
        raise UsageError(
            f"{missing} missing",
            expected=f"the counts to generate {name} for",
            fix=f"for example: {name} --ranks 4 --microbatches 8",
        )
    return schedule.build(args.ranks, args.microbatches, args.stages_per_rank)


def _registered_by(path: str, wanted: str) -> str:
    """Run a Python file that registers schedules, and return the name of the one that is meant."""
    import runpy

    from drumline.schedules import schedules

    before = schedules()
    with opened(path, Kind("schedule", UsageError, "a Python file that registers a schedule")):
        pass
    try:
        runpy.run_path(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", expected="a Python file that registers a schedule") from None
    except Exception as error:
        raise UsageError(
            f"{path} failed with {type(error).__name__}: {error}", fix="make the file run by itself"
        ) from error
    added = [name for name in schedules() if name not in before]
    if wanted in added:
        return wanted
    if len(added) == 1 and not wanted:
        return added[0]
    listed = ", ".join(added) or "none"
    raise UsageError(
        f"{path} registers {listed}", expected="one schedule, or its name behind a colon, like mine.py:name"
    )


def _loaded(args: argparse.Namespace) -> Program:
    program = Program.load(args.schedule)
    stages_per_rank = max(len(program.placement.stages_of(rank)) for rank in range(program.num_ranks))
    for flag, given, found in (
        ("--ranks", args.ranks, program.num_ranks),
        ("--microbatches", args.microbatches, program.num_microbatches),
        ("--stages-per-rank", args.stages_per_rank, stages_per_rank),
    ):
        if given is not None and given != found:
            raise UsageError(
                f"{flag} is {given}, but {args.schedule} has {found}", fix=f"leave {flag} out: the file says it"
            )
    return program


def placement_of(name: str | None, program: Program) -> Placement | None:
    """Return the named placement for the program's counts, or None where none was asked for."""
    if name is None:
        return None
    per_rank, rest = divmod(program.num_stages, program.num_ranks)
    if name == "bidirectional":
        half = (program.num_microbatches + 1) // 2
        return Placement.bidirectional(program.num_ranks, mirrored=range(half, program.num_microbatches))
    if rest or per_rank < 1 or (name == "linear" and per_rank != 1):
        raise UsageError(
            f"--placement is {name}, but {program.num_stages} stages lie on {program.num_ranks} ranks",
            expected="as many stages as ranks" if name == "linear" else "a multiple of the ranks as stages",
        )
    maker = Placement.v if name == "v" else Placement.loop
    return maker(program.num_ranks, stages_per_rank=per_rank)
