"""Scripts for a trainer, each run in one process by transformers alone, and on a pipeline of several ranks.

A script gets `make(model, **arguments)`, which makes the trainer: there is nothing else in which the two differ.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from extras import needed
from hf_models import tiny
from integrations.models import SmallForCausalLM, llama, masking, small, small_with_adapters, texts, with_adapters
from matrices import ALL

transformers: Any = needed("transformers", extra="hf")
Outcome = dict[str, Any]


@dataclass
class Making:
    """Makes trainers of one kind; `others` is the folder in which transformers alone has run the same scripts."""

    kind: type
    folder: Path
    others: Path
    pipeline: dict[str, Any] | None = None

    def __call__(self, model: nn.Module, *, of: Callable[[type], type] | None = None, **given: Any) -> Any:
        """Return a trainer of a class that is derived from this kind, with arguments for it and for its settings."""
        base: Any = self.kind if of is None else of(self.kind)
        known = ("data_collator", "callbacks", "compute_loss_func", "compute_metrics", "optimizers", "train_dataset",
                 "eval_dataset", "preprocess_logits_for_metrics")  # fmt: skip
        own = {name: given.pop(name) for name in known if name in given}
        defaults = {
            "output_dir": str(self.folder / "out"), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4,
            "max_steps": 3, "learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
            "use_cpu": True, "disable_tqdm": True, "seed": 3,
        }  # fmt: skip
        arguments = transformers.TrainingArguments(**{**defaults, **given})
        data = {"train_dataset": texts(44), "eval_dataset": texts(9, seed=5)}
        more = {} if self.pipeline is None else {"pipeline": self.pipeline}
        trainer = base(model, arguments, **{**data, **own, **more})
        trainer.remove_callback(transformers.PrinterCallback)
        return trainer


def outcome(trainer: Any, **more: Any) -> Outcome:
    """Return what was logged, the weights, and more."""
    kept = ("loss", "grad_norm", "learning_rate", "epoch", "step", "train_loss", "num_input_tokens_seen", "total_flos")
    logs = [
        {name: value for name, value in entry.items() if name in kept or is_number(name)}
        for entry in trainer.state.log_history
    ]
    weights = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    return {"log": logs, "weights": weights, **more}


def is_number(name: str) -> bool:
    """Whether an evaluation's number depends on the model, and not on time."""
    return name.startswith("eval_") and not name.endswith(("_runtime", "_per_second", "_time"))


def plainly(make: Making) -> Outcome:
    """Labels that count unevenly, decay of some weights, a schedule of the learning rate, clipping; trained twice."""
    trainer = make(llama(), weight_decay=0.1, lr_scheduler_type="cosine", warmup_steps=1, max_grad_norm=0.5)
    trainer.train()
    first = outcome(trainer)
    trainer.train()
    return outcome(trainer, first=first, groups=[group["weight_decay"] for group in trainer.optimizer.param_groups])


def saved(make: Making, model: Callable[[], nn.Module] = small) -> Outcome:
    """A run that is saved, and resumed from its own checkpoint and from the other kind's."""
    given = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "data_collator": collator(model)}
    trainer = make(model(), **given)
    trainer.train()
    whole = outcome(trainer)
    resumed = {}
    for name, folder in {"own": make.folder, "other": make.others}.items():
        checkpoint = folder / "out" / "checkpoint-2"
        if checkpoint.exists():
            resumed[name] = resume(make, model, checkpoint, output_dir=str(make.folder / name), **given)
    return {**whole, "resumed": resumed}


def resume(make: Making, model: Callable[[], nn.Module], checkpoint: Path, **given: Any) -> Outcome:
    trainer = make(model(), **{"max_steps": 4, "data_collator": collator(model), **given})
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return outcome(trainer)


def collator(model: Callable[[], nn.Module]) -> Any:
    """Return what collates batches: for one of the models, at random."""
    return masking if model is small else None


