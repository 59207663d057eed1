"""`drumline plan MODEL`: what to run, and why."""

from __future__ import annotations

import argparse

from drumline.cli import plan_cluster


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("subject", metavar="MODEL", help="a model's name, or the config.json of a Hugging Face model")
    plan_cluster.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Plan for a cluster."""
    return plan_cluster.run(args)
