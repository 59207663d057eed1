"""A bug that is planted on purpose: one expression in the place of another, and the tests that should notice."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple, Protocol

from planting_anchors import PACKAGE, ROOT, home_of, places_of

__all__ = ["PACKAGE", "ROOT", "Bug", "Change", "Planted", "area_of", "differing"]

# Which tests look at a file: its own first, where there are any, then these, in this order.
OF_FOLDER = {
    "core": ("tests/core", "tests/schedules", "tests/report"),
    "schedules": ("tests/schedules", "tests/core/test_validate.py", "tests/core/test_simulate.py"),
    "plan": ("tests/plan", "tests/report/test_plan_page.py", "tests/cli/test_plan_verb.py"),
    "report": ("tests/report",),
    "cli": ("tests/cli",),
    "train": ("tests/train", "tests/cli/test_train.py"),
    "profile": ("tests/profile", "tests/pipeline/test_plan.py", "tests/pipeline/test_auto_schedule.py"),
    "serve": (
        "tests/served/test_flow.py",
        "tests/served/test_parts.py",
        "tests/served/test_service.py",
        "tests/served/test_failures.py",
        "tests/served/test_refusals.py",
        "tests/served/test_admission.py",
        "tests/served/test_survives.py",
        "tests/served/test_identity.py",
        "tests/served/test_hosts.py",
    ),
    "adapt": ("tests/adapt", "tests/pipeline/test_adapting.py"),
    "checkpoint": (
        "tests/pipeline/test_rotation.py",
        "tests/pipeline/test_saving.py",
        "tests/pipeline/test_saving_refusals.py",
        "tests/train/test_checkpoints.py",
        "tests/train/test_continue.py",
    ),
    "channel": (
        "tests/channel",
        "tests/pipeline/test_transports.py",
        "tests/runtime",
        "tests/pipeline/test_parity.py",
        "tests/pipeline/test_pipeline.py",
        "tests/pipeline/test_recording.py",
    ),
    "model": (
        "tests/pipeline/test_parity.py",
        "tests/pipeline/test_pipeline.py",
        "tests/model",
        "tests/pipeline/test_odd_models.py",
        "tests/pipeline/test_tied.py",
        "tests/pipeline/test_memory.py",
        "tests/pipeline/test_precision.py",
        "tests/pipeline/test_captured.py",
        "tests/runtime",
    ),
    "runtime": (
        "tests/pipeline/test_parity.py",
        "tests/pipeline/test_pipeline.py",
        "tests/runtime",
        "tests/model",
        "tests/channel",
        "tests/pipeline/test_odd_models.py",
        "tests/pipeline/test_tied.py",
        "tests/pipeline/test_memory.py",
        "tests/pipeline/test_precision.py",
        "tests/pipeline/test_captured.py",
        "tests/pipeline/test_transports.py",
    ),
    **dict.fromkeys(
        ("engine", "features", "pipeline", "verification"),
        (
            "tests/pipeline/test_pipeline.py",
            "tests/pipeline/test_parity.py",
            "tests/pipeline/test_recording.py",
            "tests/pipeline/test_precision.py",
            "tests/pipeline/test_tied.py",
            "tests/pipeline/test_frozen.py",
            "tests/channel/test_by_value.py",
            "tests/channel/test_launch.py",
            "tests/pipeline/test_transports.py",
        ),
    ),
}

# What plain cases do not show, for any file of a folder: briefly tested, so tried early.
UNEQUAL = {
    "core": ("tests/core/test_copies_and_updates.py", "tests/core/test_unequal_costs.py"),
    **dict.fromkeys(
        ("engine", "features", "pipeline", "verification"),
        (
            "tests/pipeline/test_refused_updates.py",
            "tests/pipeline/test_shares.py",
            "tests/pipeline/test_metrics.py",
        ),
    ),
    "plan": ("tests/plan/test_bounds.py", "tests/plan/test_counted_once.py", "tests/plan/test_cluster_shares.py"),
    "model": ("tests/model/test_randomness.py", "tests/model/test_watch.py", "tests/channel/test_messages.py"),
    "runtime": (
        "tests/runtime/test_gradients.py",
        "tests/model/test_randomness.py",
        "tests/channel/test_messages.py",
    ),
    "schedules": ("tests/schedules/test_counts.py",),
}

LOSSES = (
    "tests/pipeline/test_losses.py",
    "tests/pipeline/test_more_losses.py",
    "tests/pipeline/test_own_loss.py",
    "tests/pipeline/test_loss_lines.py",
    "tests/mesh/test_fuzz_mesh.py",
)

# Tests of a file that does not share its name with them.
OF_FILE = {
    "serve/export": ("tests/served/test_export_sizes.py", "tests/served/test_export.py"),
    "serve/front/queue.py": ("tests/served/test_admission.py",),
    "serve/front/answer_sizes.py": ("tests/served/test_admission.py",),
    "serve/front/service.py": ("tests/served/test_admission.py", "tests/served/test_service.py"),
    "serve/front/metrics_port.py": ("tests/served/test_survives.py",),
    "serve/logs.py": ("tests/served/test_survives.py",),
    "serve/stages/home.py": ("tests/served/test_identity.py",),
    "serve/stages/keeper.py": ("tests/served/test_survives.py", "tests/served/test_hosts.py"),
    "serve/stages/remote.py": ("tests/served/test_hosts.py",),
    "serve/stages/supervisor.py": ("tests/served/test_service.py",),
    "serve/stage.py": ("tests/served/test_identity.py",),
    "serve/wire/files.py": ("tests/served/test_identity.py",),
    "serve/wire/flow.py": ("tests/served/test_flow.py", "tests/served/test_identity.py"),
    "serve/wire/flows.py": ("tests/served/test_flow.py", "tests/served/test_identity.py"),
    "serve/wire/links.py": ("tests/served/test_failures.py",),
    "serve/wire/protocol.py": ("tests/served/test_service.py",),
    "train/data/own": ("tests/train/test_own_data.py",),
    "train/data/position.py": ("tests/train/test_own_data.py",),
    "train/data/items/fingerprint.py": ("tests/train/test_changed_data.py",),
    "train/data/read/text.py": ("tests/train/test_read.py",),
    "train/config": ("tests/train/test_preflight.py", "tests/train/test_config.py"),
    "core/measured/account.py": ("tests/core/test_measured.py",),
    "core/clock/assemble.py": ("tests/core/test_simulate.py",),
    "core/prove/exchanges.py": ("tests/core/test_validate.py",),
    "core/prove/queues.py": ("tests/core/test_channel.py",),
    "core/simulate/durations.py": ("tests/core/test_simulate.py", "tests/core/test_slices.py"),
    "core/lower/lower.py": ("tests/core/test_channel.py", "tests/core/test_lower.py"),
    "core/measured/measured.py": ("tests/core/test_measured.py", "tests/pipeline/test_stream_limits.py"),
    "core/measured/run.py": ("tests/pipeline/test_recording.py",),
    "core/measured/metrics.py": ("tests/core/test_measured.py", "tests/pipeline/test_recording.py"),
    "core/timeline/timeline.py": ("tests/core/test_simulate.py", "tests/core/test_attribute.py"),
    "core/kernel": ("tests/core/test_kernel.py",),
    "core/kernel/legality.c": ("tests/core/test_legality.py",),
    "core/kernel/csv.c": ("tests/core/test_text.py",),
    "core/kernel/text.py": ("tests/core/test_text.py",),
    "core/prove/arrays.py": ("tests/core/test_legality.py",),
    "core/clock": ("tests/core/test_kernel.py", "tests/core/test_validate.py"),
    "core/timeline/causes.py": ("tests/core/test_attribute.py",),
    "core/graph.py": ("tests/core/test_columns.py", "tests/core/test_slices.py"),
    "core/program.py": ("tests/core/test_columns.py", "tests/core/test_slices.py"),
    "core/memory.py": ("tests/core/test_memory.py", "tests/core/test_slices.py"),
    "core/action.py": ("tests/core/test_slices.py",),
    "core/costs.py": ("tests/core/test_slices.py",),
    "core/simulate": ("tests/core/test_slices.py",),
    "core/lower/torch_text.py": ("tests/core/test_slices.py",),
    "engine/ranks/elements.py": ("tests/pipeline/test_agreement.py",),
    "engine/stages/engine.py": ("tests/pipeline/test_captured.py",),
    "engine/model/blocks.py": ("tests/pipeline/test_pipeline.py",),
    "pipeline/building.py": ("tests/pipeline/test_captured.py",),
    "engine/flow.py": (
        "tests/pipeline/test_step.py",
        "tests/pipeline/test_unused.py",
        "tests/pipeline/test_updates.py",
    ),
    "engine/together.py": ("tests/pipeline/test_together.py",),
    "engine/choice.py": ("tests/pipeline/test_programs.py", "tests/pipeline/test_adapting.py"),
    "engine/model/model_watch.py": ("tests/pipeline/test_chain_check.py", "tests/pipeline/test_zoo.py"),
    "engine/updates/optimizer_state.py": ("tests/pipeline/test_optimizer_state.py",),
    "engine/loss/rules/lengths.py": (*LOSSES, "tests/pipeline/test_lengths_empty.py", "tests/pipeline/test_lengths.py"),
    "features/mesh/attach/lines.py": ("tests/mesh/test_running.py", "tests/mesh/test_lines_agree.py"),
    "model/layers": ("tests/mesh/test_parts.py", "tests/mesh/test_experts.py", "tests/mesh/test_hugging_face.py"),
    "engine/state/tensors.py": ("tests/pipeline/test_tied.py",),
    "features/adapt/auto_slices.py": ("tests/pipeline/test_auto_choice.py",),
    "features/adapt/auto_schedule.py": ("tests/pipeline/test_auto_choice.py", "tests/pipeline/test_auto_schedule.py"),
    "features/slices/on_demand.py": ("tests/pipeline/test_auto_slices.py",),
    "features/slices/trial.py": ("tests/pipeline/test_auto_slices.py",),
    "features/slices": ("tests/pipeline/test_slices.py", "tests/pipeline/test_slices_ranks.py"),
    "core/slices": ("tests/pipeline/test_slices.py",),
    "core/prove/slices.py": ("tests/core/test_slices.py",),
    "features/check/units": ("tests/pipeline/test_slices_check.py",),
    "features/check/sample.py": ("tests/pipeline/test_slices_check.py",),
    "features/check/trial.py": ("tests/pipeline/test_slices_check.py",),
    "verification/one_process.py": ("tests/pipeline/test_slices_check.py",),
    "train/replan.py": ("tests/train/test_runs_in_slices.py", "tests/train/test_restarts.py"),
    "train/config/relations.py": ("tests/train/test_runs_in_slices.py",),
    "train/memory/forecast.py": ("tests/train/test_runs_in_slices.py", "tests/train/test_dry_run.py"),
    "report/compare.py": ("tests/report/test_slices.py",),
    "report/draw/palette.py": ("tests/report/test_slices.py",),
    "cli/flags.py": ("tests/cli/test_slices.py",),
    "schedules/equal_slices.py": ("tests/schedules/test_slices.py",),
    "schedules/slices.py": ("tests/schedules/test_slices.py", "tests/core/test_slices.py"),
    "engine/program/find.py": ("tests/pipeline/test_slices.py",),
    "features/moving": ("tests/pipeline/test_moving.py",),
    "engine/updates/guard.py": ("tests/model/test_patches.py", "tests/pipeline/test_pipeline.py"),
    "features/precision": ("tests/pipeline/test_precision.py",),
    "engine/updates/updates.py": (
        "tests/pipeline/test_precision.py",
        "tests/pipeline/test_pipeline.py",
        "tests/pipeline/test_moving.py",
    ),
    "features/mesh/attach/line_check.py": ("tests/mesh/test_lines_agree.py", "tests/mesh/test_first_check.py"),
    "features/check": (
        "tests/pipeline/test_model_check.py",
        "tests/pipeline/test_chain_check.py",
        "tests/pipeline/test_sentinels.py",
        "tests/pipeline/test_relay.py",
        "tests/pipeline/test_rounding.py",
        "tests/pipeline/test_odd_models.py",
        "tests/mesh/test_first_check.py",
        "tests/pipeline/test_auto_slices.py",
        "tests/mesh/test_cells.py",
    ),
    "model/watch/keeping.py": ("tests/model/test_keeping.py", "tests/pipeline/test_chain_check.py"),
    "features/check/gradients/witness.py": (
        "tests/pipeline/test_slices_check.py",
        "tests/pipeline/test_inner_gradients.py",
        "tests/pipeline/test_chain_check.py",
    ),
    "engine/loss": LOSSES,
    "engine/loss/rules": LOSSES,
    "runtime/sequences.py": ("tests/pipeline/test_slices.py",),
    "runtime/segment.py": ("tests/runtime/test_stash.py", "tests/pipeline/test_odd_models.py"),
    "pipeline/steps/step.py": ("tests/pipeline/test_step.py", "tests/mesh/test_running.py"),
    "verification": ("tests/pipeline/test_verify.py", "tests/mesh/test_verify.py"),
    "engine/unsplit": ("tests/pipeline/test_plain.py", "tests/pipeline/test_chain_check.py"),
    "engine/stages/intake.py": (
        "tests/pipeline/test_losses.py",
        "tests/pipeline/test_captured.py",
        "tests/pipeline/test_lengths_empty.py",
    ),
    "features/record/recording.py": ("tests/pipeline/test_recording.py",),
    "engine/loss/own_loss.py": ("tests/pipeline/test_hugging_face.py",),
    "features/record/run_folder.py": ("tests/pipeline/test_recording.py",),
    "core/measured/outbox.py": ("tests/pipeline/test_recording.py", "tests/train/test_checkpoints.py"),
    "features/saving": ("tests/pipeline/test_rotation.py", "tests/pipeline/test_saving.py"),
    "engine/ranks/tally.py": (
        "tests/pipeline/test_tally.py",
        "tests/pipeline/test_unused.py",
        "tests/pipeline/test_recording.py",
    ),
    "plan/device/sliced.py": ("tests/plan/test_plan_slices.py",),
    "plan/device/plan.py": ("tests/plan/test_plan_slices.py", "tests/pipeline/test_slices_planned.py"),
    "plan/device/slice_profile.py": ("tests/plan/test_plan_slices.py",),
    "pipeline/slice_timing.py": ("tests/pipeline/test_slices_planned.py",),
    "plan/device/candidate.py": ("tests/plan/test_planner.py",),
    "plan/device/combinations.py": ("tests/plan/test_planner.py",),
    "plan/cut/chain.py": ("tests/plan/test_partition.py", "tests/plan/test_planner.py"),
    "plan/cut/partition.py": ("tests/plan/test_partition.py",),
    "plan/cut/timed.py": ("tests/plan/test_timed.py", "tests/plan/test_planner.py"),
    "plan/device/blocks.py": ("tests/plan/test_planner.py", "tests/profile/test_blocks.py"),
    "plan/cut/peaks.py": ("tests/plan/test_partition.py", "tests/core/test_frozen.py", "tests/plan/test_planner.py"),
    "plan/device/ranks.py": ("tests/plan/test_planner.py",),
    "plan/device/stages.py": ("tests/plan/test_planner.py",),
    "plan/calibrated": ("tests/plan/test_calibrated.py", "tests/profile/test_calibrate.py"),
    "profile/calibrate": ("tests/profile/test_calibrate.py",),
    "cli/plan_calibrated.py": ("tests/cli/test_calibrate.py",),
    "plan/cluster": (
        "tests/plan/test_cluster_by_hand.py",
        "tests/plan/test_cluster_estimate.py",
        "tests/plan/test_cluster_shape.py",
        "tests/plan/test_software.py",
    ),
    "plan/cluster/hugging_face.py": ("tests/plan/test_cluster_models.py",),
    "report/run/page.py": ("tests/report/test_run_report.py",),
    "plan/layouts": (
        "tests/plan/test_what_if.py",
        "tests/plan/test_cluster_searched.py",
        "tests/plan/test_cluster_cuts.py",
        "tests/plan/test_launch_files.py",
        "tests/plan/test_planner_cluster.py",
        "tests/plan/test_software.py",
    ),
    "plan/slices/orders.py": ("tests/pipeline/test_auto_choice.py",),
    "plan/slices": ("tests/plan/test_slice_search.py",),
    "core/slices/curve.py": ("tests/plan/test_slice_search.py",),
    "plan/search": ("tests/plan/test_lower_bounds.py", "tests/plan/test_search.py"),
    "features/mesh": ("tests/mesh/test_parts.py", "tests/mesh/test_cells.py", "tests/mesh/test_hugging_face.py"),
    "model/follow/attributes.py": ("tests/pipeline/test_zoo.py", "tests/pipeline/test_kept_tables.py"),
    "model/follow/inside_blocks.py": ("tests/pipeline/test_kept_tables.py",),
    "model/follow/recipes.py": ("tests/pipeline/test_kept_tables.py",),
    "features/check/by_itself": ("tests/pipeline/test_relay_hooks.py",),
    "runtime/batch.py": ("tests/pipeline/test_pipeline.py",),
    "pipeline/calls": ("tests/pipeline/test_calls.py",),
    "pipeline/whole.py": ("tests/pipeline/test_whole.py",),
    "engine/state/name_patterns.py": ("tests/pipeline/test_updates.py",),
    "model/numpys_words.py": ("tests/model/test_randomness.py",),
    "model/pythons_words.py": ("tests/model/test_randomness.py",),
    "runtime/execute/jobs.py": ("tests/runtime/test_executor.py",),
    "runtime/step.py": ("tests/pipeline/test_updates.py",),
    "model/kept_state": ("tests/pipeline/test_kept_state.py", "tests/pipeline/test_kept_outside.py"),
    "engine/state/own_entries.py": ("tests/pipeline/test_own_entries.py",),
    "engine/state/sharing.py": ("tests/pipeline/test_own_entries.py", "tests/pipeline/test_kept_outside.py"),
    "engine/state": ("tests/pipeline/test_kept_outside.py", "tests/pipeline/test_kept_state.py"),
    "model/weights/twin.py": ("tests/pipeline/test_hooks.py",),
    "model/weights/overlaps.py": ("tests/pipeline/test_overlaps.py",),
    "runtime/backward/hooked.py": ("tests/pipeline/test_hooks.py",),
    "runtime/ledger.py": (
        "tests/pipeline/test_kept_state.py",
        "tests/pipeline/test_kept_outside.py",
        "tests/pipeline/test_put_back.py",
    ),
    "runtime/recomputing.py": ("tests/pipeline/test_odd_models.py",),
    "features/capture": ("tests/pipeline/test_captured.py",),
    "runtime/gradients/clip.py": ("tests/pipeline/test_pipeline.py",),
    "model/weights/tied.py": (
        "tests/pipeline/test_tied.py",
        "tests/pipeline/test_overlaps.py",
        "tests/pipeline/test_hooks.py",
    ),
    "runtime/gradients/exchange.py": ("tests/pipeline/test_tied.py", "tests/pipeline/test_tied_ranks.py"),
    "channel/in_process.py": ("tests/channel/test_channels.py",),
    "channel/layout.py": ("tests/channel/test_channels.py",),
    "channel/link.py": ("tests/channel/test_mesh.py", "tests/channel/test_channels.py"),
    "model/quantised": ("tests/tune/test_quantised_weights.py", "tests/tune/test_quantised_pipeline.py"),
    "train/tune": ("tests/tune/test_refusals.py", "tests/tune/test_runs.py", "tests/tune/test_composed_runs.py"),
    "train/tune/same_adapter.py": ("tests/tune/test_refusals.py",),
    "train/data/read/instructions.py": ("tests/tune/test_chats.py",),
    "train/data/fill.py": ("tests/tune/test_chats.py", "tests/train/test_lengths.py"),
    "model/follow/skeleton.py": ("tests/tune/test_adapters.py",),
    "features/mesh/reduce.py": ("tests/tune/test_quantised_pipeline.py",),
    "core/prove/whole.py": ("tests/core/test_whole.py",),
    "model/loss/counts.py": ("tests/pipeline/test_own_loss.py",),
    "model/loss/terms.py": ("tests/pipeline/test_own_loss.py",),
    "channel/mesh.py": ("tests/channel/test_mesh.py", "tests/runtime/test_clock.py"),
    "channel/mesh_channel.py": ("tests/channel/test_channels.py",),
    "model/randomness.py": (
        "tests/pipeline/test_slices.py",
        "tests/runtime/test_accelerators.py",
        "tests/pipeline/test_parity.py",
        "tests/pipeline/test_odd_models.py",
    ),
    "channel/shared_memory.py": ("tests/channel/test_channels.py",),
    "features/stream": ("tests/pipeline/test_stream.py", "tests/pipeline/test_stream_limits.py"),
    "features/stream/stream.py": ("tests/pipeline/test_stream_limits.py",),
    "runtime/stash.py": ("tests/pipeline/test_memory.py",),
    "runtime/backward/tape.py": ("tests/runtime/test_split_backward.py",),
    "model/blocks/value_names.py": ("tests/pipeline/test_agreement.py", "tests/pipeline/test_zoo.py"),
    "features/validated": ("tests/pipeline/test_validated.py",),
    "model/values.py": ("tests/pipeline/test_pipeline.py", "tests/pipeline/test_odd_models.py"),
    "model/watch/fingerprint.py": ("tests/model/test_watch.py",),
    "model/watch/surroundings.py": ("tests/model/test_watch.py",),
    "model/watch/watch.py": ("tests/pipeline/test_zoo.py",),
}


class Bug(NamedTuple):
    """A bug: inside of the function `at` the expression `old` becomes `new`, and that `breaks` something.

    `at` is a function, class or constant of the package, wherever it lives: `Tally.finite`. Line breaks do not count in
    `old`. `survives` says why no test can be asked to notice it.
    """

    name: str
    at: str
    old: str
    new: str
    breaks: str
    survives: str = ""

    @property
    def file(self) -> str:
        """The file of the package that holds it."""
        return home_of(self.at, self.old)

    @property
    def path(self) -> str:
        """The file's place in the tree."""
        return f"{PACKAGE}/{self.file}"

    @property
    def folder(self) -> str:
        """The package's folder that the file belongs to."""
        return self.file.partition("/")[0]

    def planted_in(self, text: str) -> str:
        """Return the file's text with the bug in it; the old expression must stand there exactly once."""
        places = places_of(text, self.at, self.old)
        if len(places) != 1:
            raise ValueError(f"{self.name}: {self.at} holds {self.old!r} {len(places)} times; expected once")
        (first, end), *_ = places
        return text[:first] + self.new.strip() + text[end:]

    def place(self, text: str) -> tuple[int, int]:
        """Return where the text that changes begins and ends, without what both have in common."""
        return differing(text, self.planted_in(text))

    def tests(self, root: Path = ROOT) -> list[str]:
        """Return what to run, the likeliest to notice first: doctests of the file, then test files."""
        return area_of(self.file, root)


