"""Start local ranks from a script or a notebook: `launch(fn, ...)` returns the results of all ranks, rank 0 first.

Each rank is a fresh Python process that receives `fn` by value. So `fn` and its classes may be defined in a notebook
cell or in a script without an `if __name__ == "__main__"` guard: launch neither imports nor runs these again.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from drumline.channel.devices.choice import AskedDevice, default_num_ranks
from drumline.channel.launch import by_value
from drumline.channel.launch.blame import blame
from drumline.channel.launch.processes import Processes
from drumline.channel.launch.stop import asked, stop_on_signals
from drumline.channel.launch.wire import Failure, Parts, blank, write
from drumline.core.errors import DrumlineError, LaunchError, RankFailed, WaitTimeout, counted
from drumline.schedules.registry import own_schedules

T = TypeVar("T")

_SECONDS_OF_GRACE = 5.0


def launch(
    fn: Callable[..., T],
    *args: Any,
    num_ranks: int | None = None,
    kwargs: Mapping[str, Any] | None = None,
    threads: int = 1,
    timeout: float | None = None,
    backend: str | None = None,
    prefix: bool = True,
    stoppable: bool = False,
    **named: Any,
) -> list[T]:
    """Run `fn(*args, **named)` on `num_ranks` local processes and return their results, rank 0 first.

    Without `num_ranks` there is a rank for each CUDA device, or two on a machine without one. Keyword arguments that
    launch does not know go to `fn`. Use `kwargs` for those with the same names.

    Each rank joins the default process group and uses `threads` CPU threads. On a machine with CUDA devices, that group
    has gloo and NCCL, and rank r has the device of its number; with more ranks than devices, some share one. With
    `backend="gloo"`, or without such devices, ranks compute on the CPU. What a rank prints appears here, after
    `[rank 1] ` unless `prefix` is False.

    The ranks know the schedules that you registered.

    If a rank fails, launch ends all ranks and raises RankFailed with the rank, its error and its traceback. If every
    rank raised the same DrumlineError, launch raises that. If a rank gives up waiting for another, that one prints its
    stacks. `timeout` limits the whole call, in seconds: after it, each rank prints its stacks, and WaitTimeout names
    the unfinished ranks.

    With `stoppable`, SIGTERM and the first Ctrl-C end nothing: they make `pipe.stopping()` true on every rank after the
    same step. A second Ctrl-C ends all ranks at once.

    >>> def rank_of(word):
    ...     import torch.distributed as dist
    ...     return f"{word} {dist.get_rank()} of {dist.get_world_size()}"
    >>> launch(rank_of, word="rank", num_ranks=2)
    ['rank 0 of 2', 'rank 1 of 2']
    """
    kwargs = kwargs or {}
    for name in named.keys() & kwargs.keys():
        raise LaunchError(f"{name} is given twice, as an argument and in kwargs", expected="only one of them")
    kwargs = {**named, **kwargs}
    if num_ranks is None:
        num_ranks = _num_ranks(backend)
    _check(fn, args, kwargs, num_ranks=num_ranks, threads=threads, timeout=timeout)
    _check_backend(backend, num_ranks)
    parts = _packed(fn, args, kwargs)
    limit = None if timeout is None else time.monotonic() + timeout
    listens = stop_on_signals() if stoppable else contextlib.nullcontext()
    with listens, socket.create_server(("127.0.0.1", 0)) as listener, Processes() as ranks, blank() as task:
        write(task, parts)
        port = listener.getsockname()[1]
        for rank in range(num_ranks):
            ranks.start(
                lambda control: _command(control, threads=threads, backend=backend or "", stoppable=stoppable),
                _environment(rank, num_ranks=num_ranks, port=port, threads=threads),
                task.fileno(),
                prefix=f"[rank {rank}] " if prefix else "",
            )
        # End the ranks before their store: without it they would complain.
        with _store(listener, port), ranks:
            failures = _wait(ranks, limit, timeout)
            if failures:
                raise _error(failures, num_ranks)
            ranks.let_go()
            results = [rank.parts for rank in ranks]
    return [_loaded(rank, result) for rank, result in enumerate(results)]


def _num_ranks(backend: str | None) -> int:
    """Return how many ranks to start if nobody says."""
    from drumline.channel.devices.visible import with_nccl

    return default_num_ranks(with_nccl(), AskedDevice("cpu" if backend == "gloo" else ""))


def _check(
    fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, num_ranks: int, threads: int, timeout: float | None
) -> None:
    for name, number in (("num_ranks", num_ranks), ("threads", threads)):
        if number < 1:
            raise LaunchError(f"{name} is {number}", expected="a count of 1 or more")
    if timeout is not None and timeout <= 0:
        raise LaunchError(f"timeout is {timeout}", expected="a positive number of seconds, or None for no limit")
    if not callable(fn):
        raise LaunchError(f"fn is {fn!r}", expected="a function", fix="pass it without calling it: launch(fn, *args)")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise LaunchError(f"{_name(fn)}{signature} cannot be called with the given arguments: {error}") from None


def _check_backend(backend: str | None, num_ranks: int) -> None:
    """Refuse NCCL without any device, before ranks are there that would have to be ended."""
    if not backend or "nccl" not in backend:
        return
    import torch

    if not torch.accelerator.device_count():
        raise LaunchError(
            f"{counted(num_ranks, 'rank')} with backend {backend}, but this host has no device",
            expected="a device for each rank, or some that ranks share",
            fix='pass backend="gloo"',
        )


def _packed(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Parts:
    try:
        return by_value.dumps((own_schedules(), fn, args, kwargs))
    except LaunchError:
        raise
    except Exception as error:
        schedules = [(f"the schedule {name}", schedule.recipe) for name, schedule in own_schedules().items()]
        named = [
            *schedules,
            (_name(fn), fn),
            *((f"argument {at}", arg) for at, arg in [*enumerate(args), *kwargs.items()]),
        ]
        culprit = next(filter(None, (blame(value, name) for name, value in named)), f"{type(error).__name__}: {error}")
        raise LaunchError(
            f"cannot send to the ranks: {culprit}", fix="create it inside the function, or pass what you build it from"
        ) from error


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", None) or repr(fn)


def _command(control: int, *, threads: int, backend: str, stoppable: bool) -> list[str]:
    """Return the command of a rank: it gets this process's modules and arguments, and never runs its main module."""
    lines = [
        "import sys",
        f"sys.path[:] = {[os.fspath(name) for name in sys.path]!r}",
        f"sys.argv[:] = {sys.argv!r}",
        "from drumline.channel.launch.worker import main",
        f"main({control}, parent={os.getpid()}, threads={threads}, backend={backend!r}, stoppable={stoppable})",
    ]
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-c", "; ".join(lines)]


