"""Compares the kernel's reader and writer of the text form with the Python ones."""

from __future__ import annotations

import random

from drumline.core.errors import ProgramError
from drumline.core.kernel.library import Kernel
from drumline.core.program import Program, Row
from kernel_cases import using

# What a damaged text gets more of: all that means something to a reader, and some of what Python counts as white space.
LETTERS = "0123456789FBIWSENDRCV_UPTHA()(;);,,,\n\n \t\r\f\v\x1c\x85\u2028٣é-+."
WORDS = (
    "SEND_F",
    "WAIT_SEND_F",
    "UPDATE",
    "REDUCE_GRAD",
    "OVERLAP_F_B",
    "(0F1;1B0)OVERLAP_F_B",
    "\r\n",
    "  ",
    "00",
    "1" * 10,
)


def outcome(text: str) -> tuple[Row, ...] | tuple[str, str, str]:
    """Return the rows that a text gives, or its error."""
    try:
        return Program.parse(text).rows
    except ProgramError as error:
        return error.error, error.expected, error.fix


def compare_texts(kernel: Kernel, text: str) -> bool:
    """Compare what both readers give for a text; return whether it is a program."""
    outcomes = []
    for use in (kernel, None):
        with using(use):
            outcomes.append(outcome(text))
    assert outcomes[0] == outcomes[1], text
    return not isinstance(outcomes[0][0], str)


def compare_writers(kernel: Kernel, program: Program) -> str:
    """Compare what both writers give for a program of arrays; return the text."""
    texts = []
    for use in (kernel, None):
        with using(use):
            texts.append(Program.of_columns(Program(program.rows).columns).format())
    assert texts[0] == texts[1]
    return texts[0]


def edited(text: str, rng: random.Random) -> str:
    """Return the text with one to three letters or words put in, taken out or replaced."""
    for _ in range(rng.randint(1, 3)):
        low = rng.randrange(len(text) + 1)
        high = min(len(text), low + rng.randrange(3))
        text = text[:low] + rng.choice(("", rng.choice(LETTERS), rng.choice(WORDS))) + text[high:]
    return text
