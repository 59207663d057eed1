"""Which line of the model's own code an error comes from: neither torch's nor ours."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

_OTHERS = (Path(torch.__file__).parent, Path(__file__).parent.parent)


def line_of(error: Exception) -> str:
    """Return the line of the model's own code that an error came up in."""
    return _own_line(traceback.extract_tb(error.__traceback__))


def line_here() -> str:
    """Return the line of the model's own code that runs now."""
    return _own_line(traceback.extract_stack())


def _own_line(frames: traceback.StackSummary) -> str:
    own = [one for one in frames if not any(others in Path(one.filename).parents for others in _OTHERS)]
    frame = own[-1] if own else None
    return "" if frame is None else f", in `{frame.line}` ({Path(frame.filename).name}:{frame.lineno})"
