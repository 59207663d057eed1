"""Compiles the kernel (src/drumline/core/kernel) when a wheel is built or the package is installed.

Without a compiler, or with a broken one, the wheel is built without a kernel: simulations then run in Python, slower.
"""

from __future__ import annotations

import runpy
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags

KERNEL = Path("src/drumline/core/kernel")


class KernelHook(BuildHookInterface[Any]):
    """Adds the compiled kernel to a wheel, and the platform that it is for to the wheel's name."""

    _scratch: str | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, beside the sources if the installation is editable; never fail."""
        try:
            build = runpy.run_path(str(Path(self.root) / KERNEL / "build.py"))["build"]
            if version == "editable":
                build()
                return
            self._scratch = tempfile.mkdtemp(prefix="drumline-")
            library = build(Path(self._scratch))
            platforms = (tag.platform for tag in sys_tags())
            platform = next(name for name in platforms if not name.startswith(("manylinux", "musllinux")))
        except Exception as failure:  # a missing file, a compiler of any kind, a folder that cannot be written
            self.app.display_warning(f"the kernel is not compiled, so simulations run in Python, slower: {failure}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["force_include"][str(library)] = f"drumline/core/kernel/{library.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled for the wheel."""
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
