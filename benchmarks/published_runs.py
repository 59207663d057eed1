"""Published runs as layouts, with what was measured.

The software of a run is part of it: it decides what is fused and what waits (`Practice`). The rule: a run takes the
preset of its framework and year, and no row has a switch of its own. All of this is public:

- SC'21 (Megatron-LM of 2021; microbatches, virtual stages and flags from `examples/sc21` of its repository): gradients
  are added up in 16 bits by a kernel of their own, 6 bytes a parameter; a rank waits for its messages of all kinds.
  Where there is no pipeline, PyTorch's DistributedDataParallel exchanges gradients during backward.
- arXiv 2205.05198 (Megatron-LM of 2022): sums in 32 bits, added to by the weights' products themselves; the exchange of
  an input's gradient goes on beside those.
- DeepSpeed's pipeline (MT-NLG, BLOOM): bf16 with sums in 32 bits. A gradient is first cast, then added, 18 bytes a
  parameter. Messages are sent in parts and gathered, one after the other.
- Llama 3 (arXiv 2407.21783): a layer per virtual stage; the first has the embedding alone, the last the head alone.
- FP8 (performance tables of NeMo 24.07 and of Megatron Bridge 25.09, tokens a second of a device): Transformer Engine.
  Tensor-parallel messages of the forward hide behind products too, keys and values travel round a ring. The tables do
  not say what is recomputed; we take nothing.
- DeepSeek-V3 (arXiv 2412.19437): 180,000 hours of a device for 10^12 tokens, in steps of 15,360 x 4,096 of them. FP8,
  and tokens on their way to experts hide behind another microbatch. Norms, outputs of activation functions, and
  queries, keys and values are computed again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from drumline.plan.cluster.estimate import Estimate, estimate
from drumline.plan.cluster.hardware import Cluster, cluster
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.models import model
from drumline.plan.cluster.practice import PRACTICE, Practice
from drumline.plan.cluster.transformer import Transformer, attention_flops, layer_weights, model_flops
from drumline.plan.layouts.software import software

MEGATRON_2021, MEGATRON_2022 = (software(f"megatron@{year}").practice for year in (2021, 2022))
DEEPSPEED, NEMO, BRIDGE = (software(name).practice for name in ("deepspeed@2022", "nemo@24.07", "nemo@25.09"))
LLAMA3, DEEPSEEK = software("meta@2024").practice, software("deepseek@2024").practice
PRACTICES = {
    "Megatron-LM of 2022": MEGATRON_2022,
    "Megatron-LM of 2021": MEGATRON_2021,
    "drumline plan": PRACTICE,  # what the planner assumes unless it is told otherwise
    "DeepSpeed": DEEPSPEED,
}


@dataclass(frozen=True, slots=True)
class Run:
    """A published run: where it is from, what it ran, and the seconds of a step that were measured."""

    source: str
    name: str
    transformer: Transformer
    hardware: str
    layout: Layout
    seconds: float

    @property
    def cluster(self) -> Cluster:
        """Return its machines."""
        return cluster(self.hardware, self.layout.num_devices)

    @property
    def preset(self) -> str:
        """Return the name of its practice: framework and year."""
        return next(name for name, practice in PRACTICES.items() if practice == self.layout.practice)

    def under(self, practice: Practice) -> Run:
        """Return the same run as if its software had done as `practice` says."""
        return replace(self, layout=replace(self.layout, practice=practice))

    def estimate(self, *, exact: bool = False) -> Estimate:
        """Return what the layout is estimated to take."""
        return estimate(self.transformer, self.cluster, self.layout, exact=exact)


@dataclass(frozen=True, slots=True)
class Holding:
    """GiB of a device that arXiv 2205.05198 computes: weights with optimizer, and activations."""

    name: str
    transformer: Transformer
    layout: Layout
    weights: float
    activations: float


def run_flops(transformer: Transformer, layout: Layout) -> float:
    """Return the operations that a step runs, those included that are computed again.

    >>> gpt = Transformer("145.6B", num_layers=80, hidden=12288, num_heads=96, vocabulary=51200, sequence=2048)
    >>> h, l, s, v = 12288, 80, 2048, 51200
    >>> layout = Layout(batch=1, recompute="full")
    >>> round(run_flops(gpt, layout) / (96 * s * l * h**2 * (1 + s / 6 / h + v / 16 / l / h)), 6)
    1.0
    """
    again = 0.0
    if layout.recompute != "none":
        again += attention_flops(transformer, layout.batch)
    if layout.recompute == "full":
        again += 2.0 * layout.batch * transformer.sequence * layer_weights(transformer)
    return model_flops(transformer, layout.batch) + again


def sc21() -> tuple[Run, ...]:
    """Return the ten rows of Megatron-LM's SC'21 paper, Table 1: the only ones that constants were taken from.

    >>> [round(run.seconds, 1) for run in sc21()][-2:]
    [54.1, 102.6]
    """
    return tuple(_sc21(*row) for row in _SC21)


def sc21_scaling() -> tuple[Run, ...]:
    """Return the pipelines of that paper's Table 2: two models, each on three numbers of devices at the same batch.

    Their virtual stages are not public; they are taken to be two, and three where there are three layers.
    """
    return tuple(
        _sc21(name, 8, pipeline, devices, batch, 1, virtual, rate, label=f"{name} on {devices}")
        for name, pipeline, virtual, batch, rows in _SCALED
        for devices, rate in rows
    )


def sc21_sharded() -> tuple[Run, ...]:
    """Return the rows of the same table that shard the weights by DeepSpeed's ZeRO 3 instead."""
    found = []
    for name, rows in _SHARDED:
        for devices, microbatch, batch, rate in rows:
            layout = Layout(
                batch=batch, microbatch=microbatch, data=devices, zero=3, recompute="full", practice=DEEPSPEED
            )
            transformer = model(f"gpt-{name}")
            seconds = _seconds(run_flops(transformer, layout), layout, rate * 1e12)
            found.append(Run("SC'21", f"{name} ZeRO 3", transformer, "a100-80", layout, seconds))
    return tuple(found)


