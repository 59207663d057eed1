"""`drumline plan PROFILE.json`: decide how to run a profiled model, on ranks like the profiled one or others."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from drumline.cli import flags
from drumline.cli.output import PICTURES, Paper, deliver, files_of, progress, wrapped
from drumline.core.costs import Edge
from drumline.core.errors import counted

if TYPE_CHECKING:
    from drumline.plan.device.candidate import Candidate
    from drumline.plan.device.plan import Plan
    from drumline.plan.device.planner import Planned

_MIB = 2**20
_SHOWN = 10
_FEW = 4
_DRAWN = 6
_HEADROOM = 0.1
# A JSON file is the plan itself, for Pipeline(plan=...); --json also prints the alternatives.
# A TOML file is the config for `drumline train`; it names the JSON file that is written beside it.
FORMATS = {".json": "plan", ".toml": "config", ".txt": "text"} | PICTURES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of planning from a profile, except those shared with clusters."""
    add = flags.adder(parser, "a profiled model on this machine")
    add("-r --ranks P", "number of ranks (required)", flags.whole_number)
    add("--checkpoint HOW,...", "none, full, or both to choose from (default both)", flags.names)
    add("--optimizer NAME", "adam, momentum or sgd; decides the memory of its state", str, "adam")
    add("--seconds S", "seconds to search for a better schedule; 0 disables the search", flags.number, 5.0)
    speed = "speed of each rank, relative to the profiled device (default: all the same)"
    add("--whole-sequences", "leave out slices, which a profile with --slices allows")
    add("--rank-speed S,...", speed, flags.listed(flags.number))
    add("--rank-memory BYTES,...", "memory of each rank (default: --memory for all)", flags.listed(flags.size))
    slower = "a slower link between two ranks, both ways: what it adds to a profiled message. May be repeated"
    add("--link A-B:LATENCY:BYTES_PER_SECOND", slower, _link, [], action="append")


def run(args: argparse.Namespace) -> int:
    """Plan and report."""
    from drumline.plan.device.combinations import CHECKPOINTING
    from drumline.plan.device.model_profile import ModelProfile
    from drumline.plan.device.planner import plan
    from drumline.plan.launch.profile_config import profile_config

    flags.require(args, "ranks", "batch", example=f"plan {args.subject} --ranks 2 --batch 16")
    flags.check_counts(args, "ranks", "batch")
    args.formats = FORMATS
    configs = [path for path, form in files_of(args) if form == "config"]
    plans = [path for path, form in files_of(args) if form == "plan"]
    if configs and not plans:
        plans = [configs[0].with_suffix(".json")]
        args.out.append(plans[0])
    profile = ModelProfile.load(args.subject)
    disturbed = profile.sizes[-1][1].disturbed
    planned = plan(
        profile,
        num_ranks=args.ranks,
        batch=args.batch,
        memory_bytes=args.memory,
        headroom=_HEADROOM if args.headroom is None else args.headroom,
        optimizer=args.optimizer,
        schedules=args.schedules,
        checkpoint=args.checkpoint or CHECKPOINTING,
        stages_per_rank=args.stages_per_rank,
        seconds=args.seconds,
        slices=not args.whole_sequences,
        rank_speeds=args.rank_speed,
        rank_memory=args.rank_memory,
        links={ends: edge for pair, edge in args.link for ends in (pair, pair[::-1])},
        progress=progress,
    )

    def make(form: str, paper: Paper) -> str:
        if form == "text":
            return _text(planned, disturbed, paper.width)
        if form == "plan":
            return planned.best.to_json()
        if form == "config":
            return profile_config(profile, planned.best, plan_file=str(plans[0]))
        return _page(planned) if form == "html" else _picture(planned)

    command = f"drumline train {configs[0]}" if configs else ""
    more = {"launch": command} if configs else {}
    deliver(args, make, lambda: {**_summary(planned), "busy_machine": disturbed, **more})
    if configs and not args.json:
        named = "" if profile.source else "Name the model in its [model] table, which the profile does not say. "
        print(f"\n{named}Start it: {command}")
    return 0


def _page(planned: Planned) -> str:
    """Return the timelines of the choice and of the best candidate of every other schedule."""
    from drumline.report.draw.html import page

    best: dict[str, Candidate] = {}
    for candidate in planned.candidates:
        best.setdefault(candidate.program.name, candidate)
    plan = planned.best
    fullest = max(rank_bytes.total for rank_bytes in plan.rank_bytes)
    return page(
        [candidate.timeline() for candidate in list(best.values())[:_DRAWN]],
        title=f"Plan for {plan.model.name} on {counted(plan.num_ranks, 'rank')}, a batch of {plan.batch} rows",
        advice=f"{plan.schedule}, {_pieces(plan)}:"
        f" a step takes {plan.step_seconds * 1e3:.1f} ms, the fullest rank {fullest / _MIB:.1f} MiB",
        seconds=True,
    )