def differing(old: str, new: str) -> tuple[int, int]:
    """Return where two texts differ, as a piece of the old one.

    >>> differing("a < b", "a <= b"), differing("x = 1 + y", "x = 2 + y")
    ((3, 3), (4, 5))
    """
    first, last, shorter = 0, 0, min(len(old), len(new))
    while first < shorter and old[first] == new[first]:
        first += 1
    while last < shorter - first and old[-1 - last] == new[-1 - last]:
        last += 1
    return first, len(old) - last


def area_of(file: str, root: Path = ROOT) -> list[str]:
    """Return the tests of a file's area, the likeliest to notice first: its doctests, then test files."""
    folder, stem = file.partition("/")[0], Path(file).stem
    # What is changed in C is compiled by the kernel's tests alone.
    own = [f"{PACKAGE}/{file}"] if file.endswith(".py") else ["tests/core/test_kernel.py"]
    wanted = [*own, f"tests/{folder}/test_{stem}.py", *UNEQUAL.get(folder, ())]
    for place in (file, *(str(above) for above in Path(file).parents)):
        wanted += OF_FILE.get(place, ())
    found = []
    for name in (*wanted, *OF_FOLDER.get(folder, ("tests/test_imports.py",))):
        listed = sorted((root / name).glob("test_*.py")) if (root / name).is_dir() else [root / name]
        found += [str(path.relative_to(root)) for path in listed if path.exists()]
    return list(dict.fromkeys(found))


class Change(Protocol):
    """What can be planted: a bug of the list, or a change drawn at random."""

    @property
    def name(self) -> str:
        """What it is told apart by."""

    @property
    def file(self) -> str:
        """The file of the package that it changes."""

    @property
    def path(self) -> str:
        """The file's place in the tree."""

    def planted_in(self, text: str) -> str:
        """Return the file's text with the change in it."""

    def place(self, text: str) -> tuple[int, int]:
        """Return where the text that changes begins and ends."""

    def tests(self) -> list[str]:
        """Return the tests of its area."""


class Planted:
    """A file of a tree with a bug in it, for as long as the block lasts."""

    def __init__(self, bug: Change, tree: Path, moment: float) -> None:
        self.file = tree / bug.path
        self.bug = bug
        self.moment = moment  # of the change: compiled code is told apart by it, in whole seconds

    def __enter__(self) -> None:
        self.text = self.file.read_text(encoding="utf-8")
        self._write(self.bug.planted_in(self.text), self.moment)

    def __exit__(self, *_: object) -> None:
        self._write(self.text, self.moment + 1)

    def _write(self, text: str, moment: float) -> None:
        self.file.write_text(text, encoding="utf-8")
        os.utime(self.file, (moment, moment))
