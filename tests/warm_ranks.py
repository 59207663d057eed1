"""Ranks that start in a moment: forked by a process that has already imported torch.

A fresh rank spends seconds on imports, and most tests need ranks only as a vehicle. `WarmRanks` stands in for
the module `subprocess` where `launch` starts its ranks:

    test process                        server, one per test process               rank
      Popen(command) ── code, files ──►   has torch and drumline; forks ─────────►   runs the command's code
      poll, wait    ◄── how it ended ──   waits for its children          ◄─────────   exits

The server also imports transformers once, where the test process has it: ranks would spend seconds on it, too.
`WarmRanks.run` forks any other piece of code, in place of `python -c`.
What must be a fresh process, because its interpreter or its libraries are set up otherwise, is started as ever. So is
everything in tests of starting itself, of memory, and of what depends on the order of sets (`cold_ranks`): forked ranks
share one order. And so is every rank where an import starts threads, which no fork takes along: the server says so.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import types
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

_LOADED = (
    "torch.distributed",
    "torch._dynamo",
    "drumline.pipeline.pipeline",
    "drumline.channel.launch.worker",
    "drumline.train.loop.run",
    "drumline.train.data.build",
    "drumline.train.models.build",
    "pytest",
)
# What is slow to import, of what tests use.
_ONCE_USED = {
    "transformers": "transformers.models.llama.modeling_llama",
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao.quantization",
    "peft": "peft",
}
_FIXED_AT_START = ("ATEN", "CUDA", "GLIBC", "LD_", "MALLOC", "MKL", "NCCL", "OMP", "PYTHON", "TORCH")
_READ_LATER = ("NCCL_SOCKET_IFNAME", "PYTHONPATH", "TORCHINDUCTOR_CACHE_DIR")
# Arrow, which transformers imports where it finds it, would start a thread for its allocator.
_WITHOUT_THREADS = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
_LARGEST = 1 << 17
_ABOVE = 200  # numbers of files that no rank's own collide with
_THREADS = b"threads"  # the server's answer where it cannot fork


class WarmRanks:
    """`subprocess`, but for `Popen` of a rank's command, which is forked by a server of ours where that is the same."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._fixed = fixed({**os.environ, "OMP_NUM_THREADS": "1"})
        self._forks = True

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(self, command: list[str], *, env: dict[str, str], pass_fds: list[int], **rest: Any) -> Any:
        """Start a rank."""
        if self._forks and command[-2] == "-c" and fixed(env) == self._fixed:
            try:
                return self.forked(command[-1], env=env, pass_fds=pass_fds)
            except HasThreads:
                self._forks = False
        return subprocess.Popen(command, env=env, pass_fds=pass_fds, **rest)

    def forked(
        self,
        code: str,
        *,
        env: Mapping[str, str],
        pass_fds: Sequence[int] = (),
        used: Sequence[str] = (),
        given: int = -1,
    ) -> Forked:
        """Fork a process that runs code: `used` is imported once for all that ask for it, `given` is a file to read."""
        more = [module for package, module in _ONCE_USED.items() if sys.modules.get(package)]
        return Forked(self._connected(), code, env, pass_fds, [*more, *used], given)

    def start(self, code: str, *, given: str = "", pass_fds: Sequence[int] = (), used: Sequence[str] = ()) -> Any:
        """Start a process that runs code and may read a text; returns what `Popen` does, with output in bytes."""
        with tempfile.TemporaryFile() as file:
            file.write(given.encode())
            file.seek(0)
            if self._forks:
                try:
                    return self.forked(code, env=os.environ, pass_fds=pass_fds, used=used, given=file.fileno())
                except HasThreads:
                    self._forks = False
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            pipes: Any = {"stdin": file, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            return subprocess.Popen([sys.executable, "-c", code], env=env, pass_fds=pass_fds, **pipes)

    def run(self, code: str, *, given: str = "", used: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        """Run code to its end; returns its status and what it printed."""
        started = self.start(code, given=given, used=used)
        printed, said = started.communicate()
        return subprocess.CompletedProcess(code, started.returncode, printed.decode(), said.decode())

    def _connected(self) -> tuple[socket.socket, int]:
        if self._server is None or self._server.poll() is not None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _LARGEST)
            with theirs:
                flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
                self._server = subprocess.Popen(
                    [sys.executable, *flags, __file__, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, **_WITHOUT_THREADS, "PYTHONPATH": os.pathsep.join(sys.path)},
                    cwd="/",  # this process may be in a folder that is gone before the next rank starts
                )
            self._socket = ours
        assert self._socket is not None
        return self._socket, self._server.pid

    def close(self) -> None:
        """End the server, and with it all that it has forked."""
        if self._socket is not None and self._server is not None:
            self._socket.close()
            self._server.wait(30)
            self._server = None


class HasThreads(Exception):
    """The server cannot fork: what it imported has started threads."""


class Forked:
    """A process that the server has forked, with what `launch` uses of a Popen."""

    def __init__(
        self,
        server: tuple[socket.socket, int],
        code: str,
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        used: Sequence[str],
        given: int,
    ) -> None:
        connection, parent = server
        self.returncode: int | None = None
        self._ended, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        outputs = [os.pipe(), os.pipe()]
        with theirs, open(os.devnull, "rb") as nothing:
            code = re.sub(rf"\bparent={os.getpid()}\b", f"parent={parent}", code)
            task = {"code": code, "env": dict(env), "cwd": os.getcwd(), "passed": [*pass_fds], "used": [*used]}
            standard = [nothing.fileno() if given < 0 else given, *(write for _, write in outputs)]
            socket.send_fds(connection, [json.dumps(task).encode()], [*standard, *pass_fds, theirs.fileno()])
        for _, write in outputs:
            os.close(write)
        self.stdout, self.stderr = (os.fdopen(read, "rb", 0) for read, _ in outputs)
        told = self._ended.recv(100)
        if told == _THREADS:
            for io in (self.stdout, self.stderr, self._ended):
                io.close()
            raise HasThreads
        self.pid = int(told)

    def poll(self) -> int | None:
        """Return how it ended, None while it runs."""
        if self.returncode is None and not select.select([self._ended], [], [], 0)[0]:
            return None
        return self.wait()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return how that was, as Popen does."""
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(int(self._ended.recv(100)))
            self._ended.close()
        return self.returncode

    def communicate(self) -> tuple[bytes, bytes]:
        """Read all that it prints and wait for its end, as Popen does."""
        with self.stdout, self.stderr, ThreadPoolExecutor(1) as reader:
            said = reader.submit(self.stderr.readall)
            printed = self.stdout.readall()
            self.wait()
            return printed, said.result()

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


def fixed(env: dict[str, str]) -> dict[str, str]:
    """Return what of an environment counts when a process starts, and never again."""
    return {name: value for name, value in env.items() if name.startswith(_FIXED_AT_START) and name not in _READ_LATER}


def serve(connection: socket.socket) -> None:
    """Fork ranks as they are asked for, until nobody can ask any more."""
    load(_LOADED)
    importlib.import_module("first_pipeline").make_one()
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, socket.socket] = {}
    while True:
        ready = select.select([connection.fileno(), woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            tell_ended(running)
        if connection.fileno() in ready and not start(connection, running):
            return


def load(names: Sequence[str]) -> None:
    """Import what ranks then have from the beginning."""
    if all(name in sys.modules for name in names):
        return
    for name in names:
        importlib.import_module(name)
    leave_out_finalizers("torch.library")
    gc.freeze()


def leave_out_finalizers(module: str) -> None:
    """Spare each rank what a module clears at the end of a process: for torch's operators 50 ms, of 80 in all."""
    for finalizer, what in list(weakref.finalize._registry.items()):  # type: ignore[attr-defined]
        if what.func.__module__ == module:
            finalizer.atexit = False


def tell_ended(running: dict[int, socket.socket]) -> None:
    for process in list(running):
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            with running.pop(process) as asker, contextlib.suppress(OSError):
                asker.send(str(status).encode())


def start(connection: socket.socket, running: dict[int, socket.socket]) -> bool:
    """Fork one rank; return False where nobody asks any more."""
    told, files, _, _ = socket.recv_fds(connection, _LARGEST, 5)
    if not told:
        return False
    asker = socket.socket(fileno=files.pop())
    task = json.loads(told)
    load(task["used"])
    if len(os.listdir("/proc/self/task")) > 1:  # a lock that another thread holds stays locked in a fork
        asker.send(_THREADS)
        asker.close()
        for file in files:
            os.close(file)
        return True
    process = os.fork()
    if not process:
        become(task, files)
    for file in files:
        os.close(file)
    running[process] = asker
    asker.send(str(process).encode())
    return True


def become(task: dict[str, Any], files: list[int]) -> NoReturn:
    """Be the rank: its files, its folder, its environment, its code, and nothing of the server's."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, _ABOVE) for file in files]
    kept = [0, 1, 2, *task["passed"]]
    for file, number in zip(high, kept, strict=True):
        os.dup2(file, number)
    for file in map(int, os.listdir("/proc/self/fd")):
        if file not in kept:
            with contextlib.suppress(OSError):  # the folder's own
                os.close(file)
    os.environ.clear()
    os.environ.update(task["env"])
    os.chdir(task["cwd"])
    random.seed()
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    status: object = 0
    try:
        exec(compile(task["code"], "<string>", "exec"), main.__dict__)
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
