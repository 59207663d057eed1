"""What does not go together in any pipeline, and halves of clashes that features share: see core/settings/clash.py.

Features declare theirs in a `together.py` of their own. None of these files imports PyTorch, so that `drumline train`
knows all clashes before it starts anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from drumline.channel.rank_names import mesh_shown
from drumline.core.program import Program
from drumline.core.settings.clash import Clash, Facts, Given, fact

PLANNED = ("schedule", "num_microbatches", "stages_per_rank", "balance", "cuts", "checkpoint")  # what a plan sets
_MESH = "the mesh is {mesh_name}"
NO_FLUSH = Given("schedule", "a schedule without a flush", lambda facts: facts.get("flushed") is False,
                 "{program_name} has no flush")  # fmt: skip
TWO_COPIES = Given("schedule", "a schedule with two copies of each stage", fact("copies").holds,
                   "{program_name} holds each stage on two ranks of a line")  # fmt: skip
NAMED_PROGRAM = Given("program", "a step's `program`", fact("program").holds, "a step names a program")
AFTER = fact("validated", "after")
AUTO = "auto"  # the schedule that measured steps choose


def axis(*names: str) -> Given:
    """Return a mesh with several lines along one of these axes."""
    shown = " or ".join(f"`{name}`" for name in names)
    return Given("mesh", f"a `mesh` with {shown}", lambda facts: any(_size(facts, name) > 1 for name in names), _MESH)


def without(name: str) -> Given:
    """Return a mesh with one line along an axis, or no mesh."""
    return Given("mesh", f"no `{name}`", lambda facts: _size(facts, name) == 1, f"the mesh has no {{{name}}}")


def _size(facts: Facts, name: str) -> int:
    size: int = (facts.get("mesh") or {}).get(name, 1)
    return size


SEVERAL_LINES = replace(axis("dp", "cp", "ep", "tp"), shown="a `mesh` with several lines")


def mesh_facts(sizes: Mapping[str, int], *, dp: str = "dp", tp: str = "tp") -> dict[str, Any]:
    """Return what is known of a mesh, which is empty if there is none; `dp` and `tp` are what errors call these axes.

    >>> mesh_facts({"pp": 2, "dp": 1, "tp": 2})["mesh_name"]
    'pp2 x tp2'
    """
    shown = mesh_shown({name: size for name, size in sizes.items() if name == "pp" or size > 1})
    return {"mesh": sizes, "mesh_name": shown, "dp": dp, "tp": tp}


def program_facts(program: Program) -> dict[str, Any]:
    """Return what is known of a program."""
    name, flushed, copies = program.name, not program.num_updates, bool(program.placement.mirrored)
    return {"program_name": name, "flushed": flushed, "copies": copies, "num_stages": program.num_stages}


def _planned(option: str) -> Clash:
    condition = Given(option, f"`{option}`", lambda facts: facts.get(option) not in (None, "none"))
    why = "a plan sets the schedule, microbatches, cut and checkpointing"
    return Clash(condition, fact("plan"), "only one of them", why, fix="leave one out, or make another plan")


CLASHES = (
    *map(_planned, PLANNED),
    Clash(fact("transport", "in-process"), SEVERAL_LINES, "a process for each rank", "no process has several lines",
          ("transport", "auto")),
)  # fmt: skip
