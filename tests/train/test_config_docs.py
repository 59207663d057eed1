"""The reference of keys in docs/train.md is what the reader knows; running this file rewrites it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from drumline.core.settings.setting import Setting
from drumline.plan.launch.toml import written
from drumline.train.config.keys import GROUPS, TABLES, keys

PAGE = Path(__file__).resolve().parents[2] / "docs" / "train.md"
START, END = "<!-- keys -->\n", "<!-- /keys -->\n"


def reference() -> str:
    """Return the tables of all keys."""
    return "\n".join(line for table in (*TABLES, GROUPS) for line in section(table)) + "\n"


def section(table: str) -> Iterator[str]:
    named = f"`[[{table}]]`" if table == GROUPS else f"`[{table}]`"
    meaning = keys()["optimizer"]["groups"].meaning if table == GROUPS else TABLES[table]
    yield f"### {named}\n\n{meaning[:1].upper()}{meaning[1:]}.\n"
    yield "| key | default | what it may be | meaning |\n|---|---|---|---|"
    yield from (row(key) for key in keys()[table].values() if key.path != GROUPS)
    yield ""


def row(key: Setting) -> str:
    default = "" if key.default is None else f"`{written(key.default)}`"
    unit = f", in {key.rule.unit}" if key.rule.unit else ""
    expected = f"{key.expected}{unit}".replace("|", "\\|")
    return f"| `{key.name}` | {default} | {expected} | {key.meaning} |"


def test_the_page_lists_every_key_as_the_reader_knows_it() -> None:
    text = PAGE.read_text()
    assert text.partition(START)[2].partition(END)[0] == reference(), f"run python {Path(__file__).name}"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(START)
    PAGE.write_text(before + START + reference() + END + rest.partition(END)[2])
