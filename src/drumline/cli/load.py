"""`drumline load URL`: load a service, and measure latency and throughput."""

from __future__ import annotations

import argparse

from drumline.cli import flags
from drumline.cli.output import PICTURES, TEXTS, Paper, deliver, progress
from drumline.core.errors import UsageError, installing

EXAMPLE = "drumline load 127.0.0.1:8001 --concurrency 1,2,4,8 --out load.html"
_SCHEMES = ("grpc://", "http://", "grpcs://", "https://")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add, whole = flags.adder(parser), flags.whole_number
    add("URL", "address of the service, like 127.0.0.1:8001")
    add("--model NAME", "the model to load (default: the service's only model)")
    many = "closed loop: requests in flight at a time, one load after the other (default 1,2,4,8 without --rate)"
    add("--concurrency N,...", many, flags.listed(whole))
    add("--rate R,...", "open loop: requests per second, Poisson arrivals", flags.listed(flags.number))
    add("--seconds S", "seconds of each load", flags.number, 10.0)
    add("--rows N[-N]", "rows of a request, or a range to draw from (default 1)", _range, (1, 1))
    add("--length N", "size of other variable dimensions", whole, 32)
    add("--integers-below N", "upper bound of random whole numbers to send", whole, 100)
    add("--seed S", "random seed", whole, 0)
    add("--tls-ca FILE", "the authority of the service's certificate, PEM")
    add("--tls-cert FILE", "this side's certificate, for mutual TLS")
    add("--tls-key FILE", "the key of that certificate, PEM")
    flags.add_out(parser, TEXTS | PICTURES, "write FILE.txt, FILE.json, a plot as FILE.svg, or a page as FILE.html")
    flags.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Load, and print a table."""
    try:
        from drumline.serve.load.generator import Demand, load
        from drumline.serve.load.page import load_page
        from drumline.serve.load.picture import load_svg, load_text
        from drumline.serve.wire.links import Tls, parts_of
        from drumline.serve.wire.loops import run_to_end
    except ModuleNotFoundError as error:
        raise UsageError(f"load needs {error.name}", fix=installing("serve")) from None
    tls = Tls(args.tls_cert or "", args.tls_key or "", args.tls_ca or "")
    scheme = next((name for name in _SCHEMES if args.url.startswith(name)), "")
    if scheme.endswith("s://") and not tls:
        raise UsageError(f"URL is {args.url[:80]}", fix="name the authority of its certificate: --tls-ca FILE")
    address = args.url.removeprefix(scheme).rstrip("/")
    parts_of(address, flag="URL")
    counts = args.concurrency if args.concurrency is not None else () if args.rate else (1, 2, 4, 8)
    least, most = args.rows
    demand = Demand(least, most, length=args.length, below=args.integers_below, seed=args.seed)
    results = run_to_end(
        load(
            address,
            model=args.model or "",
            concurrencies=counts,
            rates=args.rate or (),
            seconds=args.seconds,
            demand=demand,
            tls=tls,
            tell=progress,
        )
    )

    def make(form: str, paper: Paper) -> str:
        if form == "text":
            return load_text(results, width=paper.width)
        return load_svg(results) if form == "svg" else load_page(results, service=address)

    deliver(args, make, lambda: {"loads": [result.to_json() for result in results]})
    return 0 if any(result.latencies for result in results) else 1


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return flags.whole_number(first), flags.whole_number(last or first)
