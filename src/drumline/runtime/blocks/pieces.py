"""Any model as a chain of blocks: each runs one of the model's own modules and what the forward does around it.

    model.embed, mask, positions │ model.layers.0 │ model.layers.1 │ model.norm │ model.lm_head, loss

A piece takes the values that are alive before it and returns those alive after it, so a value that is used five blocks
later rides along. At the end of a stage only what has to travel is handed on (`Piece.seal`), and the first piece of the
next stage makes the rest again.

Pieces hold the model's own modules and parameters, under the model's own names.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, pairwise
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError
from drumline.runtime.blocks.contents import refuse_objects
from drumline.runtime.blocks.cut import Block
from drumline.runtime.blocks.emit import Emitter
from drumline.runtime.blocks.graph import Crossing, Graph, crossings
from drumline.runtime.blocks.value_names import Names, by_name, described, kind_text
from drumline.runtime.follow.block_choice import is_list, opened
from drumline.runtime.follow.numbers import names_of, packed
from drumline.runtime.follow.skeleton import Meta, Skeleton
from drumline.runtime.follow.stand_ins import Known
from drumline.runtime.follow.tracing import Decides, Unseen, trace
from drumline.runtime.loss.counts import Counts
from drumline.runtime.loss.sheet import Sheet, scale
from drumline.runtime.loss.terms import Terms, Walk, loss_place
from drumline.runtime.values import pack, plain_in
from drumline.runtime.watch.watch import Watch


class Inputs(NamedTuple):
    """What the model is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Shapes = tuple[tuple[torch.Size, torch.dtype], ...]


class Kind(NamedTuple):
    """What a graph depends on: how the inputs are put together, their shapes and types, and the mode."""

    form: Any
    shapes: Shapes
    train: bool
    strides: tuple[tuple[int, ...], ...] | None = None  # unless all inputs are contiguous
    autocast: torch.dtype | None = None
    types: str = ""  # of the plain values: 1, 1.0 and True are equal and yet not the same

    @classmethod
    def of(cls, inputs: Inputs, device: torch.device, *, train: bool) -> tuple[Kind, tuple[Tensor, ...]]:
        """Return the kind of some inputs, as things are here, and the tensors in them.

        >>> one, other = (Kind.of(Inputs((), {"n": n}), torch.device("cpu"), train=True)[0] for n in (1, 1.0))
        >>> one == other
        False
        """
        tensors, form = pack((inputs.args, inputs.kwargs))
        shapes = tuple((one.shape, one.dtype) for one in tensors)
        plain = all(one.is_contiguous() for one in tensors)
        on = torch.is_autocast_enabled(device.type)
        kind = cls(
            form,
            shapes,
            train,
            None if plain else tuple(one.stride() for one in tensors),
            torch.get_autocast_dtype(device.type) if on else None,
            " ".join(type(one).__name__ for one in plain_in(form)),
        )
        return kind, tensors

    @property
    def metas(self) -> list[Meta]:
        """What is known of the input tensors."""
        strides = self.strides or (None,) * len(self.shapes)
        return [Meta(shape, dtype, one) for (shape, dtype), one in zip(self.shapes, strides, strict=True)]


class Live(NamedTuple):
    """What one piece hands to the next: all values alive, or of these only what travels."""

    kind: Kind
    sealed: bool
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Code:
    """What a piece does for one kind of input."""

    run: Callable[..., Any]
    resume: Callable[..., Any]  # from what travelled
    sent: tuple[int, ...]  # which of the values that the piece returns travel on


