"""The table of constants in `docs/cluster-method.md` and the constants in the code are the same, both ways."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path

import drumline.plan.cluster as folder
from drumline.plan.cluster.hardware import HOPPER, REACH
from drumline.plan.cluster.practice import ATTENTION, OPTIMIZERS, PRACTICE, Practice
from drumline.plan.layouts.software import PRESETS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cluster-method.md"
ROW = re.compile(r"^\| `([^`]+)` \| ([^|]+?) \| ([^|]+?) \| ([^|]*?) ?\|$", re.MULTILINE)
# Limits of what is accepted, units, what is assumed of a config that says nothing, and when a formula serves.
NO_CONSTANTS = {"_GIB", "_SHARE", "_MOST_LAYERS", "_MOST", "_ASSUMED", "EVEN"}


def table() -> dict[str, str]:
    text = PAGE.read_text(encoding="utf-8")
    part = text[text.index("## The constants") : text.index("## Order of ranks")]
    return {name: value for name, value, _, _ in ROW.findall(part)}


def said(value: object) -> str:
    """Return a number, or several, as the table writes them."""
    if isinstance(value, tuple):
        return ", ".join(map(said, value))
    assert isinstance(value, int | float)
    return f"{value:.3g}" if isinstance(value, float) and value < 1 else f"{value:g}"


def numbers(module: str) -> Iterator[tuple[str, object]]:
    """Yield the numbers that a module gives names to."""
    loaded = importlib.import_module(f"drumline.plan.cluster.{module}")
    for node in ast.parse(Path(str(loaded.__file__)).read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        for name in (part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)):
            value = getattr(loaded, name)
            several = isinstance(value, tuple) and all(isinstance(item, int | float) for item in value)
            if (isinstance(value, int | float) or several) and name not in NO_CONSTANTS:
                yield f"{module}.{name}", value


def constants() -> dict[str, str]:
    own = [path.stem for path in Path(str(folder.__file__)).parent.glob("*.py") if path.stem != "__init__"]
    found = {name: said(value) for module in own for name, value in numbers(module)}
    for alias in ("device_memory.OPTIMIZER_BYTES", "estimate.STEP_BYTES"):  # of OPTIMIZERS["adamw"]
        del found[alias]
    found |= {f"hardware.REACH.{name}": said(value) for name, value in asdict(REACH).items()}
    others = {name: value for name, value in asdict(HOPPER).items() if value != getattr(REACH, name)}
    found |= {f"hardware.HOPPER.{name}": said(value) for name, value in others.items()}
    found |= {f"practice.ATTENTION[{name}]": said(value) for name, value in ATTENTION.items()}
    found |= {f"practice.OPTIMIZERS[{name}]": said(tuple(kind)[:2]) for name, kind in OPTIMIZERS.items()}
    return found | {f"Practice.{name}": said(value) for name, value in of_practice(PRACTICE).items()}


def of_practice(practice: Practice) -> dict[str, int | float]:
    values = {field.name: getattr(practice, field.name) for field in fields(practice)}
    return {name: value for name, value in values.items() if isinstance(value, int | float) and type(value) is not bool}


def of_presets() -> Iterator[tuple[str, str]]:
    """Yield the numbers of presets that differ from the default's, each with its preset."""
    for name, preset in PRESETS.items():
        for number, value in of_practice(preset.practice).items():
            if value != getattr(PRACTICE, number):
                yield f"{name}.{number}", said(value)


def test_every_constant_in_the_code_is_in_the_table_with_its_value() -> None:
    written = table()
    general = {name: value for name, value in written.items() if "@" not in name}
    assert general == constants()


def test_every_number_of_a_preset_is_in_the_table_there_or_with_another_preset() -> None:
    written, own = table(), dict(of_presets())
    listed = {name: value for name, value in written.items() if "@" in name}
    assert listed.items() <= own.items()
    kinds = {(name.rsplit(".", 1)[1], value) for name, value in own.items()}
    assert kinds == {(name.rsplit(".", 1)[1], value) for name, value in listed.items()}


def test_every_row_says_from_what() -> None:
    text = PAGE.read_text(encoding="utf-8")
    sources = [source for _, _, source, _ in ROW.findall(text[text.index("## The constants") :])]
    kinds = ("counted", "fitted:", "published:", "assumed", "read", "the measure", "the same")
    assert len(sources) == len(table())
    assert [source for source in sources if not source.startswith(kinds)] == []


def test_a_constant_that_is_added_or_changed_is_missed() -> None:
    assert said(0.848484) == "0.848"
    assert said((36.0, 72.0)) == "36, 72"
    assert dict(numbers("kernels"))["kernels.CONTENTION"] == 0.15
    assert "hardware.NODE_REACH" in constants()
