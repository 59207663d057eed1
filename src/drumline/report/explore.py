"""The answers for the explore page: schedules with sliders, the user's own CSV, and files to download.

The settings are the page's address, so that a shared address shows the same picture. Everything is computed here, by
the functions that `drumline simulate` calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from html import escape
from typing import Any

from drumline.core.costs import Costs
from drumline.core.errors import DrumlineError, UsageError, nearest
from drumline.core.lower.torch_text import for_torch
from drumline.core.program import Program
from drumline.core.prove.violation import InvalidProgram
from drumline.core.simulate.simulate import Simulation, simulate
from drumline.core.timeline.idle import Limit
from drumline.report.draw import html
from drumline.report.draw.scene import document, explanations
from drumline.report.summary import figures, listed, refused
from drumline.schedules import find, schedules
from drumline.schedules.registry import too_large

# Up to this many actions, a picture with its explanations is faster than two requests.
EXPLAINED_AT_ONCE = 2000
# The most that a page shows: more takes too long, and a browser cannot draw it.
MAX_RANKS, MAX_ACTIONS = 1024, 200_000


@dataclass(frozen=True, slots=True)
class Sliders:
    """The slider values. A `max_activations` of 0 means no limit; `against` is a second schedule to compare with."""

    schedule: str = "zb-h1"
    ranks: int = 4
    microbatches: int = 8
    stages_per_rank: int = 0
    slices: int = 1
    attention: float = 0.0
    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    comm: float = 0.0
    max_activations: float = 0.0
    against: str = ""

    @staticmethod
    def of(query: Mapping[str, str]) -> Sliders:
        """Return the settings in an address; missing ones have their defaults.

        >>> Sliders.of({"schedule": "1f1b", "ranks": "8"}).ranks
        8
        """
        known = {field.name: field.type for field in fields(Sliders)}
        values: dict[str, Any] = {}
        for name, text in query.items():
            if name not in known:
                raise UsageError(f"unknown setting {name[:40]!r}", fix=nearest(name[:40], known))
            values[name] = text if known[name] == "str" else _number(name, text, whole=known[name] == "int")
        return Sliders(**values)

    @property
    def costs(self) -> Costs:
        """The costs of a stage."""
        seconds = self.forward, self.backward_input, self.backward_weight
        return Costs(*seconds, comm=self.comm, attention=self.attention)

    @property
    def limit(self) -> Limit | None:
        """What a rank may hold."""
        return Limit(max_activations=self.max_activations) if self.max_activations > 0 else None

    def program(self, csv: str | None = None) -> Program:
        """Return the program for the settings, or the one in the user's own text."""
        if csv is not None:
            return _shown(_parsed(csv))
        return _shown(_generated(self.schedule, self.ranks, self.microbatches, self.stages_per_rank, self.slices))

    @property
    def other(self) -> Sliders | None:
        """The same settings with the schedule to compare with."""
        return replace(self, schedule=self.against, against="") if self.against else None


def _shown(program: Program) -> Program:
    """Return the program, unless its page would take minutes."""
    if program.num_ranks > MAX_RANKS or program.num_actions > MAX_ACTIONS:
        raise UsageError(
            f"the program has {program.num_ranks} ranks and {program.num_actions} actions",
            expected=f"at most {MAX_RANKS} ranks and {MAX_ACTIONS} actions on this page",
            fix="use `drumline simulate`",
        )
    return program


@lru_cache(maxsize=8)
def _generated(name: str, ranks: int, microbatches: int, stages_per_rank: int, slices: int) -> Program:
    """Generate once: moving a cost slider keeps the program and everything compiled from it."""
    schedule = find(name)
    stages = stages_per_rank if stages_per_rank and schedule.stage_counts != "fixed" else None
    if (refused := too_large(ranks, microbatches * max(slices, 1), stages or schedule.stages_per_rank)) is not None:
        raise refused
    return schedule.build(ranks, microbatches, stages, slices=slices)


@lru_cache(maxsize=2)
def _parsed(csv: str) -> Program:
    """Parse once, for the same reason."""
    return Program.parse(csv, name="own program")


def _number(name: str, text: str, *, whole: bool) -> float:
    try:
        return int(text) if whole else float(text)
    except ValueError:
        raise UsageError(f"{name} is {text[:40]!r}", expected="a whole number" if whole else "a number") from None


