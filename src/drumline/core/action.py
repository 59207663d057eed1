"""A single action of a rank, and its text.

    2F0    forward of stage 2 on microbatch 0        2SEND_F0  send stage 2's output
    2B0    its whole backward                        3RECV_F0  receive it at stage 3
    2I0    the half that makes the input gradient    3SEND_B0  send stage 3's input gradient back
    2W0    the half that makes the weight gradient   2RECV_B0  receive it at stage 2
    (0F5;1B2)OVERLAP_F_B   a forward and a backward run as one action
    2UNSHARD  2RESHARD     gather or release the stage's parameters
    2REDUCE_GRAD           exchange the stage's gradients between its copies or replicas
    2WAIT_SEND_F0  3WAIT_SEND_B0   wait until that send completes
    2WAIT_REDUCE_GRAD      wait until the stage's gradient exchange completes
    2UPDATE5               optimizer step of stage 2 with the gradients up to microbatch 5
    2F0.3                  forward of stage 2 on slice 3 of microbatch 0, where microbatches run in slices

Slices count through all microbatches: of S slices, slice s of microbatch m is unit m*S + s, and runs like a microbatch.
Only its text says which slice it is.

PyTorch's pipelining reads and writes the same text, except for UPDATE and slices. It knows the three WAITs since
version 2.15.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from drumline.core.errors import ProgramError, nearest


class Op(StrEnum):
    """The kind of an action; the value is its text."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    OVERLAP = "OVERLAP_F_B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    UPDATE = "UPDATE"
    WAIT_SEND_F = "WAIT_SEND_F"
    WAIT_SEND_B = "WAIT_SEND_B"
    WAIT_REDUCE_GRAD = "WAIT_REDUCE_GRAD"


COMPUTE_OPS = frozenset({Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})
SEND_OPS = frozenset({Op.SEND_F, Op.SEND_B})
RECV_OPS = frozenset({Op.RECV_F, Op.RECV_B})
TRANSFER_OPS = SEND_OPS | RECV_OPS
TIMED_OPS = COMPUTE_OPS | {Op.OVERLAP, Op.UPDATE, Op.UNSHARD, Op.RESHARD}
STATE_OPS = frozenset({Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD})
# Maps each WAIT to the op it waits for. The rank started that op earlier, for the same stage and microbatch.
AWAITED = {Op.WAIT_SEND_F: Op.SEND_F, Op.WAIT_SEND_B: Op.SEND_B, Op.WAIT_REDUCE_GRAD: Op.REDUCE_GRAD}
WAIT_OPS = frozenset(AWAITED)
WITHOUT_MICROBATCH = STATE_OPS | {Op.WAIT_REDUCE_GRAD}


class SliceNumber(int):
    """The number of one of S slices of all microbatches, written as microbatch and slice; otherwise a plain number.

    >>> unit = SliceNumber.of(6, 4)
    >>> print(unit, unit == 6, Action(2, Op.FORWARD, unit), unit + 1)
    1.2 True 2F1.2 7
    """

    num_slices: int

    @staticmethod
    def of(number: int, num_slices: int) -> SliceNumber:
        """Return the unit with this number, of microbatches in so many slices."""
        unit = SliceNumber(number)
        unit.num_slices = num_slices
        return unit

    def __str__(self) -> str:
        microbatch, number = divmod(int(self), self.num_slices)
        return f"{microbatch}.{number}"

    def __reduce__(self) -> tuple[Any, ...]:
        return SliceNumber.of, (int(self), self.num_slices)


def placed(number: int | None) -> tuple[int, int]:
    """Return the microbatch and the slice of a number in an action; without slices, slice 0.

    >>> placed(6), placed(SliceNumber.of(6, 4)), placed(None)
    ((6, 0), (1, 2), (0, 0))
    """
    number = number or 0
    return divmod(number, number.num_slices) if isinstance(number, SliceNumber) else (number, 0)


def in_units(numbers: Sequence[int], num_slices: int) -> Sequence[int]:
    """Return numbers of microbatches, or of their slices, each with its text; -1 stays as it is.

    >>> list(map(str, in_units([0, 1, 2], 1))), list(map(str, in_units([0, 1, 2, -1], 2)))
    (['0', '1', '2'], ['0.0', '0.1', '1.0', '-1'])
    """
    if num_slices == 1:
        return numbers
    known = {number: SliceNumber.of(number, num_slices) if number >= 0 else number for number in set(numbers)}
    return [known[number] for number in numbers]


class Action(NamedTuple):
    """One action of one rank. An overlapped pair holds its two halves in `parts` and takes the stage of the first.

    This is a named tuple because programs hold up to millions of actions, and tuples hash and compare 5x faster.

    >>> Action(2, Op.FORWARD, 0)
    2F0
    >>> Action.parse("(0F5;1B2)OVERLAP_F_B").parts
    (0F5, 1B2)
    """

    stage: int
    op: Op
    microbatch: int | None = None
    parts: tuple[Any, ...] = ()  # holds Actions; mypy drops the defaults of a named tuple that refers to itself

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.op}"
        return f"{self.stage}{self.op}" if self.microbatch is None else f"{self.stage}{self.op}{self.microbatch}"

    def __repr__(self) -> str:
        return str(self)

    @property
    def is_compute(self) -> bool:
        """Whether the rank computes: F, B, I, W or an overlapped pair."""
        return self.op in COMPUTE_OPS or self.op is Op.OVERLAP

    @property
    def work(self) -> tuple[Action, ...]:
        """The plain actions inside: the two halves of an overlapped pair, or the action itself."""
        return self.parts or (self,)

    def later(self, by: int) -> Action:
        """Return the same action so many microbatches later.

        >>> Action.parse("(0F5;1B2)OVERLAP_F_B").later(4), Action.parse("0REDUCE_GRAD").later(4)
        ((0F9;1B6)OVERLAP_F_B, 0REDUCE_GRAD)
        """
        microbatch = None if self.microbatch is None else self.microbatch + by
        return self._replace(microbatch=microbatch, parts=tuple(part.later(by) for part in self.parts))

    @staticmethod
    def parse(text: str, num_slices: int = 1) -> Action:
        """Parse `text` strictly: `2F0junk` is an error, and so is `2F0.3` unless microbatches run in slices.

        >>> Action.parse("2UPDATE5"), Action.parse("2F0.3", num_slices=4)
        (2UPDATE5, 2F0.3)
        """
        return _parse_pair(text, num_slices) if text.startswith("(") else _parse_single(text, num_slices)


