"""Real steps of the plain model: what the host needs for its parts, and whole steps that judge a forecast."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from drumline.plan.calibrated.calibration import MeasuredSize, MeasuredStep, plain_shape
from drumline.plan.calibrated.forecast import TINY
from drumline.plan.calibrated.setting import LOSS_ROWS, StepSetting
from drumline.plan.cluster.transformer import Transformer
from drumline.profile.calibrate.plain_model import PlainModel
from drumline.profile.calibrate.recipes import DTYPES, precise
from drumline.profile.calibrate.watches import Timed, summed_up

_WARM_UPS = 3


@dataclass(slots=True)
class RealStep:
    """A step of the plain model with its optimizers, ready to be called."""

    shape: Transformer
    setting: StepSetting
    device: torch.device
    model: PlainModel = field(init=False)
    optimizers: list[torch.optim.Optimizer] = field(init=False)
    batch: tuple[Tensor, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        setting = self.setting
        with self.device:
            self.model = PlainModel(self.shape, loss=setting.loss, recompute=setting.recompute)
        self.model.to(DTYPES[setting.dtype])
        self.optimizers = optimizers(self.model, setting.optimizer)
        sizes = (setting.rows, self.shape.sequence)
        self.batch = tuple(torch.randint(self.shape.vocabulary, sizes, device=self.device) for _ in range(2))  # type: ignore[assignment]

    def __call__(self) -> None:
        """Train for a step; the host does not wait for the device."""
        with precise(self.setting.dtype):
            self.model.zero_grad(set_to_none=True)
            self.model(*self.batch).backward()
            for optimizer in self.optimizers:
                optimizer.step()


def optimizers(model: PlainModel, name: str) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a setting.

    >>> shape = plain_shape("m", num_layers=1, hidden=8, num_heads=1, vocabulary=10, sequence=4)
    >>> [type(optimizer).__name__ for optimizer in optimizers(PlainModel(shape), "muon")]
    ['AdamW', 'Muon']
    """
    matrices = [param for param in model.layers.parameters() if param.dim() == 2] if name == "muon" else []
    chosen = {id(param) for param in matrices}
    others = [param for param in model.parameters() if id(param) not in chosen]
    how: dict[str, Any] = {"adamw-foreach": {"foreach": True}, "adamw-loop": {"foreach": False}}.get(
        name, {"fused": True}
    )
    adamw: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, **how)]
    return [*adamw, torch.optim.Muon(matrices)] if matrices else adamw