def recomputation() -> tuple[Run, ...]:
    """Return the eight times of arXiv 2205.05198: four models, with full and with selective recomputation."""
    return tuple(
        Run("2205.05198", f"{name} {kind}", model(f"gpt-{name}"), "a100-80", _recomputed(kind, *shape), seconds)
        for name, shape, *times in _RECOMPUTED
        for kind, seconds in zip(("full", "selective"), times, strict=True)
    )


def mt_nlg() -> tuple[Run, ...]:
    """Return MT-NLG's steps on three numbers of devices."""
    base = Layout(batch=1920, tensor=8, pipeline=35, recompute="full", practice=DEEPSPEED)
    return tuple(
        Run("2201.11990", f"530b on {280 * data}", model("mt-nlg-530b"), "a100-80", replace(base, data=data), seconds)
        for data, seconds in ((8, 60.1), (10, 50.2), (12, 44.4))
    )


def bloom() -> tuple[Run, ...]:
    """Return BLOOM's step. Its optimizer is DeepSpeed's ZeRO 1 in other words."""
    layout = Layout(
        batch=2048, microbatch=2, tensor=4, pipeline=12, data=8, zero=1, recompute="full", practice=DEEPSPEED
    )
    return (Run("BLOOM", "176b", model("bloom-176b"), "jean-zay", layout, 104.7),)


def held_out() -> tuple[Run, ...]:
    """Return every run that no A100 constant was taken from."""
    return recomputation() + mt_nlg() + bloom()


def llama3() -> tuple[Run, ...]:
    """Return the three rows of Llama 3's table; the first one gave the one constant of Hopper devices."""
    counts = (0, *(1,) * 126, 0)
    base = Layout(
        batch=2048,
        tensor=8,
        pipeline=16,
        stages_per_rank=8,
        schedule="interleaved-1f1b",
        zero=1,
        sequence_parallel=True,
        counts=counts,
        practice=LLAMA3,
    )
    plain = model("llama-3-405b")
    rows = (
        ("405b on 8192", plain, replace(base, data=64), 430e12),
        ("405b on 16384", plain, replace(base, data=128), 400e12),
        ("405b, 131072 tokens", replace(plain, sequence=131072), replace(base, batch=128, data=8, context=16), 380e12),
    )
    return tuple(
        Run("2407.21783", name, t, "h100", layout, _seconds(model_flops(t, layout.batch, causal=True), layout, rate))
        for name, t, layout, rate in rows
    )


