"""A layout: how a cluster's devices divide one training step among themselves."""

from __future__ import annotations

from dataclasses import dataclass

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class Practice:
    """What the software that runs a layout does at the same time, fuses, or leaves out.

    - `flash_attention`: one kernel for attention; the scores are never stored, and only half of them are computed.
    - `accumulation_bytes`: what is read and written per parameter and microbatch to add a gradient to its sum. Nothing
      where the product that makes the gradient adds it by itself.
    - `gradient_bytes`: of a gradient's sum over the microbatches, which is also what is exchanged.
    - `overlap_tensor`: in backward, tensor-parallel messages travel while weight gradients are computed.
    - `overlap_pipeline`: a rank computes while messages between stages travel; where not, it waits for each.
    - `scatter_gather`: of a message between stages each tensor-parallel rank sends its part only, and the receivers
      gather it over the faster links of their node.
    - `duplex`: messages between two ranks travel both ways at once.
    - `overlap_data`: gradients are exchanged while the last backward runs, weights while the next forward does.
    """

    flash_attention: bool = True
    accumulation_bytes: int = 0
    gradient_bytes: int = 4
    overlap_tensor: bool = True
    overlap_pipeline: bool = True
    scatter_gather: bool = True
    duplex: bool = True
    overlap_data: bool = True


PRACTICE = Practice()


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees of parallelism and everything else that decides what a device does and holds.

    `tensor * pipeline * data * context` is the number of devices; `expert` divides `data * context`. `batch` and
    `microbatch` count sequences; a data-parallel rank runs `batch / (data * microbatch)` microbatches. `counts` are the
    layers of every stage, where they are not to be as even as possible. Ranks are numbered with tensor parallelism
    innermost, then context, then data, then the pipeline.
    """

    batch: int
    microbatch: int = 1
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    stages_per_rank: int = 1
    schedule: str = "1f1b"
    zero: int = 0
    sequence_parallel: bool = False
    recompute: str = "none"
    counts: tuple[int, ...] = ()
    practice: Practice = PRACTICE

    @property
    def num_devices(self) -> int:
        """Return how many devices it takes."""
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def num_stages(self) -> int:
        """Return into how many stages the layers are cut."""
        return self.pipeline * self.stages_per_rank

    @property
    def num_microbatches(self) -> int:
        """Return how many microbatches go through a pipeline in a step.

        >>> Layout(batch=2304, tensor=8, pipeline=8, data=24).num_microbatches
        96
        """
        return self.batch // (self.data * self.microbatch)
