"""`drumline serve DIR`: an exported model as a service, its stages as processes joined by gRPC."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from drumline.cli import flags
from drumline.cli.output import print_json
from drumline.core.errors import UsageError, installing

EXAMPLE = "drumline serve served --listen 127.0.0.1:8001"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add, whole, number = parser.add_argument, flags.whole_number, flags.number
    add("folder", metavar="DIR", type=Path, help="the folder that `drumline export` wrote")
    where = "address for clients (default 127.0.0.1:8001; port 0 picks a free one). Other machines need TLS or --plain"
    add("--listen", default="127.0.0.1:8001", metavar="HOST:PORT", help=where)
    metrics = "address for Prometheus, over HTTP (default 127.0.0.1:8002; port 0 picks a free one, none turns it off)"
    add("--metrics", default="127.0.0.1:8002", metavar="HOST:PORT", help=metrics)
    add(
        "--record",
        type=Path,
        metavar="DIR",
        help="write the timeline of the load to this new folder, for `drumline report`",
    )
    add("--log-requests", action="store_true", help="log every request, not only those that fail")
    add("--threads", type=whole, default=1, metavar="N", help="threads of each stage (default 1)")
    pin = "give every stage cores of its own, on a machine that does little else: steadier, and a little faster"
    add("--pin", action="store_true", help=pin)
    flags.add_json(parser)
    batch = parser.add_argument_group("batches").add_argument
    batch("--max-batch", type=whole, default=64, metavar="N", help="the most rows to batch together (default 64)")
    wait = "seconds that a request waits for others while the pipe is busy (default 0.005)"
    batch("--max-wait", type=number, default=0.005, metavar="S", help=wait)
    budget = "seconds that a microbatch may spend in the pipe; bounds its rows and queues (default 0.05)"
    batch("--budget", type=number, default=0.05, metavar="S", help=budget)
    batch("--microbatch-rows", type=whole, metavar="N", help="rows of a microbatch, 1 or more (default: tuned)")
    window = "microbatches in the pipe at a time, 1 or more (default: tuned)"
    batch("--window", type=whole, metavar="N", help=window)
    limit = parser.add_argument_group("limits").add_argument
    limit("--max-requests", type=whole, default=512, metavar="N", help="the most requests that wait (default 512)")
    limit(
        "--max-queue",
        type=flags.size,
        default=2.0**28,
        metavar="BYTES",
        help="the most bytes that wait (default 256MiB)",
    )
    limit(
        "--max-message", type=flags.size, default=2.0**26, metavar="BYTES", help="the largest message (default 64MiB)"
    )
    limit("--timeout", type=number, default=60.0, metavar="S", help="the longest that a request may take (default 60)")
    again = "how often a microbatch is sent again if a stage dies, but for the one that it computes (default 1)"
    limit("--retries", type=whole, default=1, metavar="N", help=again)
    hang = "seconds after which a stage that hangs is ended and started again (default 30; 0: never)"
    limit("--hang", type=number, default=30.0, metavar="S", help=hang)
    limit(
        "--drain", type=number, default=30.0, metavar="S", help="seconds to finish requests after SIGTERM (default 30)"
    )
    host = parser.add_argument_group("several hosts").add_argument
    host("--hosts", metavar="HOST:PORT,...", help="addresses of stages that run elsewhere, the first stage first")
    host("--stage", type=whole, metavar="K", help="run only stage K, and listen for the stage before it")
    host("--next", metavar="HOST:PORT", help="with --stage: the address of the stage behind it")
    tls = parser.add_argument_group("TLS").add_argument
    tls("--tls-cert", metavar="FILE", help="this side's certificate, PEM")
    tls("--tls-key", metavar="FILE", help="the key of that certificate, PEM")
    tls("--tls-ca", metavar="FILE", help="the authority that clients need a certificate of (mutual TLS)")
    tls("--plain", action="store_true", help="allow addresses that other machines can reach without TLS")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    try:
        from drumline.serve.front.pipe import Rules
        from drumline.serve.front.run import Settings, Started, serve
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
    for one in hosts:
        parts_of(one, flag="--hosts")
    settings = Settings(
        args.folder,
        listen=args.listen,
        metrics=metrics,
        hosts=hosts,
        tls=tls,
        threads=args.threads,
        pin=args.pin,
        budget=args.budget,
        rules=Rules(args.max_batch, args.max_wait, args.retries),
        rows=args.microbatch_rows,
        window=args.window,
        max_requests=args.max_requests,
        max_queue_bytes=int(args.max_queue),
        max_bytes=int(args.max_message),
        timeout=args.timeout,
        hang=args.hang,
        drain=args.drain,
        log_requests=args.log_requests,
        record=args.record,
    )

    def told(started: Started) -> None:
        host = parts_of(args.listen, flag="--listen")[0]
        _told(args, {"address": f"{host}:{started.port}", "metrics_port": started.metrics_port})

    run_to_end(serve(settings, told=told))
    return 0


def _told(args: argparse.Namespace, found: dict[str, Any]) -> None:
    if args.json:
        print_json(found)
    else:
        print(f"serving {args.folder} at {found['address']}   (press Ctrl-C to stop)")
    sys.stdout.flush()


def _run_stage(args: argparse.Namespace, tls: Any) -> int:
    from drumline.serve.stage import run_stage
    from drumline.serve.wire.loops import run_to_end

    if args.pin:
        raise UsageError("--pin with --stage", fix="choose its cores yourself: taskset --cpu-list 0 drumline serve ...")
    run_to_end(
        run_stage(
            args.folder,
            args.stage,
            args.listen,
            args.next or "",
            tls=tls,
            threads=args.threads,
            limit=(args.window or 0) + 16,
            max_bytes=int(args.max_message),
        )
    )
    return 0
