"""The whole of Drumline in one file: from a model to a checkpoint that goes on, without `drumline train`.

    python examples/whole.py [FOLDER]

    model ──► program ──► proof ──► simulation           what should run, before anything runs
                 │
                 ├──► two ranks ──► steps ──► timeline    what did run, and where its idle time went
                 │                    └──► checkpoint ──► the same steps again, from the middle
                 └──► one process, which gives the same gradients

It needs two cores and no GPU. Every part is a function of its own, to copy from.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import drumline as dl

NUM_RANKS = 2
NUM_MICROBATCHES = 8
NUM_STEPS = 6
WORDS, WIDTH, LENGTH, ROWS = 50, 64, 16, 32


# ---- a model: any module will do, nothing in it knows of pipelines ---------------------------------------------------


class Block(nn.Module):
    """Attention and a feedforward network, each beside a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, num_heads=4, batch_first=True)
        self.feedforward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Any:
        """Return the sequence after this block; each token sees those before it."""
        mask = torch.triu(torch.full((x.shape[1], x.shape[1]), float("-inf")), diagonal=1)
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.feedforward(self.norm_2(x))


class Decoder(nn.Module):
    """A small language model whose embedding is also its output layer: tied weights, on two ranks."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Any:
        """Return the logits of the next token at every place."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean loss of a microbatch; Drumline finds out by itself what it averages over."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def made() -> Decoder:
    """Return the model with the same first values on every rank."""
    torch.manual_seed(0)
    return Decoder()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the tokens and targets of a step: what comes next is three more, around the clock."""
    start = torch.randint(WORDS, (ROWS, 1), generator=torch.Generator().manual_seed(step))
    tokens = (start + 3 * torch.arange(LENGTH + 1)) % WORDS
    return tokens[:, :-1], tokens[:, 1:]


# ---- a program: what every rank does, before anything runs -----------------------------------------------------------


def chosen() -> dl.Program:
    """Return the schedule that the simulator finds fastest of some, each proven to be runnable."""
    costs = dl.Costs(forward=1.0, backward_input=1.0, backward_weight=1.0, comm=0.05)
    best: tuple[float, dl.Program] | None = None
    for name in ("gpipe", "1f1b", "zb-h1"):
        program = dl.generate(name, num_ranks=NUM_RANKS, num_microbatches=NUM_MICROBATCHES)
        assert dl.validate(program) == [], "a proof: no deadlock, nothing missing, nothing twice"
        timeline = dl.simulate(program, costs)
        print(f"{name:6} {timeline.makespan:5.1f} units, {timeline.bubble:5.1%} idle")
        if best is None or timeline.makespan < best[0]:
            best = timeline.makespan, program
    assert best is not None
    return best[1]


# ---- ranks: the same function on each --------------------------------------------------------------------------------


def trained(program: dl.Program, folder: Path) -> tuple[list[float], list[float], str]:
    """Train on this rank, and train the last steps again from a checkpoint.

    Return the losses of both, and a picture of the last step.
    """
    with dl.Pipeline(
        made(), loss_fn=loss_fn, schedule=program, example=torch.zeros(ROWS, LENGTH, dtype=torch.long), balance="even"
    ) as pipe:
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=3e-3)

        def steps(first: int, last: int) -> list[float]:
            """Run some steps; reading a loss waits for the rank with the last stage."""
            losses = []
            for number in range(first, last):
                tokens, target = batch(number)
                result = pipe.step(tokens, target=target)
                pipe.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                assert result.loss is not None
                losses.append(float(result.loss))
            return losses

        half = NUM_STEPS // 2
        losses = steps(0, half)
        pipe.save(folder, wait=True)  # all ranks together: model, optimizer, random numbers, step
        losses += steps(half, NUM_STEPS)
        pipe.load(folder)
        again = steps(half, NUM_STEPS)
        return losses, again, dl.grid(pipe.timeline(), width=72)


# ---- one process: what the gradients ought to be ---------------------------------------------------------------------


def plain() -> list[float]:
    """Train the same model by itself, and return its losses."""
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for number in range(NUM_STEPS):
        tokens, target = batch(number)
        loss = loss_fn(model(tokens), target)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def main() -> None:
    """Do all of it, and say what came out."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())
    program = chosen()
    print(f"chosen: {program.name}, whose rank 0 begins {', '.join(map(str, program.rows[0][:5]))} ...")
    losses, again, picture = dl.launch(trained, program, folder, num_ranks=NUM_RANKS)[0]
    expected = plain()
    print(f"losses on two ranks    {' '.join(f'{loss:.4f}' for loss in losses)}")
    print(f"losses in one process  {' '.join(f'{value:.4f}' for value in expected)}")
    assert all(abs(loss - other) < 1e-4 for loss, other in zip(losses, expected, strict=True))
    assert again == losses[NUM_STEPS // 2 :], "a checkpoint goes on bit for bit"
    print(f"the last {len(again)} steps again, from {folder.name}: the same bits")
    print(picture)


if __name__ == "__main__":
    main()
