"""A name for this start of the ranks, in a store that has outlived earlier ones.

torchrun's agents keep their store when they start workers again, and keys of dead workers stay in it: addresses where
nobody listens, counts that nobody shares. So all keys of a start get a prefix that is new.

    rank r   hello/r = my token        (overwrites what a dead rank r has left)
    rank 0   number = add(starts, 1)   then for every hello it sees: welcome/TOKEN = number
    rank r   reads welcome/MY TOKEN    which only a living rank 0 can have written; here/NUMBER/r = 1
    rank 0   continues once all are here

The number of restarts does not do: agents that join later count from 0.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from torch.distributed.distributed_c10d import PrefixStore, Store

from drumline.channel.channel import too_late

_SHORTEST, _LONGEST = 0.005, 0.2  # seconds between looks


def this_start(store: Store, rank: int, num_ranks: int, *, timeout: float) -> str:
    """Return the prefix of this start, the same on all ranks and new; every rank calls it once.

    >>> from torch.distributed import HashStore
    >>> store = HashStore()
    >>> this_start(store, 0, 1, timeout=1.0), this_start(store, 0, 1, timeout=1.0)
    ('drumline/start/1', 'drumline/start/2')
    """
    here = PrefixStore("drumline/starts", store)
    number = _welcome_all(here, num_ranks, timeout) if rank == 0 else _welcomed(here, rank, timeout)
    return f"drumline/start/{number}"


def _welcome_all(store: Store, num_ranks: int, timeout: float) -> int:
    number = store.add("number", 1)
    missing, answered = set(range(1, num_ranks)), set[str]()

    def look() -> bool:
        for rank in sorted(missing):
            if store.check([f"hello/{rank}"]):
                token = store.get(f"hello/{rank}").decode()
                if token not in answered:
                    answered.add(token)
                    store.set(f"welcome/{token}", str(number))
            if store.check([f"here/{number}/{rank}"]):
                missing.discard(rank)
        return not missing

    _wait(look, timeout, lambda: f"rank 0 waits for rank {min(missing)} to report its arrival")
    return number


def _welcomed(store: Store, rank: int, timeout: float) -> int:
    token = secrets.token_hex(8)
    store.set(f"hello/{rank}", token)
    answer = f"welcome/{token}"
    _wait(lambda: bool(store.check([answer])), timeout, lambda: f"rank {rank} waits for rank 0 to report its arrival")
    number = int(store.get(answer).decode())
    store.set(f"here/{number}/{rank}", "1")
    return number


def _wait(look: Callable[[], bool], timeout: float, waits: Callable[[], str]) -> None:
    started, pause = time.perf_counter(), _SHORTEST
    while not look():
        if time.perf_counter() - started > timeout:
            raise too_late(waits(), timeout)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
