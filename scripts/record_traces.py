"""Record PyTorch's own pipeline schedules under PyTorch's own profiler: traces to try `drumline analyze` on.

    python scripts/record_traces.py FOLDER 1F1B Interleaved1F1B ...

starts two ranks and writes FOLDER/SCHEDULE/rank0.json.gz and rank1.json.gz, and beside them `order.csv`, what the
schedule object says it runs, where it says that. Nothing of Drumline takes part. A schedule may carry settings:
`1F1B,stack` records Python's frames, `1F1B,slow=1` makes stage 1 compute four times as much.

With `--device cuda` both ranks share one GPU and talk by NCCL, which takes them for two hosts (NCCL_HOSTID).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

NUM_RANKS = 2
TIMEOUT_SECONDS = 240


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("schedules", nargs="+", metavar="SCHEDULE[,SETTING...]")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is None:
        _start(args)
    else:
        _record_all(args)


def _start(args: argparse.Namespace) -> None:
    args.folder.mkdir(parents=True, exist_ok=True)
    meeting = args.folder / "meeting"
    meeting.unlink(missing_ok=True)
    ranks = []
    for rank in range(NUM_RANKS):
        apart = {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        environment = {**os.environ, **apart, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, *sys.argv[1:], "--rank", str(rank)]
        ranks.append(subprocess.Popen(command, env=environment))
    codes = [rank.wait(TIMEOUT_SECONDS) for rank in ranks]
    meeting.unlink(missing_ok=True)
    if any(codes):
        raise SystemExit(f"the ranks ended with {codes}")


def _record_all(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if args.device == "cuda" else "gloo",
        init_method=f"file://{(args.folder / 'meeting').resolve()}",
        rank=args.rank,
        world_size=NUM_RANKS,
    )
    if args.device == "cuda":
        torch.cuda.set_device(0)
    for text in args.schedules:
        _record(args, *text.split(","))
    dist.barrier()
    dist.destroy_process_group()


def _record(args: argparse.Namespace, name: str, *settings: str) -> None:
    import torch
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, schedules

    single = name in ("GPipe", "1F1B")
    num_stages = NUM_RANKS if single else 2 * NUM_RANKS
    in_a_v = name in ("ZBVZeroBubble", "DualPipeV")
    mine = [args.rank] if single else [args.rank, num_stages - 1 - args.rank if in_a_v else args.rank + NUM_RANKS]
    slow = next((int(setting.partition("=")[2]) for setting in settings if setting.startswith("slow=")), None)
    device = torch.device(args.device)
    torch.manual_seed(0)

    def stage(index: int) -> PipelineStage:
        depth = args.layers // num_stages * (4 if index == slow else 1)
        layers = [nn.Sequential(nn.Linear(args.width, args.width), nn.GELU()) for _ in range(depth)]
        return PipelineStage(nn.Sequential(*layers).to(device), index, num_stages, device)

    stages = [stage(index) for index in mine]
    kind: Any = getattr(schedules, f"Schedule{name}")
    schedule = kind(stages[0] if single else stages, args.microbatches, loss_fn=nn.MSELoss())
    batch = torch.randn(args.rows * args.microbatches, args.width, device=device)
    optimizer = torch.optim.AdamW([param for each in stages for param in each.submod.parameters()])

    def step() -> None:
        ends: Any = {"target": batch, "losses": []} if num_stages - 1 in mine else {}
        schedule.step(*([batch] if 0 in mine else []), **ends)
        optimizer.step()
        optimizer.zero_grad()
        if args.device == "cuda":
            torch.cuda.synchronize()

    folder = args.folder / "-".join([name, *settings]).replace("=", "")
    folder.mkdir(exist_ok=True)
    step()
    with torch.profiler.profile(
        record_shapes=True,
        with_stack="stack" in settings,
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda profile: profile.export_chrome_trace(str(folder / f"rank{args.rank}.json.gz")),
    ) as profile:
        for _ in range(4):
            step()
            profile.step()
    order = getattr(schedule, "pipeline_order_with_comms", None)
    if args.rank == 0 and order is not None:
        lines = [",".join(map(str, order[rank])) for rank in sorted(order)]
        (folder / "order.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
