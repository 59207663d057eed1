"""What software does while it trains: what it overlaps, fuses and keeps, and what its optimizer holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from drumline.core.errors import PlanError, nearest
from drumline.plan.cluster.hardware import HashedOnce

OVERLAPS = ("forward", "experts", "context")  # what software may hide beyond what plans assume

# Bytes that a loss reads and writes per logit, forward and backward, counted kernel by kernel.
# PyTorch in eager mode: to 32 bits (2 + 4), and log-softmax reads twice and writes (12). Backward, the gradient of the
# choice is written (4). Then log-softmax reads two tensors twice and writes (20), and it is back to 16 bits (4 + 2).
EAGER_LOSS = 48
# Megatron-LM: to 32 bits (6), the largest (4), subtract (8), exponential (8), sum (4), divide (8). Backward: scale the
# gradient (8), back to 16 bits (6).
PARALLEL_LOSS = 52
# One kernel each way: to 32 bits (6), largest and sum in one read (4), softmax in place (8), back (6).
FUSED_LOSS = 24
# The kernel of apex and flash-attention on 16-bit logits: read twice (4), read and written in place backward (4).
IN_PLACE_LOSS = 8
# Bytes held per logit at the peak. Eager: 16 bits, a copy in 32, log-softmax, its gradient. Otherwise 16 and 32 bits.
EAGER_LOGIT, FUSED_LOGIT, IN_PLACE_LOGIT = 14, 6, 2

# What generations of fused attention reach of a device's best, before Hopper and on it. From figures of papers, for
# causal heads of 128, forward and backward: FlashAttention (arXiv 2205.14135) and its second version (2307.08691). The
# third (2407.08608), with cuDNN 9, is for Hopper alone.
ATTENTION = {1: (0.55, 0.35), 2: (1.0, 0.65), 3: (1.0, 1.0)}


class OptimizerKind(NamedTuple):
    """Bytes per parameter of an optimizer's state, and those that its step reads and writes.

    `muon` makes the updates of layers' weights orthogonal. The state includes the weight in 32 bits. A step reads
    gradients and state, and writes state and weights.
    """

    state_bytes: float
    step_bytes: float
    muon: bool = False


# The norm of gradients and their scale take 12 bytes, the new 16-bit weight 2. AdamW reads the gradient (4). It reads
# and writes two averages and the weight in 32 bits (24). Averages in 16 bits save 8 bytes of 16, in 8 bits 12 (with one
# scale in 32 bits for 256 of them, which is 0.03 bytes). Muon has one average.
OPTIMIZERS = {
    "adamw": OptimizerKind(12.0, 42.0),
    "adamw-bf16": OptimizerKind(8.0, 34.0),
    "adamw-8bit": OptimizerKind(6.03, 30.06),
    "muon": OptimizerKind(8.0, 34.0, muon=True),
}


@dataclass(frozen=True, slots=True)
class Practice(HashedOnce):
    """What the software that runs a layout overlaps, fuses, or leaves out.

    - `flash_attention`: one kernel for attention; it never stores the scores, and computes only half of them.
    - `accumulation_bytes`: bytes read and written per parameter and microbatch to add a gradient to its sum; 0 if the
      product that makes the gradient adds it directly.
    - `gradient_bytes`: bytes of a gradient's sum over the microbatches, which is also what ranks exchange.
    - `overlap_tensor`: in backward, tensor-parallel messages travel while weight gradients are computed. A schedule
      that computes these later, by themselves, leaves nothing to travel behind.
    - `overlap_forward`: in forward, tensor-parallel messages travel while products compute other pieces of the tokens.
    - `overlap_experts`: tokens travel to experts and back while another microbatch computes, as in pairs of DualPipe.
    - `overlap_context`: keys and values travel round a ring while attention computes with those that are there;
      otherwise every layer gathers them first, again in backward, and sums their gradients.
    - `overlap_pipeline`: a rank computes while messages between stages travel; otherwise it waits for each.
    - `scatter_gather`: each tensor-parallel rank sends only its part of a message between stages, and the receivers
      gather it over the faster links of their node.
    - `duplex`: messages between two ranks travel both ways at once.
    - `overlap_data`: ranks exchange gradients during the last backward, and weights during the next forward; in a
      pipeline only with `overlap_staged`.
    - `host_seconds`: how long the host takes to launch the kernels of one layer in one pass (forward, gradients of
      inputs, gradients of weights). A pass cannot be shorter, however small its products are.
    - `host_meets`: the share by which that grows with every further tensor-parallel rank: ranks that meet in a
      collective wait for the slowest host.
    - `meet_seconds`: how long tensor-parallel ranks wait for each other at every collective.
    - `loss_bytes`: bytes that the loss reads and writes per logit, forward and backward together.
    - `logit_bytes`: bytes that the loss holds per logit at its peak.
    - `fp8`: products with a layer's weights take 8-bit inputs, cast from 16-bit ones. With `keeps_fp8_inputs`, inputs
      are kept in 8 bits until their backward; otherwise they are kept in 16 and cast again. With `keeps_fp8_weights`,
      weights are cast once in a step and held beside the 16-bit ones; otherwise they are cast for every pass.
    - `product_share`: what the libraries of this release reach of a product's usual share, on Hopper.
    - `attention_kernels`: the generation of the kernels of fused attention (`ATTENTION`).
    - `eager`: every operation is a kernel of its own: a norm without biases, positions, and a gated activation function
      pass over memory several times, in 32 bits.
    - `stops_early`: full recomputation ends before a dense layer's last product, whose output no backward needs.
    - `step_seconds`: what the host takes between two steps, with nothing for the device to do.
    - `optimizer`: what the optimizer holds and steps through (`OPTIMIZERS`).
    """

    flash_attention: bool = True
    accumulation_bytes: int = 0
    gradient_bytes: int = 4
    overlap_tensor: bool = True
    overlap_forward: bool = False
    overlap_experts: bool = False
    overlap_context: bool = False
    overlap_pipeline: bool = True
    scatter_gather: bool = True
    duplex: bool = True
    overlap_data: bool = True
    overlap_staged: bool = True
    host_seconds: float = 3e-4
    host_meets: float = 0.03
    meet_seconds: float = 2e-5
    loss_bytes: float = PARALLEL_LOSS
    logit_bytes: int = FUSED_LOGIT
    fp8: bool = False
    keeps_fp8_inputs: bool = True
    keeps_fp8_weights: bool = True
    product_share: float = 1.0
    attention_kernels: int = 3
    eager: bool = False
    stops_early: bool = False
    step_seconds: float = 0.0
    optimizer: str = "adamw"

    __hash__ = HashedOnce.__hash__

    def __post_init__(self) -> None:
        if self.attention_kernels not in ATTENTION:
            raise PlanError(f"attention_kernels is {self.attention_kernels}", expected="1, 2 or 3")
        if self.optimizer not in OPTIMIZERS:
            raise PlanError(f"optimizer is {self.optimizer!r}", fix=nearest(self.optimizer, OPTIMIZERS))

    @property
    def states(self) -> OptimizerKind:
        """Return what the optimizer holds and steps through.

        >>> Practice(optimizer="adamw-bf16").states.state_bytes
        8.0
        """
        return OPTIMIZERS[self.optimizer]


PRACTICE = Practice()
