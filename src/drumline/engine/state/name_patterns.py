"""Parameters chosen by name: patterns over the names of the whole model, so that every rank chooses alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

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
    if isinstance(patterns, str):
        patterns = [patterns]
    chosen: set[str] = set()
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise UsageError(f"names holds {pattern!r:.60}", expected="text: a parameter's name, or a pattern of it")
        matches = {name for name, each in names.items() if any(_matches(text, pattern) for text in each)}
        if not matches:
            raise UsageError(
                f"no trainable parameter is named {pattern!r}",
                expected="a name of the whole model, or a pattern like '*.weight'",
                fix=_near(pattern, names),
            )
        chosen |= matches
    return [name for name in names if name in chosen]


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)


def _near(pattern: str, names: Iterable[str]) -> str:
    """Return a hint that names the parameters closest to a pattern, and never a list of hundreds."""
    listed = list(names)
    hint = nearest(pattern.strip("*?").strip(".") or pattern, listed)
    if hint.startswith("choose") and len(listed) > 4:
        return f"the first of {len(listed)} are {', '.join(listed[:4])}"
    return hint
