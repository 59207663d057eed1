"""Slices of sequences on a CUDA device: every kernel of attention, and the gradients of one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import drumline as dl
from drumline.features.slices.attention import SliceMemory, attend
from drumline.features.slices.kernels import CUDNN, EFFICIENT, FLASH, PLAIN, SliceKernel, kernel_for
from some import some

pytestmark = [
    pytest.mark.torch,
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    pytest.mark.features("slices"),
]
KERNELS: dict[str, tuple[SDPBackend, SliceKernel, torch.dtype, float]] = {
    "flash": (SDPBackend.FLASH_ATTENTION, FLASH, torch.bfloat16, 2e-2),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, CUDNN, torch.bfloat16, 2e-2),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, EFFICIENT, torch.float32, 2e-3),  # products may round to TF32
    "efficient-half": (SDPBackend.EFFICIENT_ATTENTION, EFFICIENT, torch.float16, 4e-3),
    "plain": (SDPBackend.MATH, PLAIN, torch.float64, 1e-11),
}


def formula(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention in one piece, in the dtype of its inputs."""
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    future = torch.ones(query.shape[-2], query.shape[-2], dtype=torch.bool, device=query.device).triu(1)
    weights = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(future, -torch.inf).softmax(-1)
    output: Tensor = weights @ value
    return output


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_attends_as_whole_sequences_do(name: str, heads: int) -> None:
    backend, kernel, dtype, bound = KERNELS[name]
    torch.manual_seed(0)
    parts = [100, 37, 64, 7]
    whole = [torch.randn(2, each, sum(parts), 64, device="cuda").to(dtype) for each in (4, heads, heads)]
    towards = torch.randn_like(whole[0])
    exact = [tensor.double().requires_grad_() for tensor in whole]
    wanted = formula(exact[0], exact[1], exact[2])
    gradients = torch.autograd.grad(wanted, exact, towards.double())
    memory, outputs, inputs, start = SliceMemory(), [], [], 0
    with sdpa_kernel([backend, SDPBackend.MATH]):  # torch itself has no grouped heads in some of them
        for number, size in enumerate(parts):
            own = [tensor[:, :, start : start + size].detach().requires_grad_() for tensor in whole]
            assert kernel_for(own[0], own[1], own[2], has_noise=False) is kernel
            outputs.append(attend(own[0], own[1], own[2], memory, number))
            inputs.append(own)
            start += size
        back = [
            torch.autograd.grad(output, own, towards_own)
            for output, own, towards_own in [*zip(outputs, inputs, torch.split(towards, parts, -2), strict=True)][::-1]
        ]
    exact_output = wanted.detach()
    apart = torch.cat(outputs, -2).detach().double() - exact_output
    assert float(apart.abs().max()) <= bound * float(exact_output.abs().max())
    for at, gradient in enumerate(some(gradients)):
        found = torch.cat([each[at] for each in back[::-1]], -2).double()
        assert float((found - gradient).abs().max()) <= bound * float(gradient.abs().max()), at


class Layer(nn.Module):
    """Attention with grouped heads, beside what a block adds."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        q = self.q(x).unflatten(-1, (4, 16)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 2, 16)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        output: Tensor = x + self.out(attended.transpose(1, 2).flatten(2))
        return output


class Model(nn.Module):
    """Tokens with learned positions, and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 64), nn.Embedding(64, 64)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(64, 50)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return logits."""
        x = self.tokens(tokens) + self.places(positions)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 5e-6), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved-1f1b", "zb-h1"])
def test_gradients_on_the_device_are_those_of_one_process(schedule: str, dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(0)
    model = Model().to("cuda", dtype)
    text = torch.randint(50, (4, 65), generator=torch.Generator().manual_seed(1)).cuda()
    x, target = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    places = torch.arange(64, device="cuda").expand(4, -1)
    whole = copy.deepcopy(model)
    torch.autograd.backward(loss_fn(whole(x, places), target))
    for slices in (4, [30, 20, 14]):
        pipe = dl.Pipeline(
            copy.deepcopy(model), loss_fn=loss_fn, schedule=schedule, num_ranks=2, transport="in-process",
            num_microbatches=2, slices=slices, balance="even", example={"tokens": x, "positions": places},
            device="cuda", check_model=False,
        )  # fmt: skip
        pipe.step(tokens=x, target=target)
        found = {name: param.grad for name, param in pipe.named_parameters()}
        for name, param in whole.named_parameters():
            gradient = found[name]
            assert gradient is not None
            assert param.grad is not None
            assert float((gradient - param.grad).norm()) <= bound * max(float(param.grad.norm()), 1e-3), name
        pipe.close()
