"""What ranks compare, so that all train on the same: graphs, code, weights, batches.

All of it is small and cheap: digests, counts, and a few elements of each tensor. If two ranks differ, what they told
shows how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
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
from drumline.model.blocks.value_names import digest_of, function_name, short
from drumline.model.quantised.packed import parts_of
from drumline.model.values import pack
from drumline.runtime.user_batch import is_apart

Print = tuple[str, tuple[int, ...], bytes]  # a tensor's dtype, shape and some elements


def plan_of(blocks: Iterable[Block]) -> Script | None:
    """Return the trace of a model, if it was traced."""
    return next((block.module.script for block in blocks if isinstance(block.module, Piece)), None)


class TracedKinds:
    """The kinds of input on which this process traced blocks, and which of them other ranks do not know yet.

    >>> TracedKinds([]).fresh()
    {}
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._plan = plan_of(blocks)
        self._known = set() if self._plan is None else set(self._plan.written)

    def fresh(self) -> dict[str, str]:
        """Return a digest of the graph traced for each new kind of input."""
        if self._plan is None or len(self._plan.written) == len(self._known):
            return {}
        new = {kind: digest_of(lines) for kind, lines in self._plan.written.items() if kind not in self._known}
        self._known.update(new)
        return new


_MENDS = {
    "graph": "make sure that the forward depends neither on the rank nor on the order of a set: use sorted(...)",
    "code": "start all ranks from the same files, with the same settings",
}


def agree_on_lines(crew: Crew, what: str, lines: Sequence[str]) -> None:
    """Raise the same error on all ranks unless all have the same lines; send them only if their digests differ."""
    answers = crew.collect(what, short("\n".join(lines)))
    if len(set(answers)) > 1:
        each = crew.collect(f"{what} in full", list(lines))
        rank = next(rank for rank, report in enumerate(answers) if report != answers[0])
        raise _different(what, crew.naming.several(0, rank), each[0], each[rank])


def _different(what: str, ranks: str, first: Sequence[str], second: Sequence[str]) -> MismatchError:
    name, other = next(pair for pair in zip_longest(first, second, fillvalue="nothing more") if pair[0] != pair[1])
    subject = "traced the model to different graphs" if what == "graph" else f"have different {what} of the model"
    return MismatchError(
        f"{ranks} {subject}: {name!s:.160} and {other!s:.160}",
        expected="the same model on every rank",
        fix=_MENDS[what],
    )


def agree_on_followed(graphs: Sequence[Mapping[str, str]], step: int, naming: RankNames = BY_NUMBER) -> None:
    """Raise unless all ranks that traced a new kind of input in this step got the same graph.

    >>> agree_on_followed([{"a": "1"}, {"a": "2"}], 3)
    Traceback (most recent call last):
    drumline.core.errors.MismatchError: step 3: ranks 0 and 1 traced the model to different graphs for new inputs...
    """
    difference = first_difference(graphs)
    if difference is not None:
        raise MismatchError(
            f"step {step}: {naming.several(*difference[:2])} traced the model to different graphs for new inputs",
            expected="the same calls on every rank",
            fix=_MENDS["graph"],
        )


# ---- code and weights ------------------------------------------------------------------------------------------------


def code_of(model: Model, *functions: Any) -> list[str]:
    """Return lines that identify the model's code and settings: its classes, their forwards, torch's own layers.

    >>> code_of(nn.Sequential(nn.Dropout(0.1))) == code_of(nn.Sequential(nn.Dropout(0.2)))
    False
    """
    modules = [(name, module) for name, module in _modules(model)]
    kinds = dict.fromkeys(type(module) for _, module in modules)
    lines = [f"{kind.__module__}.{kind.__qualname__} {_code(kind.forward)}" for kind in kinds]
    lines += [
        f"{name}: {type(module).__name__}({module.extra_repr()})"
        for name, module in modules
        if type(module).__module__.startswith("torch.nn.modules")
    ]
    return lines + [f"{_function_name(function)} {_code(function)}" for function in functions if function is not None]


