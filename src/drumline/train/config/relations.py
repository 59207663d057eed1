"""What must fit together: keys that are each fine by themselves and cannot be run together.

Every relation names the keys that it reads, and is left alone where one of them is wrong already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from drumline.core.errors import DrumlineError, counted
from drumline.core.parsed import shown
from drumline.core.program import Program
from drumline.core.prove.validate import validate
from drumline.core.prove.violation import InvalidProgram
from drumline.engine.program.find import program_for
from drumline.plan.device.plan import Plan
from drumline.schedules import find
from drumline.train.config import run_names
from drumline.train.config.keys import keys
from drumline.train.config.problems import Problem, refused
from drumline.train.config.settings import AdaptSettings, TrainSettings
from drumline.train.config.tables import TableSource, out_of_bounds
from drumline.train.config.toml_lines import path_of

_TEXT = ("text", "tokens", "instructions")
AROUND = {"gpt": 2, "mlp": 0}  # blocks beside the layers, of models whose number is known


@dataclass(frozen=True)
class PlacedSettings:
    """Settings with where they were given; `plan` is the file that pipeline.plan names."""

    settings: TrainSettings
    source: TableSource
    plan: Plan | None = None

    @property
    def slices(self) -> int | tuple[int, ...]:
        """How sequences are divided: as the plan says, if it divides them."""
        return self.settings.pipeline.slices if self.plan is None else self.plan.slices or self.settings.pipeline.slices

    def value(self, key: str) -> Any:
        """Return what a key is."""
        return _value(self.settings, key)

    def is_default(self, key: str) -> bool:
        """Whether a key has its default."""
        return bool(self.value(key) == _value(TrainSettings(), key))

    def problem(self, key: str, error: str, expected: str = "", fix: str = "") -> Problem:
        """Return a problem of a key."""
        if error.startswith("is ") and not self.source.has(key):
            error = f"{error} (the default)" if error[3:4].isdigit() else error
        return self.placed(Problem("", key, error, expected, fix))

    def placed(self, problem: Problem) -> Problem:
        """Return a problem with where its key was given."""
        return replace(problem, where=self.source.where(path_of(problem.key)))


def _value(settings: TrainSettings, key: str) -> Any:
    table, name = key.split(".")
    return getattr(getattr(settings, table), name)


Relation = Callable[[PlacedSettings], Iterator[Problem]]
_RELATIONS: list[tuple[tuple[str, ...], Relation]] = []


def relation(*reads: str) -> Callable[[Relation], Relation]:
    """Register what must hold between keys."""

    def register(check: Relation) -> Relation:
        _RELATIONS.append((reads, check))
        return check

    return register


def related(judged: PlacedSettings, bad: set[str]) -> Iterator[Problem]:
    """Yield every problem between keys none of which is wrong by itself."""
    for reads, check in _RELATIONS:
        if not bad.intersection(reads):
            for problem in check(judged):
                bad.add(problem.key)
                yield problem


def check_made(settings: TrainSettings, tables: Iterable[str], relations: Iterable[Relation] = ()) -> None:
    """Refuse settings that were made by hand: values in some tables by the rules of their keys, then some relations.

    >>> from drumline.train.config.settings import RunSettings
    >>> check_made(TrainSettings(run=RunSettings(steps=0)), ["run"])
    Traceback (most recent call last):
    drumline.core.errors.ConfigError: run.steps is 0; expected a whole number of 1 or more
    """
    judged = PlacedSettings(settings, TableSource({table: dict.fromkeys(names) for table, names in keys().items()}))
    problems = list(out_of_bounds(settings, tables))
    if problems := problems or [problem for check in relations for problem in check(judged)]:
        raise refused(problems)


@relation("batch.sequences", "batch.microbatch", "batch.accumulate", "mesh.data")
def _batch_divides(judged: PlacedSettings) -> Iterator[Problem]:
    batch, data = judged.settings.batch, judged.settings.mesh.data
    unit = batch.microbatch * data * batch.accumulate
    if batch.sequences % unit:
        below = batch.sequences // unit * unit
        near = " or ".join(str(number) for number in (below, below + unit) if number)
        parts = f"{batch.microbatch} (microbatch) x {data} (mesh.data) x {batch.accumulate} (accumulate)"
        yield judged.problem(
            "batch.sequences", f"is {batch.sequences}", f"a multiple of {unit} = {parts}", f"use {near}"
        )


@relation("adapt.on")
def _adapting_is_on_or_off(judged: PlacedSettings) -> Iterator[Problem]:
    names = [field.name for field in fields(AdaptSettings) if judged.source.has(f"adapt.{field.name}")]
    if names and "on" not in names:
        yield judged.problem(
            f"adapt.{names[0]}", "is given, but not whether to adapt", "adapt.on, true or false", "add --adapt"
        )


def program_of(settings: TrainSettings, plan: Plan | None = None) -> Program:
    """Return what the ranks run; raises what the schedule, the file or the plan has to say against it."""
    if plan is not None:
        return plan.program
    pipeline = settings.pipeline
    return program_for(
        pipeline.schedule,
        num_ranks=settings.mesh.pipeline,
        num_microbatches=settings.num_microbatches,
        stages_per_rank=pipeline.stages_per_rank,
        streams=True,
        vertical_sync=pipeline.vertical_sync,
        slices=pipeline.num_slices,
    )


@relation("pipeline.schedule")
def schedule_exists(judged: PlacedSettings) -> Iterator[Problem]:
    """Yield what is wrong with a schedule's name."""
    name = judged.settings.pipeline.schedule
    if name == "auto":
        yield judged.problem(
            "pipeline.schedule", 'is "auto"', "a schedule to begin with",
            "name one and set adapt.on, which searches other programs during the run",
        )  # fmt: skip
    elif name.partition(":")[0].endswith(".py"):
        counts = f"--ranks {judged.settings.mesh.pipeline} --microbatches {judged.settings.num_microbatches}"
        yield judged.problem(
            "pipeline.schedule", f"is {name!r:.80}", "the name of a schedule, or a CSV file with a program",
            f"write its program to one: drumline show {name:.80} {counts} --out FILE.csv",
        )  # fmt: skip
    elif not name.endswith(".csv"):
        try:
            find(name)
        except DrumlineError as error:
            yield Problem.of(judged.source.where(("pipeline", "schedule")), "pipeline.schedule", error)


