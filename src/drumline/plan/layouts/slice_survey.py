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
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import count
from weakref import WeakKeyDictionary

from drumline.core.errors import PlanError, counted
from drumline.plan.cluster.estimate import estimate
from drumline.plan.cluster.kernels import TILE
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.transformer import Transformer
from drumline.plan.layouts.choice import Choice
from drumline.plan.layouts.frameworks import FRAMEWORKS
from drumline.plan.layouts.pins import Degrees, Pins, tried_schedules
from drumline.plan.layouts.preference import BAND
from drumline.plan.layouts.space import layout_of, meshes, schedules_of
from drumline.plan.layouts.survey import MOST_PAIRS, Survey
from drumline.plan.slices.layout_bounds import Line, LineBounds, SliceSchedule
from drumline.plan.slices.layout_estimate import SlicedLayout
from drumline.schedules import find

_OWN = FRAMEWORKS["drumline"]  # alone runs slices
RECOMPUTE = _OWN.recompute
ZERO = _OWN.zero_staged[0]  # where data-parallel ranks share state
_WINDOWS = ("sliding_window", "max_window_layers", "layer_types")  # what models call windows shorter than a sequence
_GIB = 2**30
NUMBERS = (2, 4, 8, 16, 32, 64)
FEW = 4  # microbatches for each rank: with as many, slices save little
_EXACT = 1 - 1e-9  # on bounds, which are added up in another order than what they bound


class SliceSurvey:
    """The layouts in slices of what a survey is of, evaluated on demand."""

    def __init__(self, survey: Survey) -> None:
        self.transformer, self.cluster = survey.transformer, survey.cluster
        self.batch, self.pins = survey.batch, survey.pins
        self._survey, self._practice = survey, self.pins.practice
        self._works: dict[Layout, SlicedLayout] = {}
        self._choices: dict[Layout, Choice] = {}
        self._orders: dict[tuple[int, int, int], list[SliceSchedule]] = {}
        self._bounds = LineBounds(survey.transformer, survey.cluster.nodes, self._practice)

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

    @cached_property
    def _kinds(self) -> tuple[str, ...]:
        """The kinds of recomputation; none takes less time or holds more than a later one."""
        return tuple(kind for kind in RECOMPUTE if self.pins.recompute in (None, kind))

    @cached_property
    def _numbers(self) -> list[int]:
        """The numbers of slices to try."""
        tokens = self.transformer.sequence
        if self.pins.slices is not None:
            return [self.pins.slices]
        return [number for number in NUMBERS if tokens % number == 0 and tokens // number >= TILE]

    @cached_property
    def _lines(self) -> list[Line]:
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
            Line(mesh.pipeline, mesh.data, self._zero(mesh), size, self.batch // (mesh.data * size))
            for mesh in degrees
            if mesh.pipeline > 1
            for size in self.pins.microbatch_sizes(self.batch, mesh)
        ]
        few = [line for line in lines if line.num_microbatches < FEW * line.pipeline]
        return few if self.pins.slices is None else lines

    def _candidates(self, limit: float, near: float) -> Iterator[Layout]:
        """Yield layouts that may fit and be near, with the least recomputation that may fit.

        More slices take no less time, for products get smaller: what is too slow is so in more slices.
        """
        bounds = self._bounds
        for line in self._lines:
            kinds = [kind for kind in self._kinds if bounds.even_bytes(line, kind) <= limit]
            for number in self._numbers if kinds else ():
                if _EXACT * bounds.even_seconds(line, number, kinds[0]) > near:
                    break
                for order in self._orders_of(line, number):
                    fitting = (kind for kind in kinds if bounds.bytes(line, order, kind) <= limit)
                    if _EXACT * bounds.seconds(line, order, kinds[0]) > near or not (kind := next(fitting, "")):
                        continue
                    if _EXACT * bounds.seconds(line, order, kind) <= near:
                        yield self._layout(line, order, kind)

    def _orders_of(self, line: Line, number: int) -> list[SliceSchedule]:
        """Return the schedules that have slices and admit so many."""
        units, mesh = line.num_microbatches * number, Degrees(pipeline=line.pipeline, data=line.data)
        key = line.pipeline, units, number
        if key not in self._orders:
            most = MOST_PAIRS // (units * line.pipeline)
            admitted = schedules_of(self.transformer, mesh, units, self.pins)
            self._orders[key] = [
                SliceSchedule(name, stages, number)
                for name, stages in admitted
                if stages <= most and find(name).formula_in_slices
            ]
        return self._orders[key]

    def _layout(self, line: Line, order: SliceSchedule, kind: str) -> Layout:
        mesh, schedule = Degrees(pipeline=line.pipeline, data=line.data), (order.schedule, order.stages_per_rank)
        settings = mesh, line.microbatch, schedule, line.zero, kind, self._practice
        return replace(layout_of(self.transformer, self.batch, self.pins, *settings), slices=order.slices)

    def _zero(self, mesh: Degrees) -> int:
        """Return the ZeRO stage of layouts with this mesh."""
        return self.pins.zero if self.pins.zero is not None else ZERO if mesh.data > 1 else 0

    def _recomputed(self, layout: Layout) -> Layout | None:
        """Return the layout with the next kind of recomputation, if there is one."""
        later = self._kinds[self._kinds.index(layout.recompute) + 1 :]
        return replace(layout, recompute=later[0]) if later else None


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
    if transformer.head_width != transformer.value_width:
        yield f"{transformer.name} has values of another width than keys", "fused attention, for slices too", ""
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