def answer(settings: Sliders, csv: str | None = None) -> dict[str, Any]:
    """Return what the page shows for these settings: the picture and figures, or what is wrong.

    A large picture comes without its explanations, to arrive sooner: the page requests them next.

    >>> answer(Sliders(schedule="1f1b"))["summary"]["makespan"]
    33.0
    >>> answer(Sliders(), csv="0B0,0F0")["violations"][0]["reason"]
    'runs before 0F0'
    >>> answer(Sliders(schedule="1f1b", against="zb-h1"))["against"]["makespan"]
    27.0
    """
    try:
        program = settings.program(csv)
        timeline = _simulated(settings, csv)
        other = _compared(settings)
    except InvalidProgram as error:
        return {"violations": listed(error.violations), "rows": [[str(a) for a in row] for row in program.rows]}
    except DrumlineError as error:
        return {"error": refused(error)}
    explained = program.num_actions <= EXPLAINED_AT_ONCE
    shown = [timeline] if other is None else [timeline, other]
    title = f"Schedule explorer: {' against '.join(simulation.program.name for simulation in shown)}"
    return {
        "document": {**document(shown, title=title, explained=explained), **({"ends": True} if other else {})},
        "summary": figures(timeline),
        "against": None if other is None else figures(other),
        "over_limit": _over_limit(timeline, settings.limit),
    }


def explain(settings: Sliders, csv: str | None = None) -> dict[str, Any]:
    """Return the explanations of the picture that `answer` returned for these settings.

    >>> explain(Sliders(schedule="1f1b"))["why"]["rows"][3]["idle"]["words"][-1]
    'the pipeline drains; 0B7 of rank 0 ends last'
    """
    other = _compared(settings)
    return {
        "why": explanations(_simulated(settings, csv)),
        "against": None if other is None else explanations(other),
    }


@lru_cache(maxsize=4)
def _simulated(settings: Sliders, csv: str | None) -> Simulation:
    """Simulate once: the page requests the picture and its explanations one after the other."""
    return simulate(settings.program(csv), settings.costs, limit=settings.limit)


def _compared(settings: Sliders) -> Simulation | None:
    """Simulate the schedule to compare with, if there is one."""
    return None if settings.other is None else _simulated(settings.other, None)


def _over_limit(timeline: Simulation, limit: Limit | None) -> list[int]:
    most = limit.max_activations if limit is not None else None
    return [rank for rank, peak in enumerate(timeline.peak_activations) if most is not None and peak > most]


EXPORTS = {
    "csv": ("csv", "text/csv"),
    "torch": ("torch.csv", "text/csv"),
    "svg": ("svg", "image/svg+xml"),
    "html": ("html", "text/html"),
    "perfetto": ("perfetto.json.gz", "application/gzip"),
}


def export(settings: Sliders, kind: str, csv: str | None = None) -> tuple[str, str, bytes]:
    r"""Return a file to download, as (name, media type, contents).

    >>> export(Sliders(schedule="1f1b", ranks=2, microbatches=1), "csv")[2]
    b'0F0,0B0\n1F0,1B0\n'
    """
    if kind not in EXPORTS:
        raise UsageError(f"cannot export {kind[:40]!r}", fix=nearest(kind[:40], EXPORTS))
    ending, media_type = EXPORTS[kind]
    program = settings.program(csv)
    if kind == "csv":
        written: str | bytes = program.format() + "\n"
    elif kind == "torch":
        written = for_torch(program)
    else:
        written = html.picture(kind, _simulated(settings, csv))
    contents = written if isinstance(written, bytes) else written.encode()
    return f"{program.name.replace(' ', '-')}.{ending}", media_type, contents


def explore_page(settings: Sliders) -> str:
    """Return the page itself, with its sliders at these settings.

    >>> "Schedule explorer" in explore_page(Sliders())
    True
    """
    choices, others = (
        "".join(_option(name, schedule.summary, name == chosen) for name, schedule in schedules().items())
        for chosen in (settings.schedule, settings.against)
    )
    start = {field.name: getattr(settings, field.name) for field in fields(settings)}
    about = {name: {"summary": recipe.summary, "stages": recipe.stage_counts} for name, recipe in schedules().items()}
    return html.page_with(
        document([], title="Schedule explorer"),
        panel=html.asset("explore.html").replace("{{choices}}", choices).replace("{{others}}", others),
        style=html.asset("explore.css"),
        script=html.asset("explore.js"),
        extra={"settings": start, "schedules": about},
    )


def _option(name: str, summary: str, selected: bool) -> str:
    chosen = " selected" if selected else ""
    return f'<option value="{escape(name)}" title="{escape(summary)}"{chosen}>{escape(name)}</option>'
