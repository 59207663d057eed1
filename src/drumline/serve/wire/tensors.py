"""Tensors on the wire: KServe's datatypes, raw bytes, and refusals that name the input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from drumline.serve.wire.manifest import ANY_SIZE, NAMES_OF_TYPES, Dimensions, Tensor
from drumline.serve.wire.protocol import Contents

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

DATATYPES = {name: np.dtype(name.lower().replace("fp", "float")) for name in NAMES_OF_TYPES}
_NAMES = {dtype: name for name, dtype in DATATYPES.items()}
# Where values stand that are not sent as raw bytes.
_TYPED = {
    **{name: f"{name.lower()}_contents" for name in ("BOOL", "UINT64", "INT64", "FP32", "FP64")},
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
}
SHARED_MEMORY = "shared_memory_region"  # the parameter by which a tensor is asked to stand elsewhere
_LONGEST = 80  # characters of a foreign name in an error


class Refused(ValueError):
    """A request that does not fit the manifest; the text names the input."""


def datatype_of(dtype: Any) -> str:
    """Return KServe's name of a numpy type.

    >>> datatype_of(np.float32), datatype_of(np.int64)
    ('FP32', 'INT64')
    """
    return _NAMES[np.dtype(dtype)]


def read_inputs(request: Any, wanted: Sequence[Tensor], dimensions: Dimensions) -> Arrays:
    """Return the arrays of a request, held against what the manifest says of inputs; raise Refused otherwise."""
    inputs_by_name = {value.name: (at, value) for at, value in enumerate(request.inputs)}
    if len(inputs_by_name) != len(request.inputs):
        raise Refused("an input is given twice")
    if odd := [name for name in inputs_by_name if name not in {value.name for value in wanted}]:
        names = ", ".join(value.name for value in wanted)
        raise Refused(f"input {odd[0][:_LONGEST]!r} is unknown; expected {names}")
    shared = [value.name for value in request.inputs if SHARED_MEMORY in value.parameters]
    if shared:
        raise Refused(f"input {shared[0]!r} is in shared memory, which is not offered; send its bytes")
    if request.raw_input_contents and len(request.raw_input_contents) != len(request.inputs):
        raise Refused(
            f"{len(request.raw_input_contents)} raw contents for {len(request.inputs)} inputs; expected one for each"
        )
    sizes: dict[str, int] = {}
    inputs = {}
    for value in wanted:
        if value.name not in inputs_by_name:
            raise Refused(f"input {value.name!r} is missing")
        at, tensor = inputs_by_name[value.name]
        check_shape(value, tensor.datatype, tuple(tensor.shape), dimensions, sizes)
        raw = request.raw_input_contents[at] if request.raw_input_contents else None
        inputs[value.name] = _array(value, tensor, raw)
        check_values(value, inputs[value.name])
    return inputs


def check_shape(
    wanted: Tensor, datatype: str, shape: tuple[int, ...], dimensions: Dimensions, sizes: dict[str, int]
) -> None:
    """Raise Refused unless type and shape are as the manifest says; `sizes` collects what dimensions are.

    >>> from drumline.serve.wire.manifest import Sizes
    >>> wanted = Tensor("tokens", "INT64", ("batch", "length"))
    >>> check_shape(wanted, "INT64", (2, 300), {"length": Sizes(1, 256)}, {})
    Traceback (most recent call last):
    drumline.serve.wire.tensors.Refused: input 'tokens' has length 300 in dimension 1; expected 1 to 256
    """
    name = f"input {wanted.name!r}"
    if datatype != wanted.datatype:
        raise Refused(f"{name} has datatype {datatype[:_LONGEST]!r}; expected {wanted.datatype}")
    if len(shape) != len(wanted.shape):
        raise Refused(f"{name} has shape {list(shape)[:8]}; expected {_spelled(wanted.shape)}")
    for at, (size, dimension) in enumerate(zip(shape, wanted.shape, strict=True)):
        if isinstance(dimension, int):
            if size != dimension:
                raise Refused(f"{name} has shape {list(shape)[:8]}; expected {_spelled(wanted.shape)}")
            continue
        if not (allowed := dimensions.get(dimension, ANY_SIZE)).admits(size):
            raise Refused(f"{name} has {dimension} {size} in dimension {at}; expected {allowed}")
        if sizes.setdefault(dimension, size) != size:
            raise Refused(f"{name} has {dimension} {size} and another input {sizes[dimension]}; expected the same")


def check_values(wanted: Tensor, array: Array) -> None:
    """Raise Refused for a token that no embedding has (ONNX would count negative ones from the end), or an odd bool.

    >>> check_values(Tensor("tokens", "INT64", ("batch",), below=257), np.array([3, -1]))
    Traceback (most recent call last):
    drumline.serve.wire.tensors.Refused: input 'tokens' has the value -1; expected 0 to 256
    """
    if wanted.datatype == "BOOL" and array.size and (value := int(array.view(np.uint8).max())) > 1:
        raise Refused(f"input {wanted.name!r} has the byte {value}; expected 0 or 1 for BOOL")
    if wanted.below is None or not array.size:
        return
    for value in (int(array.min()), int(array.max())):
        if not wanted.least <= value < wanted.below:
            raise Refused(f"input {wanted.name!r} has the value {value}; expected {wanted.least} to {wanted.below - 1}")


def _spelled(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _array(wanted: Tensor, tensor: Any, raw: bytes | None) -> Array:
    dtype, shape = DATATYPES[wanted.datatype], tuple(tensor.shape)
    count = prod(shape)
    if raw is not None:
        if len(raw) != count * dtype.itemsize:
            expectation = f"{count * dtype.itemsize} for shape {list(shape)}"
            raise Refused(f"input {wanted.name!r} has {len(raw)} bytes; expected {expectation}")
        return np.frombuffer(raw, dtype).reshape(shape)
    place = _TYPED.get(wanted.datatype)
    values: Any = getattr(tensor.contents, place) if place else ()
    if len(values) != count:
        raise Refused(f"input {wanted.name!r} has {len(values)} values; expected {count} for shape {list(shape)}")
    if dtype.kind in "iu" and values and not np.iinfo(dtype).min <= min(values) <= max(values) <= np.iinfo(dtype).max:
        raise Refused(f"input {wanted.name!r} has a value that {wanted.datatype} cannot hold")
    return np.array(values, dtype).reshape(shape)


def put_inputs(request: Any, arrays: Mapping[str, Array]) -> None:
    """Write arrays into a request as raw bytes."""
    for name, array in arrays.items():
        request.inputs.add(name=name, datatype=datatype_of(array.dtype), shape=array.shape)
        request.raw_input_contents.append(array.tobytes())


def put_outputs(response: Any, arrays: Mapping[str, Array], *, typed: bool = False) -> None:
    """Write arrays into a response: as raw bytes, or as typed contents for a client that sent such."""
    typed = typed and all(datatype_of(array.dtype) in _TYPED for array in arrays.values())  # all are, or none
    for name, array in arrays.items():
        datatype = datatype_of(array.dtype)
        put = response.outputs.add(name=name, datatype=datatype, shape=array.shape)
        if typed:
            put.contents.CopyFrom(Contents(**{_TYPED[datatype]: array.ravel().tolist()}))
        else:
            response.raw_output_contents.append(array.tobytes())


def read_outputs(response: Any) -> Arrays:
    """Return the arrays of a response.

    >>> from drumline.serve.wire.protocol import InferResponse
    >>> response = InferResponse()
    >>> put_outputs(response, {"y": np.ones((1, 2), np.float32)}, typed=True)
    >>> read_outputs(response)["y"]
    array([[1., 1.]], dtype=float32)
    """
    outputs = {}
    for at, output in enumerate(response.outputs):
        dtype, shape = DATATYPES[output.datatype], tuple(output.shape)
        if response.raw_output_contents:
            outputs[output.name] = np.frombuffer(response.raw_output_contents[at], dtype).reshape(shape)
        else:
            outputs[output.name] = np.array(getattr(output.contents, _TYPED[output.datatype]), dtype).reshape(shape)
    return outputs
