"""LoRA on a Flux transformer of diffusers, in a tiny configuration, cut into two stages without a list of its layers.

    python examples/finetune_flux.py

Its two kinds of blocks take images and texts at once, and pass both on. A flow-matching loss: the model says in which
direction noise lies. Both ranks take turns in this process; `dl.launch` starts two that run at the same time.
"""

from __future__ import annotations

from typing import Any

import peft
import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor

import drumline as dl

STEPS, ROWS, PATCHES, WORDS, MICROBATCHES = 3, 8, 16, 6, 4


def tiny_flux() -> torch.nn.Module:
    """Return a Flux with LoRA on its attention."""
    torch.manual_seed(0)
    kind: Any = FluxTransformer2DModel
    model = kind(
        patch_size=1, in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    config = peft.LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v"])
    adapted: torch.nn.Module = peft.get_peft_model(model, config)
    return adapted


def batch() -> tuple[dict[str, Tensor], Tensor]:
    """Return noisy images with texts, and the noise's direction."""
    clean, noise = torch.randn(ROWS, PATCHES, 4), torch.randn(ROWS, PATCHES, 4)
    time = torch.rand(ROWS)
    inputs = {
        "hidden_states": torch.lerp(clean, noise, time[:, None, None]),
        "encoder_hidden_states": torch.randn(ROWS, WORDS, 32),
        "pooled_projections": torch.randn(ROWS, 32),
        "timestep": time,
    }
    return inputs, noise - clean


def direction_loss(output: tuple[Tensor], target: Tensor) -> Tensor:
    """Return how far the direction is off."""
    return torch.nn.functional.mse_loss(output[0], target)


def main() -> None:
    """Train a few steps."""
    model = tiny_flux()
    inputs, target = batch()
    places = {"img_ids": torch.zeros(PATCHES, 3), "txt_ids": torch.zeros(WORDS, 3), "return_dict": False}
    pipe = dl.Pipeline(
        model, loss_fn=direction_loss, num_ranks=2, num_microbatches=MICROBATCHES, example={**inputs, **places},
        transport="in-process", balance="parameters", split={"img_ids": None, "txt_ids": None},
    )  # fmt: skip
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-2)
    for step in range(STEPS):
        result = pipe.step(**inputs, **places, target=target)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {float(result.loss):.4f}" if result.loss is not None else f"step {step}")


if __name__ == "__main__":
    main()
