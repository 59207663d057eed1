"""Every key of a config: its table, kind, default, meaning, and what it may be.

Names, kinds and defaults are those of the classes in `settings`. What a key means and may be stands here, once: the
reader, `--print-config` and the reference in the documentation all take it from this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from drumline.train.config import settings

Table = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """What a value may be: a test, and what was expected in words; `choices` are names, for a near miss."""

    expected: str
    holds: Callable[[Any], bool]
    choices: tuple[str, ...] = ()


def at_least(least: float, *, whole: bool = True) -> Rule:
    """Return the rule of numbers from `least` on."""
    kind = "a whole number" if whole else "a number"
    return Rule(f"{kind} of {least:g} or more", lambda value: bool(value >= least))


def one_of(*names: str) -> Rule:
    """Return the rule of names, one of which it must be."""
    *others, last = [f'"{name}"' for name in names]
    return Rule(f"{', '.join(others)} or {last}", lambda value: value in names, names)


def each_at_least(least: int) -> Rule:
    """Return the rule of lists of whole numbers from `least` on."""
    return Rule(f"whole numbers of {least} or more", lambda values: all(one >= least for one in values))


COUNT, COUNT_OR_0, POSITIVE = at_least(1), at_least(0), Rule("a number above 0", lambda value: bool(value > 0))
NUMBER_OR_0 = at_least(0, whole=False)
SECONDS = Rule("a number above 0 and at most 31536000, a year", lambda value: bool(0 < value <= 31_536_000))
SHARE = Rule("a share, from 0 to 1", lambda value: 0 <= value <= 1)
PART = Rule("a share, from 0 to less than 1", lambda value: 0 <= value < 1)
FREE = Rule("", lambda _: True)
KINDS_OF_NUMBERS = one_of("fp32", "bf16", "fp16")
OPTIMIZER = "the name of an optimizer's class in torch.optim"

TABLES = {
    "model": "what is trained",
    "data": "what it is trained on; without files, a text that is shipped with Drumline",
    "batch": "how much one optimizer step sees",
    "lengths": "what to do about documents of unequal length",
    "mesh": "how many ranks each kind of parallelism has; all but expert multiply to the number of ranks",
    "pipeline": "schedule, cut, and how ranks run",
    "memory": "what is recomputed, and how state is sharded",
    "optimizer": "how parameters are updated",
    "learning_rate": "how the rate changes over the steps",
    "precision": "in which numbers the model computes",
    "evaluation": "held-out loss, and a sample text",
    "checkpoint": "when the state is saved, in the run's folder, and from where a run continues",
    "adapt": "what may change while the run goes on, where measured steps show that it pays",
    "failures": "what a run survives",
    "run": "how long, where to, and what is logged",
}
FUNCTION = '"package.module:function" or "file.py:function"'

_MODEL: dict[str, tuple[Rule, str]] = {
    "kind": (one_of("gpt", "mlp", "hf", "function"), "built-in GPT or MLP, a Hugging Face model, or your function"),
    "name": (FREE, "a name for the model, used for the run's folder"),
    "num_layers": (COUNT, "number of layers (gpt, mlp)"),
    "hidden": (COUNT, "width of a layer (gpt, mlp)"),
    "num_heads": (COUNT, "attention heads (gpt)"),
    "vocabulary": (COUNT, "number of tokens (gpt); not set: the tokenizer's"),
    "num_key_value_heads": (COUNT_OR_0, "heads of keys and values (gpt); 0: as many as num_heads"),
    "feedforward": (COUNT_OR_0, "inner width of the feed-forward (gpt); 0: 4 x hidden, or 8/3 x hidden if gated"),
    "head_width": (COUNT_OR_0, "width of a head (gpt); 0: hidden / num_heads"),
    "gated": (FREE, "whether the feed-forward is gated (gpt)"),
    "tied": (FREE, "whether embedding and head share one matrix (gpt)"),
    "learned_positions": (FREE, "learned positions (true) or rotary ones (gpt)"),
    "rotary_base": (POSITIVE, "base of rotary positions (gpt)"),
    "biased": (FREE, "whether layers have biases (gpt)"),
    "dropout": (PART, "share of activations that are dropped (gpt); true is 0.1"),
    "attention_dropout": (PART, "share of attention's weights that are dropped (gpt); not set: as dropout"),
    "qk_norm": (FREE, "whether queries and keys are normed (gpt)"),
    "qkv_bias": (FREE, "whether queries, keys and values alone have biases (gpt)"),
    "inputs": (COUNT, "numbers of a point (mlp)"),
    "outputs": (COUNT, "numbers that are predicted for a point (mlp)"),
    "path": (FREE, "folder with a config.json, or that file (hf)"),
    "pretrained": (FREE, "whether to load the folder's weights, if it has any (hf)"),
    "function": (FREE, f"{FUNCTION}, which returns the model (function)"),
    "arguments": (FREE, "what the function is called with, by name"),
    "others": (FREE, "numbers of a plan that no key above expresses"),
}
_DATA: dict[str, tuple[Rule, str]] = {
    "kind": (one_of("text", "tokens", "instructions", "points", "function"), "what the files hold"),
    "files": (FREE, "files to train on; none: the text shipped with Drumline"),
    "validation": (PART, "share of the documents that is held out"),
    "validation_files": (FREE, "files that are held out, in place of a share"),
    "separator": (FREE, 'text between the documents of a file, like "\\n\\n"; "": a file is one document'),
    "token_type": (FREE, "kind of number in token files other than .npy, like uint16"),
    "end": (COUNT_OR_0, "token that ends a document in token files; not set: the tokenizer's"),
    "tokenizer": (FREE, '"bytes", or a folder with a tokenizer; "": the model\'s own, else bytes'),
    "shuffle": (FREE, "whether the order changes in every epoch"),
    "seed": (FREE, "seed of the order; not set: run.seed"),
    "function": (FREE, f"{FUNCTION}, which returns the data (function)"),
    "arguments": (FREE, "what the function is called with, by name"),
    "workers": (COUNT_OR_0, "processes that read ahead"),
    "exact": (FREE, "whether to refuse data of a function that could not be continued exactly (function)"),
    "fingerprint": (
        one_of("sampled", "whole"),
        "how a run that continues sees whether files have changed: by sizes and 16 MiB of them, or by all bytes",
    ),
}
_BATCH: dict[str, tuple[Rule, str]] = {
    "sequences": (COUNT, "sequences in one optimizer step, over all ranks and microbatches"),
    "microbatch": (COUNT, "sequences in a microbatch"),
    "sequence": (COUNT, "tokens in a sequence"),
    "accumulate": (COUNT, "pipeline steps before the optimizer steps"),
}
_LENGTHS: dict[str, tuple[Rule, str]] = {
    "how": (
        one_of("blocks", "packed", "padded", "buckets"),
        "cut text into equal blocks, pack documents into rows, pad each microbatch, or sort rows by length",
    ),
    "buckets": (each_at_least(1), "lengths of the buckets, in tokens; none: chosen from the data, up to 64"),
    "search": (FREE, "whether to run unequal microbatches in the order that the simulator finds fastest"),
}
_MESH: dict[str, tuple[Rule, str]] = {
    "tensor": (COUNT, "ranks that divide every matrix"),
    "pipeline": (COUNT, "ranks that divide the model into stages"),
    "data": (COUNT, "pipelines that get different rows of the batch"),
    "context": (COUNT, "pipelines that get different parts of the same sequences"),
    "expert": (COUNT, "how many of the data-parallel ranks share out the experts; it divides data"),
}
_PIPELINE: dict[str, tuple[Rule, str]] = {
    "schedule": (FREE, "a schedule's name (`drumline show` lists them), or a CSV file"),
    "stages_per_rank": (COUNT, "stages on each rank; not set: the schedule's own"),
    "vertical_sync": (FREE, "with pipedream, whether all ranks use the weights that rank 0 uses"),
    "layers": (each_at_least(0), "layers of every stage, in order; embedding and head come on top"),
    "balance": (one_of("", "auto", "even"), 'how to cut without layers or cuts; "": by numbers of parameters'),
    "cuts": (FREE, "names of the blocks with which stages 1, 2, ... begin"),
    "plan": (FREE, "a JSON file of `drumline plan PROFILE`, which decides schedule, cut and microbatches"),
    "transport": (one_of("auto", "in-process", "shared-memory", "gloo", "nccl"), "how ranks talk to each other"),
    "interface": (FREE, 'network interface between hosts, or an address of it; "": the one towards rank 0\'s host'),
    "device": (FREE, 'PyTorch device, like "cpu" or "cuda"; "": the accelerator if there is one'),
    "timeout": (SECONDS, "seconds that a rank waits for another before it gives up"),
    "compile": (FREE, "whether stages run through torch.compile"),
    "capture": (FREE, "whether ranks launch CUDA graphs"),
    "check_model": (
        Rule(
            'true, false, "first", or a whole number of 1 or more',
            lambda value: isinstance(value, bool) or value == "first" or (isinstance(value, int) and value >= 1),
        ),
        "which steps are checked against one process: the first and a few later ones, the first, or every so many",
    ),
}
_MEMORY: dict[str, tuple[Rule, str]] = {
    "recompute": (
        one_of("none", "selective", "full"),
        "activations to recompute; selective (attention's scores) is none here: torch's attention never keeps them",
    ),
    "zero": (
        Rule("0, 1, 2 or 3", lambda value: 0 <= value <= 3),
        "what data-parallel ranks divide: 1 the optimizer's state, 3 parameters and gradients too; 2 is not run",
    ),
    "sequence_parallel": (FREE, "sequence parallelism, for tensor-parallel ranks"),
}
_OPTIMIZER: dict[str, tuple[Rule, str]] = {
    "kind": (FREE, f"{OPTIMIZER}, for parameters that no group takes"),
    "lr": (NUMBER_OR_0, "learning rate"),
    "settings": (FREE, "further arguments of the optimizer: weight_decay, betas, ..."),
    "groups": (FREE, "parameters with an optimizer of their own; the first group that matches takes a parameter"),
    "clip_norm": (NUMBER_OR_0, "largest norm of all gradients together; 0: no clipping"),
    "validated": (
        one_of("before", "after"),
        "when all ranks agree on the norm and on NaN: before they update, or after, which takes wrong updates back",
    ),
}
_GROUP: dict[str, tuple[Rule, str]] = {
    "names": (FREE, 'patterns of parameter names, like "*.weight"'),
    "kind": (FREE, OPTIMIZER),
    "only_matrices": (FREE, "whether to pass over parameters that do not have two dimensions"),
    "lr": (NUMBER_OR_0, "learning rate; not set: optimizer.lr"),
    "settings": (FREE, "further arguments of the optimizer"),
}
_RATE: dict[str, tuple[Rule, str]] = {
    "shape": (one_of("constant", "linear", "cosine", "wsd"), "how it falls after the warm-up (wsd: stay, then decay)"),
    "warmup_steps": (COUNT_OR_0, "steps in which the rate rises from 0"),
    "decay_steps": (COUNT, "steps of the decay at the end (wsd); not set: a tenth of all"),
    "final": (SHARE, "share of the rate that is left at the end"),
}
_PRECISION: dict[str, tuple[Rule, str]] = {
    "compute": (KINDS_OF_NUMBERS, "numbers of the products; bf16 and fp16 by autocast"),
    "weights": (KINDS_OF_NUMBERS, "numbers of the parameters"),
    "master_weights": (FREE, "whether the optimizer updates float32 copies of bf16 or fp16 parameters"),
}
_EVALUATION: dict[str, tuple[Rule, str]] = {
    "every": (COUNT_OR_0, "steps between evaluations; 0: none"),
    "batches": (COUNT, "batches of an evaluation"),
    "sample_every": (COUNT_OR_0, "steps between sample texts; 0: none"),
    "sample_tokens": (COUNT, "tokens of a sample text"),
    "prompt": (FREE, "what a sample text begins with"),
    "temperature": (NUMBER_OR_0, "randomness of a sample text; 0: always the likeliest token"),
}
_CHECKPOINT: dict[str, tuple[Rule, str]] = {
    "every": (COUNT_OR_0, "steps between checkpoints; 0: none before the end"),
    "at_end": (FREE, "whether to save after the last step"),
    "keep": (COUNT, "number of whole checkpoints of the run to keep, the newest"),
    "resume": (FREE, 'folder of a run or of one of its checkpoints, to continue from; "": start anew'),
    "continues": (FREE, "whether to continue the run in run.out if there is one, instead of refusing the folder"),
}
_ADAPT: dict[str, tuple[Rule, str]] = {
    "on": (FREE, "whether to adapt"),
    "program": (FREE, "whether to search another program if actions or messages take other times than before"),
    "rebalance": (
        one_of("solve", "half", "keep"),
        "how to move layers: to the best cut, half of a slow stage's to its neighbour, or not at all",
    ),
    "microbatches": (
        one_of("keep", "batch", "size"),
        "keep their number, choose it at the same batch, or at the same size through accumulation",
    ),
    "threshold": (POSITIVE, "share by which a rank must be slower than its neighbour, or an action than before"),
    "patience": (COUNT, "steps in a row for which a rank must be too slow"),
    "cooldown": (COUNT, "steps between two changes"),
    "within": (COUNT, "steps within which a change must pay for itself"),
    "least_gain": (PART, "least share of a step that a change must save"),
    "max_activations": (COUNT, "pairs of stage and microbatch that a rank may hold; not set: as at the start"),
    "max_bytes": (POSITIVE, "bytes that a rank may hold after a move of layers; not set: no limit"),
    "seconds": (SECONDS, "seconds of a search, which runs beside training"),
}
_FAILURES: dict[str, tuple[Rule, str]] = {
    "max_skipped": (
        COUNT_OR_0,
        "steps in a row that are skipped for a NaN or infinity in the loss or a gradient; one more ends the run",
    ),
    "restarts": (COUNT_OR_0, "how often to start local ranks again after a failure; torchrun has --max-restarts"),
    "elastic": (FREE, "whether to go on with fewer ranks if some do not come back, and with more if torchrun has more"),
    "again_within": (COUNT, "elastic, local ranks: one that dies again within so many restarts does not come back"),
    "min_ranks": (COUNT, "elastic: the fewest ranks to go on with"),
}
_RUN: dict[str, tuple[Rule, str]] = {
    "steps": (COUNT, "optimizer steps"),
    "seed": (Rule("a whole number from 0 to 2^63 - 1", lambda value: 0 <= value < 2**63), "random seed"),
    "out": (FREE, 'folder of the run; "": out/train/NAME, or NAME-2, ... if that holds a run'),
    "log_every": (COUNT, "steps between lines of progress"),
    "tensorboard": (FREE, "whether to write TensorBoard's files"),
    "wandb": (FREE, 'project at Weights & Biases to log to; "": none'),
    "threads": (COUNT, "threads of each rank; not set: cores / local ranks"),
}
_ALL: dict[str, dict[str, tuple[Rule, str]]] = {
    "model": _MODEL,
    "data": _DATA,
    "batch": _BATCH,
    "lengths": _LENGTHS,
    "mesh": _MESH,
    "pipeline": _PIPELINE,
    "memory": _MEMORY,
    "optimizer": _OPTIMIZER,
    "learning_rate": _RATE,
    "precision": _PRECISION,
    "evaluation": _EVALUATION,
    "checkpoint": _CHECKPOINT,
    "adapt": _ADAPT,
    "failures": _FAILURES,
    "run": _RUN,
    "optimizer.groups": _GROUP,
}


@dataclass(frozen=True, slots=True)
class Key:
    """One key: its table, name, kind of value (as Python spells it), default, rule and meaning."""

    table: str
    name: str
    kind: Any
    default: Any
    rule: Rule
    meaning: str

    @property
    def path(self) -> str:
        """The table and the name."""
        return f"{self.table}.{self.name}"

    @property
    def is_optional(self) -> bool:
        """Whether it may be left unset, so that something else decides."""
        return type(None) in get_args(self.kind)

    @property
    def inner(self) -> Any:
        """The kind of a value that is set."""
        return next(one for one in get_args(self.kind) if one is not type(None)) if self.is_optional else self.kind

    @property
    def takes_text(self) -> bool:
        """Whether a value may be a string."""
        return self.inner is str or (get_origin(self.inner) in (Union, UnionType) and str in get_args(self.inner))

    @property
    def kind_word(self) -> str:
        """The kind in words.

        >>> keys()["batch"]["sequence"].kind_word, keys()["data"]["files"].kind_word
        ('a whole number', 'a list of strings')
        """
        if get_origin(self.inner) is tuple:
            return {str: "a list of strings", int: "a list of whole numbers"}.get(get_args(self.inner)[0], "tables")
        return _WORDS.get(get_origin(self.inner) or self.inner, "a value")

    @property
    def expected(self) -> str:
        """What it may be, in words."""
        return self.rule.expected or self.kind_word


_WORDS = {str: "a string", bool: "true or false", int: "a whole number", float: "a number", dict: "a table"}


@cache
def keys() -> dict[str, dict[str, Key]]:
    """Return every key by table and name; those of a group of parameters are under "optimizer.groups".

    >>> list(keys()["mesh"])
    ['tensor', 'pipeline', 'data', 'context', 'expert']
    """
    whole = get_type_hints(settings.TrainSettings)
    classes = {name: whole[name] for name in TABLES} | {"optimizer.groups": settings.OptimizerGroup}
    return {table: {one.name: _key(table, one, get_type_hints(kind)) for one in fields(kind)}
            for table, kind in classes.items()}  # fmt: skip


def _key(table: str, field: Field[Any], hints: Table) -> Key:
    rule, meaning = _ALL[table].get(field.name, (FREE, ""))
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    return Key(table, field.name, hints[field.name], default, rule, meaning)