def fp8() -> tuple[Run, ...]:
    """Return runs in FP8 on H100: ten of NVIDIA's tables, and DeepSeek-V3 on H800. No constant comes from these."""
    found = []
    for source, name, transformer, layout, rate in _FP8:
        seconds = layout.batch * transformer.sequence / rate / layout.num_devices
        practice = NEMO if source == "NeMo 24.07" else BRIDGE
        found.append(Run(source, name, transformer, "h100", replace(layout, practice=practice), seconds))
    # The report recomputes norms, what follows the activation function's inputs, and projections of latents.
    again = "norms+activation+projections"
    layout = Layout(15360, 1, 1, 16, 128, 1, 64, 1, "dualpipe", 1, False, again, (3, *(4,) * 14, 2))
    hours = 180e3 / 1e12 * 15360 * 4096 / 2048
    # It predicts a further token: one more layer on the last rank, and the head twice.
    plain = model("deepseek-v3")
    twice = replace(plain, num_layers=62, vocabulary=2 * plain.vocabulary)
    last = Run("2412.19437", "deepseek-v3", twice, "h800", replace(layout, counts=(3, *(4,) * 14, 3)), 3600 * hours)
    return (*found, last.under(DEEPSEEK))


def holdings() -> tuple[Holding, ...]:
    """Return what arXiv 2205.05198 says a device holds: plainly, and with sequence parallelism and recomputation."""
    return tuple(
        Holding(f"{name} {kind}", model(f"gpt-{name}"), _recomputed(kind, *shape), weights, activations)
        for (name, shape, *_), (weights, *both) in zip(_RECOMPUTED, _HELD, strict=True)
        for kind, activations in zip(("none", "selective"), both, strict=True)
    )


