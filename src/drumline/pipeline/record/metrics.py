"""The line of metrics that rank 0 writes for a step: what the timeline says, and what only the pipeline knows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from drumline.core.measured.align import Dial
from drumline.core.measured.metrics import step_metrics
from drumline.pipeline.record.tally import Tally


def line_of(tally: Tally, noted: Mapping[str, Any], dials: tuple[Dial, ...] = ()) -> dict[str, Any]:
    """Return the metrics of a step; `noted` are further ones, `dials` say how the ranks' clocks are read."""
    found: dict[str, Any] = {"loss_metrics/global_avg_loss": tally.loss, **noted}
    records = tally.known_records
    if records is not None:
        found |= step_metrics(tally.program, records, dials)
        seconds = found["time_metrics/end_to_end(s)"]
        rows, tokens = (max(getattr(one, what) for one in tally.told) for what in ("num_rows", "num_tokens"))
        if rows:
            found["throughput(rows/s)"] = rows / seconds
        if tokens:
            found["throughput(tps)"] = tokens / seconds / len(records)  # of each device, as torchtitan has it
    return {name: _plain(value) for name, value in found.items()}


def _plain(value: Any) -> Any:
    """Return a number as JSON has it, which knows neither tensors nor what is not finite."""
    number = value.item() if isinstance(value, Tensor) else value
    return None if isinstance(number, float) and not math.isfinite(number) else number
