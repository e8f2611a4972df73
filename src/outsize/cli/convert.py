"""`outsize convert a.npy b.zarr --dtype float16`: rewrites an array and reports the loss of accuracy."""

from __future__ import annotations

import argparse
import dataclasses

from outsize import report
from outsize.cli.clusters import add_cluster, joined
from outsize.core.errors import InputError
from outsize.core.events import default_listener


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", help="x.npy, x.zarr, x.h5::/group/x, x.safetensors::key, x.npz::key, x.pt::key, a folder"
    )
    parser.add_argument("target", nargs="?", help=".npy, .zarr, .h5, .safetensors or .bin; not needed with --check")
    parser.add_argument("--dtype", help="element type to convert to (default: as it is)")
    parser.add_argument("--check", action="store_true", help="measure the loss of accuracy, write nothing")
    parser.add_argument("--budget", metavar="SIZE", help="most memory to use, such as 512MiB")
    parser.add_argument("--chunks", metavar="SHAPE", help="chunks of a zarr or HDF5 output, such as 1024,512")
    parser.add_argument("--no-compression", action="store_true", help="write zarr chunks uncompressed")
    parser.add_argument("--key", help="which array of the source")
    parser.add_argument("--shape", help="shape of raw binary, such as 1000,512, or --shape=-1,512")
    parser.add_argument("--raw-dtype", help="element type of raw binary")
    parser.add_argument("--offset", type=int, default=0, metavar="BYTES", help="where raw binary begins")
    add_cluster(parser)
    parser.add_argument("--missing", choices=("error", "fill"), default="error", help="what a missing zarr chunk means")


def run(args: argparse.Namespace) -> int:
    from outsize.array.run.convert import convert
    from outsize.monitor.peak import PeakMeter

    if args.target is None and not args.check:
        raise InputError("say where to write: outsize convert SOURCE TARGET, or --check to only measure")
    options = {"key": args.key, "missing": args.missing, "offset": args.offset}
    if args.shape is not None:
        options["shape"] = read_lengths(args.shape, "--shape")
    if args.raw_dtype is not None:
        options["raw_dtype"] = args.raw_dtype
    with joined(args), PeakMeter("convert") as meter:
        done = convert(
            args.source, None if args.check else args.target, args.dtype, budget=args.budget,
            chunks=None if args.chunks is None else read_lengths(args.chunks, "--chunks"),
            compress=not args.no_compression, listener=None if args.json else default_listener(), **options,
        )  # fmt: skip
    report.show(dataclasses.replace(done, measured=meter.peaks()[0].bytes), args.json)
    return 0


def read_lengths(text: str, option: str, such: str = "the length of each axis, such as 1024,512") -> tuple[int, ...]:
    """`1024,512`, `(1024, 512)` or `1024x512` as numbers; `such` says what the option wants."""
    try:
        return tuple(int(word) for word in text.strip("()[] ").rstrip(",").replace("x", ",").split(","))
    except ValueError:
        raise InputError(f"{option} is {text!r}: write {such}") from None
