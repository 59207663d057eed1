"""A model on a device as numbers: what `drumline profile` measures and saves, and what a plan is made from.

Microbatch sizes between the measured ones are interpolated linearly; beyond them nothing is known.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Self

from drumline.core.errors import PlanError
from drumline.core.files import MIB, FileKind, named, opened, parse_object, read_text
from drumline.core.parsed import Parsed, shown
from drumline.plan.device.blocks import OpTimes, Profile, ProfiledBlock, profile_from
from drumline.plan.device.overheads import MessageTime, Overheads
from drumline.plan.device.slice_profile import SliceProfile


@dataclass(frozen=True, slots=True)
class Identity:
    """Which model was measured: its name, its number of parameters, and a hash of all names, shapes and dtypes."""

    name: str
    num_parameters: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class ProfiledLink:
    """A link between two ranks: the seconds of messages of some sizes, and the line that fits them."""

    source: int
    target: int
    points: tuple[tuple[int, float], ...]
    line: MessageTime


class Saved(ABC):
    """A value stored as a JSON file that names its format (`KIND`) and version (`HEAD`)."""

    __slots__ = ()
    KIND: ClassVar[FileKind]
    HEAD: ClassVar[dict[str, Any]]
    AGAIN: ClassVar[str]  # how to replace a file that another version wrote

    @abstractmethod
    def to_json(self) -> str:
        """Return the text of a JSON file."""

    @classmethod
    @abstractmethod
    def _read(cls, table: Parsed) -> Self:
        """Read an object of this version."""

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the text that `to_json` wrote, or raise PlanError with what is wrong."""
        table, kind, head = parse_object(text, cls.KIND), cls.KIND, cls.HEAD
        if table.get("format") != head["format"]:
            raise kind.refuse(f"the file is not a {kind.name}")
        if table.get("version") != head["version"]:
            wrong = f"the {kind.name} has version {shown(table.get('version'))}"
            raise PlanError(wrong, expected=f"version {head['version']}", fix=f"{cls.AGAIN} with this drumline")
        return cls._read(Parsed(table, kind))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read it from a file."""
        text = read_text(path, cls.KIND)
        with named(path, cls.KIND):
            return cls.from_json(text)

    def save(self, path: str | Path) -> None:
        """Write it to a file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class ModelProfile(Saved):
    """Seconds and bytes of every block by microbatch size, links between ranks, and the executor's own work.

    Times are medians over `num_runs` and over `num_ranks` ranks that measured at once, each with `num_threads`. Blocks
    run slower in a pipeline than one by one, by a factor for each size (`paces`); `at` includes it.
    """

    model: Identity
    device: str
    num_ranks: int
    num_threads: int
    sizes: tuple[tuple[int, Profile], ...]  # by rows, smallest first
    overheads: Overheads = field(default_factory=Overheads)
    links: tuple[ProfiledLink, ...] = ()
    transport: str = ""
    paces: tuple[float, ...] = ()
    source: str = ""  # FILE.py:NAME or a config.json, where the model came from one
    sequence: int = 0  # tokens of a row, of a config.json
    slices: SliceProfile | None = None  # what slices of a sequence take, if that was measured

    KIND = FileKind("profile", PlanError, "a JSON file that `drumline profile --out FILE.json` wrote", 16 * MIB)
    HEAD: ClassVar = {"format": "drumline profile", "version": 1}
    AGAIN = "measure it again"

    @property
    def layers(self) -> tuple[ProfiledBlock, ...]:
        """The blocks, at the smallest size."""
        return self.sizes[0][1].layers

    @property
    def rows(self) -> tuple[int, ...]:
        """The microbatch sizes that were measured."""
        return tuple(rows for rows, _ in self.sizes)

    def at(self, rows: float) -> Profile:
        """Return the blocks at a microbatch size between the smallest and the largest measured ones.

        >>> value, four = (Profile((), OpTimes(rows, rows, rows, rows), "cpu", 5) for rows in (1.0, 4.0))
        >>> profile = ModelProfile(Identity("m", 0, ""), "cpu", 1, 1, ((1, value), (4, four)))
        >>> profile.at(2).overhead.forward
        2.0
        """
        known = self.rows
        if not known[0] <= rows <= known[-1]:
            raise PlanError(
                f"microbatches of {rows:g} rows were not measured",
                expected=f"{known[0]} to {known[-1]} rows, the measured range",
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
        """Return the text of a JSON file."""
        table = {
            **self.HEAD,
            "model": asdict(self.model),
            **({"source": self.source, "sequence": self.sequence} if self.source else {}),
            "device": self.device,
            "num_ranks": self.num_ranks,
            "num_threads": self.num_threads,
            "transport": self.transport,
            "paces": self.paces,
            "overheads": self.overheads.to_json(),
            "links": [
                {
                    "from": link.source,
                    "to": link.target,
                    "points": link.points,
                    "latency": link.line.seconds,
                    "seconds_per_byte": link.line.seconds_per_byte,
                }
                for link in self.links
            ],
            "sizes": [{"rows": rows, "profile": asdict(profile)} for rows, profile in self.sizes],
            **({} if self.slices is None else {"slices": self.slices.to_json()}),
        }
        return json.dumps(table, indent=1)

    @classmethod
    def _read(cls, table: Parsed) -> ModelProfile:
        sizes = tuple((entry["rows"].whole(1), profile_from(entry["profile"])) for entry in table["sizes"].each())
        paces = tuple(entry.number() for entry in table["paces"].each())
        if len(paces) not in (0, len(sizes)):
            raise PlanError(f"the profile has {len(paces)} paces for {len(sizes)} sizes", expected="one for each")
        if not sizes or [rows for rows, _ in sizes] != sorted({rows for rows, _ in sizes}):
            raise PlanError(f"microbatch sizes are {[rows for rows, _ in sizes]}", expected="one or more, rising")
        names = [layer.name for layer in sizes[0][1].layers]
        if not names or any([layer.name for layer in profile.layers] != names for _, profile in sizes):
            raise PlanError("the sizes have different blocks", expected="the same blocks at every size")
        return cls(
            identity_from(table["model"]),
            table["device"].text(),
            table["num_ranks"].whole(1),
            table["num_threads"].whole(),
            sizes,
            Overheads.from_json(table["overheads"]),
            tuple(map(_link_from, table["links"].each())),
            table["transport"].text(),
            paces,
            "" if (source := table.get("source")) is None else source.text(),
            0 if (sequence := table.get("sequence")) is None else sequence.whole(),
            None if (slices := table.get("slices")) is None else SliceProfile.from_json(slices),
        )


def is_profile(path: str | Path) -> bool:
    """Whether a file claims to be a profile, of any version, intact or damaged.

    >>> is_profile("no-such-file.json")
    False
    """
    try:
        with opened(path, ModelProfile.KIND) as file:
            named_so = rf'"format"\s*:\s*"{ModelProfile.HEAD["format"]}"'
            return re.search(named_so.encode(), file.read(1000)) is not None
    except PlanError:
        return False


def merged(profiles: Sequence[Profile]) -> Profile:
    """Return the medians of what several ranks measured at once."""
    return _blend(profiles, median)


def identity_from(table: Parsed) -> Identity:
    """Read the identity of a model from a JSON object."""
    table.only(entry.name for entry in fields(Identity))
    return Identity(table["name"].text(), table["num_parameters"].whole(), table["fingerprint"].text())


def _link_from(table: Parsed) -> ProfiledLink:
    points = []
    for point in table["points"].each():
        if len(point.each()) != 2:
            raise point.refuse("bytes and seconds")
        size, seconds = point.each()
        points.append((size.whole(), seconds.number()))
    line = MessageTime(table["latency"].number(), table["seconds_per_byte"].number())
    return ProfiledLink(table["from"].whole(), table["to"].whole(), tuple(points), line)


_TIMES = ("forward", "backward", "backward_input", "backward_weight")
_BYTES = tuple(entry.name for entry in fields(ProfiledBlock) if entry.name.endswith("_bytes"))


def _blend(profiles: Sequence[Profile], how: Callable[[Sequence[float]], float], *, pace: float = 1.0) -> Profile:
    """Combine several profiles with the same blocks into one, number by number."""

    def times(each: Sequence[OpTimes]) -> OpTimes:
        taped = [op_times.taped for op_times in each if op_times.taped is not None]
        seconds = {name: pace * how([getattr(op_times, name) for op_times in each]) for name in _TIMES}
        return OpTimes(**seconds, taped=pace * how(taped) if len(taped) == len(each) else None)

    first = profiles[0]
    if any([layer.name for layer in other.layers] != [layer.name for layer in first.layers] for other in profiles):
        raise PlanError("the profiles have different blocks", expected="the same model in all of them")
    layers = []
    for each in zip(*(profile.layers for profile in profiles), strict=True):
        sizes = {name: round(how([getattr(item, name) for item in each])) for name in _BYTES}
        spreads = [item.spreads for item in each if item.spreads is not None]
        layers.append(
            ProfiledBlock(
                each[0].name,
                times([item.times for item in each]),
                tied=each[0].tied,
                spreads=times(spreads) if len(spreads) == len(each) else None,
                **sizes,
            )
        )
    return Profile(tuple(layers), times([profile.overhead for profile in profiles]), first.device, first.num_runs)


def refuse_other(mine: Identity, other: Identity, what: str) -> None:
    """Raise an error if a profile or plan belongs to another model.

    >>> refuse_other(Identity("a", 1, "x"), Identity("b", 2, "y"), "the plan")
    Traceback (most recent call last):
    drumline.core.errors.PlanError: the plan is for a (1 parameters), but this model is b (2 parameters); expected ...
    """
    if mine.fingerprint != other.fingerprint:
        same = mine.name == other.name and mine.num_parameters == other.num_parameters
        raise PlanError(
            f"{what} is for {mine.name} ({mine.num_parameters:,} parameters), but this model is {other.name}"
            f" ({other.num_parameters:,} parameters)" + (": names, shapes or what is trained differ" if same else ""),
            expected="the model that was profiled",
            fix="profile this model and plan again",
        )
