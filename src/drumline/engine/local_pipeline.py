"""What runs on this process's ranks, once it is built from a model in stages."""

from __future__ import annotations

from dataclasses import dataclass

from drumline.engine.lines import Lines
from drumline.engine.no_check import NoCheck
from drumline.engine.program.frozen import Frozen
from drumline.engine.program.programs import Programs
from drumline.engine.stages.assembly import Assembly
from drumline.engine.stages.engine import Engine


@dataclass(frozen=True, slots=True)
class LocalPipeline:
    """The stages of this process's ranks, divided as their lines say, and the programs that they run."""

    lines: Lines
    frozen: Frozen
    assembled: Assembly  # of all ranks' stages
    check: NoCheck
    engine: Engine
    programs: Programs
