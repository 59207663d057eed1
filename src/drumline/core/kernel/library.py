"""The compiled kernel, if this installation has one that fits its sources.

Whoever computes asks `kernel()`. If that is None, the Python form of the same function runs and gives the same bits. It
tells `slower` how much it computed. Once that is worth telling, the log says so, and how to get the kernel.

Functions take numbers and arrays. An array must be contiguous and of the type that the function's row of `_PARAMETERS`
names: another type would be read as other numbers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from drumline.core.kernel import build

_Pointer = ctypes.c_void_p
_Count = ctypes.c_int64


class _Array:
    """An array of one type, or None."""

    dtype: np.dtype[np.generic]

    @classmethod
    def from_param(cls, array: npt.NDArray[np.generic] | None) -> ctypes.c_void_p | None:
        """Return the address of the array's first number."""
        if array is None:
            return None
        if array.dtype != cls.dtype or not array.flags.c_contiguous:
            raise TypeError(f"an array of {array.dtype}, contiguous: {array.flags.c_contiguous}, expected {cls.dtype}")
        return ctypes.c_void_p(array.__array_interface__["data"][0])


def _array_of(kind: str) -> Any:
    return type(kind, (_Array,), {"dtype": np.dtype(kind)})


_Int32, _Int64, _Float, _Byte = map(_array_of, ("int32", "int64", "float64", "uint8"))
# The parameters of every function; what returns a count is named again below.
_PARAMETERS: dict[str, tuple[Any, ...]] = {
    "clock": (_Count, _Count, _Int64, _Int32, _Float, _Float, _Float, _Int32),
    "need": (_Count, *[_Int32] * 5, _Count, _Count, _Int64, _Count, _Byte, _Int64, _Int32, _Int32, _Int32, _Byte),
    "seconds": (_Count, *[_Int32] * 3, _Count, _Float, _Float, _Byte, _Float),
    "stash": (_Count, *[_Int32] * 5, _Count, *[_Float] * 4),
    "pairs": (_Count, *[_Int32] * 4, _Count, _Byte, _Byte, _Int32),
    "starts": (_Count, _Int64, _Int32, _Float, _Float, _Float),
    "causes": (
        *(_Count, _Int64, _Int32, *[_Float] * 6, _Count, _Int32),
        *(_Int32, _Float, _Float, _Int32, _Int32, _Int32),
    ),
    "path": (_Count, _Int32, _Int32, _Float, _Float, _Int32),
    "turns": (_Count, *[_Int32] * 4),
    "lanes": (_Count, _Int64, _Count, _Int64, *[_Int32] * 6),
    "block": (_Count, _Count, _Count, _Int64, *[_Int32] * 4),
    "waves": (_Count, _Count, _Count, _Int64, _Count, *[_Int32] * 4),
    "many": (_Count, _Int64, _Int64, ctypes.c_double, _Float),
    "latest": (
        *(_Count, _Int32, _Count, _Int64, _Int32, _Int32, _Float, _Count),
        *(_Float, _Count, _Count, _Float, _Float),
    ),
    "legal": (
        *(_Count, *[_Int32] * 5, _Byte, _Count, _Count, _Count, _Int32, _Byte),
        *(_Count, _Count, _Int32, _Count, _Count, _Int32, _Byte, _Byte, _Int32, _Count),
    ),
    "sums": (_Count, _Int64, _Float, _Float),
    "read_rows": (_Byte, _Count, _Byte, _Byte, _Count, _Count, _Int64, _Int64, *[_Int32] * 4, _Byte),
    "write_rows": (_Count, _Int64, *[_Int32] * 3, _Byte, _Byte, _Count, _Count, _Count, _Byte),
}
# Those of a search take structures that hold addresses (rows.c, construct.c, moves.c).
_Address = ctypes.c_void_p
_PARAMETERS |= {"rows": (_Address,) * 7, "construct": (_Address,) * 6, "anneal": (_Address, _Address, _Count)}
_RETURN_COUNTS = {"block", "causes", "clock", "legal", "many", "need", "path", "read_rows", "waves", "write_rows"}
_RETURN_COUNTS |= {"rows", "construct", "anneal"}
_WORTH_TELLING = 200_000  # nodes: the Python form takes a tenth of a second for them


class Kernel:
    """The functions of a library, as attributes."""

    OUT_OF_MEMORY, TOO_MANY = -2, -3  # what functions that count may return

    clock: Callable[..., int]
    need: Callable[..., int]
    legal: Callable[..., int]
    read_rows: Callable[..., int]
    write_rows: Callable[..., int]
    sums: Callable[..., None]
    seconds: Callable[..., None]
    starts: Callable[..., None]
    stash: Callable[..., None]
    pairs: Callable[..., None]
    causes: Callable[..., int]
    path: Callable[..., int]
    turns: Callable[..., None]
    lanes: Callable[..., None]
    block: Callable[..., int]
    waves: Callable[..., int]
    latest: Callable[..., None]
    many: Callable[..., int]
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
    """Return the address of a contiguous array's first number, for functions that take records of addresses.

    The caller sees to its type, and keeps the array while the kernel reads it.
    """
    return None if array is None else int(array.__array_interface__["data"][0])