def smoothed(make: Making) -> Outcome:
    """Label smoothing, tied weights, groups of equal lengths, counted tokens, no clipping, no incomplete batches."""
    trainer = make(
        tiny("GPT2LMHeadModel", n_layer=2), label_smoothing_factor=0.1, train_sampling_strategy="group_by_length",
        max_grad_norm=0, include_num_input_tokens_seen=True, optim="sgd", train_dataset=texts(27), max_steps=5,
        dataloader_drop_last=True,
    )  # fmt: skip
    trainer.train()
    return outcome(trainer)


def own_loss(base: Any) -> Any:
    class OwnLoss(base):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            labels = inputs.pop("labels")
            labels = labels.masked_fill(torch.rand(labels.shape) < 0.3, -100)
            outputs = model(**inputs)
            loss = 2 * cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
            return (loss, outputs) if return_outputs else loss

        loss_is_scaled_for_ga = False

    return OwnLoss


def overridden(make: Making) -> Outcome:
    """A compute_loss of one's own, which draws random numbers; epochs whose last update has fewer microbatches."""
    trainer = make(small(), of=own_loss, max_steps=-1, num_train_epochs=2, train_dataset=texts(21))
    trainer.train()
    return outcome(trainer)


def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    loss = cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    mean: Tensor = loss / num_items_in_batch
    return mean


class Endless(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    """Rows without an end, and without a length."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            yield from texts(10)


def streamed(make: Making) -> Outcome:
    """A loss function, data without a length, an optimizer and a schedule of one's own."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    trainer = make(model, compute_loss_func=summed, train_dataset=Endless(), optimizers=(optimizer, schedule))
    trainer.train()
    return outcome(trainer)


def accuracy(prediction: Any) -> dict[str, float]:
    chosen = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    return {
        "accuracy": float(chosen.mean()),
        "spread": float(prediction.predictions.std()),
        "first": float(prediction.inputs[0, 0]),
        "worst": float(prediction.losses.max()),
        "drawn": float(torch.rand(())),
    }


def evaluated(make: Making) -> Outcome:
    """Metrics before, during and after training, several sets of data, predictions; then training goes on."""
    trainer = make(
        small(), compute_metrics=accuracy, eval_strategy="steps", eval_steps=2, eval_on_start=True,
        per_device_eval_batch_size=2, eval_accumulation_steps=2, include_for_metrics=["inputs", "loss"],
        eval_dataset={"first": texts(9, seed=5), "second": texts(4, seed=6, length=11)},
        train_sampling_strategy="group_by_length",
    )  # fmt: skip
    before = trainer.evaluate(texts(3))
    trainer.train()
    predicted = trainer.predict(texts(5, seed=7))
    unlabelled = trainer.predict([{"input_ids": row["input_ids"]} for row in texts(3)])
    return outcome(
        trainer,
        before=numbers(before),
        unlabelled=torch.tensor(unlabelled.predictions),
        predictions=torch.tensor(predicted.predictions),
        labels=torch.tensor(predicted.label_ids),
        metrics={name: value for name, value in predicted.metrics.items() if name in ("test_loss", "test_accuracy")},
    )


def numbers(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if is_number(name)}


def stopped(make: Making) -> Outcome:
    """Early stopping, the best weights at the end, a limit of checkpoints, a rate that falls on a plateau."""
    trainer = make(
        small(), max_steps=8, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        save_total_limit=2, load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True,
        lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0}, learning_rate=0.1,
        callbacks=[transformers.EarlyStoppingCallback(early_stopping_patience=2)],
    )  # fmt: skip
    trainer.train()
    after = numbers(trainer.evaluate())
    trainer.save_model(str(make.folder / "best"))
    best = str(trainer.state.best_model_checkpoint).rpartition("/")[2]
    left = sorted(path.name for path in (make.folder / "out").glob("checkpoint-*"))
    return outcome(trainer, best=best, left=left, after=after, read=read(make.folder / "best"))


