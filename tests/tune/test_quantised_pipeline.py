"""Pipelines of models with quantised bases: gradients of adapters, states, checkpoints, moves, memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import drumline as dl
from drumline.model.quantised.bases import Recipe, quantise
from drumline.model.quantised.packed import is_packed, num_bytes, parts_of
from drumline.pipeline.options import Options
from drumline.train.memory.forecast import forecast
from extras import needed
from matrices import ALL, FEW, mainly, matrix
from quantised_models import (
    BASES,
    MODELS,
    WIDTH,
    adapted,
    are_equal,
    batch,
    chain,
    difference,
    emptied,
    llama,
    looped,
    plain_llama,
    settings,
    stepped,
    values,
)
from some import some

pytestmark = pytest.mark.torch
SCHEDULES = ("1f1b", "zb-h1", "interleaved-1f1b", "dualpipe-v", "chimera")
ONE_PROCESS: dict[str, Any] = {"num_ranks": 2, "transport": "in-process"}


@matrix("base, schedule", BASES, SCHEDULES)
def test_adapters_get_the_gradients_of_a_plain_loop(base: str, schedule: str) -> None:
    model = chain(base)
    expected = looped(model, "chain")
    gradients = stepped(dl.Pipeline(model, schedule=schedule, **ONE_PROCESS, **settings("chain")), "chain")
    assert gradients.keys() == expected.keys()
    # Chimera adds the microbatches of its two copies of a stage in another order.
    assert difference(gradients, expected) <= (1e-6 if schedule == "chimera" else 0.0)


@pytest.mark.parametrize("base", BASES if ALL else BASES[::2] if FEW else BASES)
def test_a_model_of_peft_is_cut_and_keeps_its_names(base: str) -> None:
    model = llama(base)
    expected, names = looped(model, "llama"), list(model.state_dict())
    pipe = dl.Pipeline(model, balance="even", **ONE_PROCESS, **settings("llama"))
    assert difference(stepped(pipe, "llama"), expected) == 0.0
    assert list(pipe.state_dict()) == names
    assert sum(param.requires_grad for param in pipe.parameters()) == len(expected) == 18


@pytest.mark.features("saving")
@pytest.mark.parametrize("base", BASES)
def test_a_checkpoint_has_codes_and_scales(base: str, tmp_path: Path) -> None:
    model, other = chain(base), emptied(chain(base))
    expected = looped(model, "chain")
    dl.Pipeline(model, **ONE_PROCESS, **settings("chain")).save(tmp_path).wait()
    pipe = dl.Pipeline(other, **ONE_PROCESS, **settings("chain"))
    pipe.load(tmp_path)
    assert are_equal(model, other)
    assert difference(stepped(pipe, "chain"), expected) == 0.0
    assert are_equal(model, other)


@pytest.mark.parametrize("base", BASES)
def test_a_state_is_loaded_where_bitsandbytes_cannot_load_its_own(base: str) -> None:
    model, other = chain(base), emptied(chain(base))
    pipe = dl.Pipeline(other, **ONE_PROCESS, **settings("chain"))
    pipe.load_state_dict(model.state_dict())
    assert are_equal(model, other)


@pytest.mark.parametrize("base", BASES)
def test_codes_of_a_shared_layer_stay_one_object(base: str) -> None:
    model = chain(base)
    model[3].base = model[0].base  # of stages 0 and 1
    expected = looped(model, "chain")
    pipe = dl.Pipeline(model, balance=[2, 2], **ONE_PROCESS, **settings("chain"))
    assert difference(stepped(pipe, "chain"), expected) == 0.0


def loaded_by_transformers(folder: Path, bits: str) -> Any:
    transformers: Any = needed("transformers", "hf")
    config = {
        "nf4": transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        "llm-int8": transformers.BitsAndBytesConfig(load_in_8bit=True),
        "int8": transformers.TorchAoConfig(needed("torchao.quantization", "tune").Int8WeightOnlyConfig()),
    }[bits]
    how = {"quantization_config": config, "device_map": "cpu", "dtype": torch.float32}
    return adapted(transformers.AutoModelForCausalLM.from_pretrained(folder, **how)).train()


@pytest.mark.filterwarnings("ignore")  # of transformers and accelerate
@mainly("bits", "nf4", "llm-int8", "int8")
def test_models_that_transformers_quantised_train(bits: str, tmp_path: Path) -> None:
    plain_llama().save_pretrained(tmp_path)
    model = loaded_by_transformers(tmp_path, bits)
    assert sum(is_packed(param) for param in model.parameters()) == 21
    expected = looped(model, "llama")
    pipe = dl.Pipeline(model, balance="even", **ONE_PROCESS, **settings("llama"))
    assert difference(stepped(pipe, "llama"), expected) == 0.0


def test_a_forecast_counts_packed_bytes_of_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = quantise(plain_llama(), "nf4").requires_grad_(False)
    model.lm_head.requires_grad_(True)
    inputs, labels = batch("llama")
    options = Options(model, balance="even", **ONE_PROCESS, **settings("llama"))
    example = {"input_ids": inputs, "labels": labels}
    found = forecast(options, example, None, device=torch.device("cpu"), state_of=lambda name, tensor: 0)
    sizes = sum(num_bytes(tensor) for tensor in (*model.parameters(), *model.buffers()))
    assert sum(rank.weights for rank in found.ranks) == sizes
    assert all(param.is_meta for param in model.parameters())


class Float8(nn.Module):
    """Two layers, as torchao converts them to train in float8."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input with both layers' output added."""
        added: Tensor = self.down(torch.tanh(self.up(x)))
        return x + added


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_float8_training_has_the_bits_of_a_plain_loop(schedule: str) -> None:
    float8: Any = needed("torchao.float8", "tune")
    torch.manual_seed(0)
    model = nn.Sequential(*(Float8() for _ in range(4)))
    float8.convert_to_float8_training(model, config=float8.Float8LinearConfig(emulate=True))
    assert "Float8Linear" in type(model[0].up).__name__
    expected = looped(model, "chain")
    pipe = dl.Pipeline(model, schedule=schedule, **ONE_PROCESS, **settings("chain"))
    gradients = stepped(pipe, "chain")
    assert gradients.keys() == expected.keys()
    assert len(expected) == 16
    assert difference(gradients, expected) == 0.0


