"""Write modules as ONNX by PyTorch's exporter, and time them in ONNX Runtime."""

from __future__ import annotations

import contextlib
import io
import logging
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from drumline.core.errors import ModelError
from drumline.serve.export.chain import Boundary
from drumline.serve.session import open_session
from drumline.serve.wire.manifest import Dimensions
from drumline.serve.wire.tensors import Array

_LARGE = 2**20  # bytes of weights from which on they stand in a file of their own


def write_onnx(module: nn.Module, before: Boundary, behind: Boundary, path: Path, dimensions: Dimensions) -> None:
    """Write a module; its dimensions with names may change. Weights of a MiB or more stand beside the graph."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size = sum(one.nbytes for one in (*module.parameters(), *module.buffers()))
    known = {name: torch.export.Dim(name, min=max(least, 1), max=most) for name, (least, most) in dimensions.items()}
    shapes = tuple(
        {at: known.get(dimension, torch.export.Dim.DYNAMIC) for at, dimension in enumerate(one.shape)
         if isinstance(dimension, str)}
        for one in before.tensors
    )  # fmt: skip
    try:
        with _quietly():
            torch.onnx.export(
                module.eval(),
                before.example,
                str(path),
                dynamo=True,
                input_names=[one.name for one in before.tensors],
                output_names=[one.name for one in behind.tensors],
                dynamic_shapes=(shapes,),
                external_data=size >= _LARGE,
                optimize=True,
                verbose=False,
            )
    except Exception as error:  # whatever the exporter meets in a model
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise ModelError(
            f"PyTorch's ONNX exporter cannot write {path.parent.name}: {lines[0][:300]}",
            expected="a model that torch.export can trace with changing rows and lengths",
        ) from error


@contextlib.contextmanager
def _quietly() -> Any:
    """Keep the exporter's progress and warnings to itself."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def run_onnx(path: Path, inputs: Sequence[Array], names: Sequence[str], *, threads: int = 1) -> list[Array]:
    """Run a graph once."""
    session = open_session(path, threads=threads)
    found: list[Array] = session.run(None, dict(zip(names, inputs, strict=True)))
    return found


def seconds_of(path: Path, before: Boundary, *, runs: int = 7, max_seconds: float = 2.0) -> float:
    """Return the median seconds of a graph in ONNX Runtime, on one thread, for the boundary's example."""
    session = open_session(path)
    given = {one.name: tensor.numpy() for one, tensor in zip(before.tensors, before.example, strict=True)}
    used = {one.name for one in session.get_inputs()}
    given = {name: np.ascontiguousarray(array) for name, array in given.items() if name in used}
    session.run(None, given)
    found: list[float] = []
    begun = time.perf_counter()
    while len(found) < runs and (len(found) < 3 or time.perf_counter() - begun < max_seconds):
        start = time.perf_counter()
        session.run(None, given)
        found.append(time.perf_counter() - start)
    return median(found)
