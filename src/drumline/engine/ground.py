"""What runs one pipeline on this process, before anything observes its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drumline.core.settings.clash import Together
from drumline.engine.lines import Lines
from drumline.engine.program.frozen import Frozen
from drumline.engine.program.programs import Programs
from drumline.engine.ranks.crew import Crew
from drumline.engine.ranks.journal import Journal
from drumline.engine.ranks.tally import TallyLedger
from drumline.engine.stages.engine import Engine
from drumline.engine.stages.intake import Intake
from drumline.engine.state.tensors import Holdings
from drumline.engine.updates.updates import Updates


@dataclass(eq=False)
class Ground:
    """The ranks of this process, what they run, and what they hold."""

    crew: Crew
    ledger: TallyLedger
    intake: Intake
    frozen: Frozen
    programs: Programs
    engine: Engine
    holdings: Holdings
    updates: Updates
    recording: Journal
    lines: Lines
    together: Together

    def refuse(self, **more: Any) -> None:
        """Refuse what does not go with this pipeline, and with how its optimizers validate their updates."""
        validated = "after" if self.updates.validation.is_on else "before"
        self.together.refuse(**{"validated": validated, **more})
