"""What a trainer on a pipeline refuses by name: other ways of training, other seams, losses that no rank can share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drumline.core.errors import DrumlineError, ModelError, UsageError
from extras import needed
from integrations.cases import Making
from integrations.models import small, texts
from refused import refused

transformers: Any = needed("transformers", extra="hf")
from drumline.integrations.refused import check_version  # noqa: E402
from drumline.integrations.transformers import Trainer  # noqa: E402

pytestmark = pytest.mark.torch
IN_PROCESS = {"num_ranks": 2, "transport": "in-process", "check_model": False}

ARGUMENTS: dict[str, Any] = {
    "deepspeed": {}, "fsdp": "full_shard", "fp16": True, "fp16_full_eval": True, "bf16_full_eval": True,
    "torch_compile": True, "auto_find_batch_size": True, "use_liger_kernel": True, "activation_offloading": True,
    "predict_with_generate": True, "neftune_noise_alpha": 5.0, "debug": "underflow_overflow",
    "enable_jit_checkpoint": True, "parallelism_config": {"pp": 2},
}  # fmt: skip


def maker(folder: Path, **settings: Any) -> Making:
    return Making(Trainer, folder, folder, {**IN_PROCESS, **settings})


@pytest.mark.parametrize("name", ARGUMENTS)
def test_another_way_of_training_is_refused_by_the_name_of_its_argument(name: str, tmp_path: Path) -> None:
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    setattr(args, name, ARGUMENTS[name] or "zero.json")
    with refused(UsageError, name, fix="leave it out|set |pass "):
        Trainer(small(1), args, train_dataset=texts(4), pipeline=IN_PROCESS)


@pytest.mark.parametrize("name", ["loss_fn", "loss_weight", "model", "num_microbatches", "precision"])
def test_settings_that_the_arguments_decide_are_refused(name: str, tmp_path: Path) -> None:
    with refused(UsageError, name, fix="leave it out"):
        maker(tmp_path, **{name: 1})(small(1))


@pytest.mark.parametrize("name", ["DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG"])
def test_what_accelerate_is_configured_to_divide_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with refused(UsageError, f"ACCELERATE_USE_{name} is set", fix="accelerate config"):
        Trainer(small(1), args, train_dataset=texts(4), pipeline=IN_PROCESS)


def test_a_precision_of_accelerate_launch_that_is_not_bf16_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with refused(UsageError, "mixed_precision is 'fp16'", fix="bf16"):
        maker(tmp_path)(small(1))


def test_adapting_the_number_of_microbatches_is_refused(tmp_path: Path) -> None:
    with refused(UsageError, "microbatches is 'batch'", expected="gradient_accumulation_steps"):
        maker(tmp_path, adapt={"microbatches": "batch"})(small(1))


def test_slices_are_refused(tmp_path: Path) -> None:
    with refused(UsageError, "slices is 4, on a trainer", fix="drumline train"):
        maker(tmp_path, slices=4)(small(1))


def test_a_checkpoint_of_state_that_lines_divide_is_refused(tmp_path: Path) -> None:
    with refused(UsageError, "zero divides", fix="save_only_model=True"):
        maker(tmp_path, zero=1)(small(1), save_strategy="steps")
    maker(tmp_path, zero=1)(small(1), save_strategy="steps", save_only_model=True)


def test_a_model_that_comes_later_or_has_no_memory_is_refused(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    with refused(UsageError, "model_init"):
        Trainer(None, args, model_init=small, pipeline=IN_PROCESS)
    with refused(UsageError, "meta"), torch.device("meta"):
        maker(tmp_path)(nn.Linear(1, 1))


@pytest.mark.parametrize("optim", ["galore_adamw", "lomo", "adamw_bnb_8bit"])
def test_an_optimizer_that_needs_the_whole_model_is_refused(
    optim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Foreign(torch.optim.SGD):
        pass

    Foreign.__module__ = "bitsandbytes.optim" if "bnb" in optim else "elsewhere"
    known: dict[str, Any] = {"galore_adamw": {"params": []}, "lomo": {"model": None}}
    settings = known.get(optim, {})
    trainer = maker(tmp_path)(small(1), optim=optim)
    monkeypatch.setattr(trainer, "get_optimizer_cls_and_kwargs", lambda *_: (Foreign, {"lr": 0.1, **settings}))
    with refused(UsageError, "optim is", fix="adamw_torch"):
        trainer.train()


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"schedule": "pipedream"}, "pipedream"), ({"schedule": "chimera"}, "chimera")],
)
def test_schedules_that_update_or_end_in_another_way_are_refused(
    settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with refused(DrumlineError, named):
        maker(tmp_path, **settings)(small()).train()


def test_an_optimizer_of_tensors_that_the_pipeline_does_not_update_is_refused(tmp_path: Path) -> None:
    model = small().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with refused(UsageError, "optimizers=", fix="optimizer_cls_and_kwargs"):
        maker(tmp_path, master_weights=True)(model, optimizers=(optimizer, None))


def calling(compute: Any) -> Any:
    def derived(base: Any) -> Any:
        return type("Own", (base,), {"compute_loss": compute})

    return derived


def twice(self: Any, model: Any, inputs: Any, **_: Any) -> Tensor:
    loss: Tensor = model(**inputs).loss + model(**inputs).loss
    return loss


def never(self: Any, model: Any, inputs: Any, **_: Any) -> Tensor:
    return torch.zeros(())


def a_part(self: Any, model: Any, inputs: Any, **_: Any) -> Tensor:
    loss: Tensor = model(**inputs).loss + model.lm_head(torch.zeros(1, 16)).sum()
    return loss


def weights(self: Any, model: Any, inputs: Any, **_: Any) -> Tensor:
    loss: Tensor = model(**inputs).loss + sum(param.norm() for param in model.parameters())
    return loss


def in_place(self: Any, model: Any, inputs: Any, **_: Any) -> Tensor:
    inputs["labels"].clamp_(min=0)
    loss: Tensor = model(**inputs).loss
    return loss


def counting(self: Any, model: Any, inputs: Any, **_: Any) -> Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    loss: Tensor = model(**inputs).loss
    return loss


def logging(self: Any, model: Any, inputs: Any, **_: Any) -> Tensor:
    loss: Tensor = model(**inputs).loss
    self.log({"mine": float(loss.detach())})
    return loss


def nan(self: Any, model: Any, inputs: Any, **_: Any) -> Tensor:
    loss: Tensor = model(**inputs).loss
    return loss * float("nan")


@pytest.mark.parametrize(
    ("compute", "named"),
    [
        (twice, "second time"), (never, "did not call"), (a_part, "calls a Linear"), (weights, r"parameters\(\)"),
        (in_place, "labels of its inputs in place"), (counting, r"self\.calls"), (logging, r"log\(\)"),
        (nan, "NaN"),
    ],
)  # fmt: skip
def test_a_loss_that_needs_more_than_one_call_of_the_model_is_refused(compute: Any, named: str, tmp_path: Path) -> None:
    trainer = maker(tmp_path)(small(), of=calling(compute))
    with refused(DrumlineError, named):
        trainer.train()


class Looks(transformers.TrainerCallback):
    """Reads the weights in the middle of training."""

    def on_step_end(self, *_: Any, model: Any = None, **__: Any) -> None:
        sum(float(param.norm()) for param in model.parameters())


def test_a_callback_that_reads_weights_of_other_ranks_is_refused(tmp_path: Path) -> None:
    with refused(ModelError, r"a callback uses parameters\(\)", fix=r"after train\(\)"):
        maker(tmp_path)(small(), callbacks=[Looks()]).train()


class OverAllRows(nn.Module):
    """A normalisation over all tokens of a microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x.flatten(0, 1))
        return normed.view_as(x)


def test_statistics_that_a_repeated_microbatch_would_change_are_refused(tmp_path: Path) -> None:
    model: Any = small()
    model.norm = OverAllRows()
    trainer = maker(tmp_path)(model, max_steps=-1, num_train_epochs=1, train_dataset=texts(2))
    with refused(UsageError, "1 microbatch, and", expected="4"):
        trainer.train()


def test_a_version_whose_trainer_has_moved_is_refused_with_a_sentence() -> None:
    moved = type("Trainer", (transformers.Trainer,), {"training_step": lambda self, model, inputs: None})
    check_version()
    with refused(UsageError, r"transformers .* has no Trainer.training_step", expected="5.22", fix="install"):
        check_version(moved)
