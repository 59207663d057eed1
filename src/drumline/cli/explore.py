"""`drumline explore`: schedules with sliders, in the browser."""

from __future__ import annotations

import argparse
import sys
import webbrowser

from drumline.cli import flags
from drumline.cli.output import print_json, seldom_collected
from drumline.core.errors import UsageError

EXAMPLE = "drumline explore --no-browser"
PORT = 8427  # the same every time, so that links to pictures keep working


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    meaning = f"port on 127.0.0.1 (default {PORT}, or a free one if that is in use; 0 picks a free one)"
    parser.add_argument("--port", type=flags.whole_number, metavar="N", help=meaning)
    parser.add_argument("--no-browser", action="store_true", help="print the address without opening a browser")
    flags.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Serve the page until interrupted."""
    from drumline.report.explore_server import ExploreServer

    if args.port is not None and not 0 <= args.port < 65536:
        raise UsageError(f"--port is {args.port}", expected="0 to 65535")
    try:
        server = ExploreServer(PORT if args.port is None else args.port)
    except OSError as error:
        if args.port is not None:
            raise UsageError(f"cannot use port {args.port}: {error.strerror}", fix="omit --port") from None
        server = ExploreServer(0)
    with server, seldom_collected():
        if args.json:
            print_json({"address": server.address})
            sys.stdout.flush()
        else:
            print(f"{server.address}   (press Ctrl-C to stop)", flush=True)
        if not args.no_browser and not args.json:
            webbrowser.open(server.address)
        server.serve_forever()
    return 0
