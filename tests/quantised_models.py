"""Models with quantised, frozen bases and adapters that train: a chain of layers, and a small Llama under PEFT.

Both come with a batch and with a plain loop, which accumulates the same microbatches in one process.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from extras import needed

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the libraries, at their import
    needed("torchao.quantization", "tune")
    needed("bitsandbytes", "tune")
    peft: Any = needed("peft", "tune")

import drumline as dl
from drumline.model.quantised.bases import quantise
from drumline.model.quantised.packed import parts_of, settle

BASES = ("int8", "float8", "nf4", "llm-int8")
WIDTH, NUM_MICROBATCHES = 64, 4


class Adapted(nn.Module):
    """A frozen layer, and a product of two small ones beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output with the adapter's added."""
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def chain(base: str, seed: int = 0) -> nn.Sequential:
    """Return four layers with adapters."""
    torch.manual_seed(seed)
    layers = quantise(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))), base)
    torch.manual_seed(1)
    return nn.Sequential(*map(Adapted, layers.children()))


def plain_llama(**settings: Any) -> Any:
    """Return a Llama of three layers, with its own values."""
    transformers: Any = needed("transformers", "hf")
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96, **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def llama(base: str) -> Any:
    """Return the same, quantised, with LoRA on some of its layers."""
    return adapted(quantise(plain_llama(), base))


def adapted(model: Any) -> Any:
    """Return a Llama with LoRA on some of its layers."""
    torch.manual_seed(1)
    targets = ["q_proj", "v_proj", "down_proj"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT says that it cannot merge into weights of torchao
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))


MODELS = {"chain": chain, "llama": llama}


def batch(kind: str) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a step."""
    torch.manual_seed(2)
    if kind == "chain":
        return torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    tokens = torch.randint(0, 96, (8, 12))
    return tokens, tokens


def settings(kind: str, **more: Any) -> dict[str, Any]:
    """Return the options of a pipeline of such a model."""
    inputs, labels = batch(kind)
    of_kind = {"loss_fn": nn.functional.mse_loss} if kind == "chain" else {"example": _named(inputs, labels)}
    return {"num_microbatches": NUM_MICROBATCHES, **of_kind, **more}


def _named(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    return {"input_ids": inputs, "labels": labels}


def stepped(pipe: dl.Pipeline, kind: str) -> dict[str, Tensor]:
    """Run a step from no gradients on, and return the gradients."""
    inputs, target = batch(kind)
    for parameter in pipe.parameters():
        parameter.grad = None
    if kind == "chain":
        pipe.step(inputs, target=target)
    else:
        pipe.step(**_named(inputs, target))
    return {name: param.grad for name, param in pipe.named_parameters() if param.grad is not None}


def looped(model: nn.Module, kind: str) -> dict[str, Tensor]:
    """Return the gradients of a plain loop over the same microbatches."""
    inputs, target = batch(kind)
    model.zero_grad()
    pairs = zip(inputs.chunk(NUM_MICROBATCHES), target.chunk(NUM_MICROBATCHES), strict=True)
    for part, labels in pairs:
        is_chain = kind == "chain"
        loss = nn.functional.mse_loss(model(part), labels) if is_chain else model(**_named(part, labels)).loss
        (loss / NUM_MICROBATCHES).backward()
    gradients = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    return gradients


def difference(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return how far gradients are from those of the loop; all of them must be there under the same names."""
    assert gradients
    assert gradients.keys() <= expected.keys()
    return max(float((gradients[name] - expected[name]).abs().max()) for name in gradients)


def values(model: nn.Module) -> dict[str, Tensor]:
    """Return all plain tensors of a model's parameters, by name and part."""
    settle(model.modules())
    return {
        f"{name} {part}": value.view(torch.uint8) if value.dtype.itemsize == 1 else value
        for name, tensor in model.named_parameters()
        for part, value in parts_of(tensor).items()
    }


def are_equal(module: nn.Module, other: nn.Module) -> bool:
    """Whether two models have the same parameters to the last bit."""
    ours, theirs = values(module), values(other)
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())


def emptied(model: nn.Module) -> nn.Module:
    """Set every parameter of a model to zero, codes and scales too, and return it."""
    with torch.no_grad():
        for value in values(model).values():
            value.zero_()
    return model
