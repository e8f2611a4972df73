"""`outsize memory`."""

from __future__ import annotations

import argparse

from outsize import report
from outsize.machine import budget, memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scratch", metavar="FOLDER", help="scratch folder to look at instead of the default")


def run(args: argparse.Namespace) -> int:
    with budget(scratch=args.scratch):
        report.show(memory(), args.json)
    return 0
