"""A model on a device as numbers: what `drumline profile` measures and saves, and all that a plan is made from.

Sizes of microbatches that were not measured lie on straight lines between those that were; beyond them nothing is
known.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any

from drumline.core.costs import MAX_FILE_BYTES
from drumline.core.errors import PlanError
from drumline.plan.layers import Layer, Profile, Times, profile_from
from drumline.plan.lines import Line
from drumline.plan.overheads import Overheads

FORMAT = "drumline profile"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Identity:
    """Which model was measured: its name, its number of parameters, and a hash of all names, shapes and kinds."""

    name: str
    num_parameters: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Link:
    """From one rank to another: the seconds of messages of some sizes, and the line that fits them."""

    source: int
    target: int
    points: tuple[tuple[int, float], ...]
    line: Line


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """Seconds and bytes of every block by the rows of a microbatch, links between ranks, and the executor's own work.

    Times are medians over `num_runs` and over `num_ranks` ranks that measured at once, each with `num_threads`. In a
    pipeline blocks take longer than one by one, by a factor for each size (`paces`); `at` has that in it.
    """

    model: Identity
    device: str
    num_ranks: int
    num_threads: int
    sizes: tuple[tuple[int, Profile], ...]  # by rows, smallest first
    overheads: Overheads = field(default_factory=Overheads)
    links: tuple[Link, ...] = ()
    transport: str = ""
    paces: tuple[float, ...] = ()

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The blocks, at the smallest size."""
        return self.sizes[0][1].layers

    @property
    def rows(self) -> tuple[int, ...]:
        """The sizes of microbatches that were measured."""
        return tuple(rows for rows, _ in self.sizes)

    def at(self, rows: float) -> Profile:
        """Return the blocks at a size of microbatch between the smallest and the largest that were measured.

        >>> one, four = (Profile((), Times(rows, rows, rows, rows), "cpu", 5) for rows in (1.0, 4.0))
        >>> found = ModelProfile(Identity("m", 0, ""), "cpu", 1, 1, ((1, one), (4, four)))
        >>> found.at(2).overhead.forward
        2.0
        """
        known = self.rows
        if not known[0] <= rows <= known[-1]:
            raise PlanError(
                f"microbatches of {rows:g} rows",
                expected=f"{known[0]} to {known[-1]}, which were measured",
                fix=f"profile again with --microbatch-sizes {','.join(map(str, sorted({*known, math.ceil(rows)})))}",
            )
        place = bisect_left(known, rows)
        before = place - 1 if known[place] > rows else place
        (low, below), (high, above) = self.sizes[before], self.sizes[place]
        share = (rows - low) / (high - low) if high > low else 0.0

        def between(pair: Sequence[float]) -> float:
            return (1 - share) * pair[0] + share * pair[1]

        paces = self.paces or (1.0,) * len(known)
        return _blend([below, above], between, pace=between((paces[before], paces[place])))

    def to_json(self) -> str:
        """Return it as the text of a JSON file."""
        table = {
            "format": FORMAT,
            "version": VERSION,
            "model": asdict(self.model),
            "device": self.device,
            "num_ranks": self.num_ranks,
            "num_threads": self.num_threads,
            "transport": self.transport,
            "paces": self.paces,
            "overheads": self.overheads.to_json(),
            "links": [
                {
                    "from": one.source,
                    "to": one.target,
                    "points": one.points,
                    "latency": one.line.seconds,
                    "seconds_per_byte": one.line.seconds_per_byte,
                }
                for one in self.links
            ],
            "sizes": [{"rows": rows, "profile": asdict(profile)} for rows, profile in self.sizes],
        }
        return json.dumps(table, indent=1)

    @staticmethod
    def from_json(text: str) -> ModelProfile:
        """Return the profile that `to_json` wrote; raises PlanError with what is wrong."""
        table = _object(text)
        if table.get("format") != FORMAT:
            raise PlanError("not a profile", expected=_EXPECTED)
        if table.get("version") != VERSION:
            raise PlanError(
                f"a profile of version {table.get('version')!r}",
                expected=f"version {VERSION}",
                fix="measure it again with this drumline",
            )
        try:
            return _read(table)
        except PlanError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise PlanError(f"a damaged profile: {what}", expected=_EXPECTED) from None

    @staticmethod
    def load(path: str | Path) -> ModelProfile:
        """Read a profile from a file."""
        try:
            return ModelProfile.from_json(read_text(path))
        except PlanError as error:
            raise PlanError(f"{path}: {error.error}", expected=error.expected, fix=error.fix) from None

    def save(self, path: str | Path) -> None:
        """Write it to a file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")


_EXPECTED = "a JSON file that `drumline profile --out FILE.json` wrote"


def read_text(path: str | Path) -> str:
    """Return a file's text, bounded in size; raises PlanError where that is not possible."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise PlanError(f"larger than {MAX_FILE_BYTES >> 20} MiB", expected=_EXPECTED)
        return data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PlanError(reason, expected=_EXPECTED) from None