class Piece(nn.Module):
    """One block of a chain made of a graph."""

    def __init__(self, plan: Plan, number: int) -> None:
        super().__init__()
        self.plan = plan
        self._number = number
        self._callees: dict[str, Callable[..., Any]] = {}
        self._homes: dict[str, nn.Module] = {}  # of parameters and buffers that are used outside of their module
        self.merged: dict[str, str] = {}  # modules of this piece before which no cut may stand, and why

    def forward(self, value: Any, compiled: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None) -> Any:
        """Run the piece on the values alive; the first one takes the model's inputs, the last returns its output.

        It is run by its own code, or by what `compiled` makes of that.
        """
        if self._number == 0:
            kind, tensors = self.plan.kind(value, train=self.training)
            value = Live(kind, False, tensors)
        kind, sealed, tensors = value
        code = self.plan.codes(kind)[self._number]
        run = code.resume if sealed else code.run
        made = (run if compiled is None else compiled(run))(self, *tensors)
        return made if self._number == self.plan.num_pieces - 1 else Live(kind, False, made)

    __call__ = forward  # it is no module of the model's, so that no hook of all modules is for it

    @property
    def epoch(self) -> int:
        """How often the model was followed anew because something about it had changed."""
        return self.plan.epoch

    def seal(self, value: Any) -> Any:
        """Return of what the piece returned only what travels to the next stage."""
        if not isinstance(value, Live):
            return value
        sent = self.plan.codes(value.kind)[self._number].sent
        return Live(value.kind, True, tuple(value.tensors[one] for one in sent))

    @property
    def sheet(self) -> Sheet:
        """Where it is looked up what the parts of the model's own loss count."""
        return self.plan.sheet

    def adopt(self, name: str, module: nn.Module) -> None:
        """Take a module in under its own name."""
        *path, last = name.split(".")
        self._shell(path)._modules.setdefault(last, module)
        # What a class of the user's does around the call of a module was followed like all else between blocks.
        kind = type(module)
        own = kind.__call__ is not nn.Module.__call__ and not kind.__module__.startswith("transformers.")
        self._callees[name] = partial(nn.Module.__call__, module) if own else module

    def lend(self, name: str, tensor: Tensor, *, stored: bool = True) -> None:
        """Take in a parameter or buffer that is used outside of its module; `stored`, one that states contain."""
        *path, last = name.split(".")
        home = self._shell(path)
        if isinstance(tensor, nn.Parameter):
            home._parameters.setdefault(last, tensor)
        elif last not in home._buffers:
            home.register_buffer(last, tensor, persistent=stored)
        self._homes[name] = home

    def exchange(self, name: str, buffer: Tensor) -> None:
        """Take another tensor for a buffer that it was lent, if it was."""
        home = self._homes.get(name)
        if home is None:
            return
        last = name.rpartition(".")[2]
        before = home._buffers[last]
        if before is not None and (buffer.shape, buffer.dtype) != (before.shape, before.dtype):
            raise ModelError(
                f"the buffer {name!r} is now {tuple(buffer.shape)} of {buffer.dtype}",
                expected=f"{tuple(before.shape)} of {before.dtype}, as when the pipeline was made",
                fix="make a new pipeline",
            )
        home._buffers[last] = buffer if before is None else buffer.to(before.device)

    def _shell(self, path: Sequence[str]) -> nn.Module:
        """Return the module at a path, empty modules on the way where the model has some that are not here."""
        home: nn.Module = self
        for part in path:
            home = home._modules.setdefault(part, Shell())  # type: ignore[assignment]
        return home


class Shell(nn.Module):
    """Stands where the model has a module of which only parts are here."""


class Loss(NamedTuple):
    """What the model's own loss is made of, for one kind of input."""

    walk: Walk
    terms: Terms
    counts: Counts
    pieces: tuple[int, ...]  # that make the parts


