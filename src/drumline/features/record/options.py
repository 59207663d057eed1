"""The options of recording."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.core.settings.rule import Rule
from drumline.engine.options import SWITCH, FeatureOptions, option

_WHERE = Rule("True, False, or a folder for the run", lambda flag: isinstance(flag, bool | str | Path) and flag != "")


@dataclass(frozen=True, kw_only=True)
class RecordOptions(FeatureOptions):
    """`record`: keep the last step's timeline, nothing, or the whole run in a folder, which may continue one."""

    record: bool | str | Path = option(True, _WHERE)
    continue_record: bool = option(False, SWITCH, alike=True)

    def alike(self) -> dict[str, Any]:
        """Return what is recorded too, which ranks may spell differently."""
        return super().alike() | {"record": self.record if isinstance(self.record, bool) else str(self.record)}

    @property
    def folder(self) -> str | Path | None:
        """The folder of the run, if one is given."""
        return None if isinstance(self.record, bool) else self.record