def is_profile(path: str | Path) -> bool:
    """Whether a file says of itself that it is a profile, of whatever version, whole or damaged.

    >>> is_profile("no-such-file.json")
    False
    """
    try:
        with Path(path).open("rb") as file:
            return re.search(rf'"format"\s*:\s*"{FORMAT}"'.encode(), file.read(1000)) is not None
    except OSError:
        return False


def merged(profiles: Sequence[Profile]) -> Profile:
    """Return the medians of what several ranks measured at once."""
    return _blend(profiles, median)


def _object(text: str) -> dict[str, Any]:
    try:
        table = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise PlanError(f"not JSON: {error}", expected=_EXPECTED) from None
    if not isinstance(table, dict):
        raise PlanError(f"JSON of a {type(table).__name__}", expected=_EXPECTED)
    return table


def _read(table: Mapping[str, Any]) -> ModelProfile:
    sizes = tuple((int(one["rows"]), profile_from(one["profile"])) for one in table["sizes"])
    if len(table["paces"]) not in (0, len(sizes)):
        raise PlanError(f"{len(table['paces'])} paces for {len(sizes)} sizes", expected="one for each")
    if not sizes or [rows for rows, _ in sizes] != sorted({rows for rows, _ in sizes}) or sizes[0][0] < 1:
        raise PlanError(f"sizes of microbatches {[rows for rows, _ in sizes]}", expected="one or more, rising")
    if any(not one.layers or len(one.layers) != len(sizes[0][1].layers) for _, one in sizes):
        raise PlanError("sizes with different blocks", expected="the same blocks at every size")
    for _, one in sizes:
        for layer in one.layers:
            _check_numbers(layer)
    links = tuple(
        Link(
            int(one["from"]),
            int(one["to"]),
            tuple((int(size), float(seconds)) for size, seconds in one["points"]),
            Line(float(one["latency"]), float(one["seconds_per_byte"])),
        )
        for one in table["links"]
    )
    return ModelProfile(
        Identity(**table["model"]),
        str(table["device"]),
        int(table["num_ranks"]),
        int(table["num_threads"]),
        sizes,
        Overheads.from_json(table["overheads"]),
        links,
        str(table["transport"]),
        tuple(map(float, table["paces"])),
    )


def _check_numbers(layer: Layer) -> None:
    """Refuse times and bytes that are no finite numbers of 0 or more."""
    times = [(f"{layer.name}: {name}", getattr(layer.times, name)) for name in _TIMES]
    for name, value in [*times, *((f"{layer.name}: {name}", getattr(layer, name)) for name in _BYTES)]:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise PlanError(f"{name} is {value!r}", expected="a number of 0 or more")


_TIMES = ("forward", "backward", "backward_input", "backward_weight")
_BYTES = tuple(one.name for one in fields(Layer) if one.name.endswith("_bytes"))


def _blend(profiles: Sequence[Profile], how: Callable[[Sequence[float]], float], *, pace: float = 1.0) -> Profile:
    """Return one profile with every number made from those of several, which have the same blocks."""

    def times(each: Sequence[Times]) -> Times:
        taped = [one.taped for one in each if one.taped is not None]
        told = {name: pace * how([getattr(one, name) for one in each]) for name in _TIMES}
        return Times(**told, taped=pace * how(taped) if len(taped) == len(each) else None)

    first = profiles[0]
    if any([one.name for one in other.layers] != [one.name for one in first.layers] for other in profiles):
        raise PlanError("profiles of different blocks", expected="the same model in all of them")
    layers = []
    for each in zip(*(one.layers for one in profiles), strict=True):
        sizes = {name: round(how([getattr(one, name) for one in each])) for name in _BYTES}
        spreads = [one.spreads for one in each if one.spreads is not None]
        layers.append(
            Layer(
                each[0].name,
                times([one.times for one in each]),
                tied=each[0].tied,
                spreads=times(spreads) if len(spreads) == len(each) else None,
                **sizes,
            )
        )
    return Profile(tuple(layers), times([one.overhead for one in profiles]), first.device, first.num_runs)


def refuse_other(mine: Identity, other: Identity, what: str) -> None:
    """Refuse a profile or plan of another model.

    >>> refuse_other(Identity("a", 1, "x"), Identity("b", 2, "y"), "the plan")
    Traceback (most recent call last):
    drumline.core.errors.PlanError: the plan is of a (1 parameters), and this model is b (2 parameters); expected ...
    """
    if mine.fingerprint != other.fingerprint:
        same = mine.name == other.name and mine.num_parameters == other.num_parameters
        raise PlanError(
            f"{what} is of {mine.name} ({mine.num_parameters:,} parameters), and this model is {other.name}"
            f" ({other.num_parameters:,} parameters)" + (": names, shapes or what is trained differ" if same else ""),
            expected="the model that was profiled",
            fix="profile this model, and plan again",
        )
