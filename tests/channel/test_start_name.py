"""Starts of ranks in a store that has outlived earlier ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore

from drumline.channel.start_name import this_start
from drumline.core.errors import WaitTimeout
from refused import refused

pytestmark = pytest.mark.torch


def together(store: HashStore, size: int) -> set[str]:
    with ThreadPoolExecutor(size) as pool:
        found = [pool.submit(this_start, store, rank, size, timeout=30.0) for rank in range(size)]
        return {future.result() for future in found}


def test_every_start_gets_a_name_of_its_own_whatever_dead_ranks_left() -> None:
    store = HashStore()
    assert together(store, 3) == {"drumline/start/1"}
    with refused(WaitTimeout, "rank 0 waits for rank 1 to report its arrival"):
        this_start(store, 0, 3, timeout=0.3)  # the others died before they came
    with refused(WaitTimeout, "rank 2 waits for rank 0 to report its arrival"):
        this_start(store, 2, 3, timeout=0.3)  # the first died before it came
    assert together(store, 3) == {"drumline/start/3"}
    assert together(store, 2) == {"drumline/start/4"}
    assert together(store, 3) == {"drumline/start/5"}
