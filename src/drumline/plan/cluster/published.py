"""Published runs as layouts, with what was measured.

The software of a run is part of it, because it decides what is overlapped and what is fused (`Practice`):

- SC'21 (April 2021): messages between stages are scattered and gathered; a rank waits for its messages of all kinds; every
  microbatch's weight gradients are added to sums in 32 bits by a kernel of its own.
- arXiv 2205.05198 (May 2022): the weights' products add to the sums themselves, and the exchange of an input's gradient goes on
  beside them. Both came to Megatron-LM in between.
- DeepSpeed's pipeline (MT-NLG, BLOOM): as in 2021, with one message after the other, each sent whole by every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from drumline.plan.cluster.estimate import Estimate
from drumline.plan.cluster.evaluate import estimate
from drumline.plan.cluster.hardware import Cluster
from drumline.plan.cluster.layout import Layout, Practice
from drumline.plan.cluster.machines import cluster
from drumline.plan.cluster.models import model
from drumline.plan.cluster.transformer import Transformer

MEGATRON_2021 = Practice(
    flash_attention=False,
    fused_accumulation=False,
    overlap_tensor=False,
    overlap_pipeline=False,
    overlap_data=False,
)
MEGATRON_2022 = Practice(flash_attention=False, overlap_pipeline=False, overlap_data=False)
DEEPSPEED = Practice(
    flash_attention=False,
    fused_accumulation=False,
    overlap_tensor=False,
    overlap_pipeline=False,
    overlap_data=False,
    scatter_gather=False,
    duplex=False,
)


@dataclass(frozen=True, slots=True)
class Run:
    """A published run: where it is from, what it ran, and the seconds of a step that were measured."""

    source: str
    name: str
    model: str
    hardware: str
    layout: Layout
    seconds: float

    @property
    def transformer(self) -> Transformer:
        """Return its model."""
        return model(self.model)

    @property
    def cluster(self) -> Cluster:
        """Return its machines."""
        return cluster(self.hardware, self.layout.num_devices)

    def estimate(self, *, exact: bool = False) -> Estimate:
        """Return what the layout is estimated to take."""
        return estimate(self.transformer, self.cluster, self.layout, exact=exact)
