"""What the kernel of a tested notebook runs first (PYTHONSTARTUP): from here on, its ranks start warm."""

from __future__ import annotations

from drumline.channel.launch import processes
from warm_ranks import WarmRanks

vars(processes)["subprocess"] = WarmRanks()
