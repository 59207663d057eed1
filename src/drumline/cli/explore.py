"""`drumline explore`: schedules under sliders, in the browser."""

from __future__ import annotations

import argparse
import sys
import webbrowser

from drumline.cli import flags
from drumline.cli.output import print_json
from drumline.core.errors import UsageError

EXAMPLE = "drumline explore --no-browser"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    meaning = "port on 127.0.0.1 (default: a free one)"
    parser.add_argument("--port", type=flags.whole_number, default=0, metavar="N", help=meaning)
    parser.add_argument("--no-browser", action="store_true", help="print the address without opening a browser")
    flags.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Serve the page until interrupted."""
    from drumline.report.explore_server import ExploreServer

    if not 0 <= args.port < 65536:
        raise UsageError(f"--port is {args.port}", expected="0 to 65535")
    try:
        server = ExploreServer(args.port)
    except OSError as error:
        raise UsageError(f"port {args.port} cannot be used: {error.strerror}", fix="leave --port out") from None
    with server:
        if args.json:
            print_json({"address": server.address})
            sys.stdout.flush()
        else:
            print(f"{server.address}   (Ctrl-C ends it)", flush=True)
        if not args.no_browser and not args.json:
            webbrowser.open(server.address)
        server.serve_forever()
    return 0