def _environment(rank: int, *, num_ranks: int, port: int, threads: int) -> dict[str, str]:
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    by_loopback = {} if loopback is None else dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), loopback)
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
        **by_loopback,
    }


@contextlib.contextmanager
def _store(listener: socket.socket, port: int) -> Iterator[None]:
    """Host the ranks' store on a socket that already listens, so that no other program can take the port."""
    from torch import distributed

    dist: Any = distributed
    listening = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    store = dist.TCPStore("127.0.0.1", port, **listening)
    try:
        yield
    finally:
        del store  # closes it; the traceback of an error would keep it open


def _wait(ranks: Processes, limit: float | None, timeout: float | None) -> dict[int, Failure]:
    """Return after all ranks have finished, or shortly after the first failure."""
    failed_at: float | None = None
    while not all(rank.is_finished for rank in ranks):
        ranks.turn()
        if asked():
            ranks.ask_to_stop(asked())
        now = time.monotonic()
        if failed_at is None and any(rank.failure for rank in ranks):
            failed_at = now
            if any(rank.failure and rank.failure.kind == WaitTimeout.__name__ for rank in ranks):
                ranks.show_stacks()  # one of them does not answer, and its stack tells where it hangs
        if failed_at is not None and now > failed_at + _SECONDS_OF_GRACE:
            break
        if failed_at is None and limit is not None and now > limit:
            late = [rank.number for rank in ranks if not rank.is_finished]
            if late:
                ranks.show_stacks()
                names = ", ".join(map(str, late))
                raise WaitTimeout(
                    f"{'ranks' if len(late) > 1 else 'rank'} {names} did not finish within {timeout:g} s",
                    fix="read their stacks above, or raise `timeout` if they are just slow",
                )
    return {rank.number: rank.failure for rank in ranks if rank.failure is not None}


def _error(failures: Mapping[int, Failure], num_ranks: int) -> Exception:
    """Return one error for all failures: the earliest that is not the echo of another."""
    origin = min(failures, key=lambda rank: (failures[rank].echo, failures[rank].at))
    first = failures[origin]
    exception = _exception(first)
    alike = len(failures) == num_ranks and all(failure.kind == first.kind for failure in failures.values())
    error: Exception
    if alike and isinstance(exception, DrumlineError) and not isinstance(exception, RankFailed):
        error = exception
        where = f"on every rank; rank {origin}'s traceback:"
    elif isinstance(exception, RankFailed) and exception.rank not in failures:
        error = exception  # this rank did not fail: it left
        where = f"rank {origin}'s traceback:"
    else:
        error = RankFailed(origin, f"rank {origin} {first}")
        error.__cause__ = exception
        where = f"rank {origin}'s traceback:"
        for rank in sorted(failures.keys() - {origin}):
            error.add_note(f"rank {rank} then {failures[rank]}".partition("\n")[0])
    if first.traceback:
        error.add_note(f"{where}\n{first.traceback.rstrip()}")
    return error


def _exception(failure: Failure) -> BaseException | None:
    if failure.exception is None:
        return None
    try:
        loaded = by_value.loads(failure.exception)
    except Exception:  # many exceptions cannot be rebuilt from their arguments; we have the text anyway
        return None
    return loaded if isinstance(loaded, BaseException) else None


def _loaded(rank: int, parts: Any) -> Any:
    try:
        return by_value.loads(parts)
    except Exception as error:
        raise LaunchError(f"cannot load what rank {rank} returned: {type(error).__name__}: {error}") from error