@dataclass(eq=False)
class Plan:
    """How a model is cut into pieces, for every kind of input that has come along."""

    skeleton: Skeleton
    inside: frozenset[str]
    names: list[str] = field(default_factory=list)  # of the pieces: the blocks with which they begin
    _known: Known = field(default_factory=dict)
    _codes: dict[Kind, list[Code]] = field(default_factory=dict)
    _states: list[frozenset[str]] = field(default_factory=list)  # which parameters each piece was lent
    _model: ref[nn.Module] | None = None  # the user's own, as long as he has it
    _pieces: list[ref[Piece]] = field(default_factory=list)
    watch: Watch | None = None
    epoch: int = 0
    baked: frozenset[str | int] = frozenset()  # arguments by whose numbers the forward decides
    unused: frozenset[str] = frozenset()  # parameters that the forward never uses
    sheet: Sheet = field(default_factory=Sheet)  # what the parts of the model's own loss count in each microbatch
    _losses: dict[Kind, Loss | None] = field(default_factory=dict)
    # By kind of input, what was written, as ranks compare it.
    written: dict[str, list[str]] = field(default_factory=dict)

    @property
    def num_pieces(self) -> int:
        """How many pieces there are."""
        return len(self.names)

    def __deepcopy__(self, memo: Any) -> Plan:
        return self

    def kind(self, inputs: Inputs, *, train: bool) -> tuple[Kind, tuple[Tensor, ...]]:
        """Return what a graph of these inputs depends on, and the tensors that are not part of that."""
        return Kind.of(Inputs(*packed(inputs, self.baked)), self.skeleton.device, train=train)

    def graph(self, kind: Kind) -> Graph:
        """Follow the model's forward on inputs of a kind."""
        followed = trace(
            self.skeleton,
            self.inside,
            kind.form,
            kind.metas,
            train=kind.train,
            known=self._known,
            autocast=kind.autocast,
        )
        if self.watch is not None:
            self.watch.read(followed.attributes)
        return followed.graph

    def look_after(self, model: nn.Module, pieces: Sequence[Piece]) -> None:
        """Follow what becomes of the model that the pieces were made from."""
        self._model, self._pieces = ref(model), [ref(one) for one in pieces]

    def begin(self) -> None:
        """Take the model's parameters and buffers for what they should be, once all are in place."""
        if self.watch is not None:
            self.watch.begin()

    def renew(self) -> bool:
        """See whether the model has changed since it was followed; if so, it is followed again when it runs next."""
        model = None if self._model is None else self._model()
        if model is None or self.watch is None:
            return False
        for name, buffer in self.watch.exchanged():
            for piece in (one for seen in self._pieces if (one := seen()) is not None):
                piece.exchange(name, buffer)
        if not self.watch.has_changed():
            return False
        self.skeleton = Skeleton(model, self.skeleton.device)
        self._codes.clear()
        self._losses.clear()
        self._known.clear()
        self.epoch += 1
        return True

    def codes(self, kind: Kind) -> list[Code]:
        """Return what every piece does for inputs of a kind."""
        try:
            found = self._codes.get(kind)
        except TypeError:
            refuse_objects(kind.form, "the model")
            raise
        if found is None:
            graph = self.graph(kind)
            found = self.write(kind, graph, self._starts(graph))
        return found

    def write(self, kind: Kind, graph: Graph, starts: Sequence[int]) -> list[Code]:
        """Write what every piece does for inputs of a kind, of whose graph they begin with these calls."""
        self._losses[kind] = loss = loss_of(graph, kind, starts)
        if loss is not None:
            scale(graph, loss.terms, self.sheet)
        found = self._codes[kind] = self._written(graph, starts, kind_text(self.epoch, *kind))
        return found

    def loss(self, kind: Kind) -> Loss | None:
        """Return what the model's own loss is made of for inputs of a kind; None where it returns none."""
        self.codes(kind)
        return self._losses[kind]

    def _starts(self, graph: Graph) -> list[int]:
        """Return the call with which each piece begins, in a graph of another kind of input."""
        at = {name: call for call, name in named_calls(graph)}
        missing = [name for name in self.names if name not in at]
        order = [at[name] for name in self.names if name in at]
        if missing or order != sorted(order):
            raise ModelError(
                f"for this input the model does not call {missing[0]!r}"
                if missing
                else "for this input the model calls its blocks in another order",
                expected=f"the blocks that it was cut at: {', '.join(self.names)}",
                fix="pass example=, a batch as step will get it",
            )
        return [0, *order[1:]]

    def _written(self, graph: Graph, starts: Sequence[int], kind: str) -> list[Code]:
        bounds = [*starts, len(graph.calls)]
        names = Names(graph)
        crossing = [by_name(one, names) for one in crossings(graph, starts[1:])]
        cuts = [Crossing(tuple(graph.inputs), tuple(graph.inputs), ()), *crossing]
        self.written[kind] = described(graph, names, self.names, [range(*one) for one in pairwise(bounds)], cuts)
        for number, (start, end) in enumerate(pairwise(bounds)):
            for name in states_of(graph, range(start, end)) - self._states[number]:
                raise ModelError(
                    f"for this input the model uses {name!r} in {self.names[number]!r}",
                    expected="the parameters that it uses for the inputs that it was cut with",
                    fix="pass example=, a batch as step will get it",
                )
        return [
            self._code(graph, cut, range(start, end), after)
            for cut, (start, end), after in zip(cuts, pairwise(bounds), [*cuts[1:], None], strict=True)
        ]

    def _code(self, graph: Graph, cut: Crossing, calls: range, after: Crossing | None) -> Code:
        emitter = Emitter(graph, "piece._callees[{!r}]".format, _state)
        if after is None:
            kept, returns = graph.outputs, emitter.expression(graph.output_form, graph.outputs)
        else:
            kept = after.whole
            returns = f"({''.join(f'v{value}, ' for value in kept)})"
        write = partial(emitter.function, returns=returns, kept=kept)
        run = write(cut.whole, calls)
        resume = write(cut.sent, [*cut.again, *calls]) if cut.again else run
        sent = () if after is None else tuple(after.whole.index(value) for value in after.sent)
        return Code(run, resume, sent)

    def lent(self, states: Sequence[Collection[str]]) -> None:
        """Note which parameters and buffers each piece holds for use between blocks."""
        self._states = [frozenset(one) for one in states]


