"""Two ranks with an adapter: each reads its own stages of the base alone, and both write one adapter of PEFT's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import drumline as dl
from drumline.model.weights.files import StoredTensor, Weights
from drumline.train.loop.run import run_training
from matrices import ALL
from some import some
from tune.llama import chats as chats_of
from tune.runs import loaded, newest, plain_loop, settings_of

BASES = ("", "nf4") if ALL else ("nf4",)


def keys_of(base: str) -> dict[str, Any]:
    return {"adapter__base": base, "pipeline__transport": "auto", "pipeline__device": "cpu", "optimizer__lr": 1.0}


def trained(llama: str, chats: str, out: str) -> tuple[dict[str, list[str]], dict[str, dict[str, Tensor]]]:
    """Train with every base; return the tensors' names that this rank has read from files, and plain loops' adapters.

    A plain loop runs in a process like the ranks': bitsandbytes packs alike there, whatever it found in the tests' own.
    """
    told, plain = {}, {}
    for base in BASES:
        read: list[str] = []
        into, whole = StoredTensor.into, StoredTensor.read

        def note_into(stored: StoredTensor, target: Tensor, read: list[str] = read, into: Any = into) -> None:
            read.append(stored.name)
            into(stored, target)

        def note_read(stored: StoredTensor, read: list[str] = read, whole: Any = whole) -> Any:
            read.append(stored.name)
            return whole(stored)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StoredTensor, "into", note_into)
            patch.setattr(StoredTensor, "read", note_read)
            settings = settings_of(Path(llama), Path(chats), Path(out) / (base or "plain"), **keys_of(base))
            run_training(settings, tell=lambda _: None)
        told[base] = read
        plain[base] = plain_loop(settings)
    return told, plain


def test_each_rank_reads_its_own_stages_and_both_write_one_adapter(llama: Path, tmp_path: Path) -> None:
    chats = chats_of(tmp_path / "chats.jsonl")
    outcomes = dl.launch(trained, str(llama), str(chats), str(tmp_path), num_ranks=2)
    ranks, (plain, _) = zip(*outcomes, strict=True)
    names = set(Weights(llama).tensors)
    for base in BASES:
        own = [set(rank[base]) & names for rank in ranks]
        assert own[0] | own[1] == names
        assert not own[0] & own[1], "nothing is read twice"
        assert len(own[0]) < 0.7 * len(names)
        assert len(own[1]) < 0.7 * len(names)
        out = tmp_path / (base or "plain")
        found = load_file(newest(out) / "adapter_model.safetensors")
        expected = plain[base]
        assert found.keys() == expected.keys()
        for name, tensor in some(found.items()):
            assert torch.allclose(tensor, expected[name], rtol=0.0, atol=1e-5), name
        parts = [load_file(file) for file in sorted(newest(out).glob("model-*.safetensors"))]
        assert [bool(part) for part in parts] == [True, True]
        tokens = torch.arange(3, 9)[None]
        with torch.no_grad():
            assert loaded(llama, newest(out))(input_ids=tokens).logits.isfinite().all()
