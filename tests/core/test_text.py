"""The text form, read and written by the kernel: what the Python form gives, and its errors word by word."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.core import program as program_module
from drumline.core.errors import ProgramError
from drumline.core.kernel import library
from drumline.core.kernel.text import read
from drumline.core.program import _SPELLING, MAX_IN_ARRAYS, Program
from kernel_cases import using
from kernels import compiled
from matrices import examples
from programs import programs
from proof_cases import variants
from refused import refused
from some import some
from text_cases import compare_texts, compare_writers, edited


@pytest.fixture(scope="module")
def kernel() -> library.Kernel:
    return compiled()


@settings(max_examples=examples(100))
@given(programs(max_ranks=4, max_microbatches=5), st.integers(0, 2**32 - 1))
def test_both_forms_read_and_write_the_same(kernel: library.Kernel, program: Program, seed: int) -> None:
    rng = random.Random(seed)
    for variant in some(variants(program, rng)):
        text = compare_writers(kernel, variant)
        assert compare_texts(kernel, text)
        for _ in range(3):
            compare_texts(kernel, edited(text, rng))


# None of them is read by the kernel; some of them are programs.
IRREGULAR = [
    "",
    "\n",
    ",",
    "0F0\n\n0F1",
    "\n0F0",
    "0F0\n,\n0F1",
    "0F0,junk",
    "0F",
    "F0",
    "00F0",
    "0F00",
    "0F0000000000",
]
IRREGULAR += [
    "1234567890F0",
    "0X0",
    "0UNSHARD0",
    "0OVERLAP_F_B",
    "(0F0;0B0)",
    "(0F0;0B0)OVERLAP",
    "(0F0,0B0)OVERLAP_F_B",
]
IRREGULAR += [
    "(0F0;0SEND_F0)OVERLAP_F_B",
    "(0F0;0B0;0B1)OVERLAP_F_B",
    "(0F0 ;0B0)OVERLAP_F_B",
    "(0F0;0B0",
    "(",
    "0F0 0B0",
]
IRREGULAR += ["0F0\r0B0", "0F0\x0b0B0", "0F0\u20280B0", "0F٣", "\ufeff0F0", "0F0,\xa00B0", "0f0", "-1F0", "0F0;0B0"]


@pytest.mark.parametrize("text", IRREGULAR)
def test_what_is_not_regular_is_left_to_the_python_form(kernel: library.Kernel, text: str) -> None:
    with using(kernel):
        assert read(text, _SPELLING, MAX_IN_ARRAYS) is None
    compare_texts(kernel, text)


REGULAR = ["0F0", "0F0\n", "0F0\r\n1F0\r\n", " 0F0 ,\t0B0\t,\n1F0,,1B0", ",0F0", "999999999F999999999", "0F0 \n \t\n"]
REGULAR += ["0UNSHARD,(0F1;1B0)OVERLAP_F_B,0WAIT_REDUCE_GRAD,0UPDATE12"]


@pytest.mark.parametrize("text", REGULAR)
def test_what_is_regular_is_read_by_the_kernel(kernel: library.Kernel, text: str) -> None:
    with using(kernel):
        assert read(text, _SPELLING, MAX_IN_ARRAYS) is not None
    assert compare_texts(kernel, text)


def test_too_many_actions_are_refused_by_row(kernel: library.Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("MAX_ACTIONS", "MAX_IN_ARRAYS"):
        monkeypatch.setattr(program_module, limit, 3)
    for use in (kernel, None):
        with using(use):
            assert Program.parse("0F0,0B0\n1F0").num_actions == 3
            with refused(ProgramError, "row 2: more than 3 actions"):
                Program.parse("0F0,0B0\n1F0,1B0\n2F0")


def test_a_file_without_a_stage_is_refused(kernel: library.Kernel, tmp_path: Path) -> None:
    path = tmp_path / "gap.csv"
    path.write_text("0F0,2F0\n999999999F0\n")
    for use in (kernel, None):
        with using(use), refused(ProgramError, "no rank runs stage 1, though the file has a stage 999999999"):
            Program.load(path)
