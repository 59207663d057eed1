"""Processor cores of their own for stages, so that they neither move nor push each other aside."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from drumline.core.errors import UsageError, counted

_TOPOLOGY = Path("/sys/devices/system/cpu")


def own_cores() -> list[int]:
    """Return the cores that this process may use; UsageError where the system does not say.

    A processor that runs two threads at a time counts as two cores. Its second one comes after all first ones.
    """
    if not hasattr(os, "sched_getaffinity"):
        raise UsageError("--pin needs Linux, which lets a process choose its cores", fix="leave it out")
    return first_threads_first(os.sched_getaffinity(0), processor_of)


def processor_of(core: int) -> str:
    """Return what cores of the same processor have in common; its own number where the system does not say."""
    try:
        return (_TOPOLOGY / f"cpu{core}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(core)


def first_threads_first(cores: Collection[int], processor: Callable[[int], str]) -> list[int]:
    """Return cores in order, those whose processor has come already behind the others.

    >>> first_threads_first([0, 1, 2, 3, 5], lambda core: str(core // 2))
    [0, 2, 5, 1, 3]
    """
    first: dict[str, int] = {}
    for core in sorted(cores):
        first.setdefault(processor(core), core)
    return [*first.values(), *sorted(set(cores) - set(first.values()))]


def shares(cores: Sequence[int], num_stages: int, threads: int) -> list[list[int]]:
    """Return the cores of every stage, one for each of its threads, and last those that are left.

    >>> shares([0, 1, 4, 5, 6], 2, 2)
    [[0, 1], [4, 5], [6]]
    >>> shares([0, 1], 4, 1)
    Traceback (most recent call last):
    drumline.core.errors.UsageError: --pin: 4 stages of 1 thread on 2 cores; expected 4 cores; leave out --pin
    """
    needed = num_stages * threads
    if needed > len(cores):
        what = f"{counted(num_stages, 'stage')} of {counted(threads, 'thread')} on {counted(len(cores), 'core')}"
        raise UsageError(f"--pin: {what}", expected=counted(needed, "core"), fix="leave out --pin")
    own_numbers = [list(cores[at : at + threads]) for at in range(0, needed, threads)]
    return [*own_numbers, list(cores[needed:])]


def stay_on(cores: Collection[int]) -> None:
    """Keep this process, and all threads that it starts from now on, on some cores."""
    os.sched_setaffinity(0, cores)


def of_messages(left: Sequence[int], num_stages: int) -> list[int]:
    """Return the cores on which stages read and write messages: those that are left, if there is one for each stage.

    Otherwise none: each does it on its own cores, beside its computations.

    >>> of_messages([2, 3], 2), of_messages([2], 2)
    ([2, 3], [])
    """
    return list(left) if len(left) >= num_stages else []
