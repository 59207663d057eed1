"""Turn any model into a chain of blocks: each runs one of the model's modules and the forward's code around it.

    model.embed, mask, positions │ model.layers.0 │ model.layers.1 │ model.norm │ model.lm_head, loss

A piece takes the values that are alive before it and returns those alive after it, so a value that is used five blocks
later rides along. At the end of a stage, only what must travel is passed on (`Piece.seal`), and the first piece of the
next stage recomputes the rest.

Pieces hold the model's own modules and parameters, under the model's own names.

Which modules are blocks: Drumline opens a model down to its lists. The elements of the outermost `nn.ModuleList`s,
`nn.Sequential`s and `nn.ModuleDict`s are blocks, as is every other module next to them. A model without lists is
opened once: its children are its blocks. A cut that names a module deeper inside opens the modules around it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NoReturn
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError
from drumline.model.block import Block
from drumline.model.blocks.script import Live, Script, named_calls, states_of
from drumline.model.catalogue import named_tensors, whole_name
from drumline.model.follow.between_blocks import places_of, refuse_shared
from drumline.model.follow.decisions import Undecided
from drumline.model.follow.inputs import InputKind, Inputs, names_of
from drumline.model.follow.notes import Changes, TryAgain, Unseen
from drumline.model.follow.skeleton import Skeleton
from drumline.model.follow.tracing import Decides
from drumline.model.graph.graph import CallGraph
from drumline.model.loss.factors import Sheet


class Piece(nn.Module):
    """One block of a chain, built from a graph."""

    def __init__(self, script: Script, number: int) -> None:
        super().__init__()
        self.script = script
        self._number = number
        self.callees: dict[str, Callable[..., Any]] = {}  # the modules that it calls, by name
        self.homes: dict[str, nn.Module] = {}  # modules of parameters and buffers used outside them
        self.merged: dict[str, str] = {}  # modules before which this piece cannot be cut, and why

    def forward(self, value: Any, compiled: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None) -> Any:
        """Run the piece on the live values; the first takes the model's inputs, the last returns its output.

        It runs its own code, or what `compiled` makes of it.
        """
        if self._number == 0:
            kind, tensors = self.script.kind(value, train=self.training)
            value = Live(kind, False, tensors)
        kind, sealed, tensors = value
        code = self.script.codes(kind)[self._number]
        run = code.resume if sealed else code.run
        output = (run if compiled is None else compiled(run))(self, *tensors)
        return output if self._number == len(self.script.names) - 1 else Live(kind, False, output)

    __call__ = forward  # not a module of the model, so global module hooks must not run on it

    def seal(self, value: Any) -> Any:
        """Return only the part of the piece's result that travels to the next stage."""
        if not isinstance(value, Live):
            return value
        sent = self.script.codes(value.kind)[self._number].sent
        return Live(value.kind, True, tuple(value.tensors[number] for number in sent))

    @property
    def changed(self) -> frozenset[str]:
        """The names of the parameters and buffers that the forward changes in place."""
        return self.script.changed

    @property
    def sheet(self) -> Sheet:
        """Where to look up what the parts of the model's own loss count."""
        return self.script.sheet

    def adopt(self, name: str, module: nn.Module) -> None:
        """Add a module under its own name."""
        *path, last = name.split(".")
        self._shell(path)._modules.setdefault(last, module)
        # Code that a user's class runs around a module call was traced like everything else between blocks.
        kind = type(module)
        has_own_call = kind.__call__ is not nn.Module.__call__ and not kind.__module__.startswith("transformers.")
        self.callees[name] = partial(nn.Module.__call__, module) if has_own_call else module

    def lend(self, name: str, tensor: Tensor, *, stored: bool = True) -> None:
        """Add a parameter or buffer used outside its module; `stored` if state dicts contain it."""
        *path, last = name.split(".")
        home = self._shell(path)
        if isinstance(tensor, nn.Parameter):
            home._parameters.setdefault(last, tensor)
        elif last not in home._buffers:
            home.register_buffer(last, tensor, persistent=stored)
        self.homes[name] = home

    def exchange(self, name: str, buffer: Tensor) -> None:
        """Replace a lent buffer by another tensor, if this piece has it."""
        home = self.homes.get(name)
        if home is None:
            return
        last = name.rpartition(".")[2]
        before = home._buffers[last]
        if before is not None and (buffer.shape, buffer.dtype) != (before.shape, before.dtype):
            raise ModelError(
                f"the buffer {name!r} now has shape {tuple(buffer.shape)} and dtype {buffer.dtype}",
                expected=f"{tuple(before.shape)} and {before.dtype}, as when the pipeline was created",
                fix="create a new pipeline",
            )
        home._buffers[last] = buffer if before is None else buffer.to(before.device)

    def join(self) -> None:
        """Have buffers that the user replaces handed to this piece too, which is a copy of another."""
        self.script.exchanges.append(WeakMethod(self.exchange))

    def _shell(self, path: Sequence[str]) -> nn.Module:
        """Return the module at a path, with empty modules on the way for those that are not here."""
        home: nn.Module = self
        for part in path:
            home = home._modules.setdefault(part, Shell())  # type: ignore[assignment]
        return home


