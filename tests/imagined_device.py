"""An accelerator that is not CUDA: PyTorch's spare backend under a name of ours; the host lends memory and arithmetic.

PyTorch's dispatcher, autograd, devices and `torch.accelerator` treat it as they treat any accelerator. Its tensors live
at addresses of the host, under a storage of their own device; operators run on the host's view of them, and the result
is theirs again. Tensors of two devices do not mix. Importing this changes the process for good, so it runs in one of
its own:

    python tests/imagined_device.py      trains on it, beside the host; prints what it compared
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import backend_registration as registration
from torch.utils._pytree import tree_map

NAME = "imagined"
HOST = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class Backend(registration._DummyBackendModule):
    """What `torch.imagined` offers: random states and a name."""

    default_generators = (torch.Generator(),)

    def get_rng_state(self, device: Any = None) -> Tensor:
        return self.default_generators[0].get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        self.default_generators[0].set_state(state)

    def manual_seed(self, seed: int) -> None:
        self.default_generators[0].manual_seed(seed)

    def get_device_name(self, device: Any = None) -> str:
        return "an imagined device"


def put(tensor: Tensor, place: Any, shown: Tensor) -> Tensor:
    """Let a tensor of the device show a place as another tensor shows its own."""
    setter = torch.ops.aten.set_.source_Storage_storage_offset
    made: Tensor = setter.redispatch(HOST, tensor, place, 0, shown.shape, shown.stride())
    return made


class Memory:
    """The device's memory: host memory by storage, kept to the end so that no address is used twice."""

    def __init__(self) -> None:
        self.by_storage: dict[int, tuple[Any, Tensor]] = {}

    def made(self, host: Tensor) -> Tensor:
        """Return a tensor of the device with the host's values, sizes and strides."""
        shown = host.detach().clone()
        flat = torch.empty(0, dtype=host.dtype).set_(shown.untyped_storage())
        place = torch._C._construct_storage_from_data_pointer(flat.data_ptr(), torch.device(NAME, 0), flat.nbytes)
        self.by_storage[place._cdata] = place, flat
        return put(torch._C._acc.create_empty_tensor((0,), host.dtype), place, shown)

    def host(self, tensor: Tensor) -> Tensor:
        """Return the host's view of a tensor of the device."""
        _, flat = self.by_storage[tensor.untyped_storage()._cdata]
        flat = flat if flat.dtype is tensor.dtype else flat.view(tensor.dtype)  # a view of the same bytes
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


MEMORY = Memory()
CALLED: set[str] = set()  # operators that ran on the device


