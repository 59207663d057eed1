"""Kinds of adapters on families of models and kinds of bases: the gradients of a plain loop of PEFT, or a refusal.

`python tests/adapter_matrix.py --write` runs all of them and writes the table of docs/adapters-tested.md; `--only`
takes words that a case must have, such as "lora llama nf4".
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import drumline as dl
from drumline.core.errors import DrumlineError
from extras import needed
from hf_zoo import VOCABULARY, Batch, made

peft: Any = needed("peft", extra="tune")
Gradients = dict[str, Tensor]
Adapts = Callable[[nn.Module, str], nn.Module]
MICROBATCHES, ROWS = 4, 8
PAGE = Path(__file__).parents[1] / "docs" / "adapters-tested.md"

# The task and the linear layers of a family: of attention, and the one that feeds forward.
FAMILIES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "llama": ("CAUSAL_LM", ("q_proj", "v_proj"), ("down_proj",)),
    "qwen2": ("CAUSAL_LM", ("q_proj", "v_proj"), ("down_proj",)),
    "qwen3": ("CAUSAL_LM", ("q_proj", "v_proj"), ("down_proj",)),
    "gemma2": ("CAUSAL_LM", ("q_proj", "v_proj"), ("down_proj",)),
    "phi3": ("CAUSAL_LM", ("qkv_proj",), ("down_proj",)),
    "gpt2": ("CAUSAL_LM", ("c_attn",), ("mlp.c_proj",)),
    "opt": ("CAUSAL_LM", ("q_proj", "v_proj"), ("fc2",)),
    "gpt_neox": ("CAUSAL_LM", ("query_key_value",), ("dense_4h_to_h",)),
    "t5": ("SEQ_2_SEQ_LM", ("q", "v"), ("wo",)),
    "roberta": ("SEQ_CLS", ("query", "value"), ("output.dense",)),
}
BASES = ("plain", "int8", "nf4")
NOT_LINEAR = ("gpt2",)  # families whose layers are no nn.Linear: nothing of them is quantised


def _task(family: str) -> dict[str, Any]:
    return {"task_type": FAMILIES[family][0]}


def _lora(model: nn.Module, family: str, **settings: Any) -> nn.Module:
    _, attention, _ = FAMILIES[family]
    chosen = {"r": 4, "lora_alpha": 8, "target_modules": list(attention)} | settings
    adapted: nn.Module = peft.get_peft_model(model, peft.LoraConfig(**chosen))
    return adapted


def _by_pattern(model: nn.Module, family: str) -> nn.Module:
    """Only the odd layers, by a pattern of whole names."""
    _, attention, _ = FAMILIES[family]
    return _lora(model, family, target_modules=rf".*\.[13]\..*({'|'.join(attention)})", **_task(family))


def _with_saved_modules(model: nn.Module, family: str) -> nn.Module:
    """A head trained in full beside the adapters."""
    heads = {"roberta": "classifier", "gpt_neox": "embed_out"}
    return _lora(model, family, modules_to_save=[heads.get(family, "lm_head")], **_task(family))


def _two_adapters(model: nn.Module, family: str) -> nn.Module:
    adapted: Any = _lora(model, family, **_task(family))
    _, attention, feeding = FAMILIES[family]
    second = peft.LoraConfig(r=2, target_modules=[*attention, *feeding], **_task(family))
    adapted.add_adapter("second", second)
    adapted.base_model.set_adapter(["default", "second"])
    return adapted  # type: ignore[no-any-return]


def _ia3(model: nn.Module, family: str) -> nn.Module:
    _, attention, feeding = FAMILIES[family]
    targets = [*attention, *feeding]
    config = peft.IA3Config(target_modules=targets, feedforward_modules=list(feeding), **_task(family))
    return peft.get_peft_model(model, config)  # type: ignore[no-any-return]


def _of(config: str, **settings: Any) -> Adapts:
    def adapts(model: nn.Module, family: str) -> nn.Module:
        _, attention, _ = FAMILIES[family]
        chosen = {"r": 4, "alpha": 8, "target_modules": list(attention)} | settings
        return peft.get_peft_model(model, getattr(peft, config)(**chosen, **_task(family)))  # type: ignore[no-any-return]

    return adapts


def _virtual(config: str) -> Adapts:
    def adapts(model: nn.Module, family: str) -> nn.Module:
        return peft.get_peft_model(model, getattr(peft, config)(num_virtual_tokens=3, **_task(family)))  # type: ignore[no-any-return]

    return adapts


def _checkpointed(model: Any, family: str) -> nn.Module:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    return _lora(model, family, **_task(family))


KINDS: dict[str, Adapts] = {
    "lora": _lora,
    "lora with a task": lambda model, family: _lora(model, family, **_task(family)),
    "rslora": lambda model, family: _lora(model, family, use_rslora=True, lora_dropout=0.0, **_task(family)),
    "dora": lambda model, family: _lora(model, family, use_dora=True, **_task(family)),
    "lora and a head": _with_saved_modules,
    "two adapters": _two_adapters,
    "lora by a pattern": _by_pattern,
    "checkpointed lora": _checkpointed,
    "ia3": _ia3,
    "loha": _of("LoHaConfig"),
    "lokr": _of("LoKrConfig"),
    "prompt tuning": _virtual("PromptTuningConfig"),
    "prefix tuning": _virtual("PrefixTuningConfig"),
}


def batch_of(family: str) -> Batch:
    """Return rows of the same length, so that every microbatch counts the same and weights are exact."""
    ids = torch.randint(5, VOCABULARY - 5, (ROWS, 8), generator=torch.Generator().manual_seed(1))
    labels = torch.arange(ROWS) % 2 if family == "roberta" else ids
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def quantised(model: nn.Module, base: str) -> nn.Module:
    """Return a model whose linear layers, but for the head, are those of bitsandbytes."""
    if base == "plain":
        return model
    bnb: Any = needed("bitsandbytes", extra="tune")
    heads = ("lm_head", "embed_out", "classifier", "score", "pooler")
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or any(head in name for head in heads):
            continue
        sizes = module.in_features, module.out_features, module.bias is not None
        if base == "nf4":
            new = bnb.nn.Linear4bit(*sizes, quant_type="nf4", compute_dtype=torch.float32, device="cpu")
        else:
            new = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False, device="cpu")
        new.load_state_dict(module.state_dict())
        parent, _, key = name.rpartition(".")
        setattr(model.get_submodule(parent), key, new.to("cpu"))
    return model


def adapted(kind: str, family: str, base: str = "plain") -> nn.Module:
    """Return a family's model with adapters whose gradients are not zero."""
    model = quantised(made(family), base)
    torch.manual_seed(2)
    model = KINDS[kind](model, family)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.requires_grad and ("lora_B" in name or "hada_w2_a" in name or "lokr_w2" in name or "ia3" in name):
                param.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(3)) * 0.1)
    return model.train()