class Shell(nn.Module):
    """Replaces a module of the model of which only parts are here."""


def pieces_of(
    model: nn.Module, inputs: Inputs, *, device: torch.device | None = None, cuts: Collection[str] = ()
) -> list[Block]:
    """Return the model as a chain of blocks, traced on inputs like these.

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
        device = next((param.device for param in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    there = dict(model.named_modules())
    # Losses are opened too, to see what they count.
    losses = [f"{name}." for name, module in there.items() if isinstance(module, nn.modules.loss._Loss)]
    inside = opened(model, [*losses, *(name for name in cuts if name in there)])
    script, kind, graph = _followed(Script(ref(model), Skeleton(model, device), inside), inputs, there)
    pieces, starts = _begun(script, graph, there)
    bounds = [*starts, len(graph.calls)]
    carried = script.skeleton.carried
    named = dict(named_tensors(model)) | {name: tensor for name, tensor in places_of(model).items() if name in carried}
    fleeting = carried | {
        whole_name(path, name)
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    for piece, (start, end) in zip(pieces, pairwise(bounds), strict=True):
        for at in range(start, end):
            if graph.calls[at].block:
                piece.adopt(graph.calls[at].block, there[graph.calls[at].block])
        script.states.append(states_of(graph, range(start, end)))
        for name in sorted(script.states[-1]):
            piece.lend(name, named[name], stored=name not in fleeting)
    script.exchanges = [WeakMethod(piece.exchange) for piece in pieces]
    used = {id(param) for piece in pieces for param in piece.parameters()}
    script.unused = frozenset(name for name, param in model.named_parameters() if id(param) not in used)
    _rest(pieces, script.inside, model, named, fleeting)
    script.write(kind, graph, starts)
    return [Block(name, piece, prefix="") for name, piece in zip(script.names, pieces, strict=True)]


def _followed(script: Script, inputs: Inputs, there: Mapping[str, nn.Module]) -> tuple[Script, InputKind, CallGraph]:
    """Trace the model, opening blocks whose insides others use, and fixing a few numbers on which it branches.

    If an opened block cannot be traced inside, raise the error of the model with the block closed.
    """
    try:
        return _tried(script, inputs, there)
    except TryAgain as error:
        raise error.as_seen() from error.__cause__


def _tried(script: Script, inputs: Inputs, there: Mapping[str, nn.Module]) -> tuple[Script, InputKind, CallGraph]:
    closed: ModelError | None = None
    while True:
        kind, _ = script.kind(inputs, train=True)
        try:
            return script, kind, script.graph(kind)
        except Undecided as error:
            script.asks[kind] = error.ask
        except Unseen as error:
            fresh = _alike(error.block, script, there)
            if error.block not in fresh:
                _give_up(closed, error)
            closed = closed or error
            script = replace(script, inside=script.inside | fresh, asks={})
        except Changes as error:
            model = there[""]
            refuse_shared(model, error.name)
            carried = script.skeleton.carried | {error.name}
            script = replace(script, skeleton=Skeleton(model, script.skeleton.device, carried), asks={})
        except Decides as error:
            baked = names_of(inputs, script.baked, error.inputs)
            if not baked:
                _give_up(closed, error)
            script = replace(script, baked=script.baked | baked, asks={})
        except ModelError as error:
            _give_up(closed, error)


def _give_up(closed: ModelError | None, error: ModelError) -> NoReturn:
    """Raise the error of the model with a block closed, else the last one."""
    if closed is None:
        raise error
    raise closed from error


def _alike(block: str, script: Script, there: Mapping[str, nn.Module]) -> set[str]:
    """Return the blocks of the same class that have modules inside and are still closed."""
    kind = type(there[block])
    beside = {name for name, layer in there.items() if type(layer) is kind and name.rpartition(".")[0] in script.inside}
    return {name for name in beside if any(True for _ in there[name].children())} - script.inside


def _begun(script: Script, graph: CallGraph, there: Mapping[str, nn.Module]) -> tuple[list[Piece], list[int]]:
    """Return the pieces and the calls with which they begin: one for every block before which a cut is possible."""
    if not any(call.block for call in graph.calls):
        raise ModelError("the model calls none of its modules", expected="a model built from modules")
    pieces: list[Piece] = []
    starts: list[int] = []
    for at, name in named_calls(graph):
        block = graph.calls[at].block
        counts = isinstance(there[block.rpartition(".")[0]], LISTS) or any(True for _ in there[block].parameters())
        barred = next((barrier for barrier in graph.barriers if barrier.first < at <= barrier.last), None)
        if pieces and (barred is not None or not counts):
            if barred is not None:
                pieces[-1].merged[name] = barred.reason
            continue
        starts.append(at if pieces else 0)
        pieces.append(Piece(script, len(pieces)))
        script.names.append(name)
    return pieces, starts


def _rest(
    pieces: Sequence[Piece],
    inside: frozenset[str],
    model: nn.Module,
    named: Mapping[str, Tensor],
    fleeting: Collection[str],
) -> None:
    """Give the last piece everything that the forward never used, so that nothing of the model is lost."""
    lent_ids = {id(tensor) for piece in pieces for tensor in (*piece.parameters(), *piece.buffers())}
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        # Of a list of parameters, some may be lent already: the last stage needs no copy of them.
        is_lent = not lent_ids.isdisjoint(map(id, (*module.parameters(), *module.buffers())))
        is_called = any(name in piece.callees for piece in pieces)
        if name not in inside and parent in inside and not is_called and not is_lent:
            pieces[-1].adopt(name, module)
    held_ids = {id(param) for piece in pieces for param in (*piece.parameters(), *piece.buffers())}
    for name, tensor in named.items():
        if id(tensor) not in held_ids:
            pieces[-1].lend(name, tensor, stored=name not in fleeting)
            held_ids.add(id(tensor))


LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def opened(model: nn.Module, cuts: Iterable[str] = ()) -> frozenset[str]:
    """Return the names of the modules to trace inside; the model itself is "".

    >>> body = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    >>> sorted(opened(nn.ModuleDict({"body": body, "head": nn.Linear(2, 2)})))
    ['', 'body']
    >>> sorted(opened(nn.ModuleDict({"body": body, "head": nn.Linear(2, 2)}), ["body.1.0"]))
    ['', 'body', 'body.1']
    """
    prefixes = {""}
    for name in (*_outermost(model, ""), *cuts):
        parts = name.split(".")
        prefixes |= {".".join(parts[:length]) for length in range(len(parts))}
    return frozenset(prefixes | set(_outermost(model, "")))


def _outermost(module: nn.Module, name: str) -> Iterator[str]:
    """Yield the names of lists that are not inside another list's element."""
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if isinstance(child, LISTS):
            if len(child) > 0:
                yield path
        else:
            yield from _outermost(child, path)
