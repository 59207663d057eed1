"""Equal random numbers for a loss of some rows and for a loss of more rows, among which these are.

    whole   dropout draws a mask of shape (8, 5)         noted
    part    dropout draws a mask of shape (3, 5)         gets rows 0 to 2 of the first one
    part    dropout draws a mask of shape (5, 5)         gets rows 3 to 7

Draws that choose among rows (`randperm`) cannot be equal: they are named. Everything is restored afterwards: the
generators of torch, Python and numpy, and those that the loss has of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from drumline.model.randomness import HostChance, Randomness


class LossDraws:
    """What a loss draws of all rows; its parts draw the same.

    >>> draws = LossDraws(torch.device("cpu"), everywhere=True)
    >>> with draws.of(0, 4, 4):
    ...     whole = torch.rand(4, 2)
    >>> with draws.of(1, 3, 4):
    ...     bool((torch.rand(2, 2) == whole[1:3]).all())
    True
    """

    def __init__(self, device: torch.device, turn: int = 0, *, everywhere: bool = False) -> None:
        self.device = device
        self._turn = turn  # others draw other numbers
        self._torch = Randomness(turn, device)
        self._states = self._torch.states()
        self._host = HostChance()
        self._own_states: dict[torch.Generator, Tensor] = {}  # generators of the loss, as they were
        self._draws: list[tuple[Any, tuple[Tensor, ...]]] = []  # what was called, and what was drawn
        self.unequal: list[str] = []  # draws that could not be made equal
        self._is_noted = False  # whether all rows have drawn
        self.host = False  # whether Python's or numpy's generators were used
        self.everywhere = everywhere  # whether every call may draw, not only those whose names say so
        self.is_missed = False  # whether all rows drew numbers in a call whose name does not say so

    @contextmanager
    def of(self, first: int, end: int, rows: int) -> Iterator[TorchDispatchMode | None]:
        """Draw for the rows from `first` to `end` of so many; first for all of them.

        It yields the mode in which calls must run that may draw; None if all of them do, or all rows drew nothing.
        """
        is_whole = (first, end) == (0, rows) and not self._is_noted
        if not is_whole and not self._draws and not self.host:
            yield None
            return
        self._is_noted = True
        mode = _Drawing(self, None if is_whole else (first, end, rows))
        if self._turn:
            self._torch.seed_all(self._turn)
        try:
            with mode if self.everywhere else nullcontext():
                yield None if self.everywhere else mode
        finally:
            self.is_missed = is_whole and not self.everywhere and not self._draws and not self._turn
            self.is_missed = self.is_missed and self._torch.has_moved(self._states)  # unless they were seeded
            self._torch.go_on(self._states)
            for generator, state in self._own_states.items():
                generator.set_state(state)
            if self._host.has_moved():
                self.host = True
                self._host.restore()

    def keep(self, generator: Any) -> None:
        """Remember a generator of the loss as it is before it is first used."""
        if isinstance(generator, torch.Generator) and generator not in self._own_states:
            self._own_states[generator] = generator.get_state()

    def note(self, func: tuple[Any, Any], draws: tuple[Tensor, ...]) -> None:
        """Keep what was drawn for all rows."""
        self._draws.append((func, tuple(tensor.detach().clone() for tensor in draws)))

    def fill(self, at: int, func: tuple[Any, Any], draws: tuple[Tensor, ...], first: int, end: int, rows: int) -> None:
        """Overwrite what was drawn for some rows with what they got among all."""
        known, whole = self._draws[at] if at < len(self._draws) else (None, ())
        pairs = list(zip(whole, draws, strict=False))
        parts = [_rows_of(tensor, other, first, end, rows) for tensor, other in pairs]
        if known != func or any(tensor is None for tensor in parts):
            name = func[0]._opname.rstrip("_")
            if name not in self.unequal:
                self.unequal.append(name)
            return
        with torch.no_grad():
            for (_, tensor), part in zip(pairs, parts, strict=True):
                if part is not None:
                    tensor.copy_(part)


class _Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is drawn for all rows, or lets some `rows` draw what they drew among all."""

    def __init__(self, draws: LossDraws, rows: tuple[int, int, int] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws, self.rows = draws, rows
        self.number = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **named)
        self.draws.keep(named.get("generator"))
        entries = func(*args, **named)
        tensors = tuple(
            value for value in (entries if isinstance(entries, tuple) else (entries,)) if isinstance(value, Tensor)
        )
        call = func, _range_of(func, args)
        if self.rows is None:
            self.draws.note(call, tensors)
        else:
            self.draws.fill(self.number, call, tensors, *self.rows)
        self.number += 1
        return entries


def _range_of(func: Any, args: tuple[Any, ...]) -> Any:
    """Return from what a draw of whole numbers chooses: if that grows with the rows, it chooses among rows."""
    if func._opname == "multinomial":
        return args[0].shape[-1]
    if func._opname.startswith("rand"):
        return tuple(argument for argument in args if isinstance(argument, int))
    return None


def _rows_of(whole: Tensor, part: Tensor, first: int, end: int, rows: int) -> Tensor | None:
    """Return the part of a draw that belongs to some rows; None if its shape does not say which that is."""
    if whole.shape == part.shape:
        return whole
    if whole.dim() != part.dim() or whole.dtype != part.dtype:
        return None
    dims = [at for at, (number, other) in enumerate(zip(whole.shape, part.shape, strict=True)) if number != other]
    inside, rest = divmod(whole.shape[dims[0]], rows)
    if len(dims) > 1 or rest or part.shape[dims[0]] != (end - first) * inside:
        return None
    return whole.narrow(dims[0], first * inside, (end - first) * inside)
