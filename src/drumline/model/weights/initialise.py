"""Values for tensors that have none: every module's own initialiser, with its own random numbers.

Modules run children first, as their constructors would have. An initialiser is

- `_init_weights(module)` of the module itself or its nearest parent, as in Hugging Face models;
- if there is none, or it skips a tensor: the module's `reset_parameters()` or `_reset_parameters()`.

Every draw is seeded from (seed, module name, number of earlier draws of the initialiser). Draws into a tensor of
another rank, which is on the meta device, count too. So the same model results from any cut, on any ranks.

Whether a tensor got a value is checked, not assumed: it is filled with NaN before, and compared afterwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError
from drumline.model.catalogue import Catalogue, Entry, with_memory
from drumline.model.patches import put_in
from drumline.model.quantised.bases import recipe_in
from drumline.model.quantised.packed import is_packed, unpacked_shape
from drumline.model.weights.seeded import Seeded

Initialiser = Callable[[nn.Module], Any]


def initialise(
    catalogue: Catalogue,
    wanted: Sequence[Entry],
    *,
    seed: int,
    device: torch.device,
    parents: bool = True,
    later: Sequence[Entry] = (),
) -> None:
    """Give the wanted entries, which have memory, their first values; those of `later` get theirs afterwards.

    With `parents`, modules above the owners run too; they may change what their children drew.
    """
    run = _Initialisation(catalogue, wanted, seed, device, later)
    owners = run.owned
    devices = [] if device.type == "cpu" else [device]
    with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices, device_type=device.type):
        for module in _children_first(catalogue.modules):
            if module in owners or (parents and any(layer in owners for layer in module.modules())):
                run.module(module)
    for entry in wanted:
        if run.untouched(entry):
            raise _refusal(entry)


class _Initialisation:
    """One initialisation: the wanted entries, and their state before."""

    def __init__(
        self, catalogue: Catalogue, wanted: Sequence[Entry], seed: int, device: torch.device, later: Sequence[Entry]
    ) -> None:
        self.names = catalogue.modules
        self.entries = {id(entry.tensor): entry for entry in catalogue.entries}
        self.wanted = set(wanted)
        self.free = {*wanted, *later}  # whoever writes to these overwrites no value
        self.owned: dict[nn.Module, list[Entry]] = {}
        for entry in wanted:
            self.owned.setdefault(entry.owner, []).append(entry)
        self.seed = seed
        self.device = device
        self.above = _above(catalogue)
        with torch.no_grad():
            self.versions = {entry: _emptied(entry.tensor) for entry in wanted}

    def untouched(self, entry: Entry) -> bool:
        """Whether an entry still has no value."""
        tensor = entry.tensor.detach()
        if is_packed(entry.tensor):
            return tensor.is_meta
        if _has_nan(tensor):
            return bool(tensor.numel()) and bool(tensor.min().isnan())
        return bool(tensor.numel()) and tensor._version == self.versions[entry]

    def module(self, module: nn.Module) -> None:
        """Run a module's initialisers, for the tensors that it owns and those below it."""
        above, own_function = self.above[module], _own_method(module)
        if above is None and own_function is None:
            return
        with self._unpacked(module), self._values_kept(module), self._foreign_put_aside(module):
            if above is not None:
                self._call(module, "above", above, module)
            left = any(self.untouched(entry) for entry in self.owned.get(module, ()))
            if own_function is not None and (above is None or left):
                self._call(module, "own", own_function)
                if above is not None:
                    self._call(module, "above", above, module)

    @contextmanager
    def _unpacked(self, module: nn.Module) -> Iterator[None]:
        """Give a module's quantised weights full precision inside, and pack what its initialiser has drawn."""
        packed = [(entry, recipe_in(entry.tensor)) for entry in self.owned.get(module, ()) if is_packed(entry.tensor)]
        for entry, recipe in packed:
            if recipe is None:
                raise _refusal(entry)
            shape = unpacked_shape(entry.tensor)
            self._replace(entry, nn.Parameter(torch.empty(shape, dtype=recipe.dtype, device=self.device), False))
            self.versions[entry] = _emptied(entry.tensor)
        yield
        for entry, recipe in packed:
            if recipe is None or self.untouched(entry):
                raise _refusal(entry)
            self._replace(entry, recipe.pack(entry.tensor))

    def _replace(self, entry: Entry, tensor: Tensor) -> None:
        self.entries.pop(id(entry.tensor), None)  # another tensor may get its id
        self.entries[id(tensor)] = entry
        entry.put(tensor)

    def _call(self, module: nn.Module, which: str, initialiser: Callable[..., Any], *arguments: Any) -> None:
        with Seeded(f"{self.seed}/{self.names[module]}/{which}"):
            initialiser(*arguments)
        self._adopt(module)

    def _adopt(self, module: nn.Module) -> None:
        """Adopt buffers that an initialiser replaced."""
        for entry in self.owned.get(module, ()):
            place = entry.places[0]
            tensor = place.table[place.key]
            if tensor is not None and tensor is not entry.tensor:
                moved = tensor.to(self.device)
                self.entries[id(moved)] = entry
                entry.put(moved)
                self.versions[entry] = -1

    def _foreign_put_aside(self, module: nn.Module) -> AbstractContextManager[None]:
        """Discard what the module writes to tensors that it does not own or that are not wanted."""
        tables: list[dict[str, Any]] = [module._parameters, module._buffers]
        return put_in(
            (table, slot, with_memory(entry, torch.device("meta")))
            for table in tables
            for slot, entry in table.items()
            if entry is not None and not (self._is_wanted(entry) and self.entries[id(entry)].owner is module)
        )

    @contextmanager
    def _values_kept(self, module: nn.Module) -> Iterator[None]:
        """Refuse an initialiser that overwrites existing values of its children."""
        below = (param for part in module.children() for param in (*part.parameters(), *part.buffers()))
        others = [tensor for tensor in below if not tensor.is_meta and self.entries.get(id(tensor)) not in self.free]
        before = [other._version for other in others]
        yield
        if before != [other._version for other in others]:
            raise ModelError(
                f"the initialiser of {self.names[module] or 'the model'} ({type(module).__name__}) overwrites tensors "
                "that already have values",
                expected="a model that is entirely on the meta device",
            )

    def _is_wanted(self, tensor: Tensor) -> bool:
        entry = self.entries.get(id(tensor))
        return entry is not None and entry in self.wanted


