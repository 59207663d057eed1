"""A few cells of the matrix of Hugging Face families; `make matrices` runs all of them."""

from __future__ import annotations

import pytest

from hf_matrix import PAGE, outcomes
from hf_zoo import FAMILIES
from matrices import left

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("name", "own", "schedule", "words"),
    [
        ("bert_answers", True, "1f1b", "right"),  # answers outside of the text do not count
        ("gpt2_double_heads", True, "zb-h1", "right"),  # two means over different things
        ("vit_masked", True, "zb-v", "right"),  # a sum divided by a count
        ("qwen2_vl", True, "1f1b", "right"),  # pictures packed, sizes as numbers
        ("gemma3", True, "zb-v", "right"),  # goes through a set
        ("wav2vec2_ctc", True, "1f1b", "right"),  # checks its labels, and selects those that count
        ("electra_pretraining", True, "zb-v", "right"),  # a mask picks what counts
        ("clip", True, "1f1b", "refused: the model's loss compares rows of the batch with each other"),
        *left(
            ("longformer", True, "zb-h1", "right"),  # decides by its mask
            ("mixtral_with_router_loss_unmasked", True, "1f1b", "right"),  # counts what experts get
        ),
    ],
)
def test_a_family_is_right_or_refused(name: str, own: bool, schedule: str, words: str) -> None:
    (said,) = [said for _, said in outcomes(name, own, [schedule])]
    assert said.startswith(words), said


def test_the_page_has_every_family_and_none_is_wrong() -> None:
    rows = PAGE.read_text().partition("<!-- matrix -->")[2].partition("<!-- end -->")[0].strip().splitlines()[2:]
    assert len(rows) == len(FAMILIES) >= 60
    assert [row.split("`")[1] for row in rows] == [family.model for family in FAMILIES.values()]
    assert not [row for row in rows if "wrong" in row]
