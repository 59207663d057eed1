"""The settings of a training run as plain values: one class per table of the config file, every key once.

    [model]          what is trained            [optimizer]      how parameters are updated
    [data]           what it is trained on      [learning_rate]  how the rate changes over steps
    [batch]          how much of it in a step   [precision]      numbers, master weights
    [lengths]        documents of unequal size  [evaluation]     held-out loss and a sample text
    [mesh]           how many ranks of each     [run]            steps, seed, folder, what is logged
    [pipeline]       schedule and cut
    [memory]         what is recomputed         [checkpoint]     when the state is saved
    [adapt]          what changes meanwhile     [failures]       what a run survives

`drumline plan` writes [model], [batch], [mesh], [pipeline] and [memory]; every other key has a default. A default of
None means that the model, the data or the plan decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from drumline.schedules import DEFAULT
from drumline.train.config.names import safe_name


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """What is trained: `kind` is "gpt", "mlp", "hf" (a folder or config of Hugging Face's) or "function".

    The numbers are those of `drumline.plan`'s Transformer; "mlp" uses num_layers, hidden, inputs and outputs.
    """

    kind: str = "gpt"
    name: str = ""
    num_layers: int = 6
    hidden: int = 384
    num_heads: int = 6
    vocabulary: int | None = None  # None: the tokenizer's
    num_key_value_heads: int = 0  # 0: as many as num_heads
    feedforward: int = 0  # 0: 4 x hidden, or 8/3 x hidden if gated
    head_width: int = 0  # 0: hidden / num_heads
    gated: bool = False
    tied: bool = False
    learned_positions: bool = True
    rotary_base: float = 10000.0
    biased: bool = True
    dropout: float = 0.0  # a plan's `true` is 0.1, its `false` 0
    attention_dropout: float | None = None  # None: as dropout
    qk_norm: bool = False
    qkv_bias: bool = False
    inputs: int = 16
    outputs: int = 4
    path: str = ""  # hf: a folder with config.json, or a config file
    pretrained: bool = True  # hf: load the folder's weights if it has any
    function: str = ""  # "package.module:function" or "file.py:function"
    arguments: dict[str, Any] = field(default_factory=dict)  # passed to the function by name
    others: dict[str, Any] = field(default_factory=dict)  # numbers of a plan that no key above can express


@dataclass(frozen=True, slots=True)
class DataSettings:
    """What it is trained on: `kind` is "text", "tokens", "instructions", "points" or "function"."""

    kind: str = "text"
    files: tuple[str, ...] = ()  # none: the text shipped with the package
    validation: float = 0.05  # share of the documents held out
    validation_files: tuple[str, ...] = ()
    separator: str = ""  # text between the documents of a file, such as "\n\n"; "": a file is one document
    token_type: str = "uint16"  # of token files other than .npy
    end: int | None = None  # the token that ends a document in token files; None: the tokenizer's
    tokenizer: str = ""  # "bytes", or a folder; "": the model's own, else bytes
    shuffle: bool = True
    seed: int | None = None  # None: the run's
    function: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    workers: int = 0  # processes that read ahead
    exact: bool = True  # whether data of a function that cannot be continued exactly are refused
    fingerprint: str = "sampled"  # or "whole": what a checkpoint compares the contents of files by


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """How much one optimizer step sees: `sequences` in all, cut into microbatches of `microbatch`, `accumulate` times.

    sequences = microbatch x microbatches of a pipeline step x data-parallel ranks x accumulate.
    """

    sequences: int = 32
    microbatch: int = 4
    sequence: int = 256  # tokens
    accumulate: int = 1


@dataclass(frozen=True, slots=True)
class LengthSettings:
    """Documents of unequal size: `how` is "blocks" (text cut into equal blocks), "packed", "padded" or "buckets".

    packed: documents side by side in a row of batch.sequence tokens, without attention across them. padded: each
    microbatch padded to its own longest. buckets: steps of one length, with microbatches and a program for each.
    """

    how: str = "blocks"
    buckets: tuple[int, ...] = ()  # lengths; none: chosen from the data
    search: bool = False  # run unequal microbatches in the order that the simulator finds fastest


@dataclass(frozen=True, slots=True)
class MeshSettings:
    """How many ranks each kind of parallelism has; those of `expert` are some of those of `data`."""

    tensor: int = 1
    pipeline: int = 2
    data: int = 1
    context: int = 1
    expert: int = 1

    @property
    def axes(self) -> dict[str, int]:
        """The mesh as `dl.Pipeline` takes it, in which experts have an axis of their own.

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

    schedule: str = DEFAULT
    stages_per_rank: int | None = None
    vertical_sync: bool = False  # of schedules without a flush: all ranks use the weights that rank 0 uses
    layers: tuple[int, ...] = ()  # layers of every stage, as planned; embedding and head come on top
    balance: str = ""  # "auto" or "even"
    cuts: tuple[str, ...] = ()
    plan: str = ""  # a JSON file of `drumline plan PROFILE`, in place of schedule, cut and microbatches
    transport: str = "auto"
    interface: str = ""  # between hosts: a network interface, or an address of it; "": the one towards rank 0's host
    device: str = ""
    timeout: float = 300.0
    compile: bool = False
    capture: bool = False
    check_model: bool | int | str = True  # or "first", or a number of steps between two checks


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """What is recomputed, and how state is sharded once there are data-parallel ranks."""

    recompute: str = "none"
    zero: int = 0
    sequence_parallel: bool = False


@dataclass(frozen=True, slots=True)
class OptimizerGroup:
    """Parameters whose names match any of `names` (patterns like "*.weight"), updated by `kind`.

    The first group that matches takes a parameter; `only_matrices` passes over what has not two dimensions.
    """

    names: tuple[str, ...] = ("*",)
    kind: str = "AdamW"  # a class of torch.optim
    only_matrices: bool = False
    lr: float | None = None  # None: the optimizer's
    settings: dict[str, Any] = field(default_factory=dict)  # further arguments: weight_decay, betas, ...


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """How parameters are updated: one optimizer for all, or groups by name."""

    kind: str = "AdamW"
    lr: float = 3e-4
    settings: dict[str, Any] = field(default_factory=dict)
    groups: tuple[OptimizerGroup, ...] = ()
    clip_norm: float = 1.0  # 0: no clipping
    validated: str = "before"  # or "after": ranks do not wait for each other before they update


@dataclass(frozen=True, slots=True)
class LearningRateSettings:
    """How the rate changes: `shape` is "constant", "linear", "cosine" or "wsd" (warm up, stay, decay)."""

    shape: str = "cosine"
    warmup_steps: int = 10
    decay_steps: int | None = None  # wsd: steps of the decay at the end; None: a tenth of all
    final: float = 0.1  # share of the rate at the end


@dataclass(frozen=True, slots=True)
class PrecisionSettings:
    """What numbers are computed in; `master_weights` keeps float32 copies of weights in bf16 or fp16."""

    compute: str = "fp32"
    weights: str = "fp32"
    master_weights: bool = False


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """Held-out loss every `every` steps over `batches` batches, and a sample text; 0 switches either off."""

    every: int = 50
    batches: int = 4
    sample_every: int = 0
    sample_tokens: int = 64
    prompt: str = ""
    temperature: float = 0.8


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """When the state is saved, and from where a run continues."""

    every: int = 0  # steps between checkpoints; 0: none before the end
    at_end: bool = True
    keep: int = 3  # the newest so many stay
    resume: str = ""  # the folder of a run, of its checkpoints, or of one of them
    continues: bool = False  # whether to go on with the run in the folder, if there is one


@dataclass(frozen=True, slots=True)
class FailureSettings:
    """What a run survives."""

    max_skipped: int = 10  # steps in a row without an update, for a NaN or infinity; 0: the first ends the run
    restarts: int = 0  # how often local ranks are started again; under torchrun, --max-restarts says so
    elastic: bool = False  # whether fewer ranks go on where some do not come back
    again_within: int = 2  # a rank that dies again within so many restarts does not come back
    min_ranks: int = 1  # the fewest ranks to go on with


@dataclass(frozen=True, slots=True)
class AdaptSettings:
    """What may change while a run goes on; `drumline.adapt.settings.Adapt` says what each means."""

    on: bool = False
    program: bool = True
    rebalance: str = "solve"
    microbatches: str = "keep"
    threshold: float = 0.1
    patience: int = 3
    cooldown: int = 8
    within: int = 100
    least_gain: float = 0.02
    max_activations: int | None = None
    max_bytes: float | None = None
    seconds: float = 3.0


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How long, where to, and what is logged."""

    steps: int = 100
    seed: int = 0
    out: str = ""  # folder of the run; "": out/train/NAME, or NAME-2, ... where that holds a run
    log_every: int = 1
    tensorboard: bool = False
    wandb: str = ""  # a project's name
    threads: int | None = None  # of each rank; None: cores / local ranks


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """All of a training run.

    >>> TrainSettings().num_microbatches
    8
    >>> TrainSettings(mesh=MeshSettings(pipeline=4)).num_ranks
    4
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    lengths: LengthSettings = field(default_factory=LengthSettings)
    mesh: MeshSettings = field(default_factory=MeshSettings)
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    learning_rate: LearningRateSettings = field(default_factory=LearningRateSettings)
    precision: PrecisionSettings = field(default_factory=PrecisionSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    adapt: AdaptSettings = field(default_factory=AdaptSettings)
    failures: FailureSettings = field(default_factory=FailureSettings)
    run: RunSettings = field(default_factory=RunSettings)

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