def _children_first(modules: Mapping[nn.Module, str]) -> Iterator[nn.Module]:
    seen_modules: set[nn.Module] = set()

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        if module not in seen_modules:
            seen_modules.add(module)
            for child in module.children():
                yield from visit(child)
            yield module

    for module in modules:
        yield from visit(module)


def _above(catalogue: Catalogue) -> dict[nn.Module, Initialiser | None]:
    """Return the nearest `_init_weights` of every module, its own or that of a parent."""
    methods: dict[nn.Module, Initialiser | None] = {}

    def visit(module: nn.Module, inherited: Initialiser | None) -> None:
        mine = getattr(module, "_init_weights", None)
        method = mine if callable(mine) and _takes_one(mine) else inherited
        if methods.get(module) is None:
            methods[module] = method
            for child in module.children():
                visit(child, method)

    for top in ([catalogue.root] if catalogue.root is not None else []) + [block.module for block in catalogue.blocks]:
        visit(top, None)
    return methods


def _takes_one(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError):
        return False
    return True


def _own_method(module: nn.Module) -> Callable[[], Any] | None:
    named = (getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters"))
    return next(filter(callable, named), None)


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 1


def _emptied(tensor: Tensor) -> int:
    """Make a tensor look untouched; return its version."""
    if _has_nan(tensor) and not is_packed(tensor):
        tensor.detach().fill_(torch.nan)
    return tensor._version


def _refusal(entry: Entry) -> ModelError:
    kind = type(entry.owner).__name__
    if entry.kind == "buffer" and not entry.saved:
        return ModelError(
            f"the buffer {entry.name} of {kind} is on the meta device, and no weights file contains it",
            expected="a module that can compute it",
            fix="add a reset_parameters() that computes it, or create the buffer on the host: device='cpu'",
        )
    return ModelError(
        f"the {entry.kind} {entry.name} is on the meta device, and {kind} has no initialiser for it",
        expected="reset_parameters() in the module, or _init_weights(module) in a parent module",
        fix="add one of these, or pass weights= to read it from files",
    )