@relation(
    "pipeline.schedule", "pipeline.stages_per_rank", "pipeline.layers", "pipeline.cuts", "pipeline.plan",
    "mesh.pipeline", "mesh.data",
    "batch.sequences", "batch.microbatch", "batch.accumulate", "model.num_layers", "model.kind",
    "pipeline.vertical_sync", "pipeline.slices",
)  # fmt: skip
def _schedule_admits(judged: PlacedSettings) -> Iterator[Problem]:
    settings = judged.settings
    try:
        program = program_of(settings, judged.plan)
    except DrumlineError as error:
        key = "pipeline.schedule"
        yield Problem.of(judged.source.where(("pipeline", "schedule")), key, error)
        return
    if judged.plan is None and settings.pipeline.schedule.endswith(".csv") and (violations := validate(program)):
        invalid = InvalidProgram(settings.pipeline.schedule, violations)
        yield Problem.of(judged.source.where(("pipeline", "schedule")), "pipeline.schedule", invalid)
        return
    yield from _stages_fit(judged, program.num_stages)


def _stages_fit(judged: PlacedSettings, num_stages: int) -> Iterator[Problem]:
    """Yield what is wrong with how many layers stages have."""
    model, layers = judged.settings.model, judged.settings.pipeline.layers
    counted_layers = model.kind == "gpt" or (model.kind == "hf" and judged.source.has("model.num_layers"))
    if layers and len(layers) != num_stages:
        yield judged.problem(
            "pipeline.layers",
            f"has {counted(len(layers), 'number')}",
            f"one for each of {counted(num_stages, 'stage')}",
        )
    elif layers and counted_layers and sum(layers) != model.num_layers:
        yield judged.problem(
            "pipeline.layers", f"sums to {sum(layers)}", f"{model.num_layers}, as model.num_layers says"
        )
    elif layers and 0 in layers[1:-1]:
        yield judged.problem(
            "pipeline.layers", f"is {list(layers)}", "a layer or more in stages between first and last"
        )
    cuts = judged.settings.pipeline.cuts
    if cuts and len(cuts) != num_stages - 1:
        yield judged.problem(
            "pipeline.cuts",
            f"has {counted(len(cuts), 'name')}",
            f"{num_stages - 1}: one for each of {counted(num_stages, 'stage')} but the first",
        )
    extra = AROUND.get(model.kind)
    if extra is not None and num_stages > model.num_layers + extra:
        yield judged.problem(
            "model.num_layers", f"is {model.num_layers}", f"enough layers for {counted(num_stages, 'stage')}",
            "use fewer ranks or stages per rank",
        )  # fmt: skip


@relation("pipeline.layers", "pipeline.balance", "pipeline.cuts")
def one_cut(judged: PlacedSettings) -> Iterator[Problem]:
    """Yield whether the model is to be cut in several ways."""
    pipeline = judged.settings.pipeline
    names = [name for name in ("layers", "balance", "cuts") if getattr(pipeline, name)]
    if len(names) > 1:
        yield judged.problem(
            f"pipeline.{names[1]}", f"stands beside pipeline.{names[0]}", "one way to cut the model", "leave one out"
        )


@relation("pipeline.plan", "mesh.pipeline", "batch.sequences", "batch.microbatch", "batch.accumulate", "mesh.data")
def _plan_fits(judged: PlacedSettings) -> Iterator[Problem]:
    plan, settings = judged.plan, judged.settings
    if plan is None:
        return
    planned = {
        "mesh.pipeline": (settings.mesh.pipeline, plan.num_ranks),
        "batch.microbatch": (settings.batch.microbatch, plan.microbatch_size),
        "batch.sequences": (settings.batch.sequences, plan.batch * settings.mesh.data * settings.batch.accumulate),
    }
    for key, (number, wanted) in planned.items():
        if number != wanted:
            yield judged.problem(key, f"is {number}", f"{wanted}, as planned", "leave it out, or plan again")