def _function_name(function: Any) -> str:
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
    constants = [_text(const) if isinstance(const, CodeType) else _constant(const) for const in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _constant(group: Any) -> str:
    return str(sorted(map(repr, group))) if isinstance(group, frozenset) else repr(group)


def weights_of(model: Model) -> dict[str, bytes]:
    """Return a few elements of each parameter that has values, by name; parameters on the meta device have none."""
    if isinstance(model, nn.Module):
        named = list(model.named_parameters())
    else:
        named = [pair for block in blocks_of(model) for pair in block.named_parameters()]
    return samples_of({name: param for name, param in named if not param.is_meta})


def samples_of(named: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Return a few elements of each tensor, as bytes; all tensors of a device are read at once.

    >>> samples_of({"a": torch.zeros(100)}) == samples_of({"a": torch.ones(100)})
    False
    """
    parts = {name: parts_of(tensor).values() for name, tensor in named.items()}
    samples = iter(samples_begun([part for each in parts.values() for part in each])())
    return {name: b"".join(islice(samples, len(each))) for name, each in parts.items()}


def first_difference(tables: Sequence[Mapping[str, bytes | str]]) -> tuple[int, int, str] | None:
    """Return two ranks and the first name under which their values differ; None if they agree.

    >>> first_difference([{"a": b"1"}, {}, {"a": b"2"}])
    (0, 2, 'a')
    """
    known: dict[str, tuple[int, bytes | str]] = {}
    for rank, entry in enumerate(tables):
        for name, value in entry.items():
            first, other = known.setdefault(name, (rank, value))
            if other != value:
                return first, rank, name
    return None


# ---- steps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArgumentPrint:
    """A fingerprint of a rank's arguments: the dtype, shape and some elements of every tensor.

    >>> ArgumentPrint.of(torch.zeros(4, 2), None).batch[0][:2]
    ('torch.float32', (4, 2))
    """

    batch: tuple[Print, ...]
    target: tuple[Print, ...]
    is_apart: bool = False  # whether the user cut it into microbatches

    @staticmethod
    def of(batch: Any, target: Any) -> ArgumentPrint:
        """Return the fingerprint of this batch and target."""
        return begun(batch, target)()


def begun(batch: Any, target: Any) -> Callable[[], ArgumentPrint]:
    """Read a batch and a target before a step, which may change them; return a function that gives their fingerprint.

    Tensors on a device start copying to the host at once, all together, so that no rank waits for them later.

    >>> value = torch.zeros(4, 2)
    >>> later = begun(value, None)
    >>> _ = value.fill_(1.0)
    >>> later() == ArgumentPrint.of(torch.zeros(4, 2), None)
    True
    """
    (batches, form), (targets, other) = (((), None) if value is None else pack(value) for value in (batch, target))
    samples = samples_begun([*batches, *targets])
    given_apart = is_apart(form) or is_apart(other)

    def fingerprint() -> ArgumentPrint:
        data = samples()
        pairs = zip((*batches, *targets), data, strict=True)
        prints = [(str(tensor.dtype), tuple(tensor.shape), sample) for tensor, sample in pairs]
        return ArgumentPrint(tuple(prints[: len(batches)]), tuple(prints[len(batches) :]), given_apart)

    return fingerprint


def agree_on_batch(prints: Sequence[ArgumentPrint | None], step: int, naming: RankNames = BY_NUMBER) -> None:
    """Raise unless all ranks that got a batch or a target got the same one.

    >>> agree_on_batch([ArgumentPrint.of(torch.zeros(4, 2), None), ArgumentPrint.of(torch.zeros(3, 2), None)], 5)
    Traceback (most recent call last):
    drumline.core.errors.MismatchError: step 5: ranks 0 and 1 got different batches: float32(4, 2) and float32(3, 2)...
    """
    if all(argument_print is None or argument_print == prints[0] for argument_print in prints):
        return
    numbers = {
        mark.is_apart: rank for rank, mark in enumerate(prints) if mark is not None and (mark.batch or mark.target)
    }
    if len(numbers) > 1:
        raise MismatchError(
            f"step {step}: {naming.rank(numbers[True])} got Microbatches and {naming.rank(numbers[False])} a batch or "
            "target to be cut",
            expected="the same on every rank that gets one",
            fix="pass Microbatches to all of them",
        )
    for what in ("batch", "target"):
        each = [(rank, getattr(mark, what)) for rank, mark in enumerate(prints) if mark is not None]
        each = [(rank, mark) for rank, mark in each if mark]
        for rank, mark in each[1:]:
            _agree_on_tensors(what, step, naming.several(each[0][0], rank), each[0][1], mark)


def _agree_on_tensors(
    what: str,
    step: int,
    ranks: str,
    first: Sequence[Print],
    second: Sequence[Print],
) -> None:
    kinds, others = ([f"{dtype}{shape}".removeprefix("torch.") for dtype, shape, _ in row] for row in (first, second))
    differs = kinds != others
    samples = [(chunk, other) for (*_, chunk), (*_, other) in zip(first, second, strict=False)]
    if not differs and all(chunk == other or not chunk or not other for chunk, other in samples):
        return
    shown = f"{', '.join(kinds)} and {', '.join(others)}" if differs else "same shapes, different values"
    raise MismatchError(
        f"step {step}: {ranks} got different {what}{'es' if what == 'batch' else 's'}: {shown}",
        expected=f"the same {what} on every rank that gets one",
        fix="use the same seed and data order on all ranks, or pass None on ranks without the first or last stage",
    )


def agree_on_program(digests: Sequence[tuple[str, str]], step: int, naming: RankNames = BY_NUMBER) -> None:
    """Raise unless all ranks ran the same program: what each told is its digest and name, none for the pipeline's own.

    >>> agree_on_program([("", ""), ("1a", "long")], 2)
    Traceback (most recent call last):
    drumline.core.errors.MismatchError: step 2: rank 0 ran the pipeline's own program and rank 1 the program 'long'...
    """
    other = next((rank for rank, (digest, _) in enumerate(digests) if digest != digests[0][0]), None)
    if other is not None:
        names = [f"the program {name!r}" if digest else "the pipeline's own program" for digest, name in digests]
        raise MismatchError(
            f"step {step}: {naming.rank(0)} ran {names[0]} and {naming.rank(other)} {names[other]}",
            expected="the same program= on every rank",
        )


def agree_on_order(orders: Sequence[tuple[int, ...]], step: int, naming: RankNames = BY_NUMBER) -> None:
    """Raise unless all ranks that chose an order of microbatches chose the same.

    >>> agree_on_order([(0, 1), (), (1, 0)], 4)
    Traceback (most recent call last):
    drumline.core.errors.MismatchError: step 4: ranks 0 and 2 put the microbatches in different orders; expected ...
    """
    chosen = [(rank, order) for rank, order in enumerate(orders) if order]
    for rank, order in chosen[1:]:
        if order != chosen[0][1]:
            raise MismatchError(
                f"step {step}: {naming.several(chosen[0][0], rank)} put the microbatches in different orders",
                expected="the same sizes to choose by: those of the batch, or of a target where there is no batch",
                fix="pass the batch to all ranks that hold the first or the last stage",
            )


def agree_on_mode(trained: Sequence[bool], step: int, naming: RankNames = BY_NUMBER) -> None:
    """Raise unless all ranks called `step`, or all called `eval_step`.

    >>> agree_on_mode([True, False], 2)
    Traceback (most recent call last):
    drumline.core.errors.MismatchError: call 2: rank 0 ran step and rank 1 ran eval_step; expected the same call ...
    """
    if len(set(trained)) > 1:
        raise MismatchError(
            f"call {step}: {naming.rank(trained.index(True))} ran step and {naming.rank(trained.index(False))} ran"
            " eval_step",
            expected="the same call on all ranks",
        )
