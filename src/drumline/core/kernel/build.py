"""Compile the kernel: `python src/drumline/core/kernel/build.py`, or `make kernel`.

    sources     the .c and .h files of this folder
    digest      of the sources and flags; compiled in, and compared when the library is loaded
    file        kernel-<system>-<machine>.shared, beside the sources, so that a folder can serve several platforms

The file imports nothing of Drumline: installing the package runs it before there is a package. Whatever loads the
kernel asks it for the digest, so what only compiling needs is imported late.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import zlib
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMPILERS = ("cc", "gcc", "clang")
# Fused multiply-adds change last bits, where a processor has them.
FLAGS = ("-std=c99", "-O3", "-fPIC", "-shared", "-fvisibility=default", "-ffp-contract=off")
_MOST_SECONDS = 120


class NotBuilt(Exception):
    """The kernel could not be compiled; the text says why."""


def sources(folder: Path = HERE) -> list[Path]:
    """Return the files that are compiled or included, sorted."""
    return sorted(path for path in folder.iterdir() if path.suffix in (".c", ".h"))


def digest(folder: Path = HERE) -> str:
    """Return what tells one state of the sources and flags from another."""
    text = b"\0".join([" ".join(FLAGS).encode(), *(path.read_bytes() for path in sources(folder))])
    return f"{len(text)}-{zlib.crc32(text):08x}"


def file_name() -> str:
    """Return the library's name on this platform; Python would take one that ends in .so for a module."""
    return f"kernel-{sys.platform}-{platform.machine().lower()}.shared"


def digest_in(library: ctypes.CDLL) -> str:
    """Return the digest that was compiled into a library."""
    ask = library.drumline_digest
    ask.restype = ctypes.c_char_p
    return str((ask() or b"").decode())


def build(folder: Path = HERE, *, flags: tuple[str, ...] = FLAGS, check: bool = True) -> Path:
    """Compile the kernel into a folder and return its file, or raise NotBuilt.

    `CC` names the compiler; without it, the first of `COMPILERS` that works is taken. The file appears whole or not at
    all.
    """
    import tempfile

    chosen = [os.environ["CC"]] if os.environ.get("CC", "").strip() else list(COMPILERS)
    failures = []
    with tempfile.TemporaryDirectory(dir=folder, prefix=".kernel-") as scratch:
        library = Path(scratch) / file_name()
        for compiler in chosen:
            try:
                _compile(compiler, flags, library)
                if check:
                    _load(library)
            except NotBuilt as failure:
                failures.append(f"{compiler}: {failure}")
            else:
                return library.replace(folder / library.name)
    raise NotBuilt("; ".join(failures))


def _compile(compiler: str, flags: tuple[str, ...], library: Path) -> None:
    import shlex
    import subprocess

    files = [str(path) for path in sources() if path.suffix == ".c"]
    options = [*flags, f'-DDRUMLINE_DIGEST="{digest()}"', "-o", str(library), *files, "-lm"]
    try:
        command = [*shlex.split(compiler), *options]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_MOST_SECONDS, check=False
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise NotBuilt(str(error)) from None
    if done.returncode:
        raise NotBuilt((done.stderr.strip() or f"it ends with code {done.returncode}").splitlines()[0])


_ASK = """
import ctypes, sys
ask = ctypes.CDLL(sys.argv[1]).drumline_digest
ask.restype = ctypes.c_char_p
print(ask().decode())
"""


def _load(library: Path) -> None:
    """Raise NotBuilt if a compiler succeeded without making a library for this Python.

    Another process loads it: what a broken compiler makes may end the process.
    """
    import subprocess

    asked = subprocess.run([sys.executable, "-c", _ASK, str(library)], capture_output=True, text=True, check=False)
    if asked.stdout.strip() != digest():
        why = (asked.stderr.strip() or f"it ends with code {asked.returncode}").splitlines()[-1]
        raise NotBuilt(f"it made nothing that this Python can load: {why}")


def main() -> int:
    """Compile the kernel beside its sources."""
    try:
        print(f"compiled {build()}")
    except (NotBuilt, OSError) as failure:
        print(f"the kernel is not compiled, so simulations run in Python, slower: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
