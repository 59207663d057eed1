"""Hostile modules: models whose forward does what is hard to follow; each is trained right, or refused with a word.

`ZOO` maps a name to an `Entry`: how to make the model, what happens to it between steps, and, where it must be refused,
the words of the refusal. Everything else must end with the plain model's loss and gradients.
"""

from __future__ import annotations

from zoo import branches, buffers, functions, hooks, memory, modes, shapes, stale
from zoo.branches import ONLY_BY_CHECK
from zoo.entry import WIDTH, ZOO, Entry

__all__ = [
    "ONLY_BY_CHECK",
    "WIDTH",
    "ZOO",
    "Entry",
    "branches",
    "buffers",
    "functions",
    "hooks",
    "memory",
    "modes",
    "shapes",
    "stale",
]
