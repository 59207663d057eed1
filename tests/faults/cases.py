"""The list of faults: each is a function of a `Lab`, with a name and the words that stand in the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from faults.lab import Case


@dataclass(frozen=True)
class Fault:
    """A fault; `short` ones run in CI, and those that wait run first, beside others."""

    name: str
    what: str
    run: Case
    short: bool = False
    waits: bool = False


FAULTS: dict[str, Fault] = {}


def fault(name: str, what: str, *, short: bool = False, waits: bool = False) -> Callable[[Case], Case]:
    """Add a function to the list."""

    def add(run: Case) -> Case:
        assert name not in FAULTS, f"two faults are called {name}"
        FAULTS[name] = Fault(name, what, run, short, waits)
        return run

    return add


def all_faults() -> dict[str, Fault]:
    """Return all faults, in the order of the table."""
    from faults import disks, kills, links, nan, restarts, signals, silence

    order = [module_type.__name__ for module_type in (kills, silence, signals, restarts, nan, disks, links)]
    found = sorted(FAULTS.values(), key=lambda item: order.index(item.run.__module__))
    return {item.name: item for item in found}
