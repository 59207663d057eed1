"""LoRA on a model of your own, which is not from Hugging Face: two ranks, and an adapter that PEFT saves and loads.

    python examples/finetune_own.py [FOLDER]

PEFT wraps any module by the names of its layers. Every rank builds the model with the same first values and keeps the
stages that are its own; `weights=` reads them from files instead (see finetune_lora.py).
"""

from __future__ import annotations

import sys
from typing import Any

import peft
import torch
from torch import Tensor, nn

import drumline as dl

STEPS, ROWS, WIDTH, MICROBATCHES = 20, 32, 32, 8


class Block(nn.Sequential):
    """A feedforward network beside a residual connection."""

    def forward(self, x: Tensor) -> Any:
        """Return the rows after this block."""
        return x + super().forward(x)  # type: ignore[no-untyped-call]


class Network(nn.Module):
    """Blocks, and a head."""

    def __init__(self) -> None:
        super().__init__()
        wide = 2 * WIDTH
        self.blocks = nn.ModuleList(Block(nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH)) for _ in range(6))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Any:
        """Return a number for each row."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def base() -> Network:
    """Return the model that stays as it is; a real one would read its weights here."""
    torch.manual_seed(0)
    return Network()


def adapted() -> Any:
    """Return the model with adapters on every block; the head is trained as a whole."""
    config = peft.LoraConfig(r=4, target_modules=r".*blocks\.\d+\.[02]", modules_to_save=["head"])
    return peft.get_peft_model(base(), config)


def batch() -> tuple[Tensor, Tensor]:
    """Return rows and their targets."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    return x, x.square().mean(1, keepdim=True)


def train() -> tuple[list[float], dict[str, Tensor]]:
    """Train on this rank; return the losses, and the trained weights of its stages."""
    x, target = batch()
    model = adapted()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    settings: dict[str, Any] = {"num_microbatches": MICROBATCHES, "example": x, "balance": "parameters"}
    with dl.Pipeline(model, loss_fn=nn.functional.mse_loss, **settings) as pipe:
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-2)
        losses = []
        for _ in range(STEPS):
            result = pipe.step(x, target=target)
            optimizer.step()
            optimizer.zero_grad()
            assert result.loss is not None
            losses.append(float(result.loss))
        return losses, {name: tensor for name, tensor in pipe.state_dict().items() if name in trained}


def main() -> None:
    """Train on two ranks, save the adapter as PEFT does, and load it on a fresh model."""
    folder = sys.argv[1] if len(sys.argv) > 1 else "out/adapter-own"
    ranks = dl.launch(train, num_ranks=2)
    model = adapted()
    model.load_state_dict({name: tensor for _, state in ranks for name, tensor in state.items()}, strict=False)
    model.save_pretrained(folder)
    kind: Any = peft.PeftModel
    x, target = batch()
    loss = nn.functional.mse_loss(kind.from_pretrained(base(), folder)(x), target)
    for number, (losses, state) in enumerate(ranks):
        print(f"rank {number}: {len(state)} trained tensors, losses {losses[0]:.4f} to {losses[-1]:.4f}")
    print(f"loaded by PEFT from {folder}: loss {float(loss):.4f}")


if __name__ == "__main__":
    main()
