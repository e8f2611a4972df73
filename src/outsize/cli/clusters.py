"""`--cluster ADDRESS`, for the verbs that can run on the workers of a cluster."""

from __future__ import annotations

import argparse
import contextlib
from contextlib import AbstractContextManager
from typing import Any


def add_cluster(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cluster", metavar="ADDRESS",
        help="run on a cluster: tcp://host:8786 (a Dask scheduler), ray://host:10001 or ray; --budget is then that of one worker",
    )  # fmt: skip


def joined(args: argparse.Namespace) -> AbstractContextManager[Any]:
    """The cluster that was named, inside a block; this process where none was."""
    if args.cluster is None:
        return contextlib.nullcontext()
    from outsize.array.run.cluster import cluster

    return cluster(args.cluster)
