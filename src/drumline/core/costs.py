"""What actions cost: seconds per stage and op, seconds and bytes per edge, bytes per stage.

Every per-stage value is one number for all stages or a sequence with one number per stage. Times may use any unit;
results use the same unit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from drumline.core.cost_fields import OPTIONAL, STAGE, WHOLE, FieldShape, check_edges, check_field, check_number
from drumline.core.errors import CostsError, nearest
from drumline.core.files import MIB, FileKind, named, parse_object, read_text
from drumline.core.parsed import LARGEST, shown

PerStage = float | Sequence[float]
PerSlice = PerStage | Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Edge:
    """A directed link between two ranks: a latency, and a bandwidth that one transfer at a time uses."""

    latency: float = 0.0
    bytes_per_second: float = math.inf


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds and bytes of every action, message and stage.

    >>> costs = Costs(forward=[2, 1], backward_input=[2, 1], backward_weight=[2, 1], comm=0.1)
    >>> costs.per_stage("forward", num_stages=2)
    (2.0, 1.0)

    Time: `backward` is the unsplit B (default: I + W), `overlapped` a fused F&B pair in the forward's stage (default:
    F + B). `update` and `reduce` are the optimizer step and gradient exchange of a stage; before the exchange starts,
    copying the gradients together occupies the rank for `pack`. `microbatch_factor` multiplies the time and bytes of
    each microbatch (for variable lengths).

    Slices: all costs are those of whole microbatches, and a slice has its part. `slice_lengths` are its tokens, in any
    unit; equal unless given. Bytes follow them. `attention` is the part of F's and B's seconds that attention takes,
    which grows with the keys that a slice attends to; W has none of it. `slice_factor` says instead what was measured:
    the seconds of each slice, as a part of the whole microbatch's. With one list per stage, stages differ: attention
    grows with the keys before a slice, and a head does not.

    Messages: `comm` is a latency on every edge and occupies neither rank nor link. `message_bytes` divided by
    `bytes_per_second` occupies the link, one transfer at a time; with `overlap=False` it also occupies both ranks.
    `edges` overrides latency and bandwidth of single directed links, by (source rank, target rank).

    Memory: a pair holds `activation_bytes` from F on, and `held_until_weight_bytes` (default: the same) from I to W.
    The second is smaller if I frees memory that W does not need, and larger if the gradients W needs outweigh that. A
    stage with `recompute` holds `checkpoint_bytes` instead until its backward, which first runs F again. `weight_bytes`
    count once per weight version in use, `gradient_bytes` per accumulation in progress, `optimizer_bytes` once.
    `key_value_bytes` are a microbatch's keys and values, which its activations include. In slices, a stage holds as
    many bytes of their gradients, from a microbatch's first backward to its last; and keys and values beside
    checkpoints.
    """

    forward: PerStage = field(default=1.0, metadata=STAGE)
    backward_input: PerStage = field(default=1.0, metadata=STAGE)
    backward_weight: PerStage = field(default=1.0, metadata=STAGE)
    backward: PerStage | None = field(default=None, metadata=OPTIONAL)
    overlapped: PerStage | None = field(default=None, metadata=OPTIONAL)
    update: PerStage = field(default=0.0, metadata=STAGE)
    reduce: PerStage = field(default=0.0, metadata=STAGE)
    pack: PerStage = field(default=0.0, metadata=STAGE)
    microbatch_factor: PerStage = field(default=1.0, metadata={"shape": FieldShape("microbatch")})
    slice_lengths: PerStage = field(default=1.0, metadata={"shape": FieldShape("slice")})
    slice_factor: PerSlice | None = field(
        default=None, metadata={"shape": FieldShape("slice", optional=True, staged=True)}
    )
    attention: float = field(default=0.0, metadata={"shape": FieldShape()})
    comm: float = field(default=0.0, metadata={"shape": FieldShape()})
    bytes_per_second: float = field(default=math.inf, metadata={"shape": FieldShape(infinite=True)})
    message_bytes: PerStage = field(default=0.0, metadata=WHOLE)
    edges: Mapping[tuple[int, int], Edge] = field(default_factory=dict)
    overlap: bool = field(default=True, metadata={"shape": FieldShape(flag=True)})
    activation_bytes: PerStage | None = field(default=None, metadata=OPTIONAL)
    held_until_weight_bytes: PerStage | None = field(default=None, metadata=OPTIONAL)
    recompute: bool | Sequence[bool] = field(default=False, metadata={"shape": FieldShape("stage", flag=True)})
    checkpoint_bytes: PerStage = field(default=0.0, metadata=WHOLE)
    key_value_bytes: PerStage = field(default=0.0, metadata=STAGE)
    weight_bytes: PerStage = field(default=0.0, metadata=STAGE)
    gradient_bytes: PerStage = field(default=0.0, metadata=STAGE)
    optimizer_bytes: PerStage = field(default=0.0, metadata=STAGE)

    def __post_init__(self) -> None:
        for name, shape in SHAPES.items():
            check_field(name, getattr(self, name), shape)
        check_edges(self.edges, Edge)
        for (source, target), edge in self.edges.items():
            check_number(f"latency of edge {source}->{target}", edge.latency)
            check_number(f"bytes_per_second of edge {source}->{target}", edge.bytes_per_second, infinite=True)
        slowest = min((self.bytes_per_second, *(edge.bytes_per_second for edge in self.edges.values())))
        if slowest < 1 / LARGEST:
            raise CostsError(
                f"bytes_per_second is {slowest:g}",
                expected="more than 0",
                fix="omit it for an infinitely fast link",
            )
        for name, is_given in (
            ("held_until_weight_bytes", self.held_until_weight_bytes is not None),
            ("key_value_bytes", self.key_value_bytes != 0.0),
        ):
            if is_given and self.activation_bytes is None:
                raise CostsError(f"{name} needs activation_bytes", fix="also pass activation_bytes")
        lengths = self.slice_lengths
        if not (min(lengths) if isinstance(lengths, Sequence) else lengths) > 0:
            raise CostsError(f"slice_lengths is {shown(lengths)}", expected="more than 0 tokens in every slice")
        slice_shares([1.0], self.attention)

    @property
    def knows_bytes(self) -> bool:
        """Whether any memory cost is set."""
        said = (self.weight_bytes, self.gradient_bytes, self.optimizer_bytes)
        return self.activation_bytes is not None or any(value != 0.0 for value in said)

    @property
    def has_finite_links(self) -> bool:
        """Whether any link has limited bandwidth, so that messages occupy it."""
        if self.bytes_per_second != math.inf:
            return True
        return bool(self.edges) and any(edge.bytes_per_second != math.inf for edge in self.edges.values())

    def edge(self, source: int, target: int) -> Edge:
        """Return the link from rank `source` to rank `target`."""
        return self.edges.get((source, target)) or Edge(self.comm, self.bytes_per_second)

    def per_stage(self, name: str, num_stages: int) -> tuple[float, ...]:
        """Return the field `name` as one number per stage; `backward` defaults to I + W."""
        value = getattr(self, name)
        if value is None and name == "backward":
            halves = (self.per_stage(half, num_stages) for half in ("backward_input", "backward_weight"))
            return tuple(map(sum, zip(*halves, strict=True)))
        return _expand(name, 0.0 if value is None else value, num_stages, "stages")

    def factors(self, num_units: int, num_slices: int = 1) -> tuple[float, ...]:
        """Return the multiplier of the seconds of each microbatch, or of each slice of all microbatches.

        >>> Costs(attention=0.5).factors(2, num_slices=2)
        (0.375, 0.625)
        """
        if num_slices == 1:
            return _expand("microbatch_factor", self.microbatch_factor, num_units, "microbatches")
        if self.slice_factor is None:
            return self._of_slices(num_units, slice_shares(self.lengths(num_slices), self.attention))
        parts: Any = self.slice_factor
        assert not self.has_stage_factors, "slices of stages have factors of their own"
        return self._of_slices(num_units, _expand("slice_factor", parts, num_slices, "slices"))

    @property
    def has_stage_factors(self) -> bool:
        """Whether `slice_factor` has one list per stage."""
        value = self.slice_factor
        return isinstance(value, Sequence) and isinstance(value[0], Sequence)

    def stage_factors(self, num_units: int, num_slices: int) -> list[tuple[float, ...]]:
        """Return, for each stage, the multiplier of the seconds of each slice of all microbatches.

        >>> Costs(slice_factor=[[0.5, 0.5], [0.25, 0.75]]).stage_factors(4, 2)[1]
        (0.25, 0.75, 0.25, 0.75)
        """
        each: Any = self.slice_factor
        return [self._of_slices(num_units, _expand("slice_factor", parts, num_slices, "slices")) for parts in each]

    def byte_factors(self, num_units: int, num_slices: int = 1) -> tuple[float, ...]:
        """Return the multiplier of the bytes of each microbatch, or of each slice of all microbatches.

        >>> Costs(attention=0.4, slice_lengths=[3, 1]).byte_factors(2, num_slices=2)
        (0.75, 0.25)
        """
        if num_slices == 1:
            return self.factors(num_units)
        return self._of_slices(num_units, slice_shares(self.lengths(num_slices), 0.0))

    def lengths(self, num_slices: int) -> tuple[float, ...]:
        """Return the length of each slice."""
        return _expand("slice_lengths", self.slice_lengths, num_slices, "slices")

    def _of_slices(self, num_units: int, parts: Sequence[float]) -> tuple[float, ...]:
        whole = self.factors(num_units // len(parts))
        return tuple(factor * part for factor in whole for part in parts)

    def recomputes(self, num_stages: int) -> tuple[bool, ...]:
        """Return, per stage, whether its forward runs again before its backward."""
        value = self.recompute if isinstance(self.recompute, Sequence) else [self.recompute] * num_stages
        return tuple(map(bool, _expand("recompute", [float(flag) for flag in value], num_stages, "stages")))

    def check_counts(self, num_stages: int, num_microbatches: int, num_slices: int = 1) -> None:
        """Raise an error if the length of any list differs from the number of stages, microbatches or slices.

        >>> Costs(weight_bytes=[1, 2, 3]).check_counts(num_stages=2, num_microbatches=8)
        Traceback (most recent call last):
        drumline.core.errors.CostsError: weight_bytes has 3 values; expected one number, or one for each of the 2 stages
        """
        for name, shape in SHAPES.items():
            value = getattr(self, name)
            if shape.staged and self.has_stage_factors:
                _check_length(name, value, num_stages, "stages")
                _check_length(name, value[0], num_slices, "slices")
            elif isinstance(value, Sequence):
                count = {"stage": num_stages, "microbatch": num_microbatches, "slice": num_slices}[shape.each]
                _check_length(name, value, count, f"{shape.each}{'es' if shape.each == 'microbatch' else 's'}")

    def to_json(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults as a JSON object; `from_json` reads its text.

        >>> costs = Costs(forward=[2, 1], edges={(0, 1): Edge(latency=0.5)})
        >>> costs.to_json()
        {'forward': [2, 1], 'edges': [{'from': 0, 'to': 1, 'latency': 0.5}]}
        >>> import json
        >>> Costs.from_json(json.dumps(costs.to_json())) == costs
        True
        """
        table = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        if self.edges:
            table["edges"] = [_edge_to_json(*ends, edge) for ends, edge in self.edges.items()]
        plain = Costs()
        return {name: value for name, value in table.items() if value != getattr(plain, name)}

    @staticmethod
    def from_json(text: str) -> Costs:
        """Parse costs from a JSON object whose keys are the field names.

        `edges` is a list of {"from", "to", "latency", "bytes_per_second"}.

        >>> Costs.from_json('{"forward": [2, 1], "comm": 0.5}').comm
        0.5
        >>> Costs.from_json('{"foward": 2}')
        Traceback (most recent call last):
        drumline.core.errors.CostsError: unknown cost 'foward'; did you mean forward?
        """
        table = parse_object(text, _KIND)
        known = [entry.name for entry in fields(Costs)]
        for key in table:
            if key not in known:
                raise CostsError(f"unknown cost {key[:60]!r}", fix=nearest(key[:60], known))
        if "edges" in table:
            table["edges"] = _edges_from_json(table["edges"])
        return Costs(**table)

    @staticmethod
    def load(path: str | Path) -> Costs:
        """Read costs from a JSON file."""
        text = read_text(path, _KIND)
        with named(path, _KIND):
            return Costs.from_json(text)


SHAPES: dict[str, FieldShape] = {entry.name: entry.metadata["shape"] for entry in fields(Costs) if entry.metadata}


def slice_shares(lengths: Sequence[float], attention: float) -> tuple[float, ...]:
    """Return each slice's share of the seconds of its sequence, of which attention takes the part `attention`.

    What is not attention grows with a slice's tokens. Attention grows with the keys that each of them sees::

        keys     1 1 1 1 . . . .     slice 0: 10 of 36 pairs
                 1 1 1 1 1 1 1 1     slice 1: 26 of 36

    >>> [round(share, 3) for share in slice_shares([512] * 4, attention=0.4)]
    [0.175, 0.225, 0.275, 0.325]
    """
    if not 0.0 <= attention <= 1.0:
        raise CostsError(f"attention is {attention:g} of the time", expected="a part of it, from 0 to 1")
    total = sum(lengths)
    ends = [0.0, *accumulate(lengths)]
    return tuple(
        (1.0 - attention) * (end - start) / total + attention * (end * end - start * start) / (total * total)
        for start, end in pairwise(ends)
    )


def cut_finer(costs: Costs, stages_per_rank: int) -> Costs:
    """Return the costs of the same model with every stage cut into `stages_per_rank` equal parts.

        one stage per rank    a        b        c        d
        two                   a/2 a/2  b/2 b/2  c/2 c/2  d/2 d/2     placed on the ranks by a placement

    >>> cut_finer(Costs(forward=[2, 4], backward_input=1), 2).forward
    (1.0, 1.0, 2.0, 2.0)
    """
    if stages_per_rank == 1:
        return costs
    changed: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        value = getattr(costs, name)
        if shape.staged and costs.has_stage_factors:
            changed[name] = tuple(part for part in value for _ in range(stages_per_rank))
        elif shape.each == "stage" and isinstance(value, Sequence):
            parts = [item / stages_per_rank if shape.parted else item for item in value]
            changed[name] = tuple(part for part in parts for _ in range(stages_per_rank))
        elif shape.parted and value is not None:
            changed[name] = value / stages_per_rank
    return replace(costs, **changed)


# Enough for one number per stage and microbatch, a million of each; a larger file cannot be costs.
_KIND = FileKind("file of costs", CostsError, 'a JSON file of costs, an object like {"forward": 1}', 16 * MIB)


def _expand(name: str, value: PerStage, count: int, what: str) -> tuple[float, ...]:
    if not isinstance(value, Sequence):
        return (float(value),) * count
    _check_length(name, value, count, what)
    return tuple(map(float, value))


def _check_length(name: str, value: Sequence[float], count: int, what: str) -> None:
    if len(value) != count:
        raise CostsError(
            f"{name} has {len(value)} values", expected=f"one number, or one for each of the {count} {what}"
        )


_ENDS = {"from", "to"}


def _edge_to_json(source: int, target: int, edge: Edge) -> dict[str, float]:
    speed = {} if edge.bytes_per_second == math.inf else {"bytes_per_second": edge.bytes_per_second}
    return {"from": source, "to": target, "latency": edge.latency, **speed}


def _edges_from_json(listed: Any) -> dict[tuple[int, int], Edge]:
    expected = 'a list like [{"from": 0, "to": 1, "latency": 0.1, "bytes_per_second": 1e9}]'
    edges: dict[tuple[int, int], Edge] = {}
    if not isinstance(listed, list):
        raise CostsError(f"edges is {listed!r:.80}", expected=expected)
    for entry in listed:
        if not isinstance(entry, dict) or not _ENDS <= entry.keys() <= _ENDS | {"latency", "bytes_per_second"}:
            raise CostsError(f"edges contains {shown(entry)}", expected=expected)
        ends = entry["from"], entry["to"]
        if not all(isinstance(end, int) and not isinstance(end, bool) and end >= 0 for end in ends):
            raise CostsError(f"edges contains {shown(entry)}", expected="ranks counted from 0 in 'from' and 'to'")
        if ends in edges:
            raise CostsError(f"edges lists the link {ends[0]}->{ends[1]} twice", expected="each link once")
        edges[entry["from"], entry["to"]] = Edge(entry.get("latency", 0.0), entry.get("bytes_per_second", math.inf))
    return edges
