"""What is fuzzed: every parser of files that users hand over, each from valid files of its kind."""

from __future__ import annotations

from collections.abc import Iterator

from fuzz_case import Target
from fuzz_cluster import config_case, explore_case, machine_case, train_case
from fuzz_files import action_case, costs_case, plan_case, profile_case, program_case
from fuzz_folders import run_case, trace_case

TARGETS = (
    Target("action text", action_case),
    Target("program CSV", program_case),
    Target("costs", costs_case),
    Target("profile", profile_case),
    Target("plan", plan_case),
    Target("run folder", run_case),
    Target("trace", trace_case),
    Target("model config", config_case),
    Target("machine", machine_case),
    Target("train config", train_case),
    Target("explore page", explore_case),
)


def named(names: str) -> Iterator[Target]:
    """Yield the targets whose names begin like one of these, or all of them.

    >>> [one.name for one in named("costs,plan")]
    ['costs', 'plan']
    """
    wanted = tuple(name.strip() for name in names.split(",") if name.strip())
    return (target for target in TARGETS if not wanted or target.name.startswith(wanted))
