"""What `drumline train --dry-run` says of memory, against what the run then takes: LoRA on quantised bases, one device.

    python benchmarks/finetune_memory.py [--base nf4 int8] [--stages 2 4] [--layers 32] [--tokens 1024] [--json FILE]

The shape of Llama 3 8B with random weights. For every base and number of stages two commands run, each in a process of
its own: the dry run, and three steps of training, whose peak is what PyTorch's allocator has handed out at once. The
first step's comparison with the model itself is on, as it is for everybody, unless --no-check.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096,
    "intermediate_size": 14_336, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip
STEPS, MICROBATCHES = 3, 8


def written(folder: Path, layers: int, small: bool) -> tuple[Path, Path]:
    """Write the model's configuration and a text; return both paths."""
    less = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 896, "num_attention_heads": 8} if small else {}
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(SHAPE | less | {"num_hidden_layers": layers}))
    (folder / "text.txt").write_text("It takes two to tango, and eight to fill a pipeline. " * 4000)
    return folder / "model", folder / "text.txt"


def told(words: list[str]) -> dict[str, Any]:
    """Run `drumline train` and return what it prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "drumline", "train", *words, "--json"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"drumline train {' '.join(words)}\n{done.stderr[-3000:]}\n{done.stdout[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measured(base: str, stages: int, options: argparse.Namespace, model: Path, text: Path, out: Path) -> dict[str, Any]:
    """Return a row: forecast and peak of one case."""
    words = ["--model", str(model), "--data", str(text), "--adapter", "lora", "--adapter-rank", "16", "--base", base]
    words += ["--ranks", "1", "--stages-per-rank", str(stages), "--schedule", options.schedule, "-m", str(MICROBATCHES)]
    words += ["--batch", str(MICROBATCHES), "--sequence", str(options.tokens), "--precision", "bf16"]
    words += ["--steps", str(STEPS), "--out", str(out), "--recompute", options.recompute]
    if options.no_check:
        words += ["--set", "pipeline.check_model=false"]
    forecast = told([*words, "--dry-run"])["rank_bytes"][0]
    peak = told(words)["peak_bytes"][0]
    row = {"base": base, "stages": stages, "forecast": forecast, "peak_bytes": peak, "ratio": peak / forecast["total"]}
    parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in forecast.items() if name != "total")
    print(
        f"{base:5} {stages} stages: forecast {forecast['total'] / 2**30:.2f} GiB ({parts}), "
        f"peak {peak / 2**30:.2f} GiB, x{row['ratio']:.3f}",
        flush=True,
    )
    return row


def main() -> None:
    """Compare every case that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", nargs="+", default=["nf4", "int8"])
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--schedule", default="interleaved-1f1b")
    parser.add_argument("--recompute", default="none", choices=["none", "full"])
    parser.add_argument("--small", action="store_true", help="a small shape, to try this script")
    parser.add_argument("--no-check", action="store_true", help="without the first step's comparison")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        model, text = written(Path(name), options.layers, options.small)
        for base in options.base:
            for stages in options.stages:
                out = Path(name) / f"{base}-{stages}"
                rows.append(measured(base, stages, options, model, text, out))
    if options.json:
        options.json.write_text(json.dumps({"layers": options.layers, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
