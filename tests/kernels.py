"""The kernel, compiled from this tree's sources for the tests, whatever the installation has."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from drumline.core.kernel.build import FLAGS, NotBuilt, build
from drumline.core.kernel.library import Kernel, loaded

# With these, what is only doubtful fails the build.
STRICT = (*FLAGS, "-Wall", "-Wextra", "-Werror", "-pedantic")


@cache
def library(*flags: str) -> Path:
    """Compile the kernel once for all tests of a process; without a compiler the test is skipped, except in CI."""
    try:
        return build(Path(mkdtemp(prefix="drumline-kernel-")), flags=(*STRICT, *flags), check=not flags)
    except NotBuilt as failure:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"no kernel: {failure}")


def compiled() -> Kernel:
    """Return the kernel of this tree."""
    return loaded(library())
