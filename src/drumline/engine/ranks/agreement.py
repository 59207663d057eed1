"""What ranks compare, so that all train on the same: graphs, code, weights, batches.

All of it is small and cheap: digests, counts, and a few elements of each tensor. If two ranks differ, what they told
shows how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import CodeType
from typing import Any

import torch
from torch import nn

from drumline.channel.rank_names import BY_NUMBER, RankNames
from drumline.core.errors import MismatchError
from drumline.engine.ranks.crew import Crew
from drumline.engine.ranks.elements import samples_begun
from drumline.model.block import Block, Model, blocks_of
from drumline.model.blocks.pieces import Piece
from drumline.model.blocks.script import Script
from drumline.model.blocks.value_names import function_name, short
from drumline.model.microbatches import has_microbatches
from drumline.model.values import pack

Print = tuple[str, tuple[int, ...], bytes]  # a tensor's dtype, shape and some elements


def plan_of(blocks: Iterable[Block]) -> Script | None:
    """Return the trace of a model, if it was traced."""
    return next((block.module.script for block in blocks if isinstance(block.module, Piece)), None)


class Followed:
    """The kinds of input on which this process traced blocks, and which of them other ranks do not know yet.

    >>> Followed([]).fresh()
    {}
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._plan = plan_of(blocks)
        self._known = set() if self._plan is None else set(self._plan.written)

    def fresh(self) -> dict[str, str]:
        """Return a digest of the graph traced for each new kind of input."""
        if self._plan is None or len(self._plan.written) == len(self._known):
            return {}
        new = {kind: short("\n".join(lines)) for kind, lines in self._plan.written.items() if kind not in self._known}
        self._known.update(new)
        return new


_MENDS = {
    "graph": "make sure that the forward depends neither on the rank nor on the order of a set: use sorted(...)",
    "code": "start all ranks from the same files, with the same settings",
}


def agree_on_lines(crew: Crew, what: str, lines: Sequence[str]) -> None:
    """Raise the same error on all ranks unless all have the same lines; send them only if their digests differ."""
    told = crew.collect(what, short("\n".join(lines)))
    if len(set(told)) > 1:
        each = crew.collect(f"{what} in full", list(lines))
        rank = next(rank for rank, one in enumerate(told) if one != told[0])
        raise _different(what, crew.called.several(0, rank), each[0], each[rank])


def _different(what: str, ranks: str, first: Sequence[str], second: Sequence[str]) -> MismatchError:
    one, other = next(pair for pair in zip_longest(first, second, fillvalue="nothing more") if pair[0] != pair[1])
    subject = "traced the model to different graphs" if what == "graph" else f"have different {what} of the model"
    return MismatchError(
        f"{ranks} {subject}: {one!s:.160} and {other!s:.160}",
        expected="the same model on every rank",
        fix=_MENDS[what],
    )


def agree_on_followed(told: Sequence[Mapping[str, str]], step: int, called: RankNames = BY_NUMBER) -> None:
    """Raise unless all ranks that traced a new kind of input in this step got the same graph.

    >>> agree_on_followed([{"a": "1"}, {"a": "2"}], 3)
    Traceback (most recent call last):
    drumline.core.errors.MismatchError: step 3: ranks 0 and 1 traced the model to different graphs for new inputs...
    """
    found = first_difference(told)
    if found is not None:
        raise MismatchError(
            f"step {step}: {called.several(*found[:2])} traced the model to different graphs for new inputs",
            expected="the same calls on every rank",
            fix=_MENDS["graph"],
        )


# ---- code and weights ------------------------------------------------------------------------------------------------


def code_of(model: Model, *functions: Any) -> list[str]:
    """Return lines that identify the model's code and settings: its classes, their forwards, torch's own layers.

    >>> code_of(nn.Sequential(nn.Dropout(0.1))) == code_of(nn.Sequential(nn.Dropout(0.2)))
    False
    """
    modules = [(name, one) for name, one in _modules(model)]
    kinds = dict.fromkeys(type(one) for _, one in modules)
    lines = [f"{kind.__module__}.{kind.__qualname__} {_code(kind.forward)}" for kind in kinds]
    lines += [
        f"{name}: {type(one).__name__}({one.extra_repr()})"
        for name, one in modules
        if type(one).__module__.startswith("torch.nn.modules")
    ]
    return lines + [f"{_called(one)} {_code(one)}" for one in functions if one is not None]


