"""What does not go together in any pipeline, and halves of clashes that features share: see core/settings/clash.py.

Features declare theirs in a `together.py` of their own. None of these files imports PyTorch, so that `drumline train`
knows all clashes before it starts anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drumline.channel.rank_names import mesh_shown
from drumline.core.program import Program
from drumline.core.settings.clash import Clash, Facts, Given, given

PLANNED = ("schedule", "num_microbatches", "stages_per_rank", "balance", "cuts", "checkpoint")  # what a plan sets
NO_FLUSH = Given(
    "schedule",
    "a schedule without a flush",
    lambda facts: facts.get("flushed") is False,
    "{program_name} has no flush",
)
TWO_COPIES = Given(
    "schedule",
    "a schedule with two copies of each stage",
    lambda facts: bool(facts.get("copies")),
    "{program_name} holds each stage on two ranks of a line",
)
SEVERAL_LINES = Given(
    "mesh",
    "a `mesh` with several lines",
    lambda facts: any(size > 1 for axis, size in _sizes(facts).items() if axis != "pp"),
    "the mesh is {mesh_name}",
)
NAMED_PROGRAM = Given("program", "a step's `program`", given("program").holds, "a step names a program")
AFTER, BEFORE = given("validated", "after"), ("validated", "before")


def axis(*names: str) -> Given:
    """Return a mesh with several lines along one of these axes."""
    shown = " or ".join(f"`{name}`" for name in names)
    return Given(
        "mesh",
        f"a `mesh` with {shown}",
        lambda facts: any(_sizes(facts).get(name, 1) > 1 for name in names),
        "the mesh is {mesh_name}",
    )


def without(axis: str) -> Given:
    """Return a mesh with one line along an axis, or no mesh."""
    return Given("mesh", f"no `{axis}`", lambda facts: bool(_sizes(facts).get(axis, 1) == 1), f"the mesh has no {axis}")


def mesh_facts(sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return what is known of a mesh, which is empty if there is none.

    >>> mesh_facts({"pp": 2, "dp": 1, "tp": 2})["mesh_name"]
    'pp2 x tp2'
    """
    return {
        "mesh": sizes,
        "mesh_name": mesh_shown({name: size for name, size in sizes.items() if name == "pp" or size > 1}),
    }


def program_facts(program: Program) -> dict[str, Any]:
    """Return what is known of a program."""
    return {
        "program_name": program.name,
        "flushed": not program.num_updates,
        "copies": bool(program.placement.mirrored),
    }


def _sizes(facts: Facts) -> Mapping[str, int]:
    sizes: Mapping[str, int] = facts.get("mesh") or {}
    return sizes


def _planned(option: str) -> Clash:
    return Clash(
        Given(option, f"`{option}`", lambda facts: facts.get(option) not in (None, "none")),
        given("plan"),
        "only one of them",
        "a plan sets the schedule, microbatches, cut and checkpointing",
        fix=f"leave out {option}, or make another plan",
    )


CLASHES = (
    *map(_planned, PLANNED),
    Clash(
        given("transport", "in-process"), SEVERAL_LINES, "one process per rank of the mesh", use=("transport", "auto")
    ),
)