def read(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a saved model, as transformers reads it."""
    model = SmallForCausalLM.from_pretrained(folder)
    return {name: value.clone() for name, value in model.state_dict().items()}


def adapted(make: Making) -> Outcome:
    """Adapters on a frozen model, recomputed blocks, processes that load data, one that stays for evaluations."""
    trainer = make(
        with_adapters(), gradient_checkpointing=True, dataloader_num_workers=1, data_collator=masking,
        dataloader_persistent_workers=True, optim="adafactor",
    )  # fmt: skip
    trainer.train()
    return outcome(trainer, after=numbers(trainer.evaluate()))


class Notes(transformers.TrainerCallback):
    """Notes which events come, and changes the logs and the course of the run."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.events.append("begin")

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self.events.append("substep")

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.events.append("update")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_evaluate = state.global_step == 1
        control.should_training_stop = state.global_step == 2


def own_predictions(base: Any) -> Any:
    class OwnPredictions(base):
        def prediction_step(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
            return super().prediction_step(model, {"input_ids": inputs["labels"].clamp(min=0)}, *args, **named)

    return OwnPredictions


def called_back(make: Making) -> Outcome:
    """Callbacks, bf16, logits before metrics, batches of metrics."""
    notes = Notes()
    sums: list[float] = []

    def metrics(prediction: Any, compute_result: bool) -> dict[str, float]:
        sums.append(float(prediction.predictions.sum()))
        return {"sum": sum(sums), "batches": len(sums)} if compute_result else {}

    trainer = make(
        small(), callbacks=[notes], compute_metrics=metrics, batch_eval_metrics=True, per_device_eval_batch_size=2,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1), eval_do_concat_batches=False,
    )  # fmt: skip
    trainer.train()
    other = make(small(), of=own_predictions).predict(texts(3))
    return outcome(trainer, events=notes.events, other=torch.tensor(other.predictions))


def lines(make: Making) -> Outcome:
    """Two replicas, each of which takes half of the microbatches of an update; trained, evaluated and resumed."""
    given: dict[str, Any] = {
        "train_sampling_strategy": "sequential", "train_dataset": texts(48), "save_strategy": "steps", "save_steps": 2,
        "max_steps": 4, "weight_decay": 0.1, "include_num_input_tokens_seen": True,
    }  # fmt: skip
    if make.pipeline is not None:
        make = replace(make, pipeline={**make.pipeline, "mesh": {"dp": 2}})
        given["gradient_accumulation_steps"] = 2
    trainer = make(small(), **given)
    trainer.train()
    after = numbers(trainer.evaluate())
    again = make(small(), output_dir=str(make.folder / "again"), **given)
    again.train(resume_from_checkpoint=str(make.folder / "out" / "checkpoint-2"))
    first = outcome(trainer, after=after, again=outcome(again)["weights"], device=str(trainer.args.device))
    for entry in first["log"]:
        entry.pop("total_flos", None)  # a line counts its own
    return first


CASES: dict[str, Callable[[Making], Outcome]] = {
    "plainly": plainly,
    "saved": saved,
    "saved adapters": partial(saved, model=small_with_adapters),
    "smoothed": smoothed,
    "overridden": overridden,
    "streamed": streamed,
    "evaluated": evaluated,
    "stopped": stopped,
    "adapted": adapted,
    "called back": called_back,
}
if find_spec("drumline.features.mesh"):
    CASES["lines"] = lines
# What `make matrices` runs in addition: parts of these scripts are in the others as well.
LATER = ("streamed", "stopped", "called back")


def trainer_of(kind: str) -> Any:
    """Return the trainer's class: transformers' own, or that on a pipeline."""
    if kind == "plain":
        return transformers.Trainer
    from drumline.integrations.transformers import Trainer

    return Trainer


def all_cases(kind: str, folder: Path, others: Path, pipeline: dict[str, Any] | None = None) -> dict[str, Outcome]:
    """Run every script in a folder of its own; the first of them checks the pipeline as well."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if pipeline is not None:
        gc.freeze()  # every trainer collects garbage, which takes long among imported modules
    outcomes = {}
    for name, case in CASES.items():
        if name in LATER and not ALL:
            continue
        schedule = "zb-h1" if name == "overridden" else "1f1b"
        settings = None if pipeline is None else {"schedule": schedule, "check_model": name == "plainly", **pipeline}
        outcomes[name] = case(Making(trainer_of(kind), folder / name, others / name, settings))
    return outcomes