@relation("model.hidden", "model.num_heads", "model.head_width", "model.kind")
def _heads_fit(judged: PlacedSettings) -> Iterator[Problem]:
    model = judged.settings.model
    if model.kind == "gpt" and not model.head_width and model.hidden % model.num_heads:
        below = [number for number in range(1, model.hidden + 1) if model.hidden % number == 0]
        near = min(below, key=lambda number: abs(number - model.num_heads)) if model.hidden < 10**6 else 1
        yield judged.problem(
            "model.num_heads", f"is {model.num_heads}", f"a number that divides model.hidden, {model.hidden}",
            f"use {near}, or set model.head_width",
        )  # fmt: skip


@relation("model.num_heads", "model.num_key_value_heads", "model.kind")
def heads_share_keys(judged: PlacedSettings) -> Iterator[Problem]:
    """Yield whether heads cannot share keys and values evenly."""
    model = judged.settings.model
    if model.kind == "gpt" and model.num_key_value_heads and model.num_heads % model.num_key_value_heads:
        yield judged.problem(
            "model.num_key_value_heads", f"is {model.num_key_value_heads}",
            f"a number that divides model.num_heads, {model.num_heads}",
        )  # fmt: skip


@relation("model.kind", "model.others")
def plan_is_expressed(judged: PlacedSettings) -> Iterator[Problem]:
    """Yield what a plan knows of a model and the built-in GPT cannot be told; what says nothing new is harmless."""
    model = judged.settings.model
    if model.kind != "gpt":
        return
    for name, value in model.others.items():
        if (name == "num_dense_layers" and value == model.num_layers) or value in (False, 0, [], ""):
            continue
        said = ", ".join(map(str, value)) if isinstance(value, list) else value
        yield judged.problem(
            f"model.{name}", f"is {said}, which the built-in GPT does not have", "a dense GPT",
            'train the model itself: kind = "hf" and path = its folder, or leave the key out for a plain GPT',
        )  # fmt: skip


@relation("model.kind", "data.kind", "lengths.how", "lengths.buckets", "evaluation.sample_every")
def _data_suits(judged: PlacedSettings) -> Iterator[Problem]:
    settings = judged.settings
    model, data = settings.model.kind, settings.data.kind
    if model == "mlp" and data in _TEXT:
        yield judged.problem("data.kind", f'is "{data}", and an MLP takes points', '"points" or "function"')
    if model in ("gpt", "hf") and data == "points":
        yield judged.problem("data.kind", 'is "points", and the model takes text', ", ".join(map(repr, _TEXT)))
    if data == "points" and settings.lengths.how != "blocks":
        yield judged.problem("lengths.how", f'is "{settings.lengths.how}", and points have no length', '"blocks"')
    if model == "mlp" and settings.evaluation.sample_every:
        yield judged.problem("evaluation.sample_every", "asks for a sample text of an MLP", "0")


@relation("lengths.how", "lengths.buckets")
def _buckets_are_meant(judged: PlacedSettings) -> Iterator[Problem]:
    lengths = judged.settings.lengths
    if lengths.buckets and lengths.how != "buckets":
        yield judged.problem(
            "lengths.buckets", f'stands beside how = "{lengths.how}"', 'how = "buckets"', "change one of the two"
        )


@relation("lengths.buckets", "batch.sequence")
def buckets_rise(judged: PlacedSettings) -> Iterator[Problem]:
    """Yield whether lengths of buckets do not rise, or one is longer than a row."""
    lengths, longest = judged.settings.lengths, judged.settings.batch.sequence
    rising = all(a < b for a, b in zip(lengths.buckets, lengths.buckets[1:], strict=False))
    if not rising or max(lengths.buckets, default=0) > longest:
        yield judged.problem(
            "lengths.buckets", f"is {list(lengths.buckets)}", f"rising lengths of at most batch.sequence, {longest}"
        )


@relation("run.out")
def _folder_is_safe(judged: PlacedSettings) -> Iterator[Problem]:
    out = judged.settings.run.out
    if wrong := run_names.problem_with(out):
        yield judged.problem("run.out", f"is {shown(out)}, whose name {wrong}", run_names.EXPECTED, "use another name")


@relation("learning_rate.warmup_steps", "learning_rate.decay_steps", "run.steps")
def _decay_fits(judged: PlacedSettings) -> Iterator[Problem]:
    rate, steps = judged.settings.learning_rate, judged.settings.run.steps
    if rate.decay_steps is not None and rate.decay_steps > steps:
        yield judged.problem("learning_rate.decay_steps", f"is {rate.decay_steps}", f"at most run.steps, {steps}")