def step_seconds(
    step: Callable[[], Any], device: torch.device, count: int, now: Callable[[], float] = time.perf_counter
) -> Timed:
    """Return the time of a step among others: on an accelerator the host does not wait between them."""
    for _ in range(_WARM_UPS):
        step()
    if device.type == "cpu":
        return summed_up(list(_rounds(step, count, now)))
    torch.accelerator.synchronize(device)
    marks = [torch.Event(device, enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.accelerator.synchronize(device)
    return summed_up([before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)])


def _rounds(step: Callable[[], Any], count: int, now: Callable[[], float]) -> Iterator[float]:
    for _ in range(count):
        begun = now()
        step()
        yield now() - begun


def peak_bytes(step: RealStep, device: torch.device) -> int:
    """Return the most bytes that tensors take during a step; gradients of the step before are gone."""
    step.model.zero_grad(set_to_none=True)
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        step()
        torch.accelerator.synchronize(device)
        return int(torch.accelerator.max_memory_allocated(device))
    standing = sum(tensor.nbytes for tensor in _standing(step))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        step()
    assert profiled.profiler is not None
    events: Any = profiled.profiler.kineto_results.events()
    live = most = 0
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return standing + most


def _standing(step: RealStep) -> Iterator[Tensor]:
    yield from step.model.parameters()
    yield from step.model.buffers()
    yield from step.batch
    for optimizer in step.optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def busy_share(step: Callable[[], Any], device: torch.device, seconds: float, count: int = 3) -> float:
    """Return the share of a step in which the device computes, by the profiler; 1 on a CPU."""
    if device.type == "cpu":
        return 1.0
    activity = getattr(ProfilerActivity, device.type.upper(), ProfilerActivity.CPU)
    with profile(activities=[activity], acc_events=True) as profiled:
        for _ in range(count):
            step()
        torch.accelerator.synchronize(device)
    assert profiled.profiler is not None
    events: Any = profiled.profiler.kineto_results.events()
    spans = sorted(
        (event.start_ns(), event.end_ns()) for event in events if not str(event.device_type()).endswith("CPU")
    )
    return min(covered(spans) / 1e9 / count / seconds, 1.0) if spans else 1.0


def covered(spans: list[tuple[int, int]]) -> int:
    """Return how long at least one of the spans lasts, which are sorted by their starts.

    >>> covered([(0, 4), (2, 5), (7, 8)])
    6
    """
    total = end = 0
    for start, stop in spans:
        total += max(stop - max(start, end), 0)
        end = max(end, stop)
    return total


def host_times(
    device: torch.device, count: int = 10, now: Callable[[], float] = time.perf_counter
) -> Iterator[MeasuredSize]:
    """Measure what the host takes for layers, pieces of a fused loss, and tensors of an optimizer."""
    for recompute, ending in (("none", ""), ("full", "-recomputed")):
        for layers in (2, 6):
            setting = StepSetting(rows=1, dtype="fp32", recompute=recompute)
            step = RealStep(plain_shape("tiny", num_layers=layers, **TINY), setting, device)
            step.optimizers = []
            yield MeasuredSize(f"layers{ending}", layers, *step_seconds(step, device, count, now))
    if device.type != "cpu":  # there, a piece takes what its works take
        for pieces in (1, 5):
            shape = plain_shape("tiny", num_layers=1, **{**TINY, "sequence": LOSS_ROWS})
            step = RealStep(shape, StepSetting(rows=pieces, dtype="fp32", loss="fused"), device)
            step.optimizers = []
            yield MeasuredSize("pieces", pieces, *step_seconds(step, device, count, now))
    for kind in ("adamw", "adamw-foreach", "adamw-loop", "muon"):
        for tensors in (10, 50):
            yield MeasuredSize(kind, tensors, *_update_seconds(kind, tensors, device, count, now))


def _update_seconds(kind: str, tensors: int, device: torch.device, count: int, now: Callable[[], float]) -> Timed:
    width = TINY["hidden"]
    parameters = [nn.Parameter(torch.randn(width, width, device=device)) for _ in range(tensors)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    if kind == "muon":
        return step_seconds(torch.optim.Muon(parameters).step, device, count, now)
    how: dict[str, Any] = {"fused": True} if kind == "adamw" else {"foreach": kind == "adamw-foreach"}
    return step_seconds(torch.optim.AdamW(parameters, **how).step, device, count, now)


def measured_step(
    shape: Transformer,
    setting: StepSetting,
    device: torch.device,
    count: int = 30,
    now: Callable[[], float] = time.perf_counter,
) -> MeasuredStep:
    """Train a model for some steps, and return their median, their spread, the peak and the busy share."""
    step = RealStep(shape, setting, device)
    timed = step_seconds(step, device, count, now)
    return MeasuredStep(shape, setting, *timed, peak_bytes(step, device), busy_share(step, device, timed.seconds))


_JUDGES_ACCELERATOR = (
    ({"num_layers": 6, "hidden": 1024, "num_heads": 16, "vocabulary": 32000, "sequence": 2048}, {"rows": 8}),
    ({"num_layers": 4, "hidden": 2048, "num_heads": 16, "num_key_value_heads": 4, "vocabulary": 50000,
      "sequence": 4096}, {"rows": 4, "recompute": "full"}),
    ({"num_layers": 2, "hidden": 4096, "num_heads": 32, "num_key_value_heads": 8, "feedforward": 11008,
      "vocabulary": 64000, "sequence": 4096}, {"rows": 2, "loss": "fused"}),
    ({"num_layers": 3, "hidden": 3072, "num_heads": 24, "feedforward": 8192, "vocabulary": 32000, "sequence": 1024},
     {"rows": 8, "optimizer": "muon"}),
    ({"num_layers": 2, "hidden": 1536, "num_heads": 12, "vocabulary": 100000, "sequence": 2048},
     {"rows": 4, "dtype": "fp32"}),
    ({"num_layers": 2, "hidden": 2048, "num_heads": 16, "vocabulary": 128256, "sequence": 16384},
     {"rows": 1, "loss": "fused"}),
    ({"num_layers": 8, "hidden": 512, "num_heads": 8, "vocabulary": 32000, "sequence": 512}, {"rows": 1}),
    ({"num_layers": 16, "hidden": 768, "num_heads": 12, "vocabulary": 8000, "sequence": 512}, {"rows": 2}),
    ({"num_layers": 12, "hidden": 512, "num_heads": 8, "vocabulary": 32000, "sequence": 512},
     {"rows": 1, "recompute": "full", "optimizer": "muon"}),
)  # fmt: skip
_JUDGES_HOST = (
    ({"num_layers": 2, "hidden": 128, "num_heads": 4, "vocabulary": 2000, "sequence": 64}, {"rows": 2}),
    ({"num_layers": 3, "hidden": 192, "num_heads": 6, "num_key_value_heads": 2, "vocabulary": 1000, "sequence": 128},
     {"rows": 1, "recompute": "full"}),
    ({"num_layers": 2, "hidden": 256, "num_heads": 4, "vocabulary": 4000, "sequence": 64},
     {"rows": 2, "loss": "fused"}),
    ({"num_layers": 1, "hidden": 256, "num_heads": 8, "feedforward": 700, "vocabulary": 512, "sequence": 256},
     {"rows": 1, "optimizer": "muon"}),
    ({"num_layers": 4, "hidden": 96, "num_heads": 3, "vocabulary": 500, "sequence": 96},
     {"rows": 2, "optimizer": "adamw-foreach"}),
)  # fmt: skip


def judges(device: torch.device, dtypes: list[str]) -> Iterator[tuple[Transformer, StepSetting]]:
    """Yield the real steps to measure: device-bound and host-bound ones, one after the other."""
    for sizes, how in _JUDGES_HOST if device.type == "cpu" else _JUDGES_ACCELERATOR:
        wanted: Any = {"dtype": "fp32" if device.type == "cpu" else "bf16", **how}
        if wanted["dtype"] in dtypes:
            yield plain_shape("step", **sizes), StepSetting(**wanted)