def of_stages(pipe: dl.Pipeline) -> int:
    """Return the bytes of this rank's parameters."""
    return sum(num_bytes(param) for param in pipe.parameters())


def resident(pipe: dl.Pipeline) -> int:
    """Return the bytes of all memory behind parameters of blocks that this process knows, here or elsewhere."""
    chained = pipe._site.engine.chain
    storages: dict[int, int] = {}
    for number in range(sum(chained.counts)):
        for param in chained.block(number).module.parameters():
            for part in parts_of(param).values():
                storages[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    return sum(storages.values())


def on_two_ranks(cases: list[tuple[str, str]], folder: str) -> list[dict[str, Any]]:
    """Step, move a layer, step, save and load, step; return what came of it, for every case."""
    torch.set_num_threads(1)
    found = []
    for kind, base in cases:
        model = MODELS[kind](base)
        expected, names = looped(model, kind), set(model.state_dict())
        pipe = dl.Pipeline(model, balance="even", timeout=200.0, **settings(kind))
        pipe.optimizer(torch.optim.SGD, lr=0.0)
        apart = [difference(stepped(pipe, kind), expected)]
        del model
        first, second = pipe._site.engine.chain.balance()
        before = of_stages(pipe)
        move = pipe.repartition(balance=[first - 1, second + 1])
        apart.append(difference(stepped(pipe, kind), expected))
        pipe.save(Path(folder) / kind / base).wait()
        pipe.load(Path(folder) / kind / base)
        apart.append(difference(stepped(pipe, kind), expected))
        state = set(pipe.state_dict())
        found.append(
            {
                "apart": apart,
                "names": state <= names,
                "state": state,
                "all": names,
                "moved": move.bytes_moved,
                "sizes": (before, of_stages(pipe)),
                "others": resident(pipe) - of_stages(pipe),
            }
        )
        pipe.close()
    return found


CASES = [("chain", base) for base in BASES] + [("llama", "nf4")] * (not FEW)
CASES += [("llama", base) for base in BASES if base != "nf4"] * ALL


@pytest.mark.features("moving", "saving")
def test_two_ranks_step_move_save_and_load(tmp_path: Path) -> None:
    ranks = dl.launch(on_two_ranks, CASES, str(tmp_path), num_ranks=2, timeout=280)
    for (kind, base), *each in zip(CASES, *ranks, strict=True):
        for found in each:
            assert max(found["apart"]) == 0.0, (kind, base)
            assert found["names"]
            assert found["others"] < 4096, "what other ranks hold has no memory here: an element for each part"
        assert each[0]["state"] | each[1]["state"] == each[0]["all"]
        (before, after), (theirs, grown) = each[0]["sizes"], each[1]["sizes"]
        assert before - after == grown - theirs > 0
        assert each[0]["moved"] >= before - after


def from_files(folder: str, base: str) -> tuple[float, list[str], int]:
    """Build on the meta device, read this rank's stages, step; return how many weights were quantised."""
    sizes: list[int] = []
    pack = Recipe.pack

    def counted(recipe: Recipe, weight: Tensor) -> nn.Parameter:
        sizes.append(weight.nbytes)
        return pack(recipe, weight)

    with torch.device("meta"):
        model = quantise(plain_llama(), base)
    options = settings("llama", weights=folder, balance="even", check_model=False, timeout=200.0)
    with mock.patch.object(Recipe, "pack", counted):
        pipe = dl.Pipeline(model, **options)
    held = [name for name, param in pipe.named_parameters() if is_packed(param)]
    tokens, _ = batch("llama")
    loss = pipe.eval_step(input_ids=tokens, labels=tokens).loss
    assert loss is not None
    pipe.close()
    return float(loss), held, len(sizes)


def test_each_rank_reads_and_quantises_its_own_stages(tmp_path: Path) -> None:
    torch.save(plain_llama().state_dict(), tmp_path / "pytorch_model.bin")
    model = quantise(plain_llama(), "nf4")
    tokens, _ = batch("llama")
    with torch.no_grad():
        expected = [float(model(input_ids=part, labels=part).loss) for part in tokens.chunk(4)]
    (first, held, count), (_, others, rest) = dl.launch(from_files, str(tmp_path), "nf4", num_ranks=2, timeout=280)
    assert first == pytest.approx(sum(expected) / 4, abs=1e-6)
    assert not set(held) & set(others)
    assert len(held) + len(others) == 21
    assert (count, rest) == (len(held), len(others)), "each rank quantises its own weights, and no others"


def lines(base: str) -> tuple[bytes, list[Tensor]]:
    """Build the same model by another seed on every line, and return its base and the gradients of a step."""
    model = chain(base, seed=10 + int(os.environ["RANK"]))
    with dl.Pipeline(model, mesh={"pp": 1, "dp": 2}, **settings("chain")) as pipe:
        gradients = stepped(pipe, "chain")
    frozen = [value for name, value in values(model).items() if ".base." in name]
    assert frozen
    return b"".join(value.contiguous().numpy().tobytes() for value in frozen), list(gradients.values())


def of_bases(bases: Sequence[str]) -> list[tuple[bytes, list[Tensor]]]:
    return [lines(base) for base in bases]


@pytest.mark.features("mesh")
def test_lines_begin_with_the_codes_and_scales_of_the_first() -> None:
    first, second = dl.launch(of_bases, BASES, num_ranks=2)
    for base, (ours, gradients), (theirs, others) in zip(BASES, first, second, strict=True):
        assert ours == theirs, base
        assert len(gradients) == len(others)
        assert all(torch.equal(grad, other) for grad, other in some(zip(gradients, others, strict=True)))
