"""The compiled kernel, if this installation has one that fits its sources.

Whoever computes asks `kernel()`. If that is None, the Python form of the same function runs and gives the same bits. It
tells `slower` how much it computed. Once that is worth telling, the log says so, and how to get the kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from drumline.core.kernel import build

_Pointer = ctypes.c_void_p
_Count = ctypes.c_int64
# The parameters of every function; what returns a count is named again below.
_PARAMETERS: dict[str, tuple[type, ...]] = {
    "clock": (_Count, _Count, *[_Pointer] * 6),
    "producers": (_Count, *[_Pointer] * 5, _Count, _Count, _Pointer, _Count, *[_Pointer] * 4),
    "plain_graph": (_Count, *[_Pointer] * 4, _Count, *[_Pointer] * 10),
    "stash": (_Count, *[_Pointer] * 8),
    "starts": (_Count, *[_Pointer] * 5),
    "latest": (_Count, _Pointer, _Count, *[_Pointer] * 4, _Count, _Pointer, _Count, _Count, _Pointer, _Pointer),
}
# Those of a search (rows.c, construct.c, moves.c).
_PARAMETERS |= {"rows": (_Pointer,) * 7, "construct": (_Pointer,) * 6, "anneal": (_Pointer, _Pointer, _Count)}
_RETURN_COUNTS = ("clock", "plain_graph", "producers", "rows", "construct", "anneal")
_WORTH_TELLING = 200_000  # nodes: the Python form takes a tenth of a second for them


class Kernel:
    """The functions of a library, as attributes; numbers and pointers go in as plain integers."""

    OUT_OF_MEMORY = -2  # what functions that count may return

    clock: Callable[..., int]
    plain_graph: Callable[..., int]
    producers: Callable[..., int]
    starts: Callable[..., None]
    stash: Callable[..., None]
    latest: Callable[..., None]
    rows: Callable[..., int]
    construct: Callable[..., int]
    anneal: Callable[..., int]

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, parameters in _PARAMETERS.items():
            function = getattr(library, f"drumline_{name}")
            function.argtypes = parameters
            function.restype = _Count if name in _RETURN_COUNTS else None
            setattr(self, name, function)


class NoKernel(Exception):
    """There is no kernel to use; the text says why."""


def loaded(path: Path) -> Kernel:
    """Return the kernel in a file, or raise NoKernel if it cannot be loaded or was made from other sources."""
    if not path.is_file():
        raise NoKernel(f"{path.name} was not compiled")
    try:
        library = ctypes.CDLL(str(path))
        if build.digest_in(library) != build.digest():
            raise NoKernel(f"{path.name} was compiled from other sources")
        return Kernel(library)
    except (OSError, AttributeError, ValueError) as error:
        raise NoKernel(f"{path.name} cannot be loaded: {error}") from None


@cache
def _installed() -> Kernel | NoKernel:
    try:
        return loaded(build.HERE / build.file_name())
    except NoKernel as absent:
        return absent


def kernel() -> Kernel | None:
    """Return this installation's kernel, or None.

    >>> kernel() is kernel()
    True
    """
    found_kernel = _installed()
    return found_kernel if isinstance(found_kernel, Kernel) else None


class _Told:
    nodes = 0
    is_told = False


def slower(num_nodes: int) -> None:
    """Note that the Python form computed so many nodes; say once that there is a faster one."""
    _Told.nodes += num_nodes
    if _Told.nodes >= _WORTH_TELLING and not _Told.is_told:
        import logging

        _Told.is_told = True
        absent = _installed()
        logging.getLogger("drumline").warning(
            "simulations run in Python, with the same results but slower: %s; to compile it, run: python -m %s",
            absent if isinstance(absent, NoKernel) else "the kernel is not used",
            build.__name__,
        )


def pointer(array: npt.NDArray[np.generic] | None) -> int | None:
    """Return the address of a contiguous array's first number; None stays None."""
    return None if array is None else int(array.__array_interface__["data"][0])
