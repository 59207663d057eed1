"""What is collected where: the half that needs torch is left out of the quick tests and where torch is missing."""

from __future__ import annotations

import ast
import gc
import importlib
import logging
import os
import random
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from accelerators import BY_LIBRARY, Accelerators

# Where searches look at the clock; their budgets are counted in timed actions, too.
SEARCHES = ("drumline.plan.search.search_run", "drumline.plan.search.search", "drumline.plan.device.planner")

pytest_plugins = ["forked_tests"]
os.environ.setdefault(BY_LIBRARY, "1")
ACCELERATORS = Accelerators()
FEATURES = Path(__file__).parent / "src" / "drumline" / "features"

TORCH_HALF = (
    "model", "channel", "checkpoint", "runtime", "profile", "engine", "features", "pipeline", "verification", "train",
    "serve", "served", "mesh", "peers", "zoo", "faults", "integrations",
)  # fmt: skip
NEEDS_FEATURES = re.compile(r"\bfeatures\(([^)]*)\)")
IMPORTS_TORCH = re.compile(
    r"^(?:from|import) (?:torch|transformers"
    r"|drumline\.(?:model|channel|checkpoint|runtime|profile|engine|features|pipeline|verification|train|serve"
    r"|integrations))"
    r"|^\w.*\b(?:importorskip|needed)\(",
    re.MULTILINE,
)


def pytest_configure(config: pytest.Config) -> None:
    """Make torch unimportable in the quick half, so that what passes there passes where torch is not installed."""
    if "not torch" in config.option.markexpr:
        sys.modules["torch"] = None  # type: ignore[assignment]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the torch half out, so that collecting it does not import torch; and pages where no browser is wanted.

    In a tree without a feature, leave out files of which all tests need it: they may import it.
    """
    parts = collection_path.relative_to(config.rootpath).parts if config.rootpath in collection_path.parents else ()
    if parts[:2] == ("tests", "browser") and "not browser" in config.option.markexpr:
        return True
    if parts[:1] == ("tests",) and collection_path.suffix == ".py" and _needs_absent_features(collection_path):
        return True
    if "integrations" in parts and not all(map(find_spec, ("transformers", "accelerate"))):
        return True
    if parts[2:] == ("integrations", "trl.py") and find_spec("trl") is None:
        return True
    if find_spec("torch") is not None and (collection_path.name != "hf_models.py" or find_spec("transformers")):
        return None
    return True if _needs_torch(collection_path, parts) else None


def _needs_absent_features(path: Path) -> bool:
    """Whether all tests of a file need a feature that is not there."""
    text = path.read_text(encoding="utf-8")
    if all((FEATURES / name).is_dir() for name in _features_in(text)):
        return False
    marks = [node for node in ast.parse(text).body if isinstance(node, ast.Assign) and "pytestmark" in ast.dump(node)]
    return any(not (FEATURES / name).is_dir() for mark in marks for name in _features_in(ast.unparse(mark)))


def _features_in(text: str) -> list[str]:
    return [name for names in NEEDS_FEATURES.findall(text) for name in re.findall(r"\w+", names)]


def _needs_torch(path: Path, parts: tuple[str, ...]) -> bool:
    if parts[:1] not in (("src",), ("tests",)):
        return False
    if any(part in TORCH_HALF for part in parts):
        return True
    return path.suffix == ".py" and parts[0] == "tests" and bool(IMPORTS_TORCH.search(path.read_text(encoding="utf-8")))


def pytest_collection_finish() -> None:
    """Hide accelerators from tests that are not about them; spare the garbage collector what lives until the end.

    Six times a test, pytest attaches its handlers to the root of all loggers and to each that hands nothing on to it,
    of which PyTorch and others have a hundred: let them.
    """
    ACCELERATORS.hide()
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.freeze()


def pytest_forked() -> None:
    """Let the process that will run tests count what accelerators there are."""
    ACCELERATORS.count()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let `make matrices` try all that is drawn at random; with SHUFFLE=N run the tests in the order that N gives."""
    for item in items:
        needed = {str(name) for one in item.iter_markers("features") for name in one.args}
        if absent := sorted(name for name in needed if not (FEATURES / name).is_dir()):
            item.add_marker(pytest.mark.skip(reason=f"needs features that are not there: {', '.join(absent)}"))
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("matrix")
    if "SHUFFLE" in os.environ:
        random.Random(int(os.environ["SHUFFLE"])).shuffle(items)


@pytest.fixture(autouse=True, scope="module")
def accelerators_of_a_file(request: pytest.FixtureRequest) -> Iterator[None]:
    """Show accelerators to what the tests of a file share, where all of them are about accelerators."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("accelerator"):
            ACCELERATORS.show(patch)
        yield


@pytest.fixture(autouse=True)
def accelerators_of_a_test(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Show accelerators to a test that is about them."""
    if request.node.get_closest_marker("accelerator"):
        ACCELERATORS.show(monkeypatch)


class StandingClock:
    """Stands in for `time` where a search looks at it: no machine is so slow that its clock cuts a search short."""

    @staticmethod
    def monotonic() -> float:
        """Return always the same moment."""
        return 0.0


@pytest.fixture(autouse=True)
def products_round_alike() -> Iterator[None]:
    """Let no test change how later ones round: see `runtime.precision.settle_products`."""
    yield
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "backends"):
        torch.backends.mkldnn.set_flags(True)


@pytest.fixture(autouse=True, scope="session")
def searches_keep_up() -> Iterator[None]:
    """Let searches find the same programs on a busy machine as on a quiet one; once, for thousands of tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in SEARCHES:
            patch.setattr(importlib.import_module(name), "time", StandingClock)
        yield
