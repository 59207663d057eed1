"""A rank started by `launch`: it gets its task over a socket, runs it in a process group, and sends the outcome back.

    launch                                       rank
      ── task: fn, args ─────────────────────►   imports torch, joins the process group, runs fn
      ◄── outcome: what fn returned, or why not
      ── "t" or "c": SIGTERM, Ctrl-C ────────►   continues: `Pipeline.stopping` says so after a step
      ── "." once every rank has finished ───►   leaves the process group, exits
      ── end of file: launch is gone or ends ►   exits

So no rank closes its connections while another still works, and none outlives `launch`.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Any, NoReturn

from drumline.channel import stacks
from drumline.channel.launch import by_value, stop
from drumline.channel.launch.blame import blame
from drumline.channel.launch.wire import FAILED, RETURNED, STOPS, Failure, Parts, read, write
from drumline.core.errors import LaunchError, RankFailed
from drumline.schedules.registry import adopt

_PR_SET_PDEATHSIG = 1
_SECONDS_TO_CLEAN_UP = 15.0
_SECONDS_BETWEEN_SIGNALS = 0.2
_ending = threading.Event()  # `launch` is gone, or ends this rank
_terminated = threading.Event()  # the main thread knows it


class _Terminated(SystemExit):
    """SIGTERM as an exception, so that `finally` blocks run and release shared memory and files."""


def main(control: int, *, parent: int, threads: int, backend: str, stoppable: bool = False) -> NoReturn:
    """Run one rank; `control` is its socket, `parent` the process that started it."""
    if stoppable:
        stop.turn_on()
    signal.signal(signal.SIGINT, _leave_to_launch)
    signal.signal(signal.SIGTERM, _terminate)
    die_with(parent)
    faulthandler.enable()
    stacks.write_to_stderr()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    connection = socket.socket(fileno=control)
    connection.set_inheritable(False)
    try:
        code = _serve(connection, threads=threads, backend=backend)
    except _Terminated:
        code = -signal.SIGTERM
    except (EOFError, OSError):  # launch is gone
        code = 1
    _exit(code)


def _serve(connection: socket.socket, *, threads: int, backend: str) -> int:
    _, files, _, _ = socket.recv_fds(connection, 1, 2)
    if not files:
        raise EOFError
    task, answer = files
    parts = read(task)
    os.close(task)
    os.set_inheritable(answer, False)
    all_done = _watch(connection)
    with open(answer, "wb") as file:
        try:
            write(file, _result(_run(parts, threads=threads, backend=backend)))
            _take_leave()
        except _Terminated:
            raise
        except BaseException as error:
            # Exit at once: the closed connections tell the other ranks.
            write(file, by_value.dumps(_failure(error), reply=True))
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # launch ends all ranks now, and this one is leaving
            connection.sendall(FAILED)
            return 1
    connection.sendall(RETURNED)
    all_done.wait()
    _leave_group()
    return 0


def _run(parts: Parts, *, threads: int, backend: str) -> Any:
    _join_group(threads=threads, backend=backend)
    try:
        own_result, fn, args, kwargs = by_value.loads(parts)
    except Exception as error:
        raise LaunchError(
            f"a rank cannot load fn or its arguments: {type(error).__name__}: {error}",
            fix="each rank imports the caller's modules by name: make sure it finds the same ones",
        ) from error
    adopt(own_result)
    return fn(*args, **kwargs)


def _join_group(*, threads: int, backend: str) -> None:
    gc.disable()  # importing torch creates only lasting objects; collection would take a tenth of that time
    import torch
    from torch import distributed

    gc.enable()
    gc.freeze()
    dist: Any = distributed
    torch.set_num_threads(threads)
    rank = int(os.environ["RANK"])
    from drumline.channel.devices.visible import group_backend, take_own

    if backend != "gloo":
        take_own()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store, size = dist.TCPStore(address, port, is_master=False, wait_for_workers=False), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend or group_backend(), store=store, rank=rank, world_size=size)
    # One that is done at once and leaves would break the connections that others are still making.
    if store.add("drumline/joined", 1) == size:
        store.set("drumline/all joined", "")
    store.wait(["drumline/all joined"])


def _take_leave() -> None:
    """Tell other ranks that the pipelines still open here will send nothing more."""
    if (crews := sys.modules.get("drumline.engine.ranks.crew")) is not None:
        crews.leave_all()


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _result(value: Any) -> Parts:
    try:
        return by_value.dumps(value, reply=True)
    except Exception as error:
        culprit = blame(value, "the result") or f"{type(error).__name__}: {error}"
        raise LaunchError(
            f"cannot send back what fn returned: {culprit}", fix="return tensors, numbers, or a state_dict()"
        ) from error


def _failure(error: BaseException) -> Failure:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    try:
        exception = tuple(bytes(part) for part in by_value.dumps(error, reply=True))
    except Exception:  # the text arrives even if the exception cannot be pickled
        exception = None
    return Failure(
        kind=type(error).__name__,
        text=str(error),
        at=time.monotonic(),
        traceback="".join(traceback.format_exception(type(error), error, trace)),
        exception=exception,
        echo=_is_echo(error),
    )


def _is_echo(error: BaseException) -> bool:
    """Return whether an error only says that another rank is gone."""
    from torch.distributed import DistError

    return isinstance(error, RankFailed | DistError | ConnectionError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in ("closed by peer", "reset by peer"))
    )


def _watch(connection: socket.socket) -> threading.Event:
    """Return an event that is set when all ranks are done; if `launch` is gone, end this process."""
    all_done = threading.Event()

    def watch() -> None:
        while (word := connection.recv(1)) in STOPS:
            stop.ask(STOPS[word])
        if word:
            all_done.set()
            return
        _ending.set()
        _tell_main_thread()
        time.sleep(_SECONDS_TO_CLEAN_UP)
        os._exit(1)

    threading.Thread(target=watch, name="launch-watch", daemon=True).start()
    return all_done


def _tell_main_thread() -> None:
    """Send SIGTERM until the main thread has taken it: one that comes just before a system call does not end the call.

    CPython notes the signal and acts on it after the call, which may be a long sleep or a wait for another rank.
    """
    limit, main_thread = time.monotonic() + _SECONDS_TO_CLEAN_UP, threading.main_thread().ident
    assert main_thread is not None, "it runs"
    while not _terminated.is_set() and time.monotonic() < limit:
        signal.pthread_kill(main_thread, signal.SIGTERM)
        _terminated.wait(_SECONDS_BETWEEN_SIGNALS)


def die_with(parent: int, sent: signal.Signals = signal.SIGTERM) -> None:
    """Let the kernel send a signal when the parent dies for any reason; other systems rely on the closed socket."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, sent)
    if os.getppid() != parent:
        os._exit(1)


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    if stop.is_on() and not _ending.is_set():
        stop.ask("SIGTERM")  # of somebody else: `launch` lets go of the socket first
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: a second must not interrupt the cleanup
    _terminated.set()
    raise _Terminated


def _leave_to_launch(_signal: int, _frame: FrameType | None) -> None:
    """Ignore Ctrl-C, which reaches every process of a terminal: `launch` gets it too and ends the ranks."""


def _exit(code: int) -> NoReturn:
    """Exit without tearing down the interpreter, which takes torch 0.4 s."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