_INTERLEAVED = "interleaved-1f1b"
_LLAMA2 = replace(model("llama-3-70b"), name="llama-2", vocabulary=32000, sequence=4096, head_width=128)
_LLAMA2_7B = replace(_LLAMA2, num_layers=32, hidden=4096, num_heads=32, num_key_value_heads=32, feedforward=11008)
_LLAMA2_13B = replace(_LLAMA2, num_layers=40, hidden=5120, num_heads=40, num_key_value_heads=40, feedforward=13824)
# Source, name, model, layout, and tokens a second of a device.
_FP8 = (
    ("NeMo 24.07", "llama-2-7b", _LLAMA2_7B, Layout(128, data=8, zero=1), 16847),
    ("NeMo 24.07", "llama-2-13b", _LLAMA2_13B, Layout(128, 1, 1, 4, 4, 1, 1, 10, _INTERLEAVED, 1), 8646),
    ("NeMo 24.07", "llama-2-70b", _LLAMA2, Layout(128, 1, 4, 4, 4, 1, 1, 20, _INTERLEAVED, 1, True), 1707),
    ("NeMo 24.07", "llama-3-8b", model("llama-3-8b"), Layout(128, data=4, context=2, zero=1), 12036),
    ("NeMo 24.07", "llama-3-70b", model("llama-3-70b"), Layout(128, 1, 4, 4, 2, 2, 1, 5, _INTERLEAVED, 1, True), 1533),
    ("NeMo 24.07", "gpt-175b on 128", model("gpt-175b"), Layout(256, 1, 4, 8, 4, 1, 1, 6, _INTERLEAVED, 1, True), 726),
    (
        "NeMo 24.07",
        "gpt-175b on 512",
        model("gpt-175b"),
        Layout(2048, 2, 4, 8, 16, 1, 1, 6, _INTERLEAVED, 1, True),
        782,
    ),
    ("Bridge", "llama-3-8b ZeRO 3", model("llama-3-8b"), Layout(128, data=8, zero=3), 14079),
    ("Bridge", "llama-3-70b", model("llama-3-70b"), Layout(128, 1, 4, 8, 2, 1, 1, 5, _INTERLEAVED, 1, True), 1619),
    ("Bridge", "llama-3-405b", model("llama-3-405b"), Layout(512, 1, 8, 8, 8, 2, 1, 8, _INTERLEAVED, 1, True), 302),
)
# Model, TP, PP, devices, batch, microbatch, virtual stages, TFLOP/s of a device with everything that is run.
_SC21 = (
    ("1.7b", 1, 1, 32, 512, 16, 1, 137),
    ("3.6b", 2, 1, 64, 512, 16, 1, 138),
    ("7.5b", 4, 1, 128, 512, 16, 1, 142),
    ("18.4b", 8, 1, 256, 1024, 8, 1, 135),
    ("39.1b", 8, 2, 512, 1536, 4, 1, 138),
    ("76.1b", 8, 4, 1024, 1792, 2, 3, 140),
    ("145.6b", 8, 8, 1536, 2304, 2, 2, 148),
    ("310.1b", 8, 16, 1920, 2160, 1, 2, 155),
    ("529.6b", 8, 35, 2520, 2520, 1, 3, 163),
    ("1008b", 8, 64, 3072, 3072, 1, 1, 163),
)
# Model, PP, virtual stages, batch, and for each number of devices TFLOP/s as above.
_SCALED = (
    ("175b", 12, 2, 1536, ((384, 153), (768, 149), (1536, 141))),
    ("529.6b", 35, 3, 2240, ((560, 171), (1120, 167), (2240, 159))),
)
# Model, and devices, microbatch, batch, TFLOP/s.
_SHARDED = (
    ("175b", ((384, 4, 1536, 144), (768, 2, 1536, 88), (1536, 1, 1536, 44))),
    ("529.6b", ((640, 4, 2560, 138), (1120, 2, 2240, 98), (2240, 1, 2240, 48))),
)
# Model, (PP, virtual stages, batch, microbatch), seconds with full and with selective recomputation.
_RECOMPUTED = (
    ("22b", (1, 1, 4, 4), 1.42, 1.10),
    ("175b", (8, 3, 64, 1), 18.13, 13.75),
    ("530b", (35, 3, 280, 1), 49.05, 37.83),
    ("1t", (64, 1, 512, 1), 94.42, 71.49),
)
_HELD = ((45.56, 59.25, 9.56), (45.56, 66.84, 12.35), (31.64, 114.02, 23.08), (32.96, 131.25, 26.56))


def _sc21(
    name: str,
    tensor: int,
    pipeline: int,
    devices: int,
    batch: int,
    microbatch: int,
    virtual: int,
    rate: float,
    label: str = "",
) -> Run:
    layout = Layout(
        batch=batch,
        microbatch=microbatch,
        tensor=tensor,
        pipeline=pipeline,
        data=devices // tensor // pipeline,
        stages_per_rank=virtual,
        schedule=_schedule(virtual),
        recompute="full",
        practice=MEGATRON_2021,
    )
    item = model(f"gpt-{name}")
    return Run("SC'21", label or name, item, "a100-80", layout, _seconds(run_flops(item, layout), layout, rate * 1e12))


def _recomputed(kind: str, pipeline: int, virtual: int, batch: int, microbatch: int) -> Layout:
    return Layout(
        batch=batch,
        microbatch=microbatch,
        tensor=8,
        pipeline=pipeline,
        stages_per_rank=virtual,
        schedule=_schedule(virtual),
        sequence_parallel=kind == "selective",
        recompute=kind,
        practice=MEGATRON_2022,
    )


def _schedule(virtual: int) -> str:
    return "1f1b" if virtual == 1 else "interleaved-1f1b"


def _seconds(flops: float, layout: Layout, flops_per_second: float) -> float:
    return flops / layout.num_devices / flops_per_second
