"""The way home: after a slowness in noise, layers return sooner than they would move anywhere else."""

from __future__ import annotations

import numpy as np

from drumline.adapt.rebalance import Layers
from drumline.adapt.settings import Adapt
from drumline.adapt.slowness import RankSlowness
from virtual_pipeline import one_f_one_b, profile

HOME, AWAY = (16, 16), (20, 12)


def first_return(home: tuple[int, ...], only: tuple[int, ...] = ()) -> tuple[int, tuple[int, ...]]:
    """Return after how many steps without slowness a cut pays, and which one."""
    layers = Layers(profile(32), one_f_one_b())
    watched = RankSlowness(Adapt(), layers)
    noise = np.exp(0.2 * np.random.default_rng(3).standard_normal((90, 2)))
    for step, row in enumerate(noise.tolist()):
        slow = [row[0], row[1] * (1.6 if step < 40 else 1.0)]
        watched.see(AWAY, [seconds * factor for seconds, factor in zip(layers.stage_seconds(AWAY), slow, strict=True)])
        if step < 40:
            continue
        better = watched.look(AWAY, lambda slowness: HOME, pause=lambda counts: 0.05, has_changed=False, only=only,
                              home=home)  # fmt: skip
        if better is not None:
            return step - 40, better.counts
    return 90, ()


def test_home_pays_sooner_than_the_same_cut_without_that_name() -> None:
    (at, counts), (later, other) = first_return(HOME), first_return(())
    assert counts == other == HOME
    assert 3 <= at < later


def test_home_is_no_way_back_to_another_cut() -> None:
    """Soon after a move, the only way is the one to the cut before it."""
    assert first_return(HOME, only=(18, 14))[1] == ()