def plain_gradients(model: Any, batch: Batch) -> Gradients:
    """Return the gradients of a loop that adds up those of the same microbatches."""
    for at in range(MICROBATCHES):
        part = {name: value.tensor_split(MICROBATCHES)[at] for name, value in batch.items()}
        torch.autograd.backward(model(**part).loss / MICROBATCHES)
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def off_by(ours: Gradients, plain: Gradients) -> float:
    """Return the largest difference, as a share of the largest gradient."""
    scale = max(float(grad.abs().max()) for grad in plain.values())
    return max(float((ours[name] - grad).abs().max()) for name, grad in plain.items()) / scale


def cases(only: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield all cases whose name has every word."""
    for family in FAMILIES:
        for base in BASES:
            for kind in KINDS:
                if all(word in f"{kind} {family} {base}" for word in only.split()):
                    yield kind, family, base


def outcome(kind: str, family: str, base: str, schedule: str = "1f1b") -> str:
    """Return what a case comes to: equal, its difference, refused by us, or not supported by PEFT itself."""
    batch = batch_of(family)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = adapted(kind, family, base)
            plain = plain_gradients(copy.deepcopy(model), batch)
    except Exception as error:
        return f"PEFT: {type(error).__name__}: {str(error).splitlines()[0]}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pipe = dl.Pipeline(
                model,
                schedule=schedule,
                num_ranks=2,
                num_microbatches=MICROBATCHES,
                example=batch,
                transport="in-process",
                balance="parameters",
            )
            pipe.step(**batch)
    except DrumlineError as error:
        return f"refused: {error}" if kind == "prefix tuning" else f"wrong: refused, {error}"
    ours = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    if ours.keys() != plain.keys():
        return f"wrong: other gradients, {sorted(ours.keys() ^ plain.keys())[:3]}"
    if all(torch.equal(ours[name], grad) for name, grad in plain.items()):
        return "equal"
    difference = off_by(ours, plain)
    return f"{'close' if difference <= 1e-6 else 'wrong'}: {difference:.1e}"


HEAD = """\
# Adapters that are tested

`python tests/adapter_matrix.py --write` wrote this page, with PyTorch {torch}, PEFT {peft} and transformers
{transformers} on a CPU. It shows kinds of adapters by PEFT, on families of models and on bases in full precision, in
int8 and in NF4 (bitsandbytes). Each was trained for a step on two stages by 1f1b, and its gradients compared with those
of a plain loop over the same microbatches.

- **=** the same bits
- **≈** within 1e-6 of the largest gradient
- **P** PEFT itself does not take this pair (below)
- **R** refused in one line, because it passes a cache of keys between blocks
- **-** the family's layers are no `nn.Linear`, so there is no quantised base

Each cell has the base in full precision, int8, NF4. `make test` tries a part of the cells, `make matrices` all of them.
[Adapters in training runs](train-adapters.md) says which of them `drumline train` takes.

"""


def page(outcomes: Mapping[tuple[str, str, str], str]) -> str:
    """Return the table of a run of all cases, and what PEFT itself or we refuse."""
    versions = {name: version(name).partition("+")[0] for name in ("torch", "peft", "transformers")}
    lines = [
        *HEAD.format_map(versions).splitlines(),
        f"| adapter | {' | '.join(FAMILIES)} |",
        f"|---|{'---|' * len(FAMILIES)}",
    ]
    signs = {"equal": "=", "close": "≈", "PEFT": "P", "refused": "R", "wrong": "**wrong**"}
    for kind in KINDS:
        cells = [
            " ".join(
                "-"
                if family in NOT_LINEAR and base != "plain"
                else signs[outcomes[kind, family, base].partition(":")[0]]
                for base in BASES
            )
            for family in FAMILIES
        ]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    lines += ["", "What a plain loop of PEFT says of the pairs that it does not take:", ""]
    reasons: dict[tuple[str, str], dict[str, tuple[str, list[str]]]] = {}
    for (kind, family, base), told in outcomes.items():
        if told.startswith("PEFT: ") and (base == "plain" or family not in NOT_LINEAR):
            reason = told.removeprefix("PEFT: ").strip("(")
            same = reasons.setdefault(
                (kind, re.sub(r"\d+", "N", reason)), {}
            )  # sizes of layers differ between families
            same.setdefault(base, (reason, []))[1].append(family)
    lines += ["| adapter | base | families | PEFT's error |", "|---|---|---|---|"]
    for (kind, _), bases in reasons.items():
        reason, families = next(iter(bases.values()))
        others = [family for family in FAMILIES if family not in families]
        shown = ", ".join(families) if len(families) < 6 else f"all but {', '.join(others)}" if others else "all"
        lines.append(f"| {kind} | {', '.join(bases)} | {shown} | `{reason}` |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    outcomes = {}
    for case in cases(options.only):
        try:
            outcomes[case] = outcome(*case, options.schedule)
        except Exception as error:
            outcomes[case] = f"wrong: {type(error).__name__}: {str(error).splitlines()[0][:150]}"
        print(f"{' '.join(case):36} {outcomes[case][:230]}", flush=True)
    if options.write and not options.only:
        PAGE.write_text(page(outcomes), encoding="utf-8")
    return int(any(told.startswith("wrong") for told in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
