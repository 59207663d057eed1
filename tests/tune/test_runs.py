"""`drumline train` with an adapter: updates as of a plain loop, checkpoints that PEFT loads, merging, resuming."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file

from drumline.cli.main import main
from drumline.train.loop.run import run_training
from drumline.train.tune.merge import merge
from matrices import mainly
from some import some
from tune.llama import chats as chats_of
from tune.llama import peft, transformers
from tune.runs import loaded, newest, plain_loop, settings_of

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

TOKENS = torch.arange(3, 15).reshape(2, 6)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chats_of(tmp_path_factory.mktemp("data") / "chats.jsonl")


METHODS: list[tuple[str, dict[str, Any]]] = [
    ("lora", {"adapter__modules_to_save": ["lm_head"], "adapter__targets": ["q_proj", "down_proj"]}),
    ("lora", {"adapter__dora": True, "adapter__rslora": True}),
    ("ia3", {"adapter__rank": 8}),
    ("loha", {"adapter__alpha": 3.0}),
    ("lokr", {}),
    ("lora", {"adapter__base": "bf16"}),
    ("lora", {"adapter__base": "int8"}),
    ("lora", {"adapter__base": "nf4"}),
]


@mainly(("method", "keys"), METHODS[0], *METHODS[1:])
def test_a_run_updates_an_adapter_as_a_plain_loop_does(
    method: str, keys: dict[str, Any], llama: Path, chats: Path, tmp_path: Path
) -> None:
    settings = settings_of(llama, chats, tmp_path / "run", adapter__method=method, **keys)
    assert (settings.data.kind, settings.lengths.how) == ("instructions", "packed")
    run_training(settings, tell=lambda _: None)
    found, expected = load_file(newest(tmp_path / "run") / "adapter_model.safetensors"), plain_loop(settings)
    assert found.keys() == expected.keys()
    start = plain_loop(replace(settings, run=replace(settings.run, steps=0)))
    assert any(not torch.equal(start[name], tensor) for name, tensor in some(found.items())), "something was trained"
    for name, tensor in some(found.items()):
        assert torch.allclose(tensor, expected[name], rtol=0.0, atol=1e-6), name


def test_a_checkpoint_is_an_adapter_of_peft_and_can_be_merged(llama: Path, chats: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    keys: dict[str, Any] = {"adapter__modules_to_save": ["lm_head"], "optimizer__lr": 5.0}
    settings = settings_of(llama, chats, run, **keys)
    run_training(settings, tell=lambda _: None)
    checkpoint = newest(run)
    stored = {name for file in checkpoint.glob("model-*.safetensors") for name in load_file(file)}
    assert stored
    assert all("lora_" in name or "modules_to_save" in name for name in some(stored)), "the base is not saved"
    model = loaded(llama, checkpoint)
    base = transformers.AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        logits = model(input_ids=TOKENS).logits
        assert float((logits - base(input_ids=TOKENS).logits).abs().max()) > 1e-3, "the adapter does something"
        if Version(transformers.__version__) >= Version("5.22"):  # 5.17 leaves out what `modules_to_save` trained
            named = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
            assert torch.equal(named(input_ids=TOKENS).logits, logits), "transformers finds the base by itself"
        assert transformers.AutoTokenizer.from_pretrained(checkpoint).chat_template
        merged = transformers.AutoModelForCausalLM.from_pretrained(merge(settings, checkpoint, tmp_path / "merged"))
        theirs = model.merge_and_unload().state_dict()
        for name, tensor in some(merged.state_dict().items()):
            assert torch.allclose(tensor, theirs[name], rtol=0.0, atol=1e-6), name
        assert torch.allclose(merged(input_ids=TOKENS).logits, logits, rtol=0.0, atol=1e-5)


def test_a_run_that_continues_ends_where_one_ends_that_never_stopped(llama: Path, chats: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"optimizer__kind": "AdamW", "adapter__dropout": 0.1, "adapter__targets": ["q_proj"]}
    whole = settings_of(llama, chats, tmp_path / "whole", run__steps=4, checkpoint__every=2, **keys)
    straight = run_training(whole, tell=lambda _: None)
    half = str(tmp_path / "whole" / "checkpoints" / "step-00000002")
    rest = settings_of(llama, chats, tmp_path / "rest", run__steps=4, checkpoint__resume=half, **keys)
    resumed = run_training(rest, tell=lambda _: None)
    assert resumed.first_step == 2
    assert resumed.losses == straight.losses[2:]
    for file in ("adapter_model.safetensors", "training-00001-of-00001.safetensors"):
        found, expected = load_file(newest(tmp_path / "rest") / file), load_file(newest(tmp_path / "whole") / file)
        assert found.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in some(found.items())), file


def test_an_adapter_of_peft_is_trained_on(llama: Path, chats: Path, tmp_path: Path) -> None:
    base = transformers.AutoModelForCausalLM.from_pretrained(llama)
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["v_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(1)
    model = peft.get_peft_model(base, config)
    for param in model.parameters():
        if param.requires_grad:
            torch.nn.init.normal_(param, std=0.1)
    model.save_pretrained(tmp_path / "first")
    keys: dict[str, Any] = {"adapter__method": "", "adapter__rank": 8, "adapter__start": str(tmp_path / "first")}
    settings = settings_of(llama, chats, tmp_path / "run", optimizer__lr=0.0, **keys)
    run_training(settings, tell=lambda _: None)
    found = load_file(newest(tmp_path / "run") / "adapter_model.safetensors")
    before = load_file(tmp_path / "first" / "adapter_model.safetensors")
    assert found.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in some(found.items())), (
        "at a rate of 0 nothing changes"
    )


def test_the_command_of_the_guide_trains_evaluates_and_merges(
    llama: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = ["--model", str(llama), "--adapter", "lora", "--adapter-rank", "4", "--base", "nf4", "--data", str(chats)]
    words += ["--steps", "2", "--batch", "4", "-m", "4", "--sequence", "32", "--out", str(run), "--merge"]
    words += ["--set", "data.validation=0.3", "--set", "pipeline.transport=in-process", "--evaluate-every", "2"]
    assert main(["train", *words, "--set", "pipeline.check_model=false", "--device", "cpu"]) == 0
    told = "".join(capsys.readouterr().out.split())
    assert "held-outloss" in told
    assert f"Themodelwiththeadaptermergedintoitisin{run}/merged." in told
    merged = transformers.AutoModelForCausalLM.from_pretrained(run / "merged")
    with torch.no_grad():
        expected = loaded(llama, newest(run))(input_ids=TOKENS).logits
        assert torch.allclose(merged(input_ids=TOKENS).logits, expected, rtol=0.0, atol=1e-5)
