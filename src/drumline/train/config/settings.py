"""The settings of a training run as plain values: one class per table of the config file.

Every key is stated once, here: its name, kind, default, meaning and what it accepts. The reader, its errors, the flags
of `drumline train`, `--print-config` and the reference in the documentation follow from these fields.

`drumline plan` writes [model], [batch], [mesh], [pipeline] and [memory]; every other key has a default. A default of
None means that the model, the data or the plan decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drumline.adapt.settings import Adapt
from drumline.core.settings.rule import (
    COUNT,
    COUNT_OR_0,
    NUMBER_OR_0,
    PART,
    POSITIVE,
    SECONDS,
    SHARE,
    STEPS,
    STEPS_OR_0,
    TOKENS,
    Rule,
    each_at_least,
    one_of,
)
from drumline.core.settings.setting import same_as, setting, table
from drumline.schedules import DEFAULT
from drumline.train.config.adapter_settings import AdapterSettings
from drumline.train.config.run_names import safe_name

__all__ = [
    "AdaptSettings",
    "AdapterSettings",
    "BatchSettings",
    "CheckpointSettings",
    "DataSettings",
    "EvaluationSettings",
    "FailureSettings",
    "LearningRateSettings",
    "LengthSettings",
    "MemorySettings",
    "MeshSettings",
    "ModelSettings",
    "OptimizerGroup",
    "OptimizerSettings",
    "PipelineSettings",
    "PrecisionSettings",
    "RunSettings",
    "TrainSettings",
]  # what `import *` brings into a user's file

_FUNCTION = '"package.module:function" or "file.py:function"'
_OPTIMIZER = "the name of an optimizer's class in torch.optim"
_NUMBERS = one_of("fp32", "bf16", "fp16")
_ZERO = Rule("0, 1, 2 or 3", lambda value: 0 <= value <= 3)
_SLICES = Rule(
    "a number of slices, or the tokens of each: 2 at least",
    lambda value: value >= 1 if isinstance(value, int) else len(value) > 0 and min(value) > 1,
)
_SEED = Rule("a whole number from 0 to 2^63 - 1", lambda value: 0 <= value < 2**63)
_CHECKS = Rule(
    'true, false, "first", or a whole number of 1 or more',
    lambda value: isinstance(value, bool) or value == "first" or (isinstance(value, int) and value >= 1),
)


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """What is trained.

    The numbers are those of `drumline.plan`'s Transformer; "mlp" uses num_layers, hidden, inputs and outputs.
    """

    kind: str = setting(
        "gpt", "built-in GPT or MLP, a Hugging Face model, or your function", one_of("gpt", "mlp", "hf", "function")
    )
    name: str = setting("", "a name for the model, used for the run's folder")
    num_layers: int = setting(6, "number of layers (gpt, mlp)", COUNT)
    hidden: int = setting(384, "width of a layer (gpt, mlp)", COUNT)
    num_heads: int = setting(6, "attention heads (gpt)", COUNT)
    vocabulary: int | None = setting(None, "number of tokens (gpt)", COUNT, empty="the tokenizer's")
    num_key_value_heads: int = setting(0, "heads of keys and values (gpt)", COUNT_OR_0, empty="as many as num_heads")
    feedforward: int = setting(
        0, "inner width of the feed-forward (gpt)", COUNT_OR_0, empty="4 x hidden, or 8/3 x hidden if gated"
    )
    head_width: int = setting(0, "width of a head (gpt)", COUNT_OR_0, empty="hidden / num_heads")
    gated: bool = setting(False, "whether the feed-forward is gated (gpt)")
    tied: bool = setting(False, "whether embedding and head share one matrix (gpt)")
    learned_positions: bool = setting(True, "learned positions (true) or rotary ones (gpt)")
    rotary_base: float = setting(10000.0, "base of rotary positions (gpt)", POSITIVE)
    biased: bool = setting(True, "whether layers have biases (gpt)")
    dropout: float = setting(0.0, "share of activations that are dropped (gpt); true is 0.1", PART)
    attention_dropout: float | None = setting(
        None, "share of attention's weights that are dropped (gpt)", PART, empty="as dropout"
    )
    qk_norm: bool = setting(False, "whether queries and keys are normed (gpt)")
    qkv_bias: bool = setting(False, "whether queries, keys and values alone have biases (gpt)")
    inputs: int = setting(16, "inputs of a point (mlp)", COUNT)
    outputs: int = setting(4, "outputs for a point (mlp)", COUNT)
    path: str = setting("", "folder with a config.json, or that file (hf)")
    pretrained: bool = setting(True, "whether to load the folder's weights, if it has any (hf)")
    function: str = setting("", f"{_FUNCTION}, which returns the model (function)")
    arguments: dict[str, Any] = setting({}, "what the function is called with, by name")
    others: dict[str, Any] = setting({}, "parts of a plan that no key above expresses")


@dataclass(frozen=True, slots=True)
class DataSettings:
    """What it is trained on."""

    kind: str = setting("text", "what the files hold", one_of("text", "tokens", "instructions", "points", "function"))
    files: tuple[str, ...] = setting((), "files to train on", empty="the text that comes with Drumline")
    validation: float = setting(0.05, "share of the documents that is held out", PART)
    validation_files: tuple[str, ...] = setting((), "files that are held out, instead of a share")
    separator: str = setting("", 'text between the documents of a file, like "\\n\\n"', empty="a file is one document")
    token_type: str = setting("uint16", "kind of number in token files other than .npy, like uint16")
    end: int | None = setting(None, "token that ends a document in token files", COUNT_OR_0, empty="the tokenizer's")
    tokenizer: str = setting("", '"bytes", or a folder with a tokenizer', empty="the model's own, else bytes")
    chat_template: str = setting(
        "", 'how chats are written: "chatml", "plain" (lines like user: ...), or a file with a Jinja template',
        empty="the tokenizer's; plain if it has none and no adapter is trained",
    )  # fmt: skip
    shuffle: bool = setting(True, "whether the order changes in every epoch")
    seed: int | None = setting(None, "seed of the order", empty="run.seed")
    function: str = setting("", f"{_FUNCTION}, which returns the data (function)")
    arguments: dict[str, Any] = setting({}, "what the function is called with, by name")
    workers: int = setting(0, "processes that read ahead", COUNT_OR_0)
    exact: bool = setting(True, "whether to refuse data of a function that could not be continued exactly (function)")
    fingerprint: str = setting(
        "sampled",
        "how a continued run checks whether files have changed: by sizes and 16 MiB of them, or by all bytes",
        one_of("sampled", "whole"),
    )


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """How much one optimizer step sees: `sequences` in all, cut into microbatches of `microbatch`, `accumulate` times.

    sequences = microbatch x microbatches of a pipeline step x data-parallel ranks x accumulate.
    """

    sequences: int = setting(32, "sequences in one optimizer step, over all ranks and microbatches", COUNT)
    microbatch: int = setting(4, "sequences in a microbatch", COUNT)
    sequence: int = setting(256, "tokens in a sequence", TOKENS)
    accumulate: int = setting(1, "pipeline steps before the optimizer steps", STEPS)


@dataclass(frozen=True, slots=True)
class LengthSettings:
    """Documents of unequal size.

    blocks: text cut into equal blocks. packed: documents side by side in a row of batch.sequence tokens, without
    attention across them. padded: each microbatch padded to its own longest. buckets: steps of one length, with
    microbatches and a program for each.
    """

    how: str = setting(
        "blocks",
        "cut text into equal blocks, pack documents into rows, pad each microbatch, or sort rows by length",
        one_of("blocks", "packed", "padded", "buckets"),
    )
    buckets: tuple[int, ...] = setting(
        (), "lengths of the buckets, in tokens", each_at_least(1, unit="tokens"), empty="chosen from the data, up to 64"
    )
    search: bool = setting(False, "whether to run unequal microbatches in the order that the simulator finds fastest")


@dataclass(frozen=True, slots=True)
class MeshSettings:
    """How many ranks each kind of parallelism has; those of `expert` are some of those of `data`."""

    tensor: int = setting(1, "ranks that divide every matrix", COUNT)
    pipeline: int = setting(
        2, "ranks that divide the model into stages; by default one for each accelerator if there are any", COUNT
    )
    data: int = setting(1, "pipelines that get different rows of the batch", COUNT)
    context: int = setting(1, "pipelines that get different parts of the same sequences", COUNT)
    expert: int = setting(
        1, "how many of the data-parallel ranks divide the experts; data must be a multiple of it", COUNT
    )

    @property
    def axes(self) -> dict[str, int]:
        """The mesh as `dl.Pipeline` takes it, in which experts have their own axis.

        >>> MeshSettings(pipeline=2, data=4, expert=2).axes
        {'pp': 2, 'dp': 2, 'cp': 1, 'ep': 2, 'tp': 1}
        """
        dp = self.data // self.expert
        return {"pp": self.pipeline, "dp": dp, "cp": self.context, "ep": self.expert, "tp": self.tensor}

    @property
    def num_lines(self) -> int:
        """Pipelines side by side."""
        return self.tensor * self.data * self.context


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """Schedule and cut, and what `drumline.Pipeline` takes beside them."""

    schedule: str = setting(DEFAULT, "a schedule's name (`drumline show` lists them), or a CSV file")
    stages_per_rank: int | None = setting(None, "stages on each rank", COUNT, empty="the schedule's own")
    vertical_sync: bool = setting(False, "with pipedream, whether all ranks use the weights that rank 0 uses")
    slices: int | tuple[int, ...] = setting(
        1, "number of slices in which the sequences of every microbatch run, or a list of the tokens of each", _SLICES
    )
    layers: tuple[int, ...] = setting(
        (), "layers of every stage, in order; embedding and head come on top", each_at_least(0)
    )
    balance: str = setting(
        "", "how to cut without layers or cuts", one_of("", "auto", "even"), empty="by numbers of parameters"
    )
    cuts: tuple[str, ...] = setting((), "names of the blocks with which stages 1, 2, ... begin")
    plan: str = setting("", "a JSON file of `drumline plan PROFILE`, which decides schedule, cut and microbatches")
    transport: str = setting(
        "auto", "what carries messages between ranks", one_of("auto", "in-process", "shared-memory", "gloo", "nccl")
    )
    interface: str = setting(
        "", "network interface between hosts, or an address of it", empty="the one towards rank 0's host"
    )
    device: str = setting(
        "", 'PyTorch device, like "cpu", "cuda" or "cuda:1"', empty="the accelerators if there are any"
    )
    timeout: float = setting(300.0, "seconds that a rank waits for another before it gives up", SECONDS)
    compile: bool = setting(False, "whether stages run through torch.compile")
    capture: bool = setting(False, "whether ranks launch CUDA graphs")
    check_model: bool | int | str = setting(
        True,
        "which steps are checked against one process: the first and a few later ones, the first, or every N-th",
        _CHECKS,
    )

    @property
    def num_slices(self) -> int:
        """Slices of every sequence.

        >>> PipelineSettings(slices=8).num_slices, PipelineSettings(slices=(700, 500)).num_slices
        (8, 2)
        """
        return self.slices if isinstance(self.slices, int) else len(self.slices)


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """What is recomputed, and how state is sharded once there are data-parallel ranks."""

    recompute: str = setting(
        "none",
        "activations to recompute; selective (attention's scores) means none: torch's attention never keeps them",
        one_of("none", "selective", "full"),
    )
    zero: int = setting(
        0,
        "what data-parallel ranks divide: 1 the optimizer's state, 3 parameters and gradients too; 2 is refused",
        _ZERO,
    )
    sequence_parallel: bool = setting(False, "sequence parallelism, for tensor-parallel ranks")
    card: str = setting(
        "", "a card for which --dry-run says whether the run fits: its name, or its memory like 24GiB",
        empty="this machine's",
    )  # fmt: skip
    headroom: float = setting(0.1, "share of a card's memory that --dry-run keeps free", PART)


@dataclass(frozen=True, slots=True)
class OptimizerGroup:
    """Parameters with their own optimizer, found by their names."""

    names: tuple[str, ...] = setting(("*",), 'patterns of parameter names, like "*.weight"')
    kind: str = setting("AdamW", _OPTIMIZER)
    only_matrices: bool = setting(False, "whether to skip parameters that do not have two dimensions")
    lr: float | None = setting(None, "learning rate", NUMBER_OR_0, empty="optimizer.lr")
    settings: dict[str, Any] = setting({}, "further arguments of the optimizer")


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """How parameters are updated: one optimizer for all, or groups by name."""

    kind: str = setting("AdamW", f"{_OPTIMIZER}, for parameters that no group takes")
    lr: float = setting(3e-4, "learning rate", NUMBER_OR_0)
    settings: dict[str, Any] = setting({}, "further arguments of the optimizer: weight_decay, betas, ...")
    groups: tuple[OptimizerGroup, ...] = setting(
        (), "parameters with their own optimizer; the first group that matches takes a parameter"
    )
    clip_norm: float = setting(1.0, "largest norm of all gradients together", NUMBER_OR_0, empty="no clipping")
    validated: str = setting(
        "before",
        "when all ranks agree on the norm and on NaN: before they update, or after, which undoes wrong updates",
        one_of("before", "after"),
    )


@dataclass(frozen=True, slots=True)
class LearningRateSettings:
    """How the rate changes over the steps."""

    shape: str = setting(
        "cosine",
        "how it falls after the warm-up (wsd: stay, then decay)",
        one_of("constant", "linear", "cosine", "wsd"),
    )
    warmup_steps: int = setting(10, "steps in which the rate rises from 0", STEPS_OR_0)
    decay_steps: int | None = setting(None, "steps of the decay at the end (wsd)", STEPS, empty="a tenth of all")
    final: float = setting(0.1, "share of the rate that is left at the end", SHARE)


@dataclass(frozen=True, slots=True)
class PrecisionSettings:
    """In which numbers the model computes."""

    compute: str = setting("fp32", "precision of the products; bf16 and fp16 by autocast", _NUMBERS)
    weights: str = setting("fp32", "precision of the parameters", _NUMBERS)
    master_weights: bool = setting(False, "whether the optimizer updates float32 copies of bf16 or fp16 parameters")


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """Held-out loss, and a sample text."""

    every: int = setting(50, "steps between evaluations", STEPS_OR_0, empty="none")
    batches: int = setting(4, "batches of an evaluation", COUNT)
    sample_every: int = setting(0, "steps between sample texts", STEPS_OR_0, empty="none")
    sample_tokens: int = setting(64, "tokens of a sample text", TOKENS)
    prompt: str = setting("", "what a sample text begins with")
    temperature: float = setting(0.8, "randomness of a sample text", NUMBER_OR_0, empty="always the likeliest token")


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """When the state is saved, and from where a run continues."""

    every: int = setting(0, "steps between checkpoints", STEPS_OR_0, empty="none before the end")
    at_end: bool = setting(True, "whether to save after the last step")
    keep: int = setting(3, "number of whole checkpoints of the run to keep, the newest", COUNT)
    resume: str = setting("", "folder of a run or of one of its checkpoints, to continue from", empty="a new start")
    continues: bool = setting(
        False, "whether to continue the run in run.out if there is one, instead of refusing the folder"
    )


@dataclass(frozen=True, slots=True)
class FailureSettings:
    """What a run survives."""

    max_skipped: int = setting(
        10,
        "steps in a row that are skipped for a NaN or infinity in the loss or a gradient; one more ends the run",
        STEPS_OR_0,
    )
    restarts: int = setting(
        0, "how often to start local ranks again after a failure; torchrun has --max-restarts", COUNT_OR_0
    )
    elastic: bool = setting(
        False, "whether to continue with fewer ranks if some do not come back, and with more if torchrun has more"
    )
    again_within: int = setting(
        2, "elastic, local ranks: a rank that dies again within this many restarts does not come back", COUNT
    )
    min_ranks: int = setting(1, "elastic: the fewest ranks to continue with", COUNT)


@dataclass(frozen=True, slots=True)
class AdaptSettings:
    """What may change during a run: the settings of `dl.Pipeline(adapt=...)`, and whether to use them."""

    on: bool = setting(False, "whether to adapt")
    program: bool = same_as(Adapt, "program")
    rebalance: str = same_as(Adapt, "rebalance")
    microbatches: str = same_as(Adapt, "microbatches")
    threshold: float = same_as(Adapt, "threshold")
    patience: int = same_as(Adapt, "patience")
    cooldown: int = same_as(Adapt, "cooldown")
    within: int = same_as(Adapt, "within")
    least_gain: float = same_as(Adapt, "least_gain")
    max_activations: int | None = same_as(Adapt, "max_activations")
    max_bytes: float | None = same_as(Adapt, "max_bytes")
    seconds: float = same_as(Adapt, "seconds")


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How long, where to, and what is logged."""

    steps: int = setting(100, "optimizer steps", STEPS)
    seed: int = setting(0, "random seed", _SEED)
    out: str = setting("", "folder of the run", empty="out/train/NAME, or NAME-2, ... if that holds a run")
    log_every: int = setting(1, "steps between lines of progress", STEPS)
    tensorboard: bool = setting(False, "whether to write TensorBoard's files")
    wandb: str = setting("", "project at Weights & Biases to log to", empty="none")
    threads: int | None = setting(None, "threads of each rank", COUNT, empty="cores / local ranks")


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """All of a training run.

    >>> TrainSettings().num_microbatches
    8
    >>> TrainSettings(mesh=MeshSettings(pipeline=4)).num_ranks
    4
    """

    model: ModelSettings = table(ModelSettings, "what is trained")
    data: DataSettings = table(DataSettings, "what it is trained on; without files, a text that comes with Drumline")
    adapter: AdapterSettings = table(AdapterSettings, "what is trained instead of the model, which is then frozen")
    batch: BatchSettings = table(BatchSettings, "how much one optimizer step sees")
    lengths: LengthSettings = table(LengthSettings, "what to do about documents of unequal length")
    mesh: MeshSettings = table(
        MeshSettings,
        "how many ranks each kind of parallelism has; the product of all except expert is the number of ranks",
    )
    pipeline: PipelineSettings = table(PipelineSettings, "schedule, cut, and how ranks run")
    memory: MemorySettings = table(MemorySettings, "what is recomputed, and how state is sharded")
    optimizer: OptimizerSettings = table(OptimizerSettings, "how parameters are updated")
    learning_rate: LearningRateSettings = table(LearningRateSettings, "how the rate changes over the steps")
    precision: PrecisionSettings = table(PrecisionSettings, "the precision of computation")
    evaluation: EvaluationSettings = table(EvaluationSettings, "held-out loss, and a sample text")
    checkpoint: CheckpointSettings = table(
        CheckpointSettings, "when the state is saved, in the run's folder, and from where a run continues"
    )
    adapt: AdaptSettings = table(AdaptSettings, "what may change during the run, if measured steps show that it pays")
    failures: FailureSettings = table(FailureSettings, "what a run survives")
    run: RunSettings = table(RunSettings, "how long, where to, and what is logged")

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one pipeline step."""
        return self.batch.sequences // (self.batch.microbatch * self.mesh.data * self.batch.accumulate)

    @property
    def num_ranks(self) -> int:
        """Processes in all."""
        return self.mesh.pipeline * self.mesh.num_lines

    @property
    def folder(self) -> str:
        """Where the run is written.

        >>> TrainSettings().folder
        'out/train/gpt'
        """
        return self.run.out or f"out/train/{safe_name(self.model.name or self.model.kind)}"
