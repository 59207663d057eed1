"""The config classes of other frameworks' releases, which say what they refuse of a file of ours.

Their packages stand in a folder of their own (`scripts/releases.py`), without what they depend on. Each release is
asked in a process of its own: two releases of one package cannot be imported side by side.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module, util
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from warm_ranks import WarmRanks

HOME = Path(os.environ.get("RELEASES_FOLDER", Path(sys.prefix, "releases")))


ASKS = "import real_configs; real_configs.answer({framework!r}, {folder!r})"
# What Megatron-LM imports of PyTorch takes seconds.
USED = {"megatron": ("torch.distributed.tensor", "torch._inductor.compile_fx"), "torchtitan": ()}


def refused_by(ranks: WarmRanks, package: str, framework: str, files: Sequence[dict[str, Any]]) -> list[str]:
    """Return what a release says to each file, as the one that reads it; empty where it takes it."""
    folder = HOME / package.replace("==", "-")
    if not folder.is_dir():
        if os.environ.get("CI") == "true":
            pytest.fail(f"{package} is not installed in {folder}: `python scripts/releases.py` installs it")
        pytest.skip(f"{package} is not installed in {folder}; `python scripts/releases.py` installs it")
    code = ASKS.format(framework=framework, folder=str(folder))
    ran = ranks.run(code, given=json.dumps(list(files)), used=USED[framework])
    assert ran.returncode == 0, ran.stderr[-2000:]
    said: list[str] = json.loads(ran.stdout.splitlines()[-1])
    assert len(said) == len(files) > 0
    return said


def answer(framework: str, folder: str) -> None:
    """Print what a release says to the files that stand in the input."""
    sys.path.insert(0, folder)
    ask = {"megatron": _megatron, "torchtitan": _torchtitan}[framework]
    print("\n" + json.dumps(ask(json.load(sys.stdin))))


def _megatron(files: Sequence[dict[str, Any]]) -> list[str]:
    """Return what Megatron-LM's config class says to arguments.

    Its launch script turns arguments into fields; what that does besides passing them on is written out below. Kernels
    of Transformer Engine are taken to be there in a version that is new enough.
    """
    module = import_module("megatron.core.transformer.transformer_config")
    module.is_te_min_version = lambda version: True  # type: ignore[attr-defined]
    rope: Any = import_module("megatron.core.models.common.embeddings.rope_utils")
    rope.fused_apply_rotary_pos_emb = rope.fused_apply_rotary_pos_emb_thd = object()
    layouts: Any = import_module("megatron.core.transformer.pipeline_parallel_layer_layout")
    layouts.torch = None  # older ones ask for their rank before they print
    layouts.print = lambda *words: None
    layouts.PipelineParallelLayerLayout.from_str = staticmethod(layouts.PipelineParallelLayerLayout)
    return [_said(lambda given=given: _megatron_config(module, given)) for given in files]


def _megatron_config(module: Any, given: dict[str, Any]) -> object:
    import torch.nn.functional as functional

    kind = module.MLATransformerConfig if "--multi-latent-attention" in given else module.TransformerConfig
    names = {field.name for field in fields(kind)}
    words = {flag.removeprefix("--").replace("-", "_"): value for flag, value in given.items() if flag[0] == "-"}
    values = {name: value for name, value in words.items() if name in names}
    lists = ("recompute_modules", "cp_comm_type")
    values |= {name: [values[name]] for name in lists if name in values and not isinstance(values[name], list)}
    biased, gated = "disable_bias_linear" not in words, "swiglu" in words
    tensor = words.get("tensor_model_parallel_size", 1)
    values |= {
        "fp8": words.get("fp8_format"),
        "fp8_recipe": words.get("fp8_recipe", "delayed"),
        "add_bias_linear": biased,
        "num_moe_experts": words.get("num_experts"),
        "gated_linear_unit": gated,
        "activation_func": functional.silu if gated else functional.gelu,
        "bias_activation_fusion": gated or (biased and "no_bias_gelu_fusion" not in words),
        "apply_rope_fusion": words.get("position_embedding_type") == "rope" and "no_rope_fusion" not in words,
        "virtual_pipeline_model_parallel_size": words.get("num_virtual_stages_per_pipeline_rank"),
        "pipeline_dtype": "bf16",
        "sequence_parallel": "sequence_parallel" in words and tensor > 1,
        "num_query_groups": words.get("num_query_groups", 1) if "group_query_attention" in words else None,
        "layernorm_epsilon": words.get("norm_epsilon", 1e-5),
        "layernorm_zero_centered_gamma": "apply_layernorm_1p" in words,
    }
    if "squared_relu" in words:
        values["activation_func"] = lambda x: functional.relu(x) ** 2
    if "moe_layer_freq" in words:
        values["moe_layer_freq"] = eval(str(words["moe_layer_freq"]), {"__builtins__": {}})
    if kind is module.MLATransformerConfig:  # the launch script has other defaults than the class
        values |= {"rotary_scaling_factor": 1.0, "mscale": 1.0, "q_lora_rank": words.get("q_lora_rank")}
    if isinstance(values.get("cp_comm_type"), list):
        values["cp_comm_type"] = values["cp_comm_type"][0]
    return kind(**{name: value for name, value in values.items() if name in names})


def _torchtitan(files: Sequence[dict[str, Any]]) -> list[str]:
    """Return what torchtitan's config class says to tables; its file stands alone but for a logger."""
    sys.modules["torchtitan"] = sys.modules["torchtitan.tools"] = ModuleType("torchtitan")
    sys.modules["torchtitan.tools.logging"] = logs = ModuleType("torchtitan.tools.logging")
    logs.logger = None  # type: ignore[attr-defined]
    folder = next(path for path in sys.path if Path(path).name.startswith("torchtitan-"))
    place = Path(folder, "torchtitan", "config", "job_config.py")
    spec = util.spec_from_file_location("job_config", place)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules["job_config"] = module
    spec.loader.exec_module(module)
    return [_said(lambda given=given: _filled(module.JobConfig, given)) for given in files]


def _filled(kind: Any, given: dict[str, Any]) -> object:
    """Return a dataclass with these values, as far as it has such fields with such types."""
    known = get_type_hints(kind)
    values = {}
    for name, value in given.items():
        if name not in known:
            raise TypeError(f"{kind.__name__} has no {name}")
        values[name] = _filled(known[name], value) if is_dataclass(known[name]) else _checked(known[name], value, name)
    return kind(**values)


def _checked(hint: Any, value: Any, name: str) -> Any:
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ValueError(f"{name} is {value!r}, not one of {get_args(hint)}")
    elif hint in (int, str, bool) and type(value) is not hint:
        raise TypeError(f"{name} is {value!r}, not {hint.__name__}")
    elif get_origin(hint) is list and not isinstance(value, list):
        raise TypeError(f"{name} is {value!r}, not a list")
    return value


def _said(make: Any) -> str:
    try:
        make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
