"""What torch's inductor needs on a machine: looked for before anything is compiled."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import torch

from drumline.core.errors import ModelError


def check(device: torch.device) -> None:
    """Refuse to compile with inductor for a device where its own compiler is missing."""
    found = missing(device)
    if found:
        raise ModelError(
            f"compile=True needs {found} on this machine, and there is none",
            expected=f"what torch's inductor compiles with, for stages on {device.type}",
            fix='install it, or use compile=False or compile="aot_eager"',
        )


def missing(device: torch.device) -> str:
    """Return what is not there, in words; nothing if all is."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        compilers = (os.environ.get("CC", ""), "gcc", "clang", "cc")
        return "" if has_triton() and any(map(shutil.which, compilers)) else "Triton and a C compiler"
    if device.type != "cpu":
        return ""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception:  # of several kinds, one for each thing that may be wrong with it
        return "a C++ compiler (g++, or what CXX names)"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    return "" if header.exists() else f"Python's headers ({header})"
