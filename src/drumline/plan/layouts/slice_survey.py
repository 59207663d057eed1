"""Layouts in slices of sequences, beside a survey: where microbatches are few, slices fill the pipeline instead.

They are considered where the software runs them and a rank has fewer than four microbatches, or where a pin says how
many slices. Tensor, context and expert parallelism see sequences in one piece, so their degrees are 1.

    tried     schedules with a formula for slices; 2, 4, 8, ... equal slices that fill a tile of a product
    opened    in the order of what they take at least: what the best others rule out is not simulated
    decided   by simulating every slice of every stage, and what ranks hold
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple
from weakref import WeakKeyDictionary

from drumline.core.errors import PlanError, counted
from drumline.plan.cluster.device_memory import WEIGHT_BYTES, device_parameters, stage_activations
from drumline.plan.cluster.estimate import estimate
from drumline.plan.cluster.kernels import TILE
from drumline.plan.cluster.layout import WHOLE, Layout
from drumline.plan.cluster.stages import alike, counts_of, layer_counts, pairs_held
from drumline.plan.cluster.transformer import Transformer
from drumline.plan.layouts.choice import Choice
from drumline.plan.layouts.frameworks import FRAMEWORKS
from drumline.plan.layouts.pins import Degrees, Pins, tried_schedules
from drumline.plan.layouts.preference import BAND
from drumline.plan.layouts.space import layout_of, meshes, schedules_of
from drumline.plan.layouts.survey import MOST_PAIRS, Survey
from drumline.plan.slices.layout_estimate import SlicedLayout
from drumline.plan.slices.layout_times import head_seconds, shared, slice_seconds
from drumline.schedules import find

_OWN = FRAMEWORKS["drumline"]  # alone runs slices
RECOMPUTE = _OWN.recompute
ZERO = _OWN.zero_staged[0]  # where data-parallel ranks share state
_WINDOWS = ("sliding_window", "max_window_layers", "layer_types")  # what models call windows shorter than a sequence
_GIB = 2**30
NUMBERS = (2, 4, 8, 16, 32, 64)
FEW = 4  # microbatches for each rank: with as many, slices save little
_EXACT = 1 - 1e-9  # on bounds, which are added up in another order than what they bound


class _Lines(NamedTuple):
    """Pipelines with one mesh and one size of microbatches."""

    mesh: Degrees
    microbatch: int
    num_microbatches: int


class _Kind(NamedTuple):
    """Ranks that are alike: their dense layers, those with experts, and whether they have the head."""

    dense: int
    experts: int
    has_head: bool


class SliceSurvey:
    """The layouts in slices of what a survey is of, evaluated on demand."""

    def __init__(self, survey: Survey) -> None:
        self.transformer, self.cluster = survey.transformer, survey.cluster
        self.batch, self.pins = survey.batch, survey.pins
        self._survey, self._practice = survey, self.pins.practice
        self._works: dict[Layout, SlicedLayout] = {}
        self._choices: dict[Layout, Choice] = {}
        self._layers: dict[tuple[int, int, str], tuple[float, float, float]] = {}
        self._first: dict[tuple[int, tuple[str, int], str], tuple[float, float]] = {}

    def best(self, limit: float, known: Sequence[Choice]) -> list[Choice]:
        """Return all layouts in slices within a limit that are near the best of them and of these, simulated."""
        near = min((choice.seconds for choice in known if choice.bytes <= limit), default=math.inf) * (1 + BAND)
        numbers, fitting = count(), list[Choice]()
        opened = [(self._work(layout).least, next(numbers), layout) for layout in self._candidates(limit, near)]
        heapify(opened)
        while opened and _EXACT * opened[0][0] <= near:
            _, _, layout = heappop(opened)
            work = self._work(layout)
            if _EXACT * (work.least + work.after) > near or work.seconds > near:
                continue
            if work.bytes.total <= limit:
                near = min(near, work.seconds * (1 + BAND))
                fitting.append(self.exact(layout))
            elif (more := self._recomputed(layout)) is not None:
                heappush(opened, (self._work(more).least, next(numbers), more))
        return [choice for choice in fitting if choice.seconds <= near]

    def nothing_fits(self, limit: float, headroom: float) -> PlanError:
        """Return the error for a pinned number of slices in which nothing fits."""
        wanted = f"{self.pins.slices} slices of every sequence"
        every = (replace(each, recompute=self._kinds[-1]) for each in self._candidates(math.inf, math.inf))
        least = min(every, key=lambda each: self._work(each).standing_bytes, default=None)
        if least is None:
            return PlanError(
                f"no layout on {counted(self.cluster.num_devices, 'device')} allows {wanted}",
                expected="a pipeline of 2 ranks or more, without tensor, context and expert parallelism, and at most "
                f"{MOST_PAIRS} pairs of a stage and a slice",
                fix="leave the number of slices out",
            )
        choice = self.exact(least)
        return PlanError(
            f"{self.transformer.name} does not fit in {wanted}: {choice.mesh} with {least.schedule}, "
            f"ZeRO {least.zero} and {least.recomputation} holds {choice.bytes / _GIB:.1f} GiB per device",
            expected=f"at most {limit / _GIB:.1f} GiB with {headroom:.0%} headroom",
            fix="use another number of slices or more devices, or leave it out",
        )

    def exact(self, layout: Layout) -> Choice:
        """Return the simulated costs of a layout in slices."""
        if layout not in self._choices:
            known = self._work(layout).estimate()
            self._choices[layout] = Choice.of(self.cluster, layout, known, is_exact=True)
        return self._choices[layout]

    def cost(self, layout: Layout, limit: float) -> Choice:
        """Return the costs of a layout, in slices or not."""
        return self.exact(layout) if layout.slices > 1 else self._survey.cut(layout, limit)

    def _work(self, layout: Layout) -> SlicedLayout:
        if layout not in self._works:
            self._works[layout] = SlicedLayout(self.transformer, self.cluster, layout)
        return self._works[layout]

    @property
    def _kinds(self) -> tuple[str, ...]:
        """The kinds of recomputation; none takes less time or holds more than a later one."""
        return tuple(kind for kind in RECOMPUTE if self.pins.recompute in (None, kind))

    @property
    def _numbers(self) -> list[int]:
        """The numbers of slices to try."""
        tokens = self.transformer.sequence
        if self.pins.slices is not None:
            return [self.pins.slices]
        return [number for number in NUMBERS if tokens % number == 0 and tokens // number >= TILE]

    @cached_property
    def _lines(self) -> list[_Lines]:
        # Who brings other estimates says nothing of slices.
        refused = next(objections(self.transformer, self.pins), None) is not None
        if self.pins.slices == 1 or refused or self._survey.evaluate is not estimate:
            return []
        whole = replace(self.pins, tensor=1, context=1, expert=1)
        try:
            degrees = meshes(self.transformer, self.cluster, self.batch, whole)
        except PlanError:  # devices or pins leave no such mesh
            return []
        lines = [
            _Lines(mesh, size, self.batch // (mesh.data * size))
            for mesh in degrees
            if mesh.pipeline > 1
            for size in self.pins.microbatch_sizes(self.batch, mesh)
        ]
        few = [each for each in lines if each.num_microbatches < FEW * each.mesh.pipeline]
        return few if self.pins.slices is None else lines

    def _candidates(self, limit: float, near: float) -> Iterator[Layout]:
        """Yield layouts that may fit and be near, with the least recomputation that may fit.

        More slices take no less time, for products get smaller: what is too slow is so in more slices.
        """
        for line in self._lines:
            for number in self._numbers:
                if _EXACT * self._least(line, number, self._kinds[0]) > near:
                    break
                units = line.num_microbatches * number
                for schedule in schedules_of(self.transformer, line.mesh, units, self.pins):
                    if not find(schedule[0]).formula_in_slices:
                        continue
                    if units * line.mesh.pipeline * schedule[1] > MOST_PAIRS:
                        continue
                    kind = next(
                        (kind for kind in self._kinds if self._holds(line, number, schedule, kind) <= limit), ""
                    )
                    if kind and _EXACT * self._least(line, number, kind, schedule) <= near:
                        yield self._layout(line, number, schedule, kind)

    def _least(self, line: _Lines, number: int, kind: str, schedule: tuple[str, int] | None = None) -> float:
        """Return the work of the busiest rank; without a schedule, that of all ranks if they had equally much."""
        dense, experts, head = self._seconds(line.microbatch, number, kind)
        if schedule is None:
            layers, few = self.transformer.num_layers, self.transformer.num_dense_layers
            return line.num_microbatches * (few * dense + (layers - few) * experts + head) / line.mesh.pipeline
        kinds = kinds_of(self.transformer, line.mesh.pipeline, *schedule)
        return line.num_microbatches * max(
            each.dense * dense + each.experts * experts + each.has_head * head for each in kinds
        )

    def _seconds(self, microbatch: int, number: int, kind: str) -> tuple[float, float, float]:
        """Return the seconds of a microbatch in a dense layer, in one with experts, and in the head."""
        key = microbatch, number, kind
        if key not in self._layers:
            share = Layout(batch=self.batch, microbatch=microbatch, practice=self._practice).share
            about = self.transformer, self.cluster.nodes, shared(share), number
            recomputed = WHOLE if kind.startswith("full") else ()
            has_experts = self.transformer.experts is not None
            dense, experts = (
                float(slice_seconds(*about, experts=flag, recomputed=recomputed).sum()) for flag in (False, has_experts)
            )
            self._layers[key] = dense, experts, head_seconds(*about)
        return self._layers[key]

    def _holds(self, line: _Lines, number: int, schedule: tuple[str, int], kind: str) -> float:
        """Return the bytes that the first rank holds at least, without buffers.

        Its forwards run as early as those of as many microbatches, and in a line of single stages S-1 earlier. Before
        its first backward, all slices of a microbatch have gone forward.
        """
        key = line.mesh.pipeline, schedule, kind
        if key not in self._first:
            layout = self._layout(line, number, schedule, kind)
            counts = counts_of(self.transformer, layout)
            rank = alike(self.transformer, counts, layout.schedule, layout.pipeline, layout.stages_per_rank)[0]
            one = replace(layout, batch=layout.batch // layout.microbatch, microbatch=1, slices=1)
            kept = min(stage_activations(self.transformer, one, part) for part, _ in rank.slices)
            self._first[key] = sum(device_parameters(self.transformer, layout, rank)), kept
        parameters, kept = self._first[key]
        (name, stages), units, practice = schedule, line.num_microbatches * number, self._practice
        held = pairs_held(name, 0, line.mesh.pipeline, units, stages)
        held = max(min(held + number - 1, units) if stages == 1 else held, number * stages)
        state = practice.states.state_bytes / (line.mesh.data if self._zero(line.mesh) else 1)
        standing = parameters * (WEIGHT_BYTES + practice.gradient_bytes + state)
        return standing + held * kept * line.microbatch / number

    def _layout(self, line: _Lines, number: int, schedule: tuple[str, int], kind: str) -> Layout:
        settings = line.mesh, line.microbatch, schedule, self._zero(line.mesh), kind, self._practice
        return replace(layout_of(self.transformer, self.batch, self.pins, *settings), slices=number)

    def _zero(self, mesh: Degrees) -> int:
        """Return the ZeRO stage of layouts with this mesh."""
        return self.pins.zero if self.pins.zero is not None else ZERO if mesh.data > 1 else 0

    def _recomputed(self, layout: Layout) -> Layout | None:
        """Return the layout with the next kind of recomputation, if there is one."""
        later = self._kinds[self._kinds.index(layout.recompute) + 1 :]
        return replace(layout, recompute=later[0]) if later else None


@lru_cache(maxsize=1024)
def kinds_of(transformer: Transformer, pipeline: int, schedule: str, stages_per_rank: int) -> tuple[_Kind, ...]:
    """Return the ranks of a pipeline, those that are alike once.

    >>> from drumline.plan.cluster.models import model
    >>> kinds_of(model("llama-3-8b"), 4, "1f1b", 1)
    (_Kind(dense=8, experts=0, has_head=False), _Kind(dense=9, experts=0, has_head=False), _Kind(...))
    """
    counts = layer_counts(transformer, pipeline, schedule, stages_per_rank)
    return tuple(
        _Kind(
            sum(part.dense for part, _ in rank.slices),
            sum(part.experts for part, _ in rank.slices),
            any(part.is_last for part, _ in rank.slices),
        )
        for rank in alike(transformer, counts, schedule, pipeline, stages_per_rank)
    )


_SURVEYS: WeakKeyDictionary[Survey, SliceSurvey] = WeakKeyDictionary()


def in_slices(survey: Survey) -> SliceSurvey:
    """Return the layouts in slices beside a survey; they are refused if a pin wants them and nothing allows them."""
    if survey not in _SURVEYS:
        if (survey.pins.slices or 1) > 1 and (refused := refusal(survey.transformer, survey.pins)) is not None:
            raise refused
        _SURVEYS[survey] = SliceSurvey(survey)
    return _SURVEYS[survey]


def runs_slices(layout: Layout) -> bool:
    """Whether a layout with these settings runs in slices.

    >>> runs_slices(Layout(batch=8, pipeline=4)), runs_slices(Layout(batch=8, pipeline=4, zero=3))
    (True, False)
    """
    divided = max(layout.tensor, layout.context, layout.expert) > 1
    runs = layout.recompute in RECOMPUTE and layout.zero in (0, ZERO) and find(layout.schedule).formula_in_slices
    return runs and layout.pipeline > 1 and not divided


def numbers_beside(transformer: Transformer, layout: Layout) -> Iterator[Layout]:
    """Yield a layout in half and in twice as many slices, where these divide a sequence.

    >>> from drumline.plan.cluster.models import model
    >>> [each.slices for each in numbers_beside(model("llama-3-8b"), Layout(batch=8, pipeline=4, slices=4))]
    [2, 8]
    """
    for number in (layout.slices // 2, layout.slices * 2):
        if number > 1 and transformer.sequence % number == 0 and transformer.sequence // number >= TILE:
            yield replace(layout, slices=number)


def objections(transformer: Transformer, pins: Pins) -> Iterator[tuple[str, str, str]]:
    """Yield what speaks against slices, what they expect, and a fix.

    >>> from drumline.plan.cluster.models import model
    >>> list(objections(model("llama-3-8b"), Pins(slices=8, tensor=1)))
    []
    >>> next(objections(model("llama-3-8b"), Pins(slices=8, tensor=2)))
    ('TP is 2', 'TP 1: lines of a mesh see parts of sequences or layers in one piece', 'leave one of the two out')
    """
    if transformer.dropout and pins.slices is None:  # who wants slices is told that training leaves it out
        yield f"{transformer.name} has dropout inside of attention", "none: on GPUs no kernel draws it for slices", ""
    yield from _of_software(pins)
    yield from _of_model(transformer)
    yield from _of_pins(transformer, pins)


def _of_software(pins: Pins) -> Iterator[tuple[str, str, str]]:
    only = "drumline, which alone runs slices"
    if not pins.runs.slices:
        yield f"{pins.framework} is to run the plan", only, "leave one of the two out"
    elif pins.software and pins.assumed.name.partition("@")[0] != "drumline":
        yield f"software is {pins.software}", only, "leave one of the two out"
    if pins.is_fp8:
        yield "products are in FP8", "bf16: drumline, which alone runs slices, has no FP8", "plan in bf16"


def _of_model(transformer: Transformer) -> Iterator[tuple[str, str, str]]:
    attention = "causal attention to all tokens before, without a mask"
    if transformer.details.alibi:
        yield f"{transformer.name} has ALiBi positions", attention, "plan without slices"
    for phrase in transformer.details.others:
        if phrase.startswith(_WINDOWS):
            yield f"{transformer.name} has {phrase}", attention, "plan without slices"
    if transformer.frozen_base is not None:
        yield "nothing but an adapter trains", "slices of a model that trains", "plan without slices"


def _of_pins(transformer: Transformer, pins: Pins) -> Iterator[tuple[str, str, str]]:
    for name, degree in (("TP", pins.tensor), ("CP", pins.context), ("EP", pins.expert)):
        if (degree or 1) > 1:
            why = "lines of a mesh see parts of sequences or layers in one piece"
            yield f"{name} is {degree}", f"{name} 1: {why}", "leave one of the two out"
    if pins.pipeline == 1:
        yield "PP is 1", "a pipeline of 2 ranks or more, which slices fill", "leave one of the two out"
    every = [name for name in tried_schedules() if find(name).formula_in_slices]
    if pins.schedules and not set(every) & set(pins.schedules):
        yield f"the schedule is {' or '.join(pins.schedules)}", f"{', '.join(every[:-1])} or {every[-1]}", ""
    if pins.zero not in (None, 0, ZERO):
        yield f"ZeRO is {pins.zero}", f"ZeRO 0 or {ZERO}", ""
    if pins.recompute not in (None, *RECOMPUTE):
        yield f"recompute is {pins.recompute}", " or ".join(RECOMPUTE), ""
    tokens, number = transformer.sequence, pins.slices or 1
    if tokens % number or tokens < 2 * number:
        near = [each for each in (*range(number - 1, 1, -1), *range(number + 1, 2 * number)) if tokens % each == 0]
        fix = f"use {min(near, key=lambda each: abs(each - number))}" if near else ""
        yield f"sequences have {tokens} tokens", "a multiple of the number, with 2 tokens or more in each", fix


def refusal(transformer: Transformer, pins: Pins) -> PlanError | None:
    """Return why pins that want slices can have none, or None."""
    for what, expected, fix in objections(transformer, pins):
        return PlanError(f"slices is pinned to {pins.slices}, but {what}", expected=expected, fix=fix)
    return None
