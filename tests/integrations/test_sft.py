"""`SFTTrainer` on a pipeline: losses, norms, metrics and weights are those of TRL's own in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.core.errors import DrumlineError
from extras import needed
from integrations.trl_runs import IN_ONE_PROCESS, MARKS, assert_runs_alike, data, llama, lora, trainer
from matrices import left
from refused import refused

transformers: Any = needed("transformers", extra="hf")
peft: Any = needed("peft", extra="tune")
trl: Any = needed("trl", extra="trainers")
SFTTrainer: Any = needed("drumline.integrations.trl", extra="trainers").SFTTrainer

pytestmark = MARKS


def spread(prediction: Any) -> dict[str, float]:
    kept = prediction.predictions[prediction.label_ids != -100]
    return {"mean": float(kept.mean()), "square": float((kept**2).mean())}


def of_logits(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    loss = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].mT, labels[:, 1:], reduction="sum")
    return loss / (num_items_in_batch or (labels[:, 1:] != -100).sum())


def prompts() -> Any:
    return peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")


RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "evaluations and a short last update": (
        "texts",
        {"max_steps": -1, "num_train_epochs": 1, "eval_strategy": "steps", "eval_steps": 2},
        {"compute_metrics": lambda: spread},
    ),
    "chats": ("chats", {"assistant_only_loss": True}, {"peft_config": lora}),
    "completions": ("completions", {"completion_only_loss": True}, {"peft_config": prompts}),
    "packed": ("texts", {"packing": True, "max_length": 12, "per_device_train_batch_size": 1}, {}),
    "cut": ("texts", {"packing": True, "packing_strategy": "wrapped", "max_length": 8, "loss_type": "dft"}, {}),
    "smoothed labels": ("texts", {"label_smoothing_factor": 0.1}, {}),
    "an own loss": ("texts", {}, {"compute_loss_func": lambda: of_logits}),
}
LATER = ("cut", "smoothed labels")


@pytest.mark.parametrize("name", [*(name for name in RUNS if name not in LATER), *left(*LATER)])
def test_a_run_is_that_of_one_process(name: str, tmp_path: Path) -> None:
    rows, changes, makers = RUNS[name]
    plain, own = assert_runs_alike((trl.SFTTrainer, SFTTrainer), tmp_path, rows, changes, makers)
    if "eval_strategy" in changes:
        predicted, wanted = own.predict(own.eval_dataset), plain.predict(plain.eval_dataset)
        assert abs(predicted.predictions - wanted.predictions).max() < 1e-5
        assert (predicted.label_ids == wanted.label_ids).all()


COMPILED = torch.compile(torch.nn.Linear(1, 1), backend="eager")  # which does not import the compiler


@pytest.mark.parametrize(
    ("changes", "named", "message"),
    [
        ({"activation_offloading": True}, {}, "activation_offloading is True"),
        ({"neftune_noise_alpha": 5.0}, {}, "neftune_noise_alpha is 5.0"),
        ({"router_aux_loss_coef": 0.1}, {"model": "experts"}, "router_aux_loss_coef is set"),
        ({}, {"pipeline": {"schedul": "1f1b"}}, "the setting 'schedul'"),
        ({}, {"pipeline": {"loss_fn": print}}, "pipeline has the setting loss_fn"),
        ({}, {"pipeline": "1f1b"}, "pipeline is '1f1b'"),
        ({}, {"model": torch.nn.DataParallel(torch.nn.Linear(1, 1))}, "the model is wrapped: a DataParallel"),
        ({}, {"model": COMPILED}, "the model is wrapped: a OptimizedModule"),
    ],
)
def test_what_does_not_go_on_a_pipeline_is_refused_by_name(
    changes: dict[str, Any], named: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if named.get("model") == "experts":
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.MixtralConfig(vocab_size=24, num_key_value_heads=2, num_local_experts=2, **sizes)
        named = {"model": transformers.MixtralForCausalLM(config)}
    with refused(DrumlineError, message):
        trainer(SFTTrainer, tmp_path, data("texts", 8), changes, **{"pipeline": IN_ONE_PROCESS, **named}).train()


def test_a_model_whose_forward_is_replaced_is_refused(tmp_path: Path) -> None:
    model = llama()
    forward = model.forward
    model.forward = lambda *args, **named: forward(*args, **named)
    with refused(DrumlineError, "the forward of LlamaForCausalLM is replaced in the model"):
        trainer(SFTTrainer, tmp_path, data("texts", 8), {}, pipeline=IN_ONE_PROCESS, model=model)


def test_a_loss_that_calls_the_model_on_other_rows_is_refused(tmp_path: Path) -> None:
    def twice(self: Any, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
        loss = SFTTrainer.compute_loss(self, model, dict(inputs), *args, **named)
        return loss + model(input_ids=inputs["input_ids"].flip(1)).logits.mean()

    with refused(DrumlineError, "calls the model a second time with other arguments"):
        trainer(
            type("Twice", (SFTTrainer,), {"compute_loss": twice}),
            tmp_path,
            data("texts", 8),
            {},
            pipeline=IN_ONE_PROCESS,
        ).train()
