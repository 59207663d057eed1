"""All published schedules, one recipe per file. Importing this package registers them."""

from __future__ import annotations

# In listing order: from simple to elaborate.
# isort: off
from drumline.schedules import (
    naive,
    gpipe,
    one_f_one_b,
    interleaved_1f1b,
    looped_bfs,
    zb_h1,
    zb_h2,
    zb_v,
    v_half,
    v_min,
    interleaved_zb,
    dualpipe,
    dualpipe_v,
    chimera,
    hanayo,
    pipedream,
    pipedream_2bw,
    forward_only,
)
# isort: on

from drumline.schedules.registry import DEFAULT, Schedule, find, generate, schedule, schedules, unregister

__all__ = ["DEFAULT", "Schedule", "find", "generate", "schedule", "schedules", "unregister"]