def is_there(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on the host's views of its tensors; all of them must be the device's, but for single numbers."""
    CALLED.add(str(op))
    given: dict[int, tuple[Tensor, Tensor]] = {}

    def inward(value: Any) -> Any:
        if is_there(value):
            host = MEMORY.host(value)
            given[id(host)] = host, value
            return host
        assert not isinstance(value, Tensor) or value.dim() == 0, f"{op} got tensors of two devices"
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value

    def outward(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in given:
            return MEMORY.made(value)
        own = given[id(value)][1]
        if own.shape != value.shape:  # it was made larger or smaller to take a result
            put(own, MEMORY.made(value).untyped_storage(), value.clone())
        return own

    made = op(*tree_map(inward, args), **tree_map(inward, kwargs))
    return tree_map(outward, made)


def empty(size: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return MEMORY.made(torch.empty(size, dtype=dtype))


def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return MEMORY.made(torch.empty_strided(size, stride, dtype=dtype))


def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    source, host = (MEMORY.host(tensor) if is_there(tensor) else tensor for tensor in (source, target))
    host.copy_(source)
    return target


def register() -> list[torch.library.Library]:
    """Make the device known; what is returned must be kept."""
    registration._setup_privateuseone_for_python_backend(NAME, Backend())
    library: Any = torch.library.Library
    every, aten = library("_", "IMPL"), library("aten", "IMPL")
    every.fallback(run, "PrivateUse1")
    for name in ("as_strided", "view", "_reshape_alias", "unfold"):  # views have no values
        aten.impl(name, partial(getattr(torch.ops.aten, name).default.redispatch, HOST), "PrivateUse1")
    norm = torch.ops.aten.native_layer_norm.default  # else put together from smaller operators, with other last bits
    aten.impl("native_layer_norm", partial(run, norm), "PrivateUse1")
    for name, function in (("empty.memory_format", empty), ("empty_strided", empty_strided), ("_copy_from", copy_from)):
        aten.impl(name, function, "PrivateUse1")
    return [every, aten]


def forbid_cuda() -> None:
    """Let every use of `torch.cuda` by a module of ours fail; PyTorch itself asks it whether there is a device."""

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            caller = str(sys._getframe(1).f_globals.get("__name__"))
            assert not caller.startswith("drumline"), f"{caller} calls torch.cuda.{name}"
            return function(*args, **kwargs)

        return called

    module: ModuleType = torch.cuda
    for name, value in list(vars(module).items()):
        if callable(value) and not isinstance(value, type) and not name.startswith("_"):
            setattr(module, name, watched(name, value))


# ---- what runs on it -------------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "split backward": {"schedule": "zb-v"},
    "two copies": {"schedule": "dualpipe"},
    "recomputed and weighed": {"schedule": "zb-h1", "checkpoint": "full", "weigh": True},
    "master weights": {"master_weights": True},
    "validated after": {"schedule": "zb-h2", "how": {"validated": "after", "max_norm": 0.5}},
    "without a flush": {"schedule": "pipedream-2bw", "how": {"max_norm": 0.5}},
}


def trained(device: str, folder: str, *, how: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """Train, evaluate, save and load on a device; return all numbers on the host."""
    from drumline.pipeline.pipeline import Pipeline
    from torch_models import data, mlp

    kind = torch.bfloat16 if "master_weights" in settings else torch.float32
    settings = {"loss_fn": functional.mse_loss, "num_microbatches": 4, "num_ranks": 2, **settings}
    found: dict[str, Any] = {}
    with Pipeline(mlp(4, dropout=0.2).to(kind), device=device, transport="in-process", **settings) as pipe:
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.01, **(how or {}))
        assert pipe.device.type == device
        for step in range(2):
            batch, target = (tensor.to(device, kind) for tensor in data(8, seed=step))
            found[f"loss {step}"] = pipe.step(batch, target=target).loss
            if how is None:
                found[f"norm {step}"] = pipe.clip_grad_norm_(1.0)
            if not pipe.steps_in_flight:
                optimizer.step()
                optimizer.zero_grad()
        found["output"] = pipe.eval_step(batch).output
        pipe.save(folder, wait=True)
        pipe.load(folder)
        pipe.timeline()
        found |= dict(pipe.named_parameters())
        assert all(param.device.type == device for param in pipe.parameters())
        return {name: value.detach().cpu() for name, value in found.items()}


def without_labels(device: str, folder: str) -> dict[str, Any]:
    """Train on microbatches of which one has no labels that count; and let a model's own loss count none."""
    from drumline.model.loss.factors import ScaledCall, Sheet
    from drumline.pipeline.pipeline import Pipeline

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 5))
    x, y = torch.randn(8, 4), torch.randint(5, (8,))
    y[2:4] = -100
    x, y = x.to(device), y.to(device)
    given: dict[str, Any] = {"loss_fn": functional.cross_entropy, "num_microbatches": 4, "num_ranks": 2}
    with Pipeline(model, device=device, transport="in-process", **given) as pipe:
        found: dict[str, Any] = {"loss": pipe.step(x, target=y).loss}
        pipe.settle()
        found |= {name: param.grad for name, param in pipe.named_parameters()}
    logits = torch.ones(2, 5).to(device).requires_grad_()
    loss = ScaledCall(functional.cross_entropy, 0, Sheet())(logits, y[2:4])
    if device != "cpu":  # there the host knows that it counts nothing
        torch.autograd.backward(loss, torch.zeros_like(loss))
    found["own"] = torch.zeros(2, 5) if logits.grad is None else logits.grad
    return {name: value.detach().cpu() for name, value in found.items()}