# Recipes create hundreds of thousands of actions. Building one straight from a tuple is twice as fast as using named
# arguments; looking the op up on its class would add another 50%.
_new = tuple.__new__
_FORWARD, _BACKWARD, _INPUT, _WEIGHT = Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT
_OVERLAP = Op.OVERLAP


def F(stage: int, microbatch: int) -> Action:  # noqa: N802 - the letter the papers use
    """Return the forward of `stage` on `microbatch`.

    >>> F(2, 0)
    2F0
    """
    return _new(Action, (stage, _FORWARD, microbatch, ()))


def B(stage: int, microbatch: int) -> Action:  # noqa: N802
    """Return the whole backward of `stage` on `microbatch`.

    >>> B(2, 0)
    2B0
    """
    return _new(Action, (stage, _BACKWARD, microbatch, ()))


def I(stage: int, microbatch: int) -> Action:  # noqa: E743, N802
    """Return the input-gradient half of the backward.

    >>> I(2, 0)
    2I0
    """
    return _new(Action, (stage, _INPUT, microbatch, ()))


def W(stage: int, microbatch: int) -> Action:  # noqa: N802
    """Return the weight-gradient half of the backward.

    >>> W(2, 0)
    2W0
    """
    return _new(Action, (stage, _WEIGHT, microbatch, ()))


def overlap(forward: Action, backward: Action) -> Action:
    """Return a forward and a backward as one overlapped action.

    >>> overlap(F(0, 5), B(1, 2))
    (0F5;1B2)OVERLAP_F_B
    """
    return _new(Action, (forward.stage, _OVERLAP, None, (forward, backward)))


# ASCII digits only and no leading zeros: every action has exactly one spelling, and parsing inverts formatting.
_NUMBER = r"(0|[1-9][0-9]{0,8})"
_SINGLE = re.compile(rf"{_NUMBER}([A-Z]+(?:_[A-Z]+){{0,2}})(?:{_NUMBER}(?:\.{_NUMBER})?)?")
_PAIR = re.compile(r"\(([^();]*);([^();]*)\)OVERLAP_F_B")
_BY_TEXT = {op.value: op for op in Op}


def _parse_single(text: str, num_slices: int) -> Action:
    match = _SINGLE.fullmatch(text)
    if match is None:
        raise ProgramError(f"{_shown(text)} is not an action", expected="<stage><op><microbatch>, for example 2F0")
    stage, word, microbatch, part = match.groups()
    op = _BY_TEXT.get(word)
    if op is None or op is Op.OVERLAP:
        raise ProgramError(
            f"{_shown(text)} uses the unknown op {word!r}",
            fix=nearest(word, (op.value for op in Op if op is not Op.OVERLAP)),
        )
    if (microbatch is None) != (op in WITHOUT_MICROBATCH):
        wants = "no microbatch number" if op in WITHOUT_MICROBATCH else "a microbatch number"
        example = f"{stage}{word}" if op in WITHOUT_MICROBATCH else f"{stage}{word}0"
        raise ProgramError(f"{_shown(text)} is not an action", expected=f"{wants} after {word}, for example {example}")
    if microbatch is None:
        return Action(int(stage), op)
    if num_slices > 1 and part is not None and int(part) < num_slices:
        return Action(int(stage), op, SliceNumber.of(int(microbatch) * num_slices + int(part), num_slices))
    if num_slices > 1 or part is not None:
        raise _not_a_slice(text, f"{stage}{word}{microbatch}", part, num_slices)
    return Action(int(stage), op, int(microbatch))


def _not_a_slice(text: str, whole: str, part: str | None, num_slices: int) -> ProgramError:
    """Return the error for an action whose slice is missing, or that should have none."""
    if num_slices == 1:
        expected = f"no slice where microbatches run in one piece: {whole}"
        return ProgramError(f"{_shown(text)} names slice {part}, and microbatches have one slice", expected=expected)
    if part is None:
        return ProgramError(
            f"{_shown(text)} names no slice, and other actions do", expected=f"a slice in all of them, like {whole}.0"
        )
    return ProgramError(f"{_shown(text)} names slice {part}", expected=f"one of {num_slices} slices, counted from 0")


def _parse_pair(text: str, num_slices: int) -> Action:
    match = _PAIR.fullmatch(text)
    if match is None:
        raise ProgramError(
            f"{_shown(text)} is not an overlapped pair", expected="two actions, for example (0F5;1B2)OVERLAP_F_B"
        )
    parts = tuple(_parse_single(part, num_slices) for part in match.groups())
    if any(part.op not in COMPUTE_OPS for part in parts):
        raise ProgramError(f"{_shown(text)} overlaps a non-compute action", expected="F, B, I or W in both halves")
    return Action(parts[0].stage, Op.OVERLAP, None, parts)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