def loss_of(graph: Graph, kind: Kind, starts: Sequence[int]) -> Loss | None:
    """Return what the loss in a model's output is made of; None where there is none."""
    place = loss_place(graph.output_form, len(graph.outputs))
    if place is None or not graph.outputs:
        return None
    fixed = [value for value, (shape, _) in zip(graph.inputs, kind.shapes, strict=True) if not shape]
    walk = Walk(graph, graph.inputs, fixed)
    terms = walk.terms(graph.outputs[place])
    pieces = tuple(bisect_right(starts, term.call) - 1 for term in terms.known)
    return Loss(walk, terms, Counts(graph, terms, _state), pieces)


def _state(name: str) -> str:
    last = name.rpartition(".")[2]
    return f"getattr(piece._homes[{name!r}], {last!r})"


def states_of(graph: Graph, calls: range) -> set[str]:
    """Return the parameters and buffers that calls use and that no block of theirs brings along."""
    found: set[str] = set()
    for at in calls:
        call = graph.calls[at]
        found.update(call.reads, (graph.values[one].state for one in call.takes))
    return found - {""}


def named_calls(graph: Graph) -> list[tuple[int, str]]:
    """Return the calls of blocks with their names; the second call of `x` is `x#2`."""
    seen: dict[str, count[int]] = {}
    found = []
    for at, call in enumerate(graph.calls):
        if call.block:
            number = next(seen.setdefault(call.block, count(1)))
            found.append((at, call.block if number == 1 else f"{call.block}#{number}"))
    return found


