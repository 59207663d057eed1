"""The kernel, compiled from this tree's sources for the tests, whatever the installation has.

What was compiled is kept until the sources change, for other processes and for the next run.
"""

from __future__ import annotations

import os
import zlib
from functools import cache
from pathlib import Path

import pytest

from drumline.core.kernel.build import FLAGS, NotBuilt, build, digest, file_name
from drumline.core.kernel.library import Kernel, loaded

# With these, what is only doubtful fails the build.
STRICT = (*FLAGS, "-Wall", "-Wextra", "-Werror", "-pedantic")
KEPT = Path(__file__).parents[1] / ".pytest_cache" / "kernels"


@cache
def library(*flags: str) -> Path:
    """Compile the kernel once for all tests; without a compiler the test is skipped, except in CI."""
    chosen = (*STRICT, *flags)
    folder = KEPT / f"{digest()}-{zlib.crc32(' '.join(chosen).encode()):08x}"
    if (folder / file_name()).exists():
        return folder / file_name()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return build(folder, flags=chosen, check=not flags)
    except NotBuilt as failure:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"no kernel: {failure}")


def compiled() -> Kernel:
    """Return the kernel of this tree."""
    return loaded(library())
