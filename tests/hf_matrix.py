"""Every family of the zoo under four schedules against the plain model on the whole batch: right, refused, or wrong.

`python tests/hf_matrix.py --write` runs them all, in one process and on two with different hash seeds, and writes the
table of docs/models-tested.md. `--thin` gives every model one schedule for each loss, other ones on two processes;
`--rank` is one of the two processes.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import drumline as dl
from drumline.core.errors import DrumlineError
from hf_zoo import FAMILIES, Batch, made, transformers

SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v")
ROWS, MICROBATCHES = 8, 4
LABELS = ("labels", "mc_labels", "start_positions", "end_positions", "future_values", "return_loss")
PAGE = Path(__file__).parents[1] / "docs" / "models-tested.md"
Gradients = dict[str, Tensor | None]
Outcome = dict[str, str]  # by "family own schedule": right, refused: why, or wrong: by how much


def numbers_in(output: Any) -> Tensor:
    """Return what a loss_fn takes of a model's output: what it says of pictures, or the first numbers with rows."""
    pictures: Tensor | None = getattr(output, "image_embeds", None)
    if pictures is not None:
        return pictures
    found = [tensor for tensor in output.values() if isinstance(tensor, Tensor)]
    return next(tensor for tensor in found if tensor.is_floating_point() and tensor.dim() > 1)


