"""How many stages every rank holds, where `schedule="auto"` leaves that open: chosen at set-up, by what blocks take.

    timed                  every block, with whole and with split backwards, on all ranks at once
    simulated              all schedules and numbers of stages per rank, each with its best cut
    taken                  the shortest step within the memory of the schedule that "auto" begins with otherwise

Once ranks hold their stages, another placement would move most of the model; so a running pipeline keeps this one.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from drumline.core.errors import DrumlineError
from drumline.core.settings.clash import Together
from drumline.engine.kit import Kit
from drumline.engine.program.find import edges_of
from drumline.engine.setup import PipelineSetup
from drumline.engine.stages.balance import Balance
from drumline.engine.together import program_facts
from drumline.pipeline.cutting import blocks_of, intake_for, is_asked, time_blocks
from drumline.pipeline.together import table
from drumline.plan.cut.partition import partition_at
from drumline.plan.device.candidate import EQUAL, Candidate
from drumline.plan.device.placements import arrangements, chosen
from drumline.plan.device.ranks import Ranks


def placed(setting: PipelineSetup, kit: Kit) -> PipelineSetup:
    """Return the set-up with what blocks take and, if another placement is quicker, its program; the ranks connected.

    All ranks choose alike, by what rank 0 measured.
    """
    options = setting.options
    if setting.program.num_slices > 1:
        return setting  # arrangements are of whole sequences
    if not options.leaves_placement(options.schedule) or options.stages_per_rank is not None or setting.axes.is_mesh:
        return setting
    if options.checkpoint != "none" or not is_asked(options.balance, options.cuts, options.example):
        return setting
    blocks = blocks_of(setting, intake := intake_for(setting, kit))
    if not all(param.requires_grad for block in blocks for param in block.module.parameters()):
        return setting  # schedules change where little trains, and that depends on the cut
    balance = time_blocks(setting, intake, blocks)
    if balance is None:
        return setting
    best = _best(setting, balance)
    if best is None:
        return replace(setting, balance=balance)
    program = best.program
    together = Together(table(), options.facts() | program_facts(program))
    try:
        together.refuse()
    except DrumlineError:
        return replace(setting, balance=balance)  # these options need the stages of the first schedule
    setting.crew.connect(edges_of(program))
    chain = best.stages.cuts.chain(program)
    partition = partition_at(chain, best.cut.counts, False)
    best_balance = Balance(program, balance.profile, partition, balance.optimizer_states)
    return replace(setting, program=program, together=together, balance=best_balance)


def _best(setting: PipelineSetup, balance: Balance) -> Candidate | None:
    """Return the quickest arrangement in the memory of the first one, if it has other stages; rank 0 says why."""
    program, crew = setting.program, setting.crew
    candidates = arrangements(balance.profile, Ranks.of(program.num_ranks), program.num_microbatches)
    firsts = [each for each in candidates if each.program.rows == program.rows]
    best = chosen(candidates, firsts[0].peak * (1 + EQUAL)) if firsts else None
    if best is None or best.program.placement == program.placement:
        return None
    here = min(each.step_seconds for each in candidates if each.program.placement == program.placement)
    if crew.rank == crew.axes.number == 0:
        counts = " | ".join(map(str, best.cut.counts))
        print(
            f"schedule: begins with {best.program.name}, {best.program.num_stages // best.program.num_ranks} stages per"
            f" rank of {counts} blocks: in simulation, a step takes {best.step_seconds * 1e3:.1f} ms instead of"
            f" {here * 1e3:.1f} ms with {program.num_stages // program.num_ranks}",
            file=sys.stderr,
        )
    return best
