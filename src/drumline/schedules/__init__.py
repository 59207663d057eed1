"""Every schedule of the field, one recipe a file. Importing this package registers them all."""

from __future__ import annotations

from drumline.schedules import (
    chimera,
    dualpipe,
    dualpipe_v,
    forward_only,
    gpipe,
    hanayo,
    interleaved_1f1b,
    interleaved_zb,
    looped_bfs,
    naive,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zb_v,
)
from drumline.schedules.registry import Schedule, find, generate, schedule, schedules, unregister

__all__ = ["Schedule", "find", "generate", "schedule", "schedules", "unregister"]
