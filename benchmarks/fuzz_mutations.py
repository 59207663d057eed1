"""Valid files made into ones that are nearly valid: values and keys at random places, then characters and bytes."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

# What JSON can spell and Python's writer does not: each stands for itself in the text.
RAW = ("1e999", "-1e999", "1" * 5000, "[" * 300 + "]" * 300, '{"a":1,"a":2}', '"\\ud800"', "NaN", "-Infinity", "01")
NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 7, 0.0, -0.0, 0.5, -2.5, 1e-320, 1e100, 1e300, -1e300),
    *(2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 10**400),
    *("", "x", "0", "-1", "1e5", "nan", "\x00", "é\u202e", "a" * 3000, "../../etc/passwd", "0F0", "<script>"),
    *([], {}, [None], [[]], [0] * 50, [1, "x"], {"": ""}, {"a": {"b": []}}, [[[[[[1]]]]]]),
)
_MARK = "\x01raw{}\x01"


def json_text(value: Any, chance: random.Random, *, times: int | None = None, compact: bool = False) -> str:
    """Return a JSON value as text, having changed it at one to three places."""
    value = copy.deepcopy(value)
    for _ in range(times if times is not None else chance.choice((1, 1, 1, 2, 3))):
        value = _changed(value, chance)
    text = json.dumps(value, separators=(",", ":") if compact else None)
    for number, raw in enumerate(RAW):
        text = text.replace(json.dumps(_MARK.format(number)), raw)
    return text


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) in a value; of long lists only some items."""
    found: list[tuple[Any, Any]] = []
    left = [value]
    while left:
        row = left.pop()
        keys: list[Any] = list(row) if isinstance(row, dict) else list(range(len(row))) if isinstance(row, list) else []
        if len(keys) > 40:
            keys = keys[:12] + keys[len(keys) // 2 : len(keys) // 2 + 12] + keys[-12:]
        for key in keys:
            found.append((row, key))
            left.append(row[key])
    return found


def _changed(value: Any, chance: random.Random) -> Any:
    places = _places(value)
    if not places or chance.random() < 0.01:
        return _nasty(chance)
    where, key = chance.choice(places)
    chance.choice(_CHANGES)(where, key, chance)
    return value


def _nasty(chance: random.Random) -> Any:
    if chance.random() < 0.15:
        return _MARK.format(chance.randrange(len(RAW)))
    return copy.deepcopy(chance.choice(NASTY))


def _replace(where: Any, key: Any, chance: random.Random) -> None:
    where[key] = _nasty(chance)


def _drop(where: Any, key: Any, chance: random.Random) -> None:
    del where[key]


def _repeat(where: Any, key: Any, chance: random.Random) -> None:
    if isinstance(where, list):
        where.insert(key, copy.deepcopy(where[key]))
    else:
        where[chance.choice((f"{key}2", str(key).upper(), "", "x" * 300))] = copy.deepcopy(where[key])


def _cut(where: Any, key: Any, chance: random.Random) -> None:
    inside = where[key]
    if isinstance(inside, list | str):
        where[key] = inside[: chance.randrange(len(inside) + 1)]
    elif isinstance(inside, dict):
        where[key] = {}
    else:
        _replace(where, key, chance)


def _tweak(where: Any, key: Any, chance: random.Random) -> None:
    """Change a number a little, or its kind alone."""
    inside = where[key]
    if isinstance(inside, bool) or not isinstance(inside, int | float) or abs(inside) > 1e300:
        where[key] = [inside] if chance.random() < 0.5 else str(inside)
        return
    tweaks: list[Callable[[Any], Any]] = [
        *(lambda value: -value, lambda value: value + 1, lambda value: value - 1, lambda value: value * 2, str),
        *(
            lambda value: value + 0.5,
            lambda value: float(value) * 1e6,
            lambda value: 0 * value,
            lambda value: [value],
            bool,
        ),
    ]
    where[key] = chance.choice(tweaks)(inside)


def _swap(where: Any, key: Any, chance: random.Random) -> None:
    other = chance.choice(list(where) if isinstance(where, dict) else range(len(where)))
    where[key], where[other] = where[other], where[key]


_CHANGES = (_replace, _replace, _replace, _drop, _repeat, _cut, _tweak, _tweak, _tweak, _tweak, _swap)


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Return bytes as they are, most of the time; or cut off, with some of them others, or in another encoding."""
    kind = chance.random()
    if kind < 0.85 or not data:
        return data
    at, to = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    if kind < 0.88:
        return data[:at]
    if kind < 0.91:
        return data[:at] + data[to:]
    if kind < 0.93:
        return data[:to] + data[at:]
    if kind < 0.94:
        return b"\xef\xbb\xbf" + data
    if kind < 0.945:
        return data.decode(errors="replace").encode("utf-16")
    spoiled = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        spoiled[chance.randrange(len(spoiled))] = chance.choice((0, 0xFF, 0x80, 10, 44, 34, chance.randrange(256)))
    return bytes(spoiled)


def rows_text(text: str, chance: random.Random, words: tuple[str, ...]) -> str:
    """Return a CSV of actions, having changed some of its cells and rows."""
    rows = [line.split(",") for line in text.strip().split("\n")]
    for _ in range(chance.choice((1, 1, 2, 3))):
        row = chance.choice(rows) if rows else []
        at = chance.randrange(len(row)) if row else 0
        match chance.randrange(8):
            case 0 | 1 if row:
                row[at] = chance.choice(words)
            case 2 if row:
                del row[at]
            case 3 if row:
                row.insert(at, row[chance.randrange(len(row))])
            case 4 if row:
                other = chance.randrange(len(row))
                row[at], row[other] = row[other], row[at]
            case 5 if rows:
                rows.insert(0, list(row))
            case 6 if rows:
                rows.remove(row)
            case 7 if row:
                row[at] = word(row[at], chance)
    return "\n".join(map(",".join, rows)) + chance.choice(("\n", "", "\n\n", "\r\n"))


def word(text: str, chance: random.Random) -> str:
    """Return a short text with some of its characters others."""
    letters = list(text)
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(len(letters) + 1)
        letters[at : at + chance.randrange(3)] = chance.choice(
            ("", "0", "9", "9" * 12, "F", "B", "(", ")", ";", "_", "SEND_F", "OVERLAP_F_B", " ", "٣", "\x00", "-", "é")
        )
    return "".join(letters)
