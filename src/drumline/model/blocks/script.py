"""What the pieces of a model do: code written for each kind of input, from the graph of its forward.

A graph belongs to one kind of input: structure, shapes, plain values and mode. Another kind is traced again and cut
before the same blocks. A piece takes the values that are alive before it and returns those alive after it.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise
from typing import Any, NamedTuple
from weakref import WeakMethod, ref

from torch import Tensor, nn

from drumline.core.errors import ModelError
from drumline.model.blocks.value_names import Names, by_name, described, kind_text, shortened
from drumline.model.follow.decisions import Ask, Undecided
from drumline.model.follow.inputs import InputKind, Inputs
from drumline.model.follow.notes import TryAgain
from drumline.model.follow.skeleton import Skeleton
from drumline.model.follow.tracing import trace
from drumline.model.graph.emit import Emitter
from drumline.model.graph.graph import CallGraph, Crossing, crossings
from drumline.model.loss.calls import loss_place
from drumline.model.loss.counts import Counts
from drumline.model.loss.factors import Sheet, scale
from drumline.model.loss.terms import Walk
from drumline.model.values import refuse_objects
from drumline.model.watch.watch import Watch


class Live(NamedTuple):
    """What one piece passes to the next: all live values, or only those that travel."""

    kind: InputKind
    sealed: bool
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Code:
    """What a piece does for one kind of input."""

    run: Callable[..., Any]
    resume: Callable[..., Any]  # continues from the values that travelled
    sent: tuple[int, ...]  # the returned values that travel on
    takes: tuple[int, ...]  # the graph's values that `run` gets, in order
    resumes: tuple[int, ...]  # those that `resume` gets


class OwnLossParts(NamedTuple):
    """The parts of the model's own loss, for one kind of input."""

    walk: Walk
    counts: Counts
    pieces: tuple[int, ...]  # the pieces that compute the parts


