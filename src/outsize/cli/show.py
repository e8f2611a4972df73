"""`outsize show x.npy`: what is in a file."""

from __future__ import annotations

import argparse

from outsize import report
from outsize.array.run.contents import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="x.npy, x.zarr, x.h5, x.safetensors, x.pt, x.npz, ...")


def run(args: argparse.Namespace) -> int:
    found = [show(path) for path in args.files]
    if args.json:
        report.show(found[0] if len(found) == 1 else found, as_json=True)
    else:
        for contents in found:
            report.show(contents)
    return 0
