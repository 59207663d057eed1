"""The text of a program over units: `2F0.3` is the forward of stage 2 on slice 3 of microbatch 0.

`Program.parse` does not read this yet; these two functions do. PyTorch's own files have no slices.
"""

from __future__ import annotations

import re

from drumline.core.errors import ProgramError
from drumline.core.program import Program

_UNIT = re.compile(r"([0-9]+)([A-Z_]*[FBIW])([0-9]+)\.([0-9]+)")
_CELL = re.compile(r"([0-9]+(?:SEND_|RECV_|WAIT_SEND_)?[FBIW])([0-9]+)")


def format_slices(program: Program, num_slices: int) -> str:
    r"""Return the text of a program over units, with the slice of each.

    >>> print(format_slices(Program.parse("0F0,0F1,0SEND_F1,0B1,0B0,0REDUCE_GRAD"), 2))
    0F0.0,0F0.1,0SEND_F0.1,0B0.1,0B0.0,0REDUCE_GRAD
    """

    def written(match: re.Match[str]) -> str:
        microbatch, number = divmod(int(match[2]), num_slices)
        return f"{match[1]}{microbatch}.{number}"

    return _CELL.sub(written, program.format()) if num_slices > 1 else program.format()


def parse_slices(text: str, name: str = "custom") -> tuple[Program, int]:
    r"""Parse such a text; return the program over units and the number of slices, 1 for a text without any.

    >>> program, num_slices = parse_slices("0F0.0,0F0.1,0B0.1,0B0.0")
    >>> print(program, num_slices)
    0F0,0F1,0B1,0B0 2
    >>> parse_slices("0F0.0,0F1")
    Traceback (most recent call last):
    drumline.core.errors.ProgramError: some actions name a slice and 0F1 does not; expected a slice in all of them
    """
    units = list(_UNIT.finditer(text))
    if not units:
        return Program.parse(text, name), 1
    num_slices = 1 + max(int(match[4]) for match in units)
    plain = _UNIT.sub("", text)
    if (bare := _CELL.search(plain)) is not None:
        raise ProgramError(f"some actions name a slice and {bare[0]} does not", expected="a slice in all of them")
    text = _UNIT.sub(lambda match: f"{match[1]}{match[2]}{int(match[3]) * num_slices + int(match[4])}", text)
    return Program.parse(text, name), num_slices