class Stacks(torch.nn.Module):
    """A block that leaves a number on a stack, or takes one off, which microbatches of a pipeline do in turns."""

    def __init__(self, stack: list[Tensor], *, leaves: bool) -> None:
        super().__init__()
        self.layer, self.stack, self.leaves = torch.nn.Linear(4, 4), stack, leaves

    def forward(self, x: Tensor) -> Any:
        """Return the layer's output, by a factor that another block left."""
        if self.leaves:
            self.stack.append(x.detach().mean())
            return self.layer(x)
        return self.layer(x) * (1 + self.stack.pop())


def found_wrong(device: str, folder: str) -> dict[str, Any]:
    """Have the check refuse a gradient; return what it says, and how it compares one on the host with the device's."""
    from drumline.core.errors import ModelError
    from drumline.engine.unsplit.comparing import off
    from drumline.pipeline.pipeline import Pipeline

    torch.manual_seed(0)
    stack: list[Tensor] = []
    model = torch.nn.Sequential(Stacks(stack, leaves=True), Stacks(stack, leaves=False))
    given: dict[str, Any] = {"loss_fn": functional.mse_loss, "num_microbatches": 4, "num_ranks": 2}
    x = torch.randn(8, 4).to(device)
    with Pipeline(model, device=device, transport="in-process", **given) as pipe:
        try:
            pipe.step(x, target=x)
        except ModelError as error:
            far = off(torch.tensor([1.1]), torch.tensor([1.0]).to(device))
            return {"said": torch.tensor(list(error.error.encode())), "off": torch.tensor(far)}
    raise AssertionError("a wrong gradient was not found")


def trained_by_settings(device: str, folder: str) -> dict[str, Any]:
    """Run what `drumline train` runs on every rank; return its losses, norms and evaluations."""
    from drumline.train.config.settings import (
        BatchSettings,
        DataSettings,
        EvaluationSettings,
        ModelSettings,
        PipelineSettings,
        RunSettings,
        TrainSettings,
    )
    from drumline.train.loop.run import run_training

    settings = TrainSettings(
        model=ModelSettings(kind="mlp", num_layers=4, hidden=8),
        data=DataSettings(kind="points"),
        batch=BatchSettings(sequences=8, microbatch=2),
        pipeline=PipelineSettings(schedule="zb-h1", transport="in-process", device=device),
        evaluation=EvaluationSettings(every=2, batches=1),
        run=RunSettings(steps=3, out=f"{folder}/run", threads=1),
    )
    made = run_training(settings, tell=lambda _: None)
    numbers = {"losses": made.losses, "norms": made.grad_norms, "held out": [item.loss for item in made.evaluations]}
    return {name: torch.tensor(each) for name, each in numbers.items()}


def compared() -> list[str]:
    """Compare the device with the host, to the last bit; return what was compared, in words."""
    found, kept = [], register()
    assert torch.accelerator.current_accelerator() == torch.device(NAME)
    forbid_cuda()
    runs: dict[str, Callable[[str, str], dict[str, Any]]] = {
        **{name: partial(trained, **settings) for name, settings in CASES.items()},
        "no labels": without_labels,
        "found wrong": found_wrong,
        "drumline train": trained_by_settings,
    }
    for name, run_on in runs.items():
        with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory() as other:
            host, device = run_on("cpu", directory), run_on(NAME, other)
        assert host.keys() == device.keys()
        different = [key for key in host if not torch.equal(host[key], device[key])]
        assert not different, (name, different)
        found.append(f"{name} {len(host)} equal")
    found.append(f"{len(CALLED)} operators ran on {torch.accelerator.current_accelerator()}")
    del kept
    return found


if __name__ == "__main__":
    print("\n".join(compared()))
