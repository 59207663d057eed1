"""A stage's graph in ONNX Runtime: loaded, warmed up, run, and stopped on the way."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from drumline.serve.wire.files import check_files
from drumline.serve.wire.manifest import ANY_SIZE, BATCH, Manifest, Tensor
from drumline.serve.wire.tensors import DATATYPES, Array, Arrays

# It would tell its maker of each model, and leave files in $TMPDIR; it looks there while it is imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
import onnxruntime

_FATAL = 4  # ONNX Runtime raises its errors, and need not print them among the lines of our log
_NO_MEMORY = ("bad_alloc", "bad allocation", "Failed to allocate memory")  # how ONNX Runtime says it
_WARM_LENGTH = 8  # of dimensions other than rows, where the graph is warmed up


def open_session(path: Path, *, threads: int = 1) -> Any:
    """Return a session of ONNX Runtime that computes on so many threads, and sleeps when it waits."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _FATAL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def is_of_runtime(error: BaseException) -> bool:
    """Whether ONNX Runtime has raised an error; it has a class for each of its codes, without one for all.

    >>> is_of_runtime(ValueError())
    False
    """
    return type(error).__module__.startswith("onnxruntime.")


class Session:
    """The graph of one stage, held against its manifest."""

    def __init__(self, folder: Path, manifest: Manifest, number: int, *, threads: int = 1) -> None:
        self._mine, self._dimensions, self.threads = manifest.stages[number], manifest.dimensions, threads
        self._session = open_session(check_files(folder, manifest, number), threads=threads)
        self._outputs = [output.name for output in self._mine.outputs]

    def begin(self, arrays: Mapping[str, Array]) -> Running:
        """Return one run of the graph, which a thread may call."""
        return Running(self._session, self._outputs, arrays)

    def run(self, arrays: Mapping[str, Array]) -> Arrays:
        """Run the graph."""
        return self.begin(arrays)()

    def warm_up(self) -> None:
        """Run the graph once on zeros, so that the first request does not pay for allocations.

        Zeros of a made-up size need not fit each other: then the first request pays.
        """
        with suppress(ValueError):
            self.run({tensor.name: self._zeros(tensor) for tensor in self._mine.inputs})

    def _zeros(self, tensor: Tensor) -> Array:
        shape = [size if isinstance(size, int) else self._size(size) for size in tensor.shape]
        return np.zeros(shape, DATATYPES[tensor.datatype])

    def _size(self, dimension: str) -> int:
        sizes = self._dimensions.get(dimension, ANY_SIZE)
        wanted = 1 if dimension == BATCH or sizes.step > 1 else _WARM_LENGTH
        return max(sizes.least, min(wanted, sizes.most or wanted))


class Running:
    """One run; `stop` ends it early, from another thread."""

    def __init__(self, session: Any, outputs: list[str], arrays: Mapping[str, Array]) -> None:
        self._session, self._outputs, self._arrays = session, outputs, arrays
        self._options = onnxruntime.RunOptions()
        self._options.log_severity_level = _FATAL

    def __call__(self) -> Arrays:
        """Run, and return the outputs by name; ValueError says what ONNX Runtime could not compute.

        MemoryError says that it got no memory for it.
        """
        try:
            outputs = self._session.run(self._outputs, dict(self._arrays), self._options)
        except Exception as error:  # ONNX Runtime has a class for each of its codes, without one for all
            why = (str(error).splitlines() or ["?"])[0][:300]
            if any(text in why for text in _NO_MEMORY):
                raise MemoryError(f"no memory to compute this input: {why}") from error
            raise ValueError(f"cannot compute this input: {why}") from error
        return dict(zip(self._outputs, outputs, strict=True))

    def stop(self) -> None:
        """Let the run end at the next node of the graph."""
        self._options.terminate = True
