"""The held-out loss and a sample text, through the pipeline: on every rank at the same steps, so that nothing waits.

Neither changes training: both run in eval mode, and no random number that a training step draws depends on them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from drumline.channel.lines.grid import ROWS
from drumline.core.errors import ModelError, RunError
from drumline.core.measured.measured import Measured
from drumline.pipeline.pipeline import Pipeline
from drumline.train.config.settings import EvaluationSettings
from drumline.train.data.items.batch import Batch
from drumline.train.loop.making import Calling


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The mean loss over the held-out tokens after so many updates; `bubble` is that of its last batch."""

    step: int
    loss: float
    num_tokens: int
    seconds: float
    bubble: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """A text that the model wrote after so many updates, with the prompt that it began with."""

    step: int
    prompt: str
    text: str


def evaluate(pipe: Pipeline, call: Calling, batches: Iterable[Batch], step: int) -> Evaluation | None:
    """Return the mean loss over all counted tokens of the batches, or None if the run is to stop; on every rank."""
    started = time.perf_counter()
    total, num_tokens = 0.0, 0
    for batch in batches:
        ((count,),) = over_lines(pipe, [[batch.num_tokens]])
        if not count:
            continue
        if pipe.stopping():
            return None
        args, kwargs = call(batch)
        loss = pipe.eval_step(*args, outputs=False, **kwargs).loss
        if loss is None:
            raise ModelError("the model returned no loss for a held-out batch", fix="give it the labels there too")
        total += float(loss) * count
        num_tokens += count
    if not num_tokens:
        raise RunError("no held-out batch has a token that counts", fix="set evaluation.every = 0, or hold more out")
    return Evaluation(
        step, total / num_tokens, num_tokens, time.perf_counter() - started, bubble_of(measured(pipe, "evaluate"))
    )


def over_lines(pipe: Pipeline, counts: list[list[int]]) -> list[list[int]]:
    """Return counts of batches, such as their tokens, with those of other lines of a mesh."""
    if not pipe.axes.is_mesh:
        return counts
    total = pipe.axes.summed(torch.tensor(counts, dtype=torch.int64, device=pipe.device), *ROWS)
    return [list(row) for row in total.tolist()]


def measured(pipe: Pipeline, *kind: str) -> Measured | None:
    """Return what the last step took; None if nothing was measured, as of a captured one."""
    try:
        return pipe.timeline(*kind)
    except RunError:
        return None


def bubble_of(timeline: Measured | None) -> float | None:
    """Return the bubble of a step, if it was measured."""
    return None if timeline is None else float(timeline.bubble)


def sample(
    pipe: Pipeline, call: Calling, settings: EvaluationSettings, *, step: int, seed: int, sequence: int
) -> Sample | None:
    """Return a text that the model writes, or None if the run is to stop; call it on every rank.

    Every token is one evaluation over a window of fixed size. The rank with the last stage chooses the token and tells
    it to all; what it draws depends on the seed and the step alone.
    """
    tokenizer = call.tokenizer
    if tokenizer is None:
        raise ModelError(
            "a sample text of a model without a tokenizer",
            expected="a model of text",
            fix="set evaluation.sample_every = 0",
        )
    prompt = tokenizer.encode(settings.prompt) or [tokenizer.end]
    generator = torch.Generator().manual_seed(_mixed(seed, step))
    window = max(1, min(sequence, len(prompt) + settings.sample_tokens))
    window = window if pipe.slices == 1 else sequence  # which slices divide
    written: list[int] = []
    while len(written) < settings.sample_tokens:
        if pipe.stopping():
            return None
        tokens = [*prompt, *written][-window:]
        row = torch.tensor(tokens + [tokenizer.end] * (window - len(tokens)))
        rows = row.repeat(pipe.program.num_microbatches, 1)
        args, kwargs = call.inputs_only({call.inputs: rows})
        result = pipe.eval_step(*args, **kwargs)
        own_choice = (
            None if result.output is None else _chosen(result.output, len(tokens) - 1, settings.temperature, generator)
        )
        token = next(tensor for tensor in pipe.gather(own_choice) if tensor is not None)
        if token == tokenizer.end:
            break
        written.append(token)
    return Sample(step, settings.prompt, tokenizer.decode(written))


def _chosen(output: Any, place: int, temperature: float, generator: torch.Generator) -> int:
    logits = _logits(output)[0, place].detach().float().cpu()
    if temperature <= 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=0), 1, generator=generator))


def _logits(output: Any) -> Tensor:
    """Return the logits in what the model returned, of the shape (rows, length, vocabulary)."""
    logits = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", output)
    if isinstance(logits, tuple | list):
        logits = next((tensor for tensor in logits if isinstance(tensor, Tensor) and tensor.dim() == 3), None)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise ModelError(
            f"the model returned a {type(output).__name__} from which no token can be chosen",
            expected="logits of the shape (rows, length, vocabulary)",
            fix="set evaluation.sample_every = 0",
        )
    return logits


def _mixed(seed: int, step: int) -> int:
    """Return a seed that is another one for every seed and step."""
    return int.from_bytes(blake2b(f"sample/{seed}/{step}".encode(), digest_size=8).digest()) >> 1