def pieces_of(
    model: nn.Module, inputs: Inputs, *, device: torch.device | None = None, cuts: Collection[str] = ()
) -> list[Block]:
    """Return the model as a chain of blocks, as it runs on inputs like these.

    >>> class Skips(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
    ...     def forward(self, x, scale=1.0):
    ...         first = self.layers[0](x) * scale
    ...         return self.layers[2](self.layers[1](first) + first)
    >>> model, x = Skips(), torch.randn(4, 2)
    >>> blocks = pieces_of(model, Inputs((x,), {"scale": 2.0}))
    >>> value = Inputs((x,), {"scale": 2.0})
    >>> for block in blocks:
    ...     value = block.module(value)
    >>> [block.name for block in blocks], bool((value == model(x, scale=2.0)).all())
    (['layers.0', 'layers.1', 'layers.2'], True)
    """
    if device is None:
        device = next((one.device for one in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    there = dict(model.named_modules())
    # Losses are opened too, so that it is seen what they count.
    losses = [f"{name}." for name, module in there.items() if isinstance(module, nn.modules.loss._Loss)]
    inside = opened(model, [*losses, *(name for name in cuts if name in there)])
    plan, kind, graph = _followed(Plan(Skeleton(model, device), inside), inputs, there)
    pieces, starts = _begun(plan, graph, there)
    bounds = [*starts, len(graph.calls)]
    states = []
    named = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
    fleeting = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    for piece, (start, end) in zip(pieces, pairwise(bounds), strict=True):
        for at in range(start, end):
            if graph.calls[at].block:
                piece.adopt(graph.calls[at].block, there[graph.calls[at].block])
        states.append(states_of(graph, range(start, end)))
        for name in sorted(states[-1]):
            piece.lend(name, named[name], stored=name not in fleeting)
    plan.lent(states)
    plan.look_after(model, pieces)
    used = {id(one) for piece in pieces for one in piece.parameters()}
    plan.unused = frozenset(name for name, one in model.named_parameters() if id(one) not in used)
    _rest(pieces, plan.inside, model, named, fleeting)
    plan.write(kind, graph, starts)
    return [Block(name, piece, prefix="") for name, piece in zip(plan.names, pieces, strict=True)]


_FEW = 256  # numbers of an argument, by which a forward may decide


def _followed(plan: Plan, inputs: Inputs, there: Mapping[str, nn.Module]) -> tuple[Plan, Kind, Graph]:
    """Follow the model, opening blocks whose insides others use, and taking a few numbers it decides by as they are.

    If an opened block cannot be followed inside, the error is that of the model with the block closed.
    """
    closed: ModelError | None = None
    while True:
        kind, _ = plan.kind(inputs, train=True)
        plan.watch = Watch(there.items(), plan.inside)
        try:
            return plan, kind, plan.graph(kind)
        except Unseen as error:
            fresh = _alike(error.block, plan, there)
            if error.block not in fresh:
                raise closed or error from error
            closed = closed or error
            plan = replace(plan, inside=plan.inside | fresh, _known={})
        except Decides as error:
            baked = names_of(inputs, plan.baked, error.inputs, at_most=_FEW)
            if not baked:
                raise closed or error from error
            plan = replace(plan, baked=plan.baked | baked, _known={})
        except ModelError as error:
            raise closed or error from error


def _alike(block: str, plan: Plan, there: Mapping[str, nn.Module]) -> set[str]:
    """Return the blocks of the same class that have modules inside and are still closed."""
    kind = type(there[block])
    beside = {name for name, one in there.items() if type(one) is kind and name.rpartition(".")[0] in plan.inside}
    return {name for name in beside if any(True for _ in there[name].children())} - plan.inside


def _begun(plan: Plan, graph: Graph, there: Mapping[str, nn.Module]) -> tuple[list[Piece], list[int]]:
    """Return the pieces and the calls with which they begin: at every block that a cut may stand before."""
    if not any(call.block for call in graph.calls):
        raise ModelError("the model calls none of its modules", expected="a model made of modules")
    pieces: list[Piece] = []
    starts: list[int] = []
    for at, name in named_calls(graph):
        block = graph.calls[at].block
        counts = is_list(there[block.rpartition(".")[0]]) or any(True for _ in there[block].parameters())
        barred = next((one for one in graph.barriers if one.first < at <= one.last), None)
        if pieces and (barred is not None or not counts):
            if barred is not None:
                pieces[-1].merged[name] = barred.reason
            continue
        if counts or not pieces:
            pieces.append(Piece(plan, len(pieces)))
            starts.append(at if len(pieces) > 1 else 0)
            plan.names.append(name)
    return pieces, starts


def _rest(
    pieces: Sequence[Piece],
    inside: frozenset[str],
    model: nn.Module,
    named: Mapping[str, Tensor],
    fleeting: Collection[str],
) -> None:
    """Give what the forward never used to the last piece, so that nothing of the model is lost."""
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        if name not in inside and parent in inside and not any(name in piece._callees for piece in pieces):
            pieces[-1].adopt(name, module)
    held = {id(one) for piece in pieces for one in (*piece.parameters(), *piece.buffers())}
    for name, tensor in named.items():
        if id(tensor) not in held:
            pieces[-1].lend(name, tensor, stored=name not in fleeting)
            held.add(id(tensor))
