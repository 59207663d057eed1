"""What the releases of other frameworks accept: facts, read from their sources and kept as data in `facts/`.

A file of facts names the tag and the commit that it was read from, and has

    flags       every flag or key that we write: what it takes, choices, the default if a rule asks for it
    recomputes  the modules that recompute by themselves, and of what; `not_in_fp8` lists those that FP8 excludes
    refuses     rules. A file is refused if all conditions of one hold; `from` is where the release checks that

A condition is a key, what is said of it, and of what: ["--seq-length", "is no multiple of", [2, "--context..."]]. Its
operand may be a key too; in a list, numbers and keys multiply. A key with a dollar is a variable of the environment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from drumline.core.errors import PlanError, nearest

FOLDER = Path(__file__).with_name("facts")
RELEASES = {"megatron": ("0.14", "0.13"), "torchtitan": ("0.2",)}  # the newest first
Values = Mapping[str, Any]  # what a file says: a word, a number, a list, or True for a flag that takes nothing


@dataclass(frozen=True)
class Release:
    """A release of a framework, and what it accepts."""

    framework: str
    name: str
    release: str
    tag: str
    commit: str
    package: str
    not_in_fp8: tuple[str, ...]
    recomputes: Mapping[str, str]
    flags: Mapping[str, Mapping[str, Any]] = field(repr=False)
    refuses: tuple[Mapping[str, Any], ...] = field(repr=False)

    def refusals(self, values: Values) -> list[str]:
        """Return what the release does not accept of a file and its environment; first of all, what it cannot read."""
        return list(self._unknown(values)) or list(self._refused(values))

    def _unknown(self, values: Values) -> Iterator[str]:
        """Yield the keys that the release does not have, and values that it does not take."""
        for name, value in values.items():
            if name.startswith("$"):
                continue
            if name not in self.flags:
                yield f"{name}, which it does not have"
                continue
            flag = self.flags[name]
            every = value if isinstance(value, list | tuple) else [value]
            if flag["takes"] != "nothing" and isinstance(value, list | tuple) and not flag.get("many"):
                yield f"several values of {name}"
            if not all(_TAKEN[flag["takes"]](item) for item in every):
                yield f"{name} {_said(value)}, which takes {flag['takes']}"
            if "choices" in flag and not set(every) <= set(flag["choices"]):
                yield f"{name} {_said(value)}, which is one of {', '.join(flag['choices'])}"

    def _refused(self, values: Values) -> Iterator[str]:
        for rule in self.refuses:
            if all(_HOLDS[said](self, values, key, *operand) for key, said, *operand in rule["when"]):
                yield str(rule["what"])

    def value(self, values: Values, key: Any) -> Any:
        """Return what a file says for a key, or the default; all else stands for itself, and a list multiplies."""
        if isinstance(key, list):
            return prod(_number(self.value(values, part)) for part in key)
        if isinstance(key, str) and (key in self.flags or key.startswith("$")):
            return values.get(key, self.flags.get(key, {}).get("default"))
        return key


def release(framework: str, name: str = "") -> Release:
    """Return what a release accepts, the newest by default.

    >>> release("megatron").tag, release("megatron", "0.13").tag
    ('core_v0.14.0', 'core_v0.13.1')
    >>> release("megatron", "0.12")
    Traceback (most recent call last):
    drumline.core.errors.PlanError: unknown release 0.12 of megatron...
    """
    known = RELEASES[framework]
    if name and name not in known:
        raise PlanError(f"unknown release {name} of {framework}", fix=nearest(name, known))
    return _read(framework, name or known[0])


@cache
def _read(framework: str, name: str) -> Release:
    facts = json.loads((FOLDER / f"{framework}-{name}.json").read_text(encoding="utf-8"))
    return Release(**{**facts, "not_in_fp8": tuple(facts["not_in_fp8"]), "refuses": tuple(facts["refuses"])})


def arguments(lines: str) -> dict[str, Any]:
    r"""Return the flags of a file of arguments, one per line with its values.

    >>> arguments("# Said.\n--bf16\n--num-layers 4\n--recompute-modules layernorm moe_act")
    {'--bf16': True, '--num-layers': 4, '--recompute-modules': ['layernorm', 'moe_act']}
    """
    values: dict[str, Any] = {}
    for line in lines.splitlines():
        if line and not line.startswith("#"):
            name, *words = line.split()
            every = [_word(word) for word in words]
            values[name] = every if len(every) > 1 else every[0] if every else True
    return values


def flattened(tables: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return nested tables as one, with dotted keys.

    >>> flattened({"training": {"seq_len": 8}, "version": 1})
    {'training.seq_len': 8, 'version': 1}
    """
    values: dict[str, Any] = {}
    for name, value in tables.items():
        values |= flattened(value, f"{before}{name}.") if isinstance(value, Mapping) else {f"{before}{name}": value}
    return values


