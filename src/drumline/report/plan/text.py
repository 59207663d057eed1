"""A cluster plan in the terminal: the choice, its seconds and bytes, why others lose, what more hardware would gain.

--json prints all of it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence

from drumline.core.errors import counted
from drumline.core.units import duration, size_text
from drumline.plan.launch.launch import Config
from drumline.plan.layouts.choice import Choice
from drumline.plan.layouts.explain import Explanation, Reasons
from drumline.plan.layouts.planner import ClusterPlan
from drumline.plan.layouts.preference import BAND
from drumline.plan.layouts.why import Alternative
from drumline.report.draw.table import table

SECONDS = {
    "compute": "compute",
    "recompute": "recomputation",
    "tensor": "tensor parallelism, exposed",
    "context": "context parallelism, exposed",
    "expert": "expert parallelism, exposed",
    "pipeline": "pipeline transfers, exposed",
    "data_exposed": "gradient exchange, exposed",
    "bubble": "busiest rank waits",
    "optimizer": "optimizer",
}
BYTES = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "buffers": "buffers",
}
_SHOWN = 4  # layouts of the band to list
SCALING = ("scaling", "GPUs", "sequences", "mesh", "step", "tokens/s", "efficiency")
_PROVEN = 5e-5  # a share that is printed as 0.0%
VOLUMES = ("tensor", "context", "expert", "pipeline", "data")


def plan_text(explanation: Explanation, *, width: int = 100, framework: str = "drumline") -> str:
    """Return a plan as text, without what was not computed (`--brief`)."""
    parts = [
        _wrapped(headline(explanation.plan), width),
        _items(explanation.plan.chosen, width),
        *([] if explanation.whole is None else [_wrapped([slices_line(explanation.plan, explanation.whole)], width)]),
        _wrapped(list(explanation.software.lines()), width),
        _best(explanation, width),
    ]
    if explanation.reasons is not None:
        traffic = ["sent per step", "mesh", *VOLUMES, "step", "fits"]
        parts += [
            _wrapped(
                ["What more hardware would gain:", *(f"- {margin}" for margin in explanation.reasons.margins)], width
            ),
            table(SCALING, scaling_rows(explanation.plan, explanation.reasons), width=width),
            table(traffic, traffic_rows(explanation.plan, explanation.reasons), width=width, left=2),
        ]
    alone = len(explanation.launch.configs) == 1
    return "\n\n".join([*parts, _launch(explanation.launch.of(framework), width, alone=alone)])


def headline(plan: ClusterPlan) -> list[str]:
    """Return the choice in a few lines."""
    cluster, model, chosen = plan.cluster, plan.transformer, plan.chosen
    base = "" if model.frozen_base is None else f" with {model.frozen_base.words}"
    return [
        f"{model.name}{base} on {cluster.num_devices} x {cluster.device.name} in {counted(cluster.num_nodes, 'node')}, "
        f"{plan.batch} sequences of {model.sequence} tokens per step",
        f"Run {chosen.mesh}: {settings_text(chosen)}",
        f"{duration(chosen.seconds)} per step, {plan.tokens_per_second(chosen):,.0f} tokens/s, "
        f"{chosen.estimate.flops_per_second / 1e12:.0f} TFLOP/s per GPU "
        f"({plan.utilisation_words(chosen)}), "
        f"bubble {chosen.estimate.bubble:.1%}; {size_text(chosen.bytes)} of {size_text(plan.limit_bytes)} "
        f"({plan.headroom:.0%} headroom)",
    ]


def slices_line(plan: ClusterPlan, whole: Alternative) -> str:
    """Return what slices are, and what the same layout takes without."""
    number = plan.chosen.layout.slices
    return (
        f"Every sequence runs in {number} slices of {plan.transformer.sequence // number} tokens. "
        f"The same layout with whole sequences takes {duration(whole.choice.seconds)}: {whole.sentence}"
    )


def settings_text(choice: Choice) -> str:
    """Return the settings of a layout besides its mesh."""
    layout, parts = choice.layout, choice.settings
    parts["microbatch"] = f"{counted(layout.num_microbatches, 'microbatch')} of {layout.microbatch}"
    if layout.pipeline == 1:
        del parts["schedule"]
    if layout.sequence_parallel:
        parts["sequence"] = "sequence parallelism"
    return ", ".join(parts.values())


def seconds_rows(chosen: Choice, written: Callable[[float], str] = duration) -> list[list[str]]:
    """Return seconds and shares of a step as rows of text, without items of 0."""
    took = {name: getattr(chosen.estimate.seconds, item) for item, name in SECONDS.items()}
    return [[name, written(v), f"{v / chosen.seconds:.1%}"] for name, v in took.items() if v > 1e-9 * chosen.seconds]


def bytes_rows(chosen: Choice, *, every: bool = True) -> list[list[str]]:
    """Return what a device holds and its shares as rows of text, without items of 0 unless `every`."""
    sizes = {name: getattr(chosen.estimate.bytes, item) for item, name in BYTES.items()}
    return [[name, size_text(item), f"{item / chosen.bytes:.1%}"] for name, item in sizes.items() if every or item > 0]


def _items(chosen: Choice, width: int) -> str:
    """Return seconds and bytes, item by item, without items of 0."""
    took = [*seconds_rows(chosen), ["step", duration(chosen.seconds), ""]]
    rows = [*bytes_rows(chosen, every=False), ["device", size_text(chosen.bytes), ""]]
    tables = ((["time", "takes", "share"], took), (["memory", "holds", "share"], rows))
    return "\n\n".join(table(header, rows, width=width) for header, rows in tables)


def _best(explanation: Explanation, width: int) -> str:
    header = ["", "mesh", "schedule", "microbatch", "ZeRO", "recompute", "step", "bubble", "per device"]
    rows = []
    for number, choice in enumerate(explanation.plan.best, 1):
        layout = choice.layout
        stages = f" x{layout.stages_per_rank}" if layout.stages_per_rank > 1 else ""
        slices = f" in {layout.slices} slices" if layout.slices > 1 else ""
        schedule = choice.schedule + stages + slices if layout.pipeline > 1 else "-"
        settings = (number, choice.mesh, schedule, layout.microbatch, layout.zero, layout.recompute)
        figures = (duration(choice.seconds), f"{choice.estimate.bubble:.1%}", size_text(choice.bytes))
        rows.append([*map(str, settings), *figures])
    reasons = [
        f"{number}. {alternative}" for number, alternative in enumerate(explanation.best, 1) if alternative.sentence
    ]
    count = f"The best layout of each mesh, out of {counted(explanation.plan.survey.num_layouts, 'layout')}:"
    shown = [_wrapped([count], width), "", table(header, rows, width=width, left=3, keep=("mesh", "step"))]
    if reasons:
        shown += ["", _wrapped(["Why the others lose:", *reasons], width)]
    if explanation.plan.searched:
        shown += ["", _wrapped(list(searched_lines(explanation.plan)), width)]
    if len(explanation.plan.band) > 1:
        shown += ["", _wrapped(band_lines(explanation.plan), width)]
    return "\n".join(shown)


def searched_lines(plan: ClusterPlan) -> Iterator[str]:
    """Yield what searching for programs found."""
    yield "Searched programs, which count if they are more than 2% faster than every schedule:"
    for program in plan.searched:
        away = f"at most {program.gap:.1%} from the shortest" if program.gap > _PROVEN else "proven to be the shortest"
        saved = f"{program.gain:.1%} less than with" if program.gain > _PROVEN else "not less than with"
        stages = f"{program.start.layout.schedule} x{program.start.layout.stages_per_rank}"
        yield f"- {program.choice.mesh}: {duration(program.choice.seconds)}, {saved} {stages}; its program is {away}"
    if plan.chosen.program is not None:
        yield "--out plan.csv writes the program, and --out plan.toml writes it beside the config."


def band_lines(plan: ClusterPlan) -> list[str]:
    """Return the layouts that are as fast as the choice, within what an estimate can tell."""
    lines = [f"- {choice.mesh}: {settings_text(choice)}; {duration(choice.seconds)}" for choice in plan.band[:_SHOWN]]
    more = len(plan.band) - _SHOWN
    rest = [f"- and {counted(more, 'other')}"] if more > 0 else []
    return [
        f"Within {BAND:.0%} of the fastest, closer than a forecast can tell; of these, the first is the plainest:",
        *lines,
        *rest,
    ]


def scaling_rows(plan: ClusterPlan, reasons: Reasons) -> list[list[str]]:
    """Return strong and weak scaling as rows of text."""
    rows = []
    for name, points in reasons.scaling.items():
        for point in points:
            cells, best = ["does not fit", "", "", ""], point.best
            if best is not None:
                rate = f"{plan.tokens_per_second(best):,.0f}"
                cells = [str(best.mesh), duration(best.seconds), rate, f"{point.efficiency:.1%}"]
            rows.append([name, str(point.devices), str(point.batch), *cells])
    return rows


def traffic_rows(plan: ClusterPlan, reasons: Reasons) -> list[list[str]]:
    """Return what a device sends, as rows of text."""
    rows = []
    for name, choice in reasons.traffic:
        sent = (size_text(getattr(choice.estimate.volumes, volume)) for volume in VOLUMES)
        rows.append([name, str(choice.mesh), *sent, duration(choice.seconds), "yes" if plan.fits(choice) else "no"])
    return rows


def _launch(config: Config, width: int, *, alone: bool = False) -> str:
    if not config.starts:
        return _wrapped(list(not_started(config, alone=alone)), width)
    lines = [f"{'On every node' if '--nnodes' in config.command else 'Start it'}: {config.command}"]
    if config.missing:
        lines += ["The file cannot express:", *(f"- {name}" for name in config.missing)]
    return _wrapped(lines, width)


def not_started(config: Config, *, alone: bool = False) -> Iterator[str]:
    """Yield why a framework does not run a plan, and what does; nothing else does if Drumline is `alone`."""
    if config.framework != "drumline":
        yield f"{config.framework} does not run this plan:"
        yield from (f"- {name}" for name in config.missing)
        yield f"With --launch {config.framework}, plans have only what it runs, as far as the model allows."
        return
    yield "`drumline train` does not run this plan:"
    yield from (f"- {name}" for name in config.missing)
    yield "With --launch drumline, plans have only the ZeRO stages and the recomputation that it runs."
    if not alone:
        yield "--launch torchtitan and --launch megatron print commands that do."
    if config.command:
        yield f"Its schedule: {config.command}"


def _wrapped(lines: Sequence[str], width: int) -> str:
    return "\n".join(
        textwrap.fill(line, max(width, 10), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for line in lines
    )