def _picture(planned: Planned) -> str:
    from drumline.report.draw.svg import svg

    return svg(planned.chosen.timeline())


def _summary(planned: Planned) -> dict[str, Any]:
    return {
        "best": {**planned.best.summary(), "program": planned.best.program.format().split("\n")},
        "candidates": [candidate.summary(planned.chosen) for candidate in planned.candidates],
        "rejected": [candidate.summary(planned.chosen) for candidate in planned.rejected],
    }


def _text(planned: Planned, disturbed: str, width: int) -> str:
    from drumline.report.draw.table import table

    best = planned.best
    header = ["schedule", "M", "rows", "blocks", "recomputed", "step ms", "peak MiB", "why not"]
    rows = [_row(candidate, planned) for candidate in planned.candidates[:_SHOWN]]
    rows += [_row(candidate, planned) for candidate in planned.rejected[: max(_SHOWN - len(rows), 2)]]
    items = ", ".join(
        f"{name} {seconds * 1e3:.1f}" for name, seconds in _items(planned.best.seconds) if abs(seconds) >= 5e-5
    )
    slices = _slices_text(planned)
    lines = [
        f"{best.model.name} on {counted(best.num_ranks, 'rank')}, a batch of {best.batch} rows:"
        f" {counted(len(planned.candidates), 'combination')} fit, {len(planned.rejected)} do not",
        "",
        table(header, rows, width=width, keep=("step ms", "why not")),
        "",
        f"{best.schedule}: {_pieces(best)}, {_checkpointing(best.checkpoint)}",
        f"a step takes {best.step_seconds * 1e3:.1f} ms: {items}",
    ]
    if slices:
        lines.append(slices)
    if disturbed:
        lines.append(f"{disturbed} Predicted times are no more accurate than that: profile again on a quiet machine.")
    for rank, rank_bytes in enumerate(best.rank_bytes):
        parts = ", ".join(f"{name} {size / _MIB:.1f}" for name, size in _items(rank_bytes) if size)
        limit = "" if best.limits is None else f" of {best.limits[rank] / _MIB:.1f}"
        lines.append(f"rank {rank} holds {rank_bytes.total / _MIB:.1f} MiB{limit}: {parts}")
    return "\n".join(line if "\n" in line else wrapped(line, width) for line in lines)


def _slices_text(planned: Planned) -> str:
    """Say what slices save, if the plan has any: against the best plan of whole sequences."""
    lengths, best = planned.best.slices, planned.best
    if not lengths:
        return ""
    whole = [each.step_seconds for each in planned.candidates if each.program.num_slices == 1]
    parts = f"{len(lengths)} slices of {lengths[0]}" if len(set(lengths)) == 1 else f"slices of {_listed(lengths)}"
    saved = f": {1 - best.step_seconds / min(whole):.0%} shorter than the best plan of whole sequences" if whole else ""
    return f"{parts} tokens fill the pipeline, as {counted(best.num_microbatches, 'microbatch')} alone would not{saved}"


def _listed(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def _pieces(plan: Plan) -> str:
    """Return into what a plan divides the batch and the model."""
    microbatches = f"{counted(plan.num_microbatches, 'microbatch')} of {plan.microbatch_size}"
    return f"{microbatches}, {counted(plan.program.num_stages, 'stage')} of {' '.join(map(str, plan.counts))} blocks"


def _row(candidate: Candidate, planned: Planned) -> list[str]:
    return [
        candidate.program.name,
        str(candidate.program.num_microbatches),
        str(candidate.rows),
        _blocks(candidate.cut.counts),
        _checkpointing(candidate.stages.recompute, short=True),
        f"{candidate.step_seconds * 1e3:.1f}",
        f"{max(candidate.cut.rank_bytes) / _MIB:.1f}",
        "chosen" if candidate is planned.chosen else str(candidate.why_not(planned.chosen)),
    ]


def _blocks(counts: tuple[int, ...]) -> str:
    """Return the blocks of each stage; for many stages, the fewest and the most."""
    few = len(counts) <= _FEW
    return " ".join(map(str, counts)) if few else f"{len(counts)} of {min(counts)}-{max(counts)}"


def _items(value: Any) -> list[tuple[str, float]]:
    from dataclasses import asdict

    return list(asdict(value).items())


def _checkpointing(again: tuple[bool, ...], *, short: bool = False) -> str:
    if not any(again):
        return "none" if short else "nothing recomputed"
    if all(again):
        return "all" if short else "everything recomputed"
    named = " ".join(str(stage) for stage, flag in enumerate(again) if flag)
    return named if short else f"stages {named} recomputed"


def _link(text: str) -> tuple[tuple[int, int], Edge]:
    """Parse a link; the error names the value."""
    ends, *numbers = text.split(":")
    name, _, other = ends.partition("-")
    if len(numbers) != 2:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a link like 0-1:1e-5:1e9")
    pair = flags.whole_number(name), flags.whole_number(other)
    return pair, Edge(flags.number(numbers[0]), flags.size(numbers[1]))