def _word(word: str) -> Any:
    try:
        return int(word)
    except ValueError:
        pass
    try:
        return float(word)
    except ValueError:
        return word


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 1


def _said(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _num_stages(layout: Any) -> int:
    """Return the number of stages of a layout: a list of them, or as text with a bar between two."""
    return len(layout) if isinstance(layout, list) else len(_unrolled(str(layout)).split("|"))


def _num_layers(layout: str) -> int:
    """Return the layers of a layout in Megatron-LM's notation.

    >>> _num_layers("Et*7|(t*2|)*4|tL")
    16
    """
    return _unrolled(layout).count("t")


def _unrolled(layout: str) -> str:
    """Return a layout with what is repeated written out, groups first.

    >>> _unrolled("Et|(t*2|)*3tL")
    'Et|tt|tt|tt|tL'
    """
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        layout = re.sub(repeated, lambda match: match[1] * int(match[2]), layout)
    return layout


_TAKEN: dict[str, Callable[[Any], bool]] = {
    "nothing": lambda value: value is True,
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: type(value) is int,
    "float": lambda value: type(value) in (int, float),
    "str": lambda value: type(value) in (str, int, float),
    "layers": lambda value: type(value) is int or bool(re.fullmatch(r"[][()*+\d]+", str(value))),
    "lists": lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
}


def _compared(compare: Callable[[Any, Any], bool], *, missing: bool = False) -> Callable[..., bool]:
    """Return a condition that compares a key's value with an operand's; `missing` is its answer without a value."""

    def holds(facts: Release, values: Values, key: Any, operand: Any) -> bool:
        mine, other = facts.value(values, key), facts.value(values, operand)
        return missing if mine is None else bool(compare(mine, other))

    return holds


def _listed(compare: Callable[[set[Any], set[Any]], bool]) -> Callable[..., bool]:
    """Return a condition that compares the values of a key with a word or with several."""

    def holds(facts: Release, values: Values, key: Any, operand: Any) -> bool:
        mine = facts.value(values, key)
        many = set(mine) if isinstance(mine, list | tuple) else {mine}
        return compare(many, set(operand) if isinstance(operand, list) else {operand})

    return holds


def _is_not(mine: Any, other: Any) -> bool:
    return bool(str(mine) != str(other) if isinstance(other, str) else mine != other)


_HOLDS: dict[str, Callable[..., bool]] = {
    "is given": lambda facts, values, key: key in values,
    "is absent": lambda facts, values, key: key not in values,
    "is": _compared(lambda mine, other: not _is_not(mine, other)),
    "is not": _compared(_is_not, missing=True),
    "is more than": _compared(lambda mine, other: mine > other),
    "is less than": _compared(lambda mine, other: mine < other),
    "is no multiple of": _compared(lambda mine, other: _number(mine) % other != 0),
    "is not the product of": _compared(lambda mine, other: int(mine) != other),
    "is one of": _listed(lambda mine, other: mine <= other),
    "is not one of": _listed(lambda mine, other: not mine <= other),
    "has": _listed(lambda mine, other: other <= mine),
    "has others than": _listed(lambda mine, other: not mine <= {*other, None}),
    "does not match": _compared(lambda mine, other: not re.fullmatch(other, str(mine))),
    "has stages that are no multiple of": _compared(lambda mine, other: _num_stages(mine) % other != 0),
    "has no more stages than": _compared(lambda mine, other: _num_stages(mine) <= other, missing=True),
    "has another number of layers than": _compared(lambda mine, other: _num_layers(mine) != other),
}
