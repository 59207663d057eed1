"""The proof on arrays: it says of every program what the checks say that name each violation."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.core.channel import Queues
from drumline.core.kernel import library
from drumline.core.placement import Placement
from drumline.core.program import Program
from drumline.core.prove.arrays import surely_legal
from drumline.core.prove.validate import surely_runs, validate
from drumline.core.prove.violation import InvalidProgram
from drumline.core.simulate.simulate import simulate
from kernel_cases import using
from kernels import compiled
from matrices import examples
from programs import build, programs
from proof_cases import compare_proofs, damaged, variants
from refused import refused
from some import some


@pytest.fixture(scope="module")
def kernel() -> library.Kernel:
    return compiled()


@settings(max_examples=examples(100))
@given(programs(max_ranks=4, max_microbatches=5), st.integers(0, 2**32 - 1))
def test_arrays_prove_what_no_check_refuses(kernel: library.Kernel, program: Program, seed: int) -> None:
    rng = random.Random(seed)
    for variant in some(variants(program, rng)):
        compare_proofs(kernel, variant)
        compare_proofs(kernel, damaged(variant, rng))


# Each is legal, or breaks one rule that few random programs break.
RARE = [
    "0F0,0B0,0REDUCE_GRAD,0UPDATE0",
    "0F0,0B0,0UPDATE0,0REDUCE_GRAD",
    "0F0,0REDUCE_GRAD,0B0,0UPDATE0",
    "0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD",
    "0F0,0F1,0B0,0REDUCE_GRAD,0UPDATE0,0B1,0UPDATE1",
    "0F0,0F1,0B0,0REDUCE_GRAD,0UPDATE0,0B1,0REDUCE_GRAD,0UPDATE1",
    "0F0,0F1,0B0,0UPDATE0,0B1",
    "0F0,0F1,0B0,0UPDATE1,0B1",
    "0F0,0F1,0B0,0B1,0UPDATE1,0UPDATE1",
    "0F0,0F1,0B0,0B1,0UPDATE1,0UPDATE0",
    "0F0,0UPDATE0",
    "0F0,0REDUCE_GRAD",
    "0F0,0B0,1UPDATE0\n1F0,1B0",
    "0F0,0B0,1REDUCE_GRAD\n1F0,1B0",
    "0F0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD",
    "0F0,0B0,0WAIT_REDUCE_GRAD,0REDUCE_GRAD",
    "0F0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0WAIT_REDUCE_GRAD",
    "0F0,0B0,0WAIT_REDUCE_GRAD",
    "0F0,0F1,0B0,0REDUCE_GRAD,0UPDATE0,0B1,0REDUCE_GRAD,0UPDATE1,0WAIT_REDUCE_GRAD,0WAIT_REDUCE_GRAD",
    "0F0,0SEND_F0,0WAIT_SEND_F0\n1RECV_F0,1F0",
    "0F0,0WAIT_SEND_F0,0SEND_F0\n1RECV_F0,1F0",
    "0F0,0SEND_F0,0WAIT_SEND_F0,0F1,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1",
    "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F1,1RECV_F0,1F0,1F1",
    "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1RECV_F1,1F0,1F1,1SEND_F1",
    "0F0,0SEND_F0\n1F0,1RECV_F0",
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_F0\n1RECV_F0,1F0,1RECV_F1,1F1",
    "0F0,0SEND_F0,0WAIT_SEND_F0,1RECV_F1,1F1\n0F1,0SEND_F1,0WAIT_SEND_F1,1RECV_F0,1F0",
    "0F0,0B0,0UPDATE0\n1F0,1B0",
    "0UNSHARD,0F0,0RESHARD,0UNSHARD,0B0",
    "0UNSHARD,0F0,0RESHARD,0B0",
    "0F0,0B0,0RESHARD",
    "0F0,0UNSHARD,0B0",
    "(0F0;1B0)OVERLAP_F_B\n1F0,0B0",
    "0F0,(0F1;0B0)OVERLAP_F_B,0B1",
    "0F0,(0F1;0I0)OVERLAP_F_B,0W0,0B1",
    "0F0,(0F1;0F2)OVERLAP_F_B,0B0,0B1,0B2",
    "0F0,0F1,(0B0;0B1)OVERLAP_F_B",
    "0F0,1F0,1F1,(0F1;1B0)OVERLAP_F_B,1B1,0B0,0B1",
    "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,1F1,(1F2;1B0)OVERLAP_F_B,1B1,1B2",
    "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,(1F2;1B0)OVERLAP_F_B,1F1,1B1,1B2",
    "0F0,0F1,1F1,1B1,0B0,0B1,0REDUCE_GRAD,1REDUCE_GRAD\n1F0,1B0,0REDUCE_GRAD,1REDUCE_GRAD",
]


@pytest.mark.parametrize("text", RARE)
def test_rules_that_few_programs_break(kernel: library.Kernel, text: str) -> None:
    compare_proofs(kernel, Program.parse(text))


def test_copies_exchange_in_one_order_and_take_the_same_steps(kernel: library.Kernel) -> None:
    """Every way to order the exchanges and updates of two ranks with two copies of two stages."""
    legal = 0
    ends = ["0REDUCE_GRAD,1REDUCE_GRAD", "1REDUCE_GRAD,0REDUCE_GRAD", "0REDUCE_GRAD", ""]
    ends += [f"0REDUCE_GRAD,1REDUCE_GRAD,0UPDATE{m},1UPDATE1" for m in (0, 1)]
    ends += ["0REDUCE_GRAD,0UPDATE1,1REDUCE_GRAD,1UPDATE1", "0REDUCE_GRAD,1REDUCE_GRAD,1UPDATE1,0UPDATE1"]
    for here in ends:
        for there in ends:
            text = f"0F0,1F1,1B1,0B0,{here}\n1F0,0F1,1B0,0B1,{there}"
            legal += compare_proofs(kernel, Program.parse(text))
    assert legal == 11


def test_a_stated_placement_is_held_against_the_arrays(kernel: library.Kernel) -> None:
    program = build("zb-v", 2, 2)
    with using(kernel):
        for placement, fits in ((Placement.v(2), True), (Placement.loop(2), False), (Placement.v(3), False)):
            assert surely_legal(program, placement, Queues.EDGE) == fits == (not validate(program, placement=placement))


def test_both_forms_say_the_same_violations(kernel: library.Kernel) -> None:
    """The kernel gives no names: the checks do, in the same words."""
    rng = random.Random(1)
    refused_programs = 0
    for name in ("1f1b", "chimera", "zb-v", "pipedream"):
        program = damaged(build(name, 4, 4), rng)
        said = []
        for use in (kernel, None):
            with using(use):
                said.append([str(violation) for violation in validate(Program(program.rows))])
        assert said[0] == said[1]
        refused_programs += bool(said[0])
    assert refused_programs >= 3


def test_without_a_kernel_arrays_prove_plain_computing(kernel: library.Kernel) -> None:
    plain, spelled = build("1f1b", 2, 2), Program.parse("0F0,0SEND_F0\n1RECV_F0,1F0")
    for use, proven in ((kernel, [True, True]), (None, [True, False])):
        with using(use):
            assert [surely_runs(Program(program.rows)) for program in (plain, spelled)] == proven


@pytest.mark.parametrize(
    ("text", "what"), [("0F0,0B0,0UPDATE1", "microbatch 1"), ("0F0,0B0,1UNSHARD", "stage 1")], ids=["update", "gather"]
)
def test_what_only_other_actions_name_is_refused(text: str, what: str) -> None:
    with refused(InvalidProgram, f"no rank runs {what}, which actions without computing name"):
        simulate(Program.parse(text))
