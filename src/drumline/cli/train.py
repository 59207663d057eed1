"""`drumline train [CONFIG]`: train a model through a pipeline, on local ranks or under torchrun."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drumline.cli import flags
from drumline.cli.output import print_json, print_result, progress, pytorch, save, terminal_width, wrapped
from drumline.core.errors import ConfigError, DrumlineError, RankFailed, UsageError, counted

if TYPE_CHECKING:
    from drumline.train.config.relations import PlacedSettings
    from drumline.train.config.settings import TrainSettings
    from drumline.train.dry.dry_run import DryRun

EXAMPLE = "drumline train --steps 300 --schedule zb-h1 --print-config"
# Flags for what is changed most, as the help shows them, with the key that each sets; every other key has --set.
_FLAGS = {
    "--adapter METHOD": "adapter.method",
    "--adapter-rank N": "adapter.rank",
    "--base KIND": "adapter.base",
    "--merge": "adapter.merge",
    "--steps N": "run.steps",
    "--lr RATE": "optimizer.lr",
    "--optimizer NAME": "optimizer.kind",
    "--batch B": "batch.sequences",
    "--sequence N": "batch.sequence",
    "--accumulate N": "batch.accumulate",
    "--schedule NAME": "pipeline.schedule",
    "--stages-per-rank V": "pipeline.stages_per_rank",
    "--plan FILE": "pipeline.plan",
    "--recompute HOW": "memory.recompute",
    "--card NAME": "memory.card",
    "--precision KIND": "precision.compute",
    "--device NAME": "pipeline.device",
    "--interface NAME": "pipeline.interface",
    "--threads N": "run.threads",
    "--evaluate-every N": "evaluation.every",
    "--sample-every N": "evaluation.sample_every",
    "--save-every N": "checkpoint.every",
    "--resume FOLDER": "checkpoint.resume",
    "--restarts N": "failures.restarts",
    "--min-ranks N": "failures.min_ranks",
    "--seed N": "run.seed",
    "--wandb PROJECT": "run.wandb",
    "--continue": "checkpoint.continues",
    "--elastic": "failures.elastic",
    "--tensorboard": "run.tensorboard",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    from drumline.train.config.flags import help_of
    from drumline.train.config.keys import keys
    from drumline.train.config.settings import TrainSettings

    add, whole, microbatches = flags.adder(parser), flags.whole_number, TrainSettings().num_microbatches
    add(
        "CONFIG",
        "a TOML file, or a function that returns settings: package.module:function or file.py:function "
        "(default: a small GPT on a text that comes with Drumline)",
        nargs="?",
    )
    add("--model MODEL", "gpt, mlp, a Hugging Face model's folder or config.json, or a function")
    add("--data FILE", "file to train on, or a function. May be repeated", str, [], action="append")
    add("-r --ranks P", help_of(keys()["mesh"]["pipeline"]), whole)
    add("-m --microbatches M", f"number of microbatches in a pipeline step (default {microbatches})", whole)
    for shown, path in _FLAGS.items():
        table, _, name = path.partition(".")
        key = keys()[table][name]
        add(shown, help_of(key), {int: whole, float: flags.number}.get(key.inner, str))
    add("--adapt", "change program and cut while training, if that pays ([adapt] has the settings)")
    add("-o --out FOLDER", help_of(keys()["run"]["out"]), Path)
    meaning = "set any key of the config, like optimizer.settings.weight_decay=0.1. May be repeated"
    add("--set KEY=VALUE", meaning, str, [], action="append")
    add("--print-config", "print all settings as a config file, and train nothing")
    add("--dry-run", "print stages, proof and memory forecast, and train nothing")
    add("--picture FILE", "with --dry-run, draw what each rank holds, as SVG", Path)
    flags.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Read the settings, and print them, forecast the run, or train."""
    from drumline.channel.launch.stop import stop_on_signals
    from drumline.train.config.files.settings_file import read_judged
    from drumline.train.config.placed import placed

    is_first = os.environ.get("RANK", "0") == "0"
    judged: PlacedSettings | None = None
    try:
        overrides, named = _overrides(args)
        judged = read_judged(args.config, overrides, flags=named)
        settings = judged.settings
        if args.picture is not None and not args.dry_run:
            raise UsageError("--picture without --dry-run", fix="add --dry-run: the forecast is what is drawn")
        if args.print_config:
            return _print_config(args, judged)
        if args.dry_run:
            settings = _with_ranks(judged).settings
            return _dry_run(args, settings)
        with stop_on_signals():  # from here on: importing PyTorch takes seconds
            judged = _with_ranks(judged)
            settings = judged.settings
            trained = _trained(judged)
    except DrumlineError as error:
        if not is_first and isinstance(error, ConfigError | UsageError):
            return 2  # all ranks refuse the same, and the first one tells it
        if judged is None:
            raise
        raise placed(error, judged.source)  # noqa: B904 - the same error
    if is_first:
        _tell(args, settings, trained)
    return 0