@dataclass(eq=False)
class Script:
    """What every piece of a model does, for every kind of input so far."""

    _model: ref[nn.Module]  # the user's model, while it lives
    skeleton: Skeleton
    inside: frozenset[str]
    names: list[str] = field(default_factory=list)  # of the pieces, by their first blocks
    _codes: dict[InputKind, list[Code]] = field(default_factory=dict)
    # The parameters and buffers that each piece holds for use between blocks.
    states: list[set[str]] = field(default_factory=list)
    # Those of the pieces, which may replace lent buffers.
    exchanges: list[WeakMethod[Callable[[str, Tensor], None]]] = field(default_factory=list)
    epoch: int = 0  # how often a changed model was traced again
    baked: frozenset[str | int] = frozenset()  # arguments on whose values the forward branches
    # What the forward reads of integer inputs next, by what is decided so far.
    asks: dict[InputKind, Ask] = field(default_factory=dict)
    changed: frozenset[str] = frozenset()  # parameters and buffers that the forward changes in place
    unused: frozenset[str] = frozenset()  # parameters that the forward never uses
    sheet: Sheet = field(default_factory=Sheet)  # what the parts of the model's own loss count in each microbatch
    _losses: dict[InputKind, OwnLossParts | None] = field(default_factory=dict)
    # The written code by kind of input, as ranks compare it.
    written: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        modules = () if self.model is None else self.model.named_modules()
        self.watch = Watch(modules, self.inside, self.skeleton.carried)

    def __deepcopy__(self, memo: Any) -> Script:
        return self

    def kind(self, inputs: Inputs, *, train: bool) -> tuple[InputKind, tuple[Tensor, ...]]:
        """Return what a graph of these inputs depends on, and the tensors that are not part of it."""
        known = inputs.packed(self.baked) if self.baked else inputs
        kind, tensors = InputKind.of(known, self.skeleton.device, train=train)
        try:
            if self.asks or kind not in self._codes:  # most models decide nothing
                kind = self._decided(kind, tensors)
        except TypeError:
            refuse_objects(kind.form, "the model")
            raise
        return kind, tensors

    def _decided(self, kind: InputKind, tensors: Sequence[Tensor]) -> InputKind:
        """Add to a kind what the forward decides by the values of these inputs, question by question."""
        while True:
            ask = self.asks.get(kind)
            if ask is not None:
                kind = kind._replace(decided=(*kind.decided, ask(tensors)))
            elif kind in self._codes or not self.names:  # known, or not cut yet
                return kind
            else:
                try:
                    self.codes(kind)
                except Undecided as error:
                    self.asks[kind] = error.ask

    def graph(self, kind: InputKind) -> CallGraph:
        """Trace the model's forward on inputs of a kind."""
        graph, attributes = trace(self.skeleton, self.inside, kind)
        self.watch.read(attributes)
        self.changed |= graph.changed
        return graph

    @property
    def model(self) -> nn.Module | None:
        """The model from which the pieces were built, while it lives."""
        return self._model()

    def begin(self) -> None:
        """Record the model's parameters and buffers as the expected ones, after all are in place."""
        self.watch.begin()

    def renew(self) -> bool:
        """Check whether the model has changed since it was traced; if so, the next run traces it again."""
        model = self._model()
        if model is None:
            return False
        for name, buffer in self.watch.exchanged():
            for exchange in (function for method in self.exchanges if (function := method()) is not None):
                exchange(name, buffer)
        if not self.watch.has_changed():
            return False
        self.skeleton = Skeleton(model, self.skeleton.device, self.skeleton.carried)
        self._codes.clear()
        self._losses.clear()
        self.asks.clear()
        self.epoch += 1
        return True

    def codes(self, kind: InputKind) -> list[Code]:
        """Return the code of every piece for inputs of a kind."""
        try:
            codes = self._codes.get(kind)
        except TypeError:
            refuse_objects(kind.form, "the model")
            raise
        if codes is None:
            try:
                graph = self.graph(kind)
            except TryAgain as error:
                raise error.as_seen() from error.__cause__
            codes = self.write(kind, graph, self._starts(graph))
        return codes

    def write(self, kind: InputKind, graph: CallGraph, starts: Sequence[int]) -> list[Code]:
        """Write the code of every piece for inputs of a kind; the pieces begin with these calls of its graph."""
        self._losses[kind] = loss = loss_of(graph, kind, starts)
        if loss is not None:
            scale(loss.walk, self.sheet)
        codes = self._codes[kind] = self._written(graph, starts, kind_text(self.epoch, *kind))
        self._forget()
        return codes

    def _forget(self) -> None:
        """Keep the code of the newest kinds: where decisions depend on many numbers, every batch may have others."""
        if len(self._codes) == _MANY and (self.baked or self.asks):
            named = ", ".join(map(repr, sorted(self.baked, key=str))) or "its inputs"
            warnings.warn(
                f"the model was traced {_MANY} times, because its forward reads the values of {named} between its"
                " blocks; put what reads them into a block, which is quicker",
                stacklevel=2,
            )
        if len(self._codes) > _MOST:
            oldest = next(iter(self._codes))
            del self._codes[oldest], self._losses[oldest]

    def loss(self, kind: InputKind) -> OwnLossParts | None:
        """Return the parts of the model's own loss for inputs of a kind; None if it returns no loss."""
        self.codes(kind)
        return self._losses[kind]

    def _starts(self, graph: CallGraph) -> list[int]:
        """Return the call with which each piece begins, in the graph of another kind of input."""
        at = {name: call for call, name in named_calls(graph)}
        missing = [name for name in self.names if name not in at]
        order = [at[name] for name in self.names if name in at]
        if missing or order != sorted(order):
            raise ModelError(
                f"for this input the model does not call {missing[0]!r}"
                if missing
                else "for this input the model calls its blocks in a different order",
                expected=f"the blocks it was cut into: {', '.join(self.names)}",
                fix="pass example=, a batch like those you pass to step",
            )
        return [0, *order[1:]]

    def _written(self, graph: CallGraph, starts: Sequence[int], kind: str) -> list[Code]:
        calls = [range(*pair) for pair in pairwise([*starts, len(graph.calls)])]
        names = Names(graph)
        crossing = [by_name(border, names) for border in crossings(graph, starts[1:])]
        cuts = [Crossing(tuple(graph.inputs), tuple(graph.inputs), ()), *crossing]
        lines = described(names, self.names, calls, cuts)
        self.written[kind] = lines if len(self.written) < _MOST else shortened(lines)
        for piece, border in zip(self.names[1:], crossing, strict=True):
            if any(graph.values[value].is_uneven for value in border.whole):
                raise ModelError(
                    f"for this input, rows that a mask picks cross the cut before {piece!r}",
                    expected="rows that are picked and used between the same two blocks",
                    fix="pass example=, a batch like those you pass to step",
                )
        for number, inside in enumerate(calls):
            for name in states_of(graph, inside) - self.states[number]:
                raise ModelError(
                    f"for this input the model uses {name!r} in {self.names[number]!r}",
                    expected="the same parameters as for the inputs with which it was cut",
                    fix="pass example=, a batch like those you pass to step",
                )
        return [
            self._code(graph, cut, inside, after)
            for cut, inside, after in zip(cuts, calls, [*cuts[1:], None], strict=True)
        ]

    def _code(self, graph: CallGraph, cut: Crossing, calls: range, after: Crossing | None) -> Code:
        emitter = Emitter(graph)
        if after is None:
            kept_outputs, returns = graph.outputs, emitter.expression(graph.output_form, graph.outputs)
        else:
            kept_outputs = after.whole
            returns = f"({''.join(f'v{value}, ' for value in kept_outputs)})"
        write = partial(emitter.function, returns=returns, kept_values=kept_outputs)
        run = write(cut.whole, calls)
        resume = write(cut.sent, [*cut.again, *calls]) if cut.again else run
        sent = () if after is None else tuple(after.whole.index(value) for value in after.sent)
        return Code(run, resume, sent, cut.whole, cut.sent)


_MANY, _MOST = 64, 512  # kinds of inputs


def loss_of(graph: CallGraph, kind: InputKind, starts: Sequence[int]) -> OwnLossParts | None:
    """Return the parts of the loss in a model's output; None if there is none."""
    place = loss_place(graph.output_form)
    if place is None or not graph.outputs:
        return None
    fixed = [value for value, meta in zip(graph.inputs, kind.metas, strict=True) if not meta.shape]
    walk = Walk(graph, graph.outputs[place], graph.inputs, fixed)
    return OwnLossParts(walk, Counts(walk), tuple(bisect_right(starts, term.call) - 1 for term in walk.terms))


def states_of(graph: CallGraph, calls: range) -> set[str]:
    """Return the parameters and buffers that calls use and that none of their blocks holds."""
    states: set[str] = set()
    for at in calls:
        call = graph.calls[at]
        states.update(call.reads, (graph.values[number].state for number in call.takes))
    return states - {""}


def named_calls(graph: CallGraph) -> list[tuple[int, str]]:
    """Return the calls of blocks with their names; the second call of `x` is `x#2`."""
    counters: dict[str, count[int]] = {}
    calls = []
    for at, call in enumerate(graph.calls):
        if call.block:
            number = next(counters.setdefault(call.block, count(1)))
            calls.append((at, call.block if number == 1 else f"{call.block}#{number}"))
    return calls
