"""`drumline serve DIR`: an exported model as a service, its stages as processes joined by gRPC."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from drumline.cli import flags
from drumline.cli.output import print_result
from drumline.core.errors import UsageError, installing

EXAMPLE = "drumline serve served --listen 127.0.0.1:8001"
# Flags that settings of the service have under the same names.
_ALIKE = ("listen", "threads", "pin", "budget", "window", "max_requests", "timeout", "hang", "drain", "log_requests",
          "record")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add, whole, number = flags.adder(parser), flags.whole_number, flags.number
    add("DIR", "the folder that `drumline export` wrote", Path)
    where = "address for clients (default 127.0.0.1:8001; port 0 picks a free one). Other machines need TLS or --plain"
    add("--listen HOST:PORT", where, str, "127.0.0.1:8001")
    metrics = "address for Prometheus, over HTTP (default 127.0.0.1:8002; port 0 picks a free one, none turns it off)"
    add("--metrics HOST:PORT", metrics, str, "127.0.0.1:8002")
    add("--record DIR", "write the timeline of the load to this new folder, for `drumline report`", Path)
    add("--log-requests", "log every request, not only those that fail")
    add("--threads N", "threads of each stage", whole, 1)
    add("--pin", "give every stage its own cores, on a machine that does little else: steadier, and a little faster")
    flags.add_json(parser)
    add = flags.adder(parser, "batches")
    add("--max-batch N", "the most rows to batch together", whole, 64)
    add("--max-wait S", "seconds that a request waits for others while the pipe is busy", number, 0.005)
    budget = "seconds that a microbatch may spend in the pipe; bounds its rows and queues"
    add("--budget S", budget, number, 0.05)
    add("--microbatch-rows N", "rows of a microbatch, 1 or more (default: tuned)", whole)
    add("--window N", "microbatches in the pipe at a time, 1 or more (default: tuned)", whole)
    add = flags.adder(parser, "limits")
    add("--max-requests N", "the most requests that wait", whole, 512)
    add("--max-queue BYTES", "the most bytes of requests and their answers (default 256MiB)", flags.size, 2.0**28)
    add("--max-message BYTES", "the largest message (default 64MiB)", flags.size, 2.0**26)
    add("--timeout S", "the longest that a request may take", number, 60.0)
    again = "how often a microbatch is sent again if a stage dies, except the one that it was computing"
    add("--retries N", again, whole, 1)
    hang = "seconds after which a stage that hangs is restarted (default 30; 0: never)"
    add("--hang S", hang, number, 30.0)
    add("--drain S", "seconds to finish requests after SIGTERM", number, 30.0)
    add = flags.adder(parser, "several hosts")
    add("--hosts HOST:PORT,...", "addresses of stages that run elsewhere, the first stage first")
    add("--stage K", "run only stage K, and listen for the stage before it", whole)
    add("--next HOST:PORT", "with --stage: the address of the next stage")
    add = flags.adder(parser, "TLS")
    add("--tls-cert FILE", "this side's certificate, PEM")
    add("--tls-key FILE", "the key of that certificate, PEM")
    add("--tls-ca FILE", "the authority that must have signed clients' certificates (mutual TLS)")
    add("--plain", "allow addresses that other machines can reach without TLS")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    from drumline.serve.logs import QUIET

    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        from drumline.serve.front.lifecycle import RunningService, ServiceSettings, serve
        from drumline.serve.front.pipe import Rules
        from drumline.serve.wire.links import Tls, check_exposed, parts_of
        from drumline.serve.wire.loops import run_to_end
    except ModuleNotFoundError as error:
        raise UsageError(f"serve needs {error.name}", fix=installing("serve")) from None
    tls = Tls(args.tls_cert or "", args.tls_key or "", args.tls_ca or "")
    check_exposed(args.listen, tls, plain=args.plain, flag="--listen")
    if args.stage is not None:
        return _run_stage(args, tls)
    if args.next:
        raise UsageError("--next without --stage", fix="name the stage that this process runs: --stage K")
    metrics = "" if args.metrics == "none" else args.metrics
    if metrics:
        check_exposed(metrics, Tls(), plain=args.plain, flag="--metrics")
    hosts = tuple(args.hosts.split(",")) if args.hosts else ()
    for host in hosts:
        parts_of(host, flag="--hosts")
    settings = ServiceSettings(
        args.dir,
        metrics=metrics,
        hosts=hosts,
        tls=tls,
        rules=Rules(args.max_batch, args.max_wait, args.retries),
        rows=args.microbatch_rows,
        max_queue_bytes=int(args.max_queue),
        max_bytes=int(args.max_message),
        **{name: getattr(args, name) for name in _ALIKE},
    )

    def notify(started: RunningService) -> None:
        address = f"{parts_of(args.listen, flag='--listen')[0]}:{started.port}"
        text = f"serving {args.dir} at {address}   (press Ctrl-C to stop)"
        print_result(args, {"address": address, "metrics_port": started.metrics_port}, text)

    run_to_end(serve(settings, notify=notify))
    return 0


def _run_stage(args: argparse.Namespace, tls: Any) -> int:
    from drumline.serve.stages.host import host_stage
    from drumline.serve.wire.loops import run_to_end

    if args.pin:
        raise UsageError("--pin with --stage", fix="choose its cores yourself: taskset --cpu-list 0 drumline serve ...")
    run_to_end(
        host_stage(
            args.dir,
            args.stage,
            args.listen,
            args.next or "",
            tls=tls,
            threads=args.threads,
            limit=(args.window or 0) + 16,
            max_bytes=int(args.max_message),
            hang=args.hang,
        )
    )
    return 0