def _called(function: Any) -> str:
    return function_name(function if hasattr(function, "__qualname__") else type(function))


def _modules(model: Model) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(model, nn.Module):
        yield from model.named_modules()
        return
    for block in blocks_of(model):
        yield from block.module.named_modules(prefix=block.name)


def _code(function: Any) -> str:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return "" if code is None else short(_text(code))


def _text(code: CodeType) -> str:
    constants = [_text(one) if isinstance(one, CodeType) else _constant(one) for one in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _constant(one: Any) -> str:
    return str(sorted(map(repr, one))) if isinstance(one, frozenset) else repr(one)


def weights_of(model: Model) -> dict[str, bytes]:
    """Return a few elements of each parameter that has values, by name; parameters on the meta device have none."""
    if isinstance(model, nn.Module):
        named = list(model.named_parameters())
    else:
        named = [pair for block in blocks_of(model) for pair in block.named_parameters()]
    return samples_of({name: one for name, one in named if not one.is_meta})


def samples_of(named: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Return a few elements of each tensor, as bytes; all tensors of a device are read at once.

    >>> samples_of({"a": torch.zeros(100)}) == samples_of({"a": torch.ones(100)})
    False
    """
    return dict(zip(named, samples_begun(list(named.values()))(), strict=True))


def first_difference(told: Sequence[Mapping[str, bytes | str]]) -> tuple[int, int, str] | None:
    """Return two ranks and the first name under which their values differ; None if they agree.

    >>> first_difference([{"a": b"1"}, {}, {"a": b"2"}])
    (0, 2, 'a')
    """
    known: dict[str, tuple[int, bytes | str]] = {}
    for rank, one in enumerate(told):
        for name, value in one.items():
            first, other = known.setdefault(name, (rank, value))
            if other != value:
                return first, rank, name
    return None


# ---- steps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Given:
    """A fingerprint of a rank's arguments: the dtype, shape and some elements of every tensor.

    >>> Given.of(torch.zeros(4, 2), None).batch[0][:2]
    ('torch.float32', (4, 2))
    """

    batch: tuple[Print, ...]
    target: tuple[Print, ...]
    is_apart: bool = False  # whether the user cut it into microbatches

    @staticmethod
    def of(batch: Any, target: Any) -> Given:
        """Return the fingerprint of this batch and target."""
        return begun(batch, target)()


def begun(batch: Any, target: Any) -> Callable[[], Given]:
    """Read a batch and a target before a step, which may change them; return a function that gives their fingerprint.

    Tensors on a device start copying to the host at once, all together, so that no rank waits for them later.

    >>> one = torch.zeros(4, 2)
    >>> later = begun(one, None)
    >>> _ = one.fill_(1.0)
    >>> later() == Given.of(torch.zeros(4, 2), None)
    True
    """
    batches, targets = (() if value is None else pack(value)[0] for value in (batch, target))
    samples = samples_begun([*batches, *targets])
    is_apart = has_microbatches(batch) or has_microbatches(target)

    def given() -> Given:
        found = samples()
        pairs = zip((*batches, *targets), found, strict=True)
        prints = [(str(one.dtype), tuple(one.shape), sample) for one, sample in pairs]
        return Given(tuple(prints[: len(batches)]), tuple(prints[len(batches) :]), is_apart)

    return given


def agree_on_batch(told: Sequence[Given | None], step: int, called: RankNames = BY_NUMBER) -> None:
    """Raise unless all ranks that got a batch or a target got the same one.

    >>> agree_on_batch([Given.of(torch.zeros(4, 2), None), Given.of(torch.zeros(3, 2), None)], 5)
    Traceback (most recent call last):
    drumline.core.errors.MismatchError: step 5: ranks 0 and 1 got different batches: float32(4, 2) and float32(3, 2)...
    """
    if all(one is None or one == told[0] for one in told):
        return
    apart = {one.is_apart: rank for rank, one in enumerate(told) if one is not None and (one.batch or one.target)}
    if len(apart) > 1:
        raise MismatchError(
            f"step {step}: {called.one(apart[True])} got Microbatches and {called.one(apart[False])} a batch or target"
            " to be cut",
            expected="the same on every rank that gets one",
            fix="pass Microbatches to all of them",
        )
    for what in ("batch", "target"):
        each = [(rank, getattr(one, what)) for rank, one in enumerate(told) if one is not None]
        each = [(rank, one) for rank, one in each if one]
        for rank, one in each[1:]:
            _agree_on_tensors(what, step, called.several(each[0][0], rank), each[0][1], one)


def _agree_on_tensors(
    what: str,
    step: int,
    ranks: str,
    first: Sequence[Print],
    second: Sequence[Print],
) -> None:
    kinds, others = ([f"{dtype}{shape}".removeprefix("torch.") for dtype, shape, _ in one] for one in (first, second))
    differs = kinds != others
    samples = [(one, other) for (*_, one), (*_, other) in zip(first, second, strict=False)]
    if not differs and all(one == other or not one or not other for one, other in samples):
        return
    shown = f"{', '.join(kinds)} and {', '.join(others)}" if differs else "same shapes, different values"
    raise MismatchError(
        f"step {step}: {ranks} got different {what}{'es' if what == 'batch' else 's'}: {shown}",
        expected=f"the same {what} on every rank that gets one",
        fix="use the same seed and data order on all ranks, or pass None on ranks without the first or last stage",
    )


def agree_on_program(told: Sequence[tuple[str, str]], step: int, called: RankNames = BY_NUMBER) -> None:
    """Raise unless all ranks ran the same program: what each told is its digest and name, none for the pipeline's own.

    >>> agree_on_program([("", ""), ("1a", "long")], 2)
    Traceback (most recent call last):
    drumline.core.errors.MismatchError: step 2: rank 0 ran the pipeline's own program and rank 1 the program 'long'...
    """
    other = next((rank for rank, (digest, _) in enumerate(told) if digest != told[0][0]), None)
    if other is not None:
        names = [f"the program {name!r}" if digest else "the pipeline's own program" for digest, name in told]
        raise MismatchError(
            f"step {step}: {called.one(0)} ran {names[0]} and {called.one(other)} {names[other]}",
            expected="the same program= on every rank",
        )


def agree_on_order(told: Sequence[tuple[int, ...]], step: int, called: RankNames = BY_NUMBER) -> None:
    """Raise unless all ranks that chose an order of microbatches chose the same.

    >>> agree_on_order([(0, 1), (), (1, 0)], 4)
    Traceback (most recent call last):
    drumline.core.errors.MismatchError: step 4: ranks 0 and 2 put the microbatches in different orders; expected ...
    """
    chosen = [(rank, order) for rank, order in enumerate(told) if order]
    for rank, order in chosen[1:]:
        if order != chosen[0][1]:
            raise MismatchError(
                f"step {step}: {called.several(chosen[0][0], rank)} put the microbatches in different orders",
                expected="the same sizes to choose by: those of the batch, or of a target where there is no batch",
                fix="pass the batch to all ranks that hold the first or the last stage",
            )


def agree_on_mode(trained: Sequence[bool], step: int, called: RankNames = BY_NUMBER) -> None:
    """Raise unless all ranks called `step`, or all called `eval_step`.

    >>> agree_on_mode([True, False], 2)
    Traceback (most recent call last):
    drumline.core.errors.MismatchError: call 2: rank 0 ran step and rank 1 ran eval_step; expected the same call ...
    """
    if len(set(trained)) > 1:
        raise MismatchError(
            f"call {step}: {called.one(trained.index(True))} ran step and {called.one(trained.index(False))} ran"
            " eval_step",
            expected="the same call on all ranks",
        )
