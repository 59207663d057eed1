"""What the installed PyTorch can do, asked without importing it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def torch_version() -> tuple[int, int]:
    """Return PyTorch's major and minor version, (0, 0) where it is not installed."""
    try:
        major, minor = version("torch").split(".")[:2]
    except PackageNotFoundError:
        return 0, 0
    return int(major), int(minor)


# Before its first step PyTorch 2.11 lets neighbouring stages greet each other. Where both are on one rank, as in the
# middle of a V, that rank sends to itself, which gloo refuses.
RUNS_V_OVER_GLOO = torch_version() >= (2, 13)
