"""Which trace belongs to which rank of the pipeline, and whether all of them come from one run.

A trace names its rank and its process groups. If one of these is called pp (torchtitan: mesh_pp), it is the pipeline.
Ranks outside it (data or tensor parallel) then belong to other pipelines. Otherwise all traces form one pipeline.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from drumline.core.errors import TraceError
from drumline.core.files import is_regular
from drumline.core.parsed import shown
from drumline.report.kineto.events import Event, events

_PIPELINE = re.compile(r"(?:^|[_\W])pp(?:$|[_\W\d])", re.IGNORECASE)
_RANK = re.compile(r"rank[ _.-]?(\d{1,6})", re.IGNORECASE)
ONE_RUN = "one trace per rank, all from one run"
_QUOTE = "'"
_MOST_RANKS = 10**6
# Synchronised hosts agree better than this; traces that are further apart were not recorded together.
_APART_NS = 60 * 10**9


class Member(NamedTuple):
    """A trace, its rank among all processes, its host if known, and what else it says about the run."""

    path: Path
    rank: int
    host: str | None
    info: Mapping[str, Any]


def trace_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files to read: those given, and those in the folders given.

    >>> trace_files([Path("rank0.json"), Path("rank1.json")])
    [PosixPath('rank0.json'), PosixPath('rank1.json')]
    """
    found_paths: list[Path] = []
    for path in paths:
        if not os.path.isdir(path):
            found_paths.append(path)
            continue
        try:
            names = os.listdir(path)
        except OSError as error:
            raise TraceError(f"cannot read {path}: {error.strerror}", expected="a folder of traces") from None
        inside = sorted(path / key for key in names if key.endswith((".json", ".json.gz")) and is_regular(path / key))
        if not inside:
            deeper = sorted({file.parent for file in path.glob("*/*.json*")})
            record = "record with torch.profiler's export_chrome_trace on every rank"
            raise TraceError(
                f"{path} contains no trace",
                expected="files that end in .json or .json.gz, one per rank",
                fix=f"pass {deeper[-1]}" if deeper else record,
            )
        found_paths += inside
    return found_paths


def crew_of(paths: Sequence[Path]) -> tuple[list[Member], int]:
    """Return the traces of one pipeline in order, and how many more pipelines are in the traces.

    If there are several, it returns the one with the lowest rank. It reads only the start of each trace.
    """
    members = sorted(map(_member, paths), key=lambda member: member.rank)
    for member, other in pairwise(members):
        if member.rank == other.rank:
            raise TraceError(f"{member.path} and {other.path} are both from rank {member.rank}", expected=ONE_RUN)
        for what in ("world_size", "backend"):
            mine, theirs = member.info.get(what), other.info.get(what)
            if mine is not None and theirs is not None and mine != theirs:
                here, there = (shown(value).strip(_QUOTE) for value in (mine, theirs))
                raise TraceError(f"{what} is {here} in {member.path}, but {there} in {other.path}", expected=ONE_RUN)
    groups = {member.rank: _pipeline(member) for member in members}
    wanted = groups[members[0].rank]
    if wanted is None:
        return members, 0
    by_rank = {member.rank: member for member in members}
    if missing := [rank for rank in wanted if rank not in by_rank]:
        raise TraceError(
            f"there is no trace of {_ranks(missing)}, but the pipeline has {_ranks(wanted)}",
            expected=ONE_RUN,
            fix="pass the traces of all ranks of the pipeline",
        )
    return [by_rank[rank] for rank in wanted], len(set(groups.values())) - 1


def check_recorded_together(members: Sequence[Member], bounds: Sequence[tuple[int, int]]) -> None:
    """Reject traces that were recorded at very different times; `bounds` are their first start and last end."""
    for other, (starts, stops) in zip(members, bounds, strict=True):
        distance = max(starts - bounds[0][1], bounds[0][0] - stops)
        if distance > _APART_NS:
            raise TraceError(
                f"{other.path} was recorded {distance / 1e9:.0f} s apart from {members[0].path}", expected=ONE_RUN
            )


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _member(path: Path) -> Member:
    header: Event = {}
    head = events(path, header)
    next(head, None)
    head.close()
    said = header.get("distributedInfo")
    info = said if isinstance(said, dict) else {}
    rank = info.get("rank")
    if type(rank) is not int or not 0 <= rank < _MOST_RANKS:
        named = _RANK.search(path.name)
        if named is None:
            raise TraceError(
                f"neither {path} nor its name says which rank it is from",
                expected="distributedInfo in the trace, or a name like rank0.json",
                fix="rename the file, or start the profiler after init_process_group",
            )
        rank = int(named[1])
    host = header.get("host_name")
    return Member(path, rank, host if isinstance(host, str) and host else None, info)


def _pipeline(member: Member) -> tuple[int, ...] | None:
    """Return the ranks of the group called pp, or None if there is none."""
    groups = member.info.get("pg_config")
    for group in groups if isinstance(groups, list) else ():
        if not isinstance(group, dict) or not _PIPELINE.search(str(group.get("pg_desc", ""))):
            continue
        ranks = group.get("ranks")
        if isinstance(ranks, list) and member.rank in ranks and all(type(rank) is int for rank in ranks):
            return tuple(dict.fromkeys(ranks))
    return None
