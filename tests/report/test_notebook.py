"""What programs and timelines show in a notebook cell."""

from __future__ import annotations

from typing import Any

import drumline as dl
from drumline.report.draw.html import MAX_BOXES


def shown(value: Any) -> str:
    return str(value._repr_html_())


def test_programs_and_timelines_show_themselves() -> None:
    program = dl.generate("1f1b", num_ranks=2, num_microbatches=2)
    assert "<svg" in shown(program)
    assert shown(program) == shown(dl.simulate(program))


def test_a_program_that_cannot_run_says_why() -> None:
    assert "0B0 runs before 0F0" in shown(dl.Program.parse("0B0,0F0"))


def test_a_hostile_name_is_escaped() -> None:
    program = dl.Program.parse("0F0,0B0", name="<script>alert(1)</script>")
    assert "<script>" not in shown(program)
    assert "<script>" not in shown(dl.Program.parse("0B0,0F0", name="<script>alert(1)</script>"))


def test_what_is_too_large_for_a_cell_says_so() -> None:
    program = dl.generate("gpipe", num_ranks=2, num_microbatches=MAX_BOXES // 4 + 1)
    assert "Too large to draw here" in shown(program)
