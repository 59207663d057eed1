"""Every schedule of the field, one recipe a file. Importing this package registers them all."""

from __future__ import annotations

# In the order of listing: from the plain ones to the elaborate.
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
