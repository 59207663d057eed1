"""Parameters chosen by name: patterns over the names of the whole model, so that every rank chooses alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from drumline.core.errors import UsageError, nearest


def matching(
    patterns: str | Sequence[str], known: Iterable[str], *, others: Mapping[str, Sequence[str]] | None = None
) -> list[str]:
    """Return the known names that any of the patterns matches, in their order; refuses a pattern that matches none.

    `others` has further names of a tensor, by which it is found too.

    >>> matching(["*.bias", "0.weight"], ["0.weight", "0.bias", "1.weight"])
    ['0.weight', '0.bias']
    >>> matching("*.wieght", ["0.weight", "0.bias"])
    Traceback (most recent call last):
    drumline.core.errors.UsageError: no trainable parameter is named '*.wieght'; ...; did you mean 0.weight?
    """
    names = {name: (others or {}).get(name, (name,)) for name in known}
    homes = {text: name for name, each in names.items() for text in each}
    if isinstance(patterns, str):
        patterns = [patterns]
    chosen: set[str] = set()
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise UsageError(f"names holds {pattern!r:.60}", expected="text: a parameter's name, or a pattern of it")
        matches = (
            {homes[pattern]} if pattern in homes else {homes[text] for text in homes if fnmatchcase(text, pattern)}
        )
        if not matches:
            raise UsageError(
                f"no trainable parameter is named {pattern!r}",
                expected="a name of the whole model, or a pattern like '*.weight'",
                fix=_near(pattern, names),
            )
        chosen |= matches
    return [name for name in names if name in chosen]


def grouped(
    groups: Sequence[Mapping[str, Any]], known: Iterable[str], *, others: Mapping[str, Sequence[str]] | None = None
) -> list[tuple[set[str], dict[str, Any]]]:
    """Return each group's names and its other settings; a group without names has those that no other has.

    >>> grouped([{"names": "*.bias", "weight_decay": 0.0}, {"lr": 0.1}], ["0.weight", "0.bias"])
    [({'0.bias'}, {'weight_decay': 0.0}), ({'0.weight'}, {'lr': 0.1})]
    """
    left = set(listed := list(known))
    chosen: list[tuple[set[str], dict[str, Any]]] = []
    for group in sorted(groups, key=lambda group: "names" not in group):
        if not isinstance(group, Mapping) or "params" in group:
            raise UsageError(
                f"groups holds {group!r:.80}",
                expected="dicts with names and settings",
                fix='pass groups=[{"names": "*.weight", "weight_decay": 0.1}, {"weight_decay": 0.0}]',
            )
        names = set(matching(group["names"], listed, others=others)) if "names" in group else set(left)
        if twice := sorted(names - left):
            raise UsageError(f"{twice[0]!r} is in two groups", expected="each parameter in one group at most")
        left -= names
        chosen.append((names, {key: value for key, value in group.items() if key != "names"}))
    return chosen


def _near(pattern: str, names: Iterable[str]) -> str:
    """Return a hint that names the parameters closest to a pattern, and never a list of hundreds."""
    listed = list(names)
    hint = nearest(pattern.strip("*?").strip(".") or pattern, listed)
    if hint.startswith("choose") and len(listed) > 4:
        return f"the first of {len(listed)} are {', '.join(listed[:4])}"
    return hint
