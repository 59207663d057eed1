"""What does not go together in a config: the table of all pipelines and what whole runs add to it, told by keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from drumline.core.errors import DrumlineError
from drumline.core.settings.clash import Clash, Facts, Given, Spelling, clashes_in, fact
from drumline.engine.together import NO_FLUSH, PLANNED, SEVERAL_LINES, axis, mesh_facts, program_facts, without
from drumline.pipeline.together import table
from drumline.plan.launch.toml import written
from drumline.train.config.adapter_settings import QUANTISED_BASES
from drumline.train.config.problems import Problem
from drumline.train.config.relations import PlacedSettings, program_of

# The keys of an option, the first of which errors name unless another one is set.
KEYS: dict[str, tuple[str, ...]] = {
    "adapt": ("adapt.on",),
    "adapter": ("adapter.method", "adapter.start"),
    "arrange": ("lengths.search",),
    "balance": ("pipeline.balance",),
    "base": ("adapter.base",),
    "capture": ("pipeline.capture",),
    "checkpoint": ("memory.recompute",),
    "compile": ("pipeline.compile",),
    "cuts": ("pipeline.cuts", "pipeline.layers"),
    "elastic": ("failures.elastic",),
    "master_weights": ("precision.master_weights",),
    "max_norm": ("optimizer.clip_norm",),
    "mesh": ("mesh.data", "mesh.context", "mesh.tensor", "mesh.expert", "mesh.pipeline"),
    "parameters": ("precision.weights",),
    "plan": ("pipeline.plan",),
    "precision": ("precision.compute",),
    "programs": ("lengths.how",),
    "schedule": ("pipeline.schedule",),
    "sequence_parallel": ("memory.sequence_parallel",),
    "share": ("batch.accumulate",),
    "slices": ("pipeline.slices",),
    "stages_per_rank": ("pipeline.stages_per_rank",),
    "transport": ("pipeline.transport",),
    "validated": ("optimizer.validated",),
    "vertical_sync": ("pipeline.vertical_sync",),
    "zero": ("memory.zero",),
}
_ELASTIC, _FIXED = Given("elastic", "`--elastic`", fact("elastic").holds), ("elastic", False)
_ONE_OF_EACH = Given("mesh", "several lines without `dp`",
                     lambda facts: SEVERAL_LINES.holds(facts) and without("dp").holds(facts),
                     "no data-parallel pipeline of {mesh_name} can be left out")  # fmt: skip
_ADAPTER = Given("adapter", "`--adapter`", fact("adapter").holds)
_BY_SHAPE = Given("adapter", "`--adapter loha` or `lokr`", fact("adapter", "loha", "lokr").holds)
_FOUR_BITS = Given("base", "`--base nf4`", fact("base", "nf4").holds)
_QUANTISED = Given("base", "a quantised `--base`", fact("base", *QUANTISED_BASES).holds)
CLASHES = (
    Clash(_ADAPTER, axis("tp", "ep"), "layers that no line divides", "adapters belong to whole layers",
          fix="set mesh.tensor = 1 and mesh.expert = 1, and use more stages"),
    Clash(_QUANTISED, fact("zero", 3), "whole layers on every line", "quantised weights are not divided",
          ("zero", 1)),
    Clash(_BY_SHAPE, _FOUR_BITS, "lora or ia3, or another base",
          "PEFT adds these adapters to weights, and 4-bit codes have another shape", ("base", "int8")),
    Clash(_ELASTIC, NO_FLUSH, "a flushed schedule", "updates that are due belong to their ranks", _FIXED),
    Clash(_ELASTIC, _ONE_OF_EACH, "lines of dp, or one line", "each line holds what no other one holds", _FIXED),
)  # fmt: skip


class _Keys(Spelling):
    """Options as the keys of a config."""

    def __init__(self, judged: PlacedSettings) -> None:
        self._judged = judged

    def key(self, option: str) -> str:
        """Return the key to change."""
        return next((key for key in KEYS[option] if not self._judged.is_default(key)), KEYS[option][0])

    def is_now(self, option: str, value: Any) -> str:
        """Return what a key is."""
        key = self.key(option)
        default = "" if self._judged.source.has(key) else " (the default)"
        return f"{key} is {written(self._judged.value(key))}{default}"

    def use(self, option: str, value: Any) -> str:
        """Return how to set a key."""
        return f"set {self.key(option)} = {written(value)}"


def clashing(judged: PlacedSettings, bad: set[str]) -> Iterator[Problem]:
    """Yield every clash between keys none of which is wrong by itself."""
    spelling = _Keys(judged)
    for facts in (_facts(judged), _beside_a_plan(judged)):
        for clash in clashes_in((*table(), *CLASHES), facts):
            if not bad.intersection(KEYS[clash.first.option], KEYS[clash.other.option]):
                key, error = spelling.key(clash.first.option), clash.refusal(facts, spelling)
                where = judged.source.where(tuple(key.split(".")))
                yield Problem(where, key, error.error.removeprefix(f"{key} "), error.expected, error.fix)


def _facts(judged: PlacedSettings) -> Facts:
    """Return what is known of the run."""
    settings = judged.settings
    facts = {option: judged.value(keys[0]) for option, keys in KEYS.items() if option != "plan"}
    axes = settings.mesh.axes if settings.mesh.num_lines > 1 else {}
    facts |= mesh_facts(axes, dp="dp (mesh.data above mesh.expert)", tp="tp (mesh.tensor)")
    facts["adapter"] = settings.adapter.method or settings.adapter.start
    facts["slices"] = judged.slices if isinstance(judged.slices, int) else len(judged.slices)
    facts["programs"] = settings.lengths.how == "buckets"
    facts["parameters"] = "" if settings.precision.weights == "fp32" else settings.precision.weights
    with suppress(DrumlineError):  # a relation tells why there is no program
        facts |= program_facts(program_of(settings, judged.plan))
    return facts


def _beside_a_plan(judged: PlacedSettings) -> Facts:
    """Return what is given beyond the defaults of all that a plan decides, if there is one."""
    named = ((option, key) for option in PLANNED for key in KEYS.get(option, ()) if not judged.is_default(key))
    return {"plan": judged.settings.pipeline.plan, **{option: judged.value(key) for option, key in named}}