def _with_ranks(judged: PlacedSettings) -> PlacedSettings:
    """Return the settings with as many ranks as this machine has devices for, where nobody says."""
    with pytorch("train runs a model"):
        from drumline.train.default_ranks import with_default_ranks
    return with_default_ranks(judged)


def _trained(judged: PlacedSettings) -> Any:
    """Train; what the user's own code raises in this process is told as `launch` tells it of its ranks."""
    with pytorch("train runs a model"):
        from drumline.train.start import start
    try:
        return start(judged.settings, source=judged.source)
    except (DrumlineError, OSError):
        raise
    except Exception as error:
        rank = int(os.environ.get("RANK", "0"))
        failed = RankFailed(rank, f"rank {rank} failed with {type(error).__name__}: {error}")
        failed.add_note(f"rank {rank}'s traceback:\n{traceback.format_exc().rstrip()}")
        raise failed from error


def _overrides(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what flags set, by key, and by which flag."""
    from drumline.train.config.files.settings_file import MICROBATCHES
    from drumline.train.config.flags import assigned, data_named, model_named

    overrides: dict[str, tuple[Any, str]] = {}
    if args.model is not None:
        overrides |= {key: (value, "--model") for key, value in model_named(args.model).items()}
    if args.data:
        overrides |= {key: (value, "--data") for key, value in data_named(args.data).items()}
    for shown, key in _FLAGS.items():
        flag = shown.partition(" ")[0]
        result = getattr(args, flag[2:].replace("-", "_"))
        overrides[key] = None if result is False else result, flag  # only a flag that is there sets a key
    overrides |= {
        "mesh.pipeline": (args.ranks, "--ranks"),
        MICROBATCHES: (args.microbatches, "--microbatches"),
        "run.out": (None if args.out is None else str(args.out), "--out"),
        "adapt.on": (args.adapt or None, "--adapt"),
    }
    overrides = {key: override for key, override in overrides.items() if override[0] is not None}
    for text in args.set:
        key, value = assigned(text)
        overrides[key] = value, f"--set {key}"
    return {key: value for key, (value, _) in overrides.items()}, {key: flag for key, (_, flag) in overrides.items()}


def _print_config(args: argparse.Namespace, judged: PlacedSettings) -> int:
    from dataclasses import asdict

    from drumline.train.config.write import config_text

    # The machine that trains decides on ranks if nobody does.
    left_out = () if judged.source.has("mesh.pipeline") or judged.plan is not None else ("mesh.pipeline",)
    text = config_text(judged.settings, left_out=left_out)
    print_result(args, asdict(judged.settings), text.removesuffix("\n"))
    return 0


def torchrun_line(args: argparse.Namespace, settings: TrainSettings) -> str:
    """Return the line that starts the same run by torchrun."""
    return f"{_torchrun(settings)} {shlex.join(_words(args))}".rstrip()


def resume_line(args: argparse.Namespace, settings: TrainSettings, checkpoint: str) -> str:
    """Return the line that continues a run: the same one with --continue, else in the next folder that holds none."""
    started = _torchrun(settings) if "WORLD_SIZE" in os.environ else "drumline train"
    if settings.checkpoint.continues:
        return f"{started} {shlex.join(_words(args))}"
    first, _, number = settings.folder.rpartition("-")
    name, at = (first, int(number)) if first and number.isdecimal() else (settings.folder, 1)
    while os.path.exists(out := f"{name}-{at + 1}"):
        at += 1
    words = [*_words(args, without=("checkpoint.resume", "run.out")), "--resume", checkpoint, "--out", out]
    return f"{started} {shlex.join(words)}"


def _torchrun(settings: TrainSettings) -> str:
    """Return torchrun's part: of this host, or of each of several if an interface between them is named."""
    from drumline.plan.launch.launch import torchrun_between_hosts

    started = f"torchrun --standalone --nproc-per-node {settings.num_ranks}"
    if interface := settings.pipeline.interface:
        nodes, each = "$NUM_NODES", "$RANKS_PER_NODE"
        started = torchrun_between_hosts(nodes, each, backend="drumline", interface=interface)
    return f"{started} -m drumline train"


def _words(args: argparse.Namespace, *, without: Sequence[str] = ()) -> list[str]:
    """Return the config and what flags set, as words of a command."""
    from drumline.plan.launch.toml import written
    from drumline.train.config.files.settings_file import MICROBATCHES

    overrides, _ = _overrides(args)
    words = [] if args.config is None else [args.config]
    continues = overrides.pop("checkpoint.continues", False) is True
    for key, value in overrides.items():
        if key == MICROBATCHES:
            words += ["--microbatches", str(value)]
        elif key not in without:
            words += ["--set", f"{key}={'none' if value is None else written(value)}"]
    return [*words, "--continue"] if continues else words


def _dry_run(args: argparse.Namespace, settings: TrainSettings) -> int:
    from drumline.train.dry.dry_run import dry_run
    from drumline.train.start import is_started, with_device

    if is_started():
        raise UsageError("--dry-run under torchrun", fix="run it by itself: drumline train --dry-run")
    progress("building the model without memory ...")
    outcome = dry_run(with_device(settings), tell=progress)
    if args.picture is not None:
        from drumline.train.dry.picture import held_picture

        save(args.picture, held_picture(outcome))
        progress(f"wrote {args.picture}")
    line = torchrun_line(args, settings)
    print_result(args, {**outcome.summary(), "torchrun": line}, _text(outcome, line))
    return 0 if not outcome.violations and (outcome.fit is None or outcome.fit.fits) else 1


def _text(dry_run: DryRun, line: str) -> str:
    from drumline.core.units import duration, percent, size_text
    from drumline.report.draw.table import table

    info, width = dry_run.summary(), terminal_width()
    stages = [
        [
            str(stage["stage"]),
            ", ".join(map(str, stage["ranks"])),
            str(len(stage["blocks"])),
            f"{stage['blocks'][0]} to {stage['blocks'][-1]}" if len(stage["blocks"]) > 1 else stage["blocks"][0],
            f"{stage['parameters']:,}",
        ]
        for stage in info["stages"]
    ]
    names = ("weights", "gradients", "optimizer", "activations", "received", "working", "total")
    ranks = [[str(rank), *(size_text(size[name]) for name in names)] for rank, size in enumerate(info["rank_bytes"])]
    sizes = f"{counted(info['microbatches'], 'microbatch')} of {info['microbatch']} x {info['sequence']}"
    if info["buckets"]:
        most = max(bucket["rows"] * bucket["length"] for bucket in info["buckets"])
        sizes = f"{counted(len(info['buckets']), 'bucket')}, microbatches of at most {most:,} tokens"
    proof = (
        "It is proven to run: every message has its receiver, nothing waits in a circle."
        if info["proven"]
        else f"It cannot run: {'; '.join(info['violations'][:3])}"
    )
    lines = [
        f"{info['model']}: {info['parameters']:,} parameters{_trained_share(info)} in "
        f"{counted(len(info['stages']), 'stage')} on "
        f"{counted(info['ranks'], 'rank')}",
        table(["stage", "rank", "blocks", "which", "parameters"], stages, width=width, keep=("parameters",)),
        "",
        f"{info['schedule']}: {sizes}, {'at most ' if info['buckets'] else ''}{info['tokens_per_step']:,} tokens in an "
        f"optimizer step, "
        f"{counted(info['steps'], 'step')}",
        *_buckets(info, width),
        *([f"Its rows are drawn, and full. Training refuses the data: {info['drawn']}."] if info["drawn"] else []),
        proof,
        f"Simulated: bubble {percent(info['bubble'])}, {duration(info['step_seconds'])} for an optimizer step on "
        f"{info['device']}",
        "",
        "Memory that each rank needs at its fullest moment; working: what an action needs while it runs",
        table(["rank", *names], ranks, width=width, keep=("total",)),
        *(
            ["Of a mesh with context or tensor lines, activations and layers count undivided here."]
            if max(dry_run.settings.mesh.context, dry_run.settings.mesh.tensor) > 1
            else []
        ),
        *_fit(info["fit"], width),
        *(
            ["The whole model was built for this: only built-in and Hugging Face models can be built without memory."]
            if info["built_whole"]
            else []
        ),
        "",
        f"The run goes to {info['folder']}. The same by torchrun:",
        f"  {line}",
    ]
    return "\n".join(name if "\n" in name or name.startswith("  ") else wrapped(name, width) for name in lines)


def _trained_share(entries: dict[str, Any]) -> str:
    trained = entries["trained_parameters"]
    return "" if trained == entries["parameters"] else f", {trained:,} of them trained,"


def _fit(entries: dict[str, Any] | None, width: int) -> Iterator[str]:
    """Yield whether the run fits on its cards, and what to change if not."""
    from drumline.core.units import size_text
    from drumline.report.draw.table import table

    if entries is None:
        return
    needed, usable, there = (size_text(round(entries[f"{name}_bytes"])) for name in ("needed", "usable", "card"))
    yield ""
    if entries["fits"]:
        yield f"It fits on {entries['card']}: the fullest rank needs {needed}; headroom leaves {usable} of {there}."
        return
    yield f"It does not fit on {entries['card']}: the fullest rank needs {needed}; headroom leaves {usable} of {there}."
    rows = [
        [remedy["change"], size_text(round(remedy["bytes"])), "fits" if remedy["fits"] else "not enough"]
        for remedy in entries["remedies"]
    ]
    if rows:
        yield table(["change", "fullest rank", ""], rows, width=width, left=1, keep=("fullest rank",))
    yield (
        f"Try next: {entries['next']}"
        if entries["next"]
        else "Nothing that is known here makes it fit: use a smaller model."
    )


def _buckets(figures: dict[str, Any], width: int) -> Iterator[str]:
    """Yield which lengths each program runs."""
    from drumline.core.units import percent
    from drumline.report.draw.table import table

    rows = [
        [
            str(program["microbatches"]),
            str(len(program["lengths"])),
            ", ".join(map(str, program["lengths"])),
            percent(program["bubble"]),
        ]
        for program in figures["programs"]
        if program["lengths"]
    ]
    if rows:
        yield "A program for each number of microbatches, with its simulated bubble:"
        yield table(["microbatches", "buckets", "lengths", "bubble"], rows, width=width, keep=("bubble",))


def _tell(args: argparse.Namespace, settings: TrainSettings, trained: Any) -> None:
    """Say what came of the run."""
    from dataclasses import asdict

    stopped = trained.stopped
    saved = "" if stopped is None else stopped.checkpoint or settings.checkpoint.resume
    again = stopped is not None and settings.checkpoint.continues
    resume = resume_line(args, settings, saved) if saved or again else ""
    if args.json:
        figures = asdict(trained) | {"folder": str(trained.folder), "steps": settings.run.steps, "resume": resume}
        for name in ("losses", "grad_norms"):
            figures[name] = [line if math.isfinite(line) else None for line in figures[name]]
        print_json(figures)
        return
    losses = trained.losses
    lines: list[str] = []
    if stopped is not None:
        lines.append(f"Stopped by {stopped.stopped} after step {stopped.step} of {settings.run.steps}.")
    elif not losses:
        print(f"The run in {trained.folder} had made all {settings.run.steps} steps already.")
        if trained.merged:
            print(f"The model with the adapter merged into it is in {trained.merged}.")
        return
    if losses:
        what = (
            f"{counted(len(losses), 'step')}: loss {losses[0]:.4g} to {losses[-1]:.4g}, {trained.num_tokens:,} tokens"
        )
        what += " with those of the run it continues" if trained.first_step else ""
        skipped = f"; {counted(trained.num_skipped, 'step')} skipped for a NaN or infinity"
        lines.append(what + (skipped if trained.num_skipped else ""))
    if trained.evaluations:
        lines.append(f"held-out loss {trained.evaluations[-1].loss:.4g}")
    lines.append(f"The run is in {trained.folder}. `drumline report {trained.folder}` shows where the time went.")
    if trained.merged:
        lines.append(f"The model with the adapter merged into it is in {trained.merged}.")
    print(wrapped("\n".join(lines), terminal_width()))
    if resume:
        print(f"{f'Saved {saved}. ' if saved else ''}To continue:\n  {resume}")