def squared(output: Any, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(numbers_in(output), target)


def plain_loss(model: Any, batch: Batch, target: Tensor | None) -> Tensor:
    """Return the plain model's loss on the whole batch; what experts add for balance is of each microbatch."""
    output = model(**batch)
    if target is not None:
        return squared(output, target)
    loss: Tensor = output.loss
    if getattr(output, "aux_loss", None) is not None:
        weight = model.router_aux_loss_coef / MICROBATCHES
        parts = [
            {name: value.tensor_split(MICROBATCHES)[at] for name, value in batch.items()} for at in range(MICROBATCHES)
        ]
        loss = (
            loss - model.router_aux_loss_coef * output.aux_loss + weight * sum(model(**part).aux_loss for part in parts)
        )
    return loss


def plain(model: nn.Module, batch: Batch, target: Tensor | None) -> tuple[float, Gradients]:
    """Return loss and gradients of the model itself."""
    loss = plain_loss(model, batch, target)
    torch.autograd.backward(loss)
    return float(loss.detach()), {name: param.grad for name, param in model.named_parameters()}


def material(name: str, own: bool) -> tuple[nn.Module, Batch, Tensor | None]:
    """Return a family's model, what step gets, and the target of a loss_fn."""
    family = FAMILIES[name]
    model = made(name)
    batch = family.batch(ROWS) | dict(family.extra)
    if own:
        return model, batch, None
    kept = {key: value for key, value in batch.items() if key not in LABELS}
    config: Any = model.config
    if config.is_encoder_decoder:
        kept["decoder_input_ids"] = batch["labels"].clamp(min=3)
    with torch.no_grad():
        shape = numbers_in(model(**kept)).shape
    return model, kept, torch.randn(shape, generator=torch.Generator().manual_seed(9))


def apart(mine: Mapping[str, Tensor | None], wanted: Gradients) -> tuple[float, str]:
    """Return the largest difference of a gradient, by its norm or by a little of the whole's, and where it is."""
    whole = float(torch.stack([tensor.norm() for tensor in wanted.values() if tensor is not None]).norm())
    worst, where = 0.0, ""
    for name, tensor in mine.items():
        other = wanted[name]
        if tensor is None or other is None:
            present = tensor if other is None else other
            far = 0.0 if present is None or not present.any() else 1.0
        else:
            far = float((tensor - other).norm()) / max(float(other.norm()), 1e-3 * whole)
        if not far <= worst:
            worst, where = far, name
    return worst, where


def outcomes(name: str, own: bool, schedules: Sequence[str], *, num_ranks: int | None = 2) -> Iterator[tuple[str, str]]:
    """Yield each schedule with "right", "refused: ..." or "wrong: ..." for this process's part of a model."""
    model, batch, target = material(name, own)
    wanted_loss, wanted = plain(copy.deepcopy(model), batch, target)
    for schedule in schedules:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield (
                    schedule,
                    _outcome(name, copy.deepcopy(model), batch, target, wanted_loss, wanted, schedule, num_ranks),
                )
        except DrumlineError as error:
            yield schedule, f"refused: {error}"


def _outcome(
    name: str,
    model: nn.Module,
    batch: Batch,
    target: Tensor | None,
    wanted_loss: float,
    wanted: Gradients,
    schedule: str,
    num_ranks: int | None,
) -> str:
    own = target is None
    pipe = dl.Pipeline(
        model,
        loss_fn=None if own else squared,
        schedule=schedule,
        num_ranks=num_ranks,
        num_microbatches=MICROBATCHES,
        example=batch,
        balance="even",
        **(FAMILIES[name].settings if own else {}),
    )
    with pipe:
        found = pipe.step(**batch, target=target).loss
        assert found is not None
        pipe.settle()
        far, where = apart({path: param.grad for path, param in pipe.named_parameters()}, wanted)
    if not abs(float(found) - wanted_loss) <= 1e-5 * abs(wanted_loss):
        return f"wrong: loss {float(found):.6f} and not {wanted_loss:.6f}, gradients {far:.2g} at {where}"
    return "right" if far < 1e-4 else f"wrong: {where} is {far:.2g} off"


# ---- all of them -----------------------------------------------------------------------------------------------------


def all_outcomes(names: Sequence[str], schedules: Sequence[str], *, num_ranks: int | None = 2, thin: bool) -> Outcome:
    found: Outcome = {}
    for at, name in enumerate(names):
        for own in (True, False):
            turn = at + own + (0 if num_ranks else len(schedules) // 2)
            chosen = [schedules[turn % len(schedules)]] if thin else schedules
            for schedule, said in outcomes(name, own, chosen, num_ranks=num_ranks):
                found[f"{name} {'own' if own else 'loss_fn'} {schedule}"] = said
                print(f"{name} {'own' if own else 'loss_fn'} {schedule}: {said[:200]}", file=sys.stderr, flush=True)
    return found


def one_rank(names: Sequence[str], schedules: Sequence[str], out: str, *, thin: bool) -> None:
    """Be one of two processes."""
    dist.init_process_group("gloo")
    orders: list[Any] = [None, None]
    dist.all_gather_object(orders, list({"sliding_attention", "full_attention"}))
    assert orders[0] != orders[1], "with these hash seeds the sets that Gemma3 goes through have one order"
    Path(out).write_text(json.dumps(all_outcomes(names, schedules, num_ranks=None, thin=thin)))
    dist.destroy_process_group()


def two_processes(names: Sequence[str], schedules: Sequence[str], *, thin: bool) -> Outcome:
    """Run on two processes whose sets have other orders; what either says counts, the worse of the two."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for rank in range(2):
            more = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            given = {name: str(value) for name, value in {**more, "PYTHONHASHSEED": 1 + rank}.items()}
            command = [
                sys.executable,
                __file__,
                "--rank",
                f"{folder}/{rank}",
                "--schedules",
                *schedules,
                "--names",
                *names,
            ]
            command += ["--thin"] if thin else []
            running.append(subprocess.Popen(command, env={**os.environ, **given, "OMP_NUM_THREADS": "1"}))
        assert [popen.wait() for popen in running] == [0, 0]
        both = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(2)]
    return {key: max(value[key] for value in both) for key in both[0]}  # right < wrong; a refusal stands for both


def table(entry: Outcome, two: Outcome) -> str:
    """Return the table: every family's outcomes, all schedules in one cell where they are alike."""
    lines = ["| model | kind | own loss | `loss_fn` | on two processes |", "|---|---|---|---|---|"]
    for name, family in FAMILIES.items():
        cells = [_cell(entry, f"{name} {loss}") for loss in ("own", "loss_fn")]
        if cells[0] == "right" and "loss_weight" in family.settings:
            cells[0] = "right, with `loss_weight=`"
        again = {_short(value) for key, value in two.items() if key.startswith((f"{name} own ", f"{name} loss_fn "))}
        here = {_short(value) for key, value in entry.items() if key.startswith((f"{name} own ", f"{name} loss_fn "))}
        both = "the same" if again == here else ", ".join(sorted(again))
        lines.append(f"| `{family.model}`{_which(name)} | {family.group} | {' | '.join(cells)} | {both} |")
    return "\n".join(lines)


def _which(name: str) -> str:
    said = " with `output_router_logits`" if "router_loss" in name else ""
    said += ", without `attention_mask`" if "unmasked" in name else ""
    said += ' with `ctc_loss_reduction="mean"`' if name.endswith("ctc_mean") else ""
    return said + (" with its `problem_type`" if name.endswith("single_label") else "")


def _cell(found: Outcome, start: str) -> str:
    said = {name: _short(found[f"{start} {name}"]) for name in SCHEDULES if f"{start} {name}" in found}
    if len(set(said.values())) == 1:
        return next(iter(said.values()))
    return ", ".join(f"{schedule}: {name}" for schedule, name in said.items())


def _short(said: str) -> str:
    """Return the outcome in a few words."""
    if said.startswith("refused: "):
        return f"refused: {said.removeprefix('refused: ').partition(';')[0].partition(', in `')[0]}"
    return said


def write(entry: Outcome, two: Outcome) -> None:
    """Write the table into the page."""
    made = f"<!-- matrix -->\n{table(entry, two)}\n<!-- end -->"
    PAGE.write_text(re.sub(r"<!-- matrix -->\n.*?<!-- end -->", lambda _: made, PAGE.read_text(), flags=re.DOTALL))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", metavar="FILE")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--names", nargs="*", default=list(FAMILIES))
    parser.add_argument("--schedules", nargs="*", default=list(SCHEDULES))
    parser.add_argument("--thin", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    if given.rank:
        one_rank(given.names, given.schedules, given.rank, thin=given.thin)
        return
    entry = all_outcomes(given.names, given.schedules, thin=given.thin)
    two = two_processes(given.names, given.schedules, thin=given.thin)
    if given.write:
        write(entry, two)
    wrong = [f"{key}: {said}" for found in (entry, two) for key, said in found.items() if said.startswith("wrong")]
    print("\n".join(wrong) or f"none of {len(entry) + len(two)} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
