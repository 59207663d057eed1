"""Values of the user's own as JSON and back, exactly: nothing is pickled, so that reading a checkpoint runs no code.

    {"order": tensor([2, 0])}  ->  {"order": {"$drumline": "tensor", "of": ["int64", [2], "AgAA..."]}}

Texts, numbers of 64 bits, lists and dicts with texts for keys stay as they are.
"""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drumline.core.errors import DrumlineError, RecordError, RunError

EXPECTED = "numbers, texts, bytes, tensors, arrays, and lists, tuples, sets and dicts of them"
_TAG = "$drumline"
_WHOLE = range(-(2**63), 2**63)
_DEEPEST = 30  # twice and more of it are levels of JSON, of which a reader takes 100


def packed(value: Any, what: str = "extra") -> Any:
    """Return a value as JSON has it; raise where it holds something that could only be pickled.

    >>> packed({"seen": (1, 2), "loss": float("inf"), 7: None})["$drumline"]
    'dict'
    >>> packed({"model": object()})
    Traceback (most recent call last):
    drumline.core.errors.RunError: extra['model'] is an object of the class object; expected numbers, texts, ...
    """
    return _packed(value, what, 0)


def unpacked(value: Any) -> Any:
    """Return the value that was packed.

    >>> state = {"seen": (1, 2), "loss": float("-inf"), 7: b"abc", "large": 2**100, "order": torch.tensor([2, 0])}
    >>> unpacked(packed(state))
    {'seen': (1, 2), 'loss': -inf, 7: b'abc', 'large': 1267650600228229401496703205376, 'order': tensor([2, 0])}
    """
    if isinstance(value, list):
        return [unpacked(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {name: unpacked(item) for name, item in value.items()}
    try:
        return _READERS[value[_TAG]](value["of"])
    except DrumlineError:
        raise
    except Exception as error:  # whatever a damaged value makes of this
        raise RecordError(
            f"a saved value is damaged: {type(error).__name__}: {error}"[:200], expected="what Drumline wrote"
        ) from None


def _packed(value: Any, where: str, depth: int) -> Any:
    if depth > _DEEPEST:
        raise RunError(f"{where[:120]} lies too deep", expected=f"at most {_DEEPEST} levels of lists and dicts")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value) if _is_text(value) else _tagged("text", _in_letters(value.encode(errors="surrogatepass")))
    if isinstance(value, np.generic | np.ndarray):
        return _array(value, where)
    if isinstance(value, int):
        return int(value) if value in _WHOLE else _tagged("whole", str(int(value)))
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _tagged("float", str(float(value)))
    if isinstance(value, bytes | bytearray):
        return _tagged("bytes", _in_letters(value))
    if isinstance(value, Tensor):
        return _tensor(value, where)
    if isinstance(value, list | tuple | set | frozenset):
        each = [_packed(item, f"{where}[{at}]", depth + 1) for at, item in enumerate(value)]
        kind = next(kind for kind in ("list", "tuple", "frozenset", "set") if isinstance(value, _GROUPS[kind]))
        return each if kind == "list" else _tagged(kind, each)
    if isinstance(value, Mapping):
        pairs = [(name, _packed(item, f"{where}[{name!r:.40}]", depth + 1)) for name, item in value.items()]
        if all(type(name) is str and _is_text(name) and name != _TAG for name, _ in pairs):
            return dict(pairs)
        return _tagged("dict", [[_packed(name, f"a key of {where}", depth + 1), item] for name, item in pairs])
    raise RunError(f"{where} is an object of the class {type(value).__name__}", expected=EXPECTED)


def _tagged(kind: str, of: Any) -> dict[str, Any]:
    return {_TAG: kind, "of": of}


def _is_text(value: str) -> bool:
    return not any("\ud800" <= name <= "\udfff" for name in value)


def _in_letters(data: bytes | bytearray) -> str:
    return b64encode(data).decode("ascii")


def _tensor(value: Tensor, where: str) -> dict[str, Any]:
    name = str(value.dtype).removeprefix("torch.")
    if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
        raise RunError(f"{where} is a tensor of the kind {value.layout} on {value.device}", expected="a dense tensor")
    flat = value.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return _tagged("tensor", [name, list(value.shape), _in_letters(data)])


def _read_tensor(of: Any) -> Tensor:
    name, shape, letters = of
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is no kind of number")
    data = bytearray(b64decode(letters, validate=True))
    flat = torch.frombuffer(data, dtype=torch.uint8).view(dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


def _array(value: np.generic | np.ndarray[Any, Any], where: str) -> dict[str, Any]:
    if value.dtype.hasobject:
        raise RunError(f"{where} is an array of objects", expected=EXPECTED)
    kind = "array" if isinstance(value, np.ndarray) else "number"
    return _tagged(kind, [value.dtype.str, list(value.shape), _in_letters(np.asarray(value).tobytes())])


def _read_array(of: Any) -> Any:
    kind, shape, letters = of
    return np.frombuffer(b64decode(letters, validate=True), dtype=np.dtype(kind)).reshape(shape).copy()


_GROUPS: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_READERS: dict[str, Callable[[Any], Any]] = {
    "text": lambda of: b64decode(of, validate=True).decode(errors="surrogatepass"),
    "whole": int,
    "float": float,
    "bytes": lambda of: b64decode(of, validate=True),
    "tensor": _read_tensor,
    "array": _read_array,
    "number": lambda of: _read_array(of)[()],
    "tuple": lambda of: tuple(map(unpacked, of)),
    "set": lambda of: set(map(unpacked, of)),
    "frozenset": lambda of: frozenset(map(unpacked, of)),
    "dict": lambda of: {unpacked(name): unpacked(item) for name, item in of},
}
