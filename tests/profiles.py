"""Profiles of models that do not exist, for tests that need numbers alone."""

from __future__ import annotations

from collections.abc import Sequence

from drumline.plan.device.blocks import OpTimes, Profile, ProfiledBlock
from drumline.plan.device.model_profile import Identity, ModelProfile
from drumline.plan.device.overheads import MessageTime, Overheads

NONE = Overheads()
SOME = Overheads(
    MessageTime(1e-5, 1e-10), MessageTime(2e-5, 1e-10), MessageTime(1e-4, 1e-10), flight=3e-5, action=2e-5, begin=1e-4
)


def layer(
    name: str,
    seconds: float,
    *,
    held: int = 100,
    weights: int = 50,
    output: int = 10,
    trains: bool = True,
    tape: float = 0.0,
) -> ProfiledBlock:
    times = (
        OpTimes(seconds, 2 * seconds, seconds, seconds, (1 + tape) * seconds)
        if trains
        else OpTimes(seconds, 0.0, 0.0, 0.0)
    )
    return ProfiledBlock(name, times, held, held // 2, 0, weights, weights if trains else 0, output)


def model_profile(
    seconds: Sequence[float],
    *,
    rows: Sequence[int] = (1, 2, 4),
    held: int = 100,
    weights: int = 50,
    output: int | Sequence[int] = 10,
    overheads: Overheads = NONE,
    frozen: int = 0,
    tape: float = 0.0,
) -> ModelProfile:
    """Return the profile of a chain whose blocks take so many seconds for a row; `held` bytes a row are kept.

    `output` is what each of them hands on, of all or of each.
    """
    handed = [output] * len(seconds) if isinstance(output, int) else output

    def at(size: int) -> Profile:
        layers = [
            layer(
                str(at),
                size * duration,
                held=size * held,
                weights=weights,
                output=size * handed[at],
                trains=at >= frozen,
                tape=tape,
            )
            for at, duration in enumerate(seconds)
        ]
        return Profile(tuple(layers), OpTimes(0.0, 0.0, 0.0, 0.0), "cpu", 1)

    sizes = tuple((size, at(size)) for size in rows)
    return ModelProfile(Identity("made up", 100, "abc"), "cpu", 2, 1, sizes, overheads)
