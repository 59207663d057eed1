r"""How the learning rate changes: a share of the full rate, as a function of the step alone.

    constant   /‾‾‾‾‾‾‾‾        cosine   /‾‾\_
    linear     /\_              wsd      /‾‾‾‾‾‾\      warm up, stay, decay

All warm up in a straight line over the first `warmup_steps`. All but the constant one end at `final` in the last step.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from drumline.train.config.settings import LearningRateSettings


def _constant(done: float, final: float) -> float:
    return 1.0


def _linear(done: float, final: float) -> float:
    return 1.0 - (1.0 - final) * done


def _cosine(done: float, final: float) -> float:
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * done))


SHAPES: dict[str, Callable[[float, float], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "wsd": _linear,  # but only over the steps of the decay
}


def rate(settings: LearningRateSettings, step: int, num_steps: int) -> float:
    """Return the share of the full rate that an update has; `step` counts from 0.

    >>> cosine = LearningRateSettings(shape="cosine", warmup_steps=2, final=0.1)
    >>> [round(rate(cosine, step, 6), 3) for step in range(6)]
    [0.5, 1.0, 0.868, 0.55, 0.232, 0.1]
    >>> wsd = LearningRateSettings(shape="wsd", warmup_steps=1, decay_steps=2, final=0.0)
    >>> [rate(wsd, step, 5) for step in range(5)]
    [1.0, 1.0, 1.0, 0.5, 0.0]
    """
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    start = settings.warmup_steps
    if settings.shape == "wsd":
        decay = math.ceil(num_steps / 10) if settings.decay_steps is None else settings.decay_steps
        start = max(start, num_steps - decay)
    done = (step - start + 1) / max(num_steps - start, 1)
    return SHAPES[settings.shape](min(max(done, 0.0), 1.0), settings.final)
