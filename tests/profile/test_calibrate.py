"""The calibration's works and bytes against PyTorch itself, and how it measures: clocks, order, what fails."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from importlib import import_module
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from drumline.core.errors import UsageError
from drumline.plan.calibrated.calibration import MeasuredStep, MeasuredWork, plain_shape
from drumline.plan.calibrated.layer_list import LayerList
from drumline.plan.calibrated.prices import demand
from drumline.plan.calibrated.setting import StepSetting
from drumline.plan.calibrated.step_list import step_tape
from drumline.plan.calibrated.step_tape import StepTape, Work
from drumline.profile.calibrate.calibrate import calibrate
from drumline.profile.calibrate.cuda import captured
from drumline.profile.calibrate.plain_model import FusedLoss, PlainLayer, normalised
from drumline.profile.calibrate.real_steps import RealStep, covered, host_times, measured_step, peak_bytes
from drumline.profile.calibrate.recipes import DTYPES, call_of
from drumline.profile.calibrate.start import calibrated
from drumline.profile.calibrate.watches import HostWatch, Timed
from drumline.profile.calibrate.works import ACCELERATOR, HOST, works
from refused import refused

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
module: Any = import_module("drumline.profile.calibrate.calibrate")
SHAPE = plain_shape(
    "tiny", num_layers=2, hidden=64, num_heads=4, num_key_value_heads=2, feedforward=96, vocabulary=1000, sequence=48
)
STEP = MeasuredStep(SHAPE, StepSetting(1, "fp32"), 1.0, 0.0, 5)


class OneKernelNorm(torch.autograd.Function):
    """A norm that keeps what a GPU's keeps: its input, its weight, and one root a row."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, hidden.new_zeros(hidden.shape[:-1], dtype=torch.float32))
        return torch.zeros_like(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hidden, weight, _ = ctx.saved_tensors
        return torch.zeros_like(hidden), torch.zeros_like(weight)


def on_a_gpu(hidden: Tensor, weight: Tensor) -> Tensor:
    normed: Tensor = OneKernelNorm.apply(hidden, weight)  # type: ignore[no-untyped-call]
    return normed


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("fused_norms", [True, False])
@pytest.mark.parametrize("keys", [4, 1])
def test_a_layer_keeps_exactly_the_counted_bytes(dtype: str, fused_norms: bool, keys: int) -> None:
    shape = replace(SHAPE, num_key_value_heads=keys)
    layer = PlainLayer(shape, on_a_gpu if fused_norms else normalised).to(DTYPES[dtype])
    x = torch.randn(3, shape.sequence, shape.hidden, dtype=DTYPES[dtype], requires_grad=True) * 1
    table = torch.randn(shape.sequence, shape.head_width, dtype=DTYPES[dtype])
    apart = {tensor.untyped_storage().data_ptr() for tensor in (x, table, *layer.parameters())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in apart:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x, table, table)
    tape = StepTape(dtype)
    tape.new(x=0)
    listed = LayerList(shape, 3, x.element_size(), fused_norms)
    listed.forward(tape, "x", "y", keep=True)
    tape.free("y")
    assert y.shape == x.shape
    if not fused_norms and dtype == "bf16":  # both norms hold their input as float32, and the list takes x off
        tape.new(x_off=x.nbytes)
        assert sum(kept.values()) - x.nbytes == tape.live - x.nbytes
    else:
        assert sum(kept.values()) == tape.live


SETTINGS = [
    StepSetting(1, "fp32", "plain", "adamw-foreach", "full"),  # its optimizer takes the most
    StepSetting(1, "fp32", "plain", "adamw-loop", "full"),
    StepSetting(3, "fp32", "plain", "adamw-foreach", "none"),
    StepSetting(3, "fp32", "fused", "adamw-loop", "full"),
    StepSetting(25, "fp32", "fused", "muon", "none"),
    StepSetting(3, "fp32", "plain", "muon", "full"),
    StepSetting(3, "bf16", "plain", "adamw-foreach", "full"),
    StepSetting(25, "bf16", "fused", "adamw-foreach", "none"),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("fused_norms", [True, False])
def test_the_peak_of_a_step_is_what_the_allocator_saw(setting: StepSetting, fused_norms: bool) -> None:
    shape = replace(SHAPE, sequence=72, num_heads=2, num_key_value_heads=1) if setting.dtype == "fp32" else SHAPE
    step = RealStep(shape, setting, CPU)
    for part in (step.model, *step.model.layers) if fused_norms else ():
        part.normalise = on_a_gpu
    step()
    real = peak_bytes(step, CPU)
    tape = step_tape(shape, setting, fused_norms=fused_norms)
    # Kernels of a CPU take some bytes for themselves; numbers on the host are no part of the list.
    assert real * (1 - 1e-2) - 4096 <= tape.peak <= real + 64, (tape.peak - real, tape.peak / real)


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations of a step."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[tuple[Any, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if name in ("mm", "addmm_") and "out" not in (kwargs or {}):
            left, right = args[-2:]
            self.seen["product", (left.shape[0], right.shape[1], left.shape[1])] += 1
        elif name == "mm":
            self.seen["product", (args[0].shape[0], args[1].shape[1], args[0].shape[1])] += 1
        elif isinstance(result, Tensor) and name in NAMES:
            self.seen[NAMES[name], result.numel()] += 1
        elif "attention" in name:
            self.seen["attention-backward" if "backward" in name else "attention", 0] += 1
        return result


NAMES = {
    "silu": "silu",
    "silu_backward": "silu-backward",
    "cat": "cat",
    "neg": "neg",
    "embedding": "embedding",
    "_log_softmax": "softmax",
    "_log_softmax_backward_data": "softmax-backward",
    "nll_loss_backward": "nll-backward",
}


@pytest.mark.parametrize("loss", ["plain", "fused"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("keys", [4, 2])
def test_a_step_launches_the_listed_works(loss: str, recompute: str, keys: int) -> None:
    shape = replace(SHAPE, num_key_value_heads=keys, sequence=70)
    setting = StepSetting(15, "bf16", loss, "adamw", recompute)
    step = RealStep(shape, setting, CPU)
    step.optimizers = []
    with Launches() as real:
        step()
    listed: Counter[tuple[Any, ...]] = Counter()
    for work, number in step_tape(shape, setting, update=False).works.items():
        if work.kind.startswith("product"):
            listed["product", work.shape] += number
        elif work.kind.startswith("attention"):
            listed[work.kind, 0] += number
        elif work.kind in NAMES.values():
            size = work.shape[0] * (work.shape[1] if len(work.shape) > 1 else 1)
            listed[work.kind, size] += number
    for entries in (listed, real.seen):  # a product towards a weight may be made as its transpose
        for key in [key for key in entries if key[0] == "product"]:
            entries["product", tuple(sorted(key[1]))] += entries.pop(key)
    assert real.seen == listed
    assert len(listed) > 12


def test_the_fused_loss_is_that_of_all_logits() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(1500, 8, dtype=torch.float64), torch.randn(30, 8, dtype=torch.float64)
    target = torch.randint(30, (1500,))
    found, wanted = ([tensor.clone().requires_grad_() for tensor in (hidden, head)] for _ in range(2))
    fused: Tensor = FusedLoss.apply(*found, target)  # type: ignore[no-untyped-call]
    plain = nn.functional.cross_entropy(wanted[0] @ wanted[1].t(), target)
    (2 * fused).backward()  # type: ignore[no-untyped-call]
    (2 * plain).backward()  # type: ignore[no-untyped-call]
    assert torch.isclose(fused.double(), plain, rtol=1e-6)
    assert None not in [tensor.grad for tensor in wanted]
    gradients = [[tensor.grad for tensor in tensors] for tensors in (found, wanted)]
    torch.testing.assert_close(*gradients, atol=1e-7, rtol=1e-5)


def test_every_listed_work_has_a_recipe_and_is_in_the_calibration() -> None:
    smallest: dict[tuple[str, str], Work] = {}
    for work in works(HOST, ["fp32", "bf16"]):
        key = work.kind, work.dtype
        if key not in smallest or demand(work) < demand(smallest[key]):
            smallest[key] = work
    for work in smallest.values():
        recipe = call_of(work, CPU)
        recipe.call()
        assert (recipe.besides is None) == (work.kind not in ("attention-backward", "norm-backward"))
    kinds = {(work.kind, work.dtype) for setting in SETTINGS for work in step_tape(SHAPE, setting).works}
    assert kinds <= smallest.keys()


@pytest.mark.parametrize("sizes", [ACCELERATOR, HOST])
def test_the_first_works_cover_every_kind(sizes: Any) -> None:
    listed = works(sizes, ["bf16", "fp32", "tf32", "fp8"])
    assert len(set(listed)) == len(listed)
    kinds = {(work.kind, work.dtype) for work in listed if work.dtype in ("bf16", "fp32")}
    assert {(work.kind, work.dtype) for work in listed[:130]} == kinds
    products = [demand(work).flops for work in listed[:300] if work.kind == "product" and work.dtype == "bf16"]
    assert max(products) > 1000 * min(products)
    assert all(math.prod(work.shape) > 0 for work in listed)


def test_the_host_is_timed_by_rounds_whose_calls_last_together_long_enough() -> None:
    clock, calls = [0.0], count()

    def call() -> None:
        clock[0] += 1e-4 if next(calls) % 1000 else 5.0  # one call in a thousand is disturbed

    timed = HostWatch(lambda: clock[0]).timed(call, 0.1)
    assert timed.seconds == pytest.approx(1e-4)
    assert timed.spread < 1e-6


def test_time_that_is_over_leaves_the_rest_out_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = count()
    listed = [Work("add", "fp32", (64 * number,)) for number in range(1, 31)]
    monkeypatch.setattr(module.real_steps, "host_times", lambda *args: iter(()))
    monkeypatch.setattr(module.real_steps, "measured_step", lambda *args: STEP)
    monkeypatch.setattr(module, "works", lambda *args: listed)
    found = calibrate(CPU, seconds=14.0, dtypes=["fp32"], now=lambda: float(next(moments)))
    # Four before works, and two after them; those for which no time is left then are missing nowhere.
    assert list(found.steps) == [STEP] * 4 + [replace(STEP, peak_bytes=0)] * 2
    assert [entry.work for entry in found.works] == listed[: len(found.works)]
    assert 1 <= len(found.works) < 10
    assert [reason for reason in found.missing if "no time" in reason] == [
        "real steps of 4 layers of 96: no time",
        f"{30 - len(found.works)} of 30 works: no time",
    ]


def test_the_host_is_measured_for_layers_and_optimizers_of_two_sizes() -> None:
    found = list(host_times(CPU, 1))
    sizes = {(entry.kind, entry.size) for entry in found}
    assert sizes == {(name, size) for name in ("layers", "layers-recomputed") for size in (2, 6)} | {
        (name, size) for name in ("adamw", "adamw-foreach", "adamw-loop", "muon") for size in (10, 50)
    }
    assert min(entry.seconds for entry in found) > 0


def test_what_a_device_cannot_do_is_listed_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.real_steps, "host_times", lambda *args: iter(()))
    monkeypatch.setattr(module.real_steps, "judges", lambda *args: iter(()))
    monkeypatch.setattr(module.transfers, "copies", lambda *args: iter(()))
    usual = module.call_of

    def failing(work: Work, device: Any) -> Any:
        if work.kind == "silu":
            raise RuntimeError("silu is not implemented\nfor this device")
        return usual(work, device)

    monkeypatch.setattr(module, "call_of", failing)
    listed = [Work("add", "fp32", (64,)), *[Work("silu", "fp32", (size,)) for size in (64, 128)]]
    monkeypatch.setattr(module, "works", lambda *args: [*listed, Work("norm-backward", "fp32", (8, 16))])
    found = calibrate(CPU, seconds=1e3, dtypes=["fp32"])
    assert [entry.work.kind for entry in found.works] == ["add", "norm", "norm-backward"]
    assert found.missing[0] == "silu in fp32: silu is not implemented"
    assert len(found.missing) == 2


def test_the_host_and_real_steps_are_measured_before_works_and_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def noted(name: str, *values: Any) -> Any:
        def call(*args: Any) -> Any:
            order.append(name)
            return iter(values) if name == "the host" else values[0]

        return call

    monkeypatch.setattr(module.real_steps, "host_times", noted("the host", "host"))
    monkeypatch.setattr(module.real_steps, "judges", lambda *args: iter([(SHAPE, StepSetting(1, "fp32"))]))
    monkeypatch.setattr(module.real_steps, "measured_step", noted("a step", STEP))
    monkeypatch.setattr(module.transfers, "copies", lambda *args: iter(()))
    monkeypatch.setattr(module._Run, "_measured", noted("a work", MeasuredWork(Work("add", "fp32", (64,)), 1.0, 0.0)))
    monkeypatch.setattr(module, "works", lambda *args: [Work("add", "fp32", (64,))])
    found = calibrate(CPU, seconds=1e3, dtypes=["fp32"], now=lambda: 0.0)
    assert order == ["the host", "a step", "a work", "the host", "a step"]
    assert (len(found.host), found.missing) == (2, ("messages: one device",))
    assert [step.peak_bytes for step in found.steps] == [5, 0]  # captures leave bytes behind


def test_muon_is_known_to_launch_many_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting:
        def timed(self, call: Any, seconds: float, kernels: int = 1) -> Timed:
            return Timed(float(kernels), 0.0)

    for name in ("host_times", "judges"):
        monkeypatch.setattr(module.real_steps, name, lambda *args: iter(()))
    monkeypatch.setattr(module.transfers, "copies", lambda *args: iter(()))
    monkeypatch.setattr(module, "watch_of", lambda *args: Counting())
    listed = [Work("add", "fp32", (64,)), Work("muon", "fp32", (16, 8))]
    monkeypatch.setattr(module, "works", lambda *args: listed)
    add, muon = calibrate(CPU, seconds=1e3, dtypes=["fp32"]).works
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiled:
        call_of(muon.work, CPU).call()
    products = sum(event.count for event in profiled.key_averages() if event.key in ("aten::mm", "aten::addmm"))
    assert add.seconds == 1.0
    assert products == 15 < muon.seconds < 3 * products


class Known:
    """A watch that knows what calls take: those with a backward 5 seconds, others 2."""

    def timed(self, call: Any, seconds: float, kernels: int = 1) -> Timed:
        return Timed(5.0 if "grad" in call.__code__.co_names else 2.0, 0.0)


def test_a_backward_is_measured_without_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("host_times", "judges"):
        monkeypatch.setattr(module.real_steps, name, lambda *args: iter(()))
    monkeypatch.setattr(module.transfers, "copies", lambda *args: iter(()))
    monkeypatch.setattr(module, "watch_of", lambda *args: Known())
    monkeypatch.setattr(module, "works", lambda *args: [Work("norm-backward", "fp32", (8, 16))])
    found = calibrate(CPU, seconds=1e3, dtypes=["fp32"])
    assert [(entry.work.kind, entry.seconds) for entry in found.works] == [("norm", 2.0), ("norm-backward", 3.0)]


def test_a_real_step_is_measured_whole() -> None:
    step = measured_step(replace(SHAPE, num_layers=1), StepSetting(1, "fp32"), CPU, count=2)
    assert step.seconds > 0
    assert step.busy == 1.0
    assert step.peak_bytes == step_tape(step.shape, step.setting, fused_norms=False).peak


def test_overlapping_kernels_count_once() -> None:
    assert covered([(0, 10), (2, 3), (5, 12), (20, 21)]) == 13


def test_a_cpu_captures_nothing() -> None:
    with pytest.raises(RuntimeError, match="cpu captures nothing"):
        captured(lambda: None, 2, CPU)


@pytest.mark.parametrize("name", ["warp", "cuda:99", "meta"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with refused(UsageError, "no device", expected="cpu"):
        calibrated(name)
