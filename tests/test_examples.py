"""The programs in `examples/`: each runs as its docstring says."""

from __future__ import annotations

import difflib
import importlib.util
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from extras import needed

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.features("record", "saving")
def test_the_whole_is_shown_in_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["whole.py", str(tmp_path / "saved")])
    runpy.run_path(str(EXAMPLES / "whole.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    ranks, process = (line.split()[-6:] for line in lines if line.startswith("losses "))
    assert [float(loss) for loss in ranks] == pytest.approx([float(loss) for loss in process], abs=1e-4)
    assert "the last 3 steps again, from saved: the same bits" in lines
    assert [line[:6] for line in lines if line.startswith("rank ")] == ["rank 0", "rank 1"]
    assert list((tmp_path / "saved").glob("step-*/*"))


def example(name: str) -> Any:
    """Return an example as a module: its ranks start where the tests' own do, which takes less time than a program."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("base", ["nf4"])
def test_lora_on_two_ranks_ends_with_an_adapter_that_peft_loads(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peft, transformers = needed("peft", extra="tune"), needed("transformers", extra="hf")
    needed("bitsandbytes", extra="tune")
    finetune = example("finetune_lora")
    folder = finetune.small_llama(tmp_path / "llama")
    monkeypatch.setattr(sys, "argv", ["finetune_lora", str(folder), "--base", base, "--out", str(tmp_path / "adapter")])
    finetune.main()
    lines = capsys.readouterr().out.splitlines()
    first, second = (line.split("losses ")[1].split() for line in lines if line.startswith("rank "))
    assert first == second
    assert float(first[-1]) < float(first[0])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    loaded = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")
    weights = {name: param for name, param in loaded.named_parameters() if "lora_B" in name}
    assert len(weights) == 8
    assert all(param.abs().max() > 0 for param in weights.values())


def test_an_own_model_with_lora_trains_as_in_a_plain_loop_and_peft_loads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch, peft = needed("torch", extra="train"), needed("peft", extra="tune")
    finetune = example("finetune_own")
    monkeypatch.setattr(sys, "argv", ["finetune_own", str(tmp_path)])
    finetune.main()
    last = capsys.readouterr().out.splitlines()[-1]

    model, (x, target) = finetune.adapted(), finetune.batch()
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    for _ in range(finetune.STEPS):
        for rows, wanted in zip(x.chunk(finetune.MICROBATCHES), target.chunk(finetune.MICROBATCHES), strict=True):
            (torch.nn.functional.mse_loss(model(rows), wanted) / finetune.MICROBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    loaded = peft.PeftModel.from_pretrained(finetune.base(), tmp_path)
    assert torch.allclose(loaded(x), model(x), atol=1e-4)
    loss = torch.nn.functional.mse_loss(loaded(x), target).item()
    assert last.endswith(f"loss {loss:.4f}")
    assert loss < torch.nn.functional.mse_loss(finetune.base()(x), target).item() / 10


def test_a_flux_with_lora_trains(capsys: pytest.CaptureFixture[str]) -> None:
    needed("diffusers", extra="tunetest")
    example("finetune_flux").main()
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PyTorch, where there is no accelerator
def test_a_script_with_two_changed_lines_saves_the_adapter_of_the_script_before(tmp_path: Path) -> None:
    needed("trl", extra="trainers")
    files, peft = needed("safetensors.torch", extra="hf"), needed("peft", extra="tune")
    names = ("sft_before", "sft_after")
    bodies = [(EXAMPLES / f"{name}.py").read_text(encoding="utf-8").split('"""', 2)[2].split("\n") for name in names]
    changed = [line[0] for line in difflib.ndiff(bodies[0], bodies[1]) if line[0] in "+-" and line[2:].strip()]
    assert sorted(changed) == ["+", "+", "-"]
    saved = []
    for name in names:
        script = example(name)
        script.main(str(tmp_path / name))
        saved.append(files.load_file(tmp_path / name / "adapter_model.safetensors"))
    before, after = saved
    assert before.keys() == after.keys()
    assert all((after[name] - tensor).abs().max() < 1e-5 for name, tensor in before.items())
    assert peft.PeftModel.from_pretrained(script.small_llama(), tmp_path / "sft_after").peft_config


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_are_short_enough_to_read(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 200
