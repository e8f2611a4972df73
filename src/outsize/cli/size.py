"""`outsize size 1,256,1024,1021 --dtype float32`, `outsize size x.npy`."""

from __future__ import annotations

import argparse
import os
import re

from outsize import report
from outsize.core.errors import InputError
from outsize.core.spec import Spec
from outsize.core.units import parse_bytes
from outsize.sizing import size

_DIGITS = 100
"""The most digits a length may have; no machine has that much memory."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shapes",
        nargs="+",
        metavar="SHAPE",
        help="1,256,1024,1021; with its own dtype: 384,192:float16; or a file, whose header says both",
    )
    parser.add_argument("--dtype", default="float32", help="element type where the shape names none (float32)")
    parser.add_argument("--count", type=positive, default=1, metavar="N", help="this many copies of all of it")
    parser.add_argument("--grad", action="store_true", help="add gradients")
    parser.add_argument("--optimizer", metavar="NAME", help="add gradients and the state of sgd, adamw, ...")
    parser.add_argument("--budget", metavar="SIZE", help="say whether it fits in this much RAM, such as 2GiB")
    parser.add_argument("--card", metavar="NAME", help="say whether it fits on this card, such as rtx4090")


def run(args: argparse.Namespace) -> int:
    """Print the size; 1 if it does not fit."""
    budget = None if args.budget is None else parse_bytes(args.budget)
    specs = [read_tensor(text, args.dtype) for text in args.shapes]
    sizing = size(specs, count=args.count, grad=args.grad, optimizer=args.optimizer, budget=budget, card=args.card)
    report.show(sizing, args.json)
    return 1 if sizing.fits is False else 0


def read_tensor(text: str, dtype: str) -> Spec:
    """`1,256,1024,1021`, `(384, 192)`, `384x192`, `384,192:float16` -> a spec."""
    if not re.match(r"[\s(\[]*-?\d+\s*([,x×:)\]]|$)", text) and os.path.lexists(text.partition("::")[0]):
        return _read_file(text)
    if re.search(r"\.[A-Za-z]\w*(::.*)?$", text):
        raise InputError(f"there is no file {text}: check the path, or write a shape such as 384,192")
    lengths, colon, own = text.partition(":")
    bare = lengths.strip().strip("[]() ").rstrip(",")
    if not bare:
        raise InputError(
            f"{text!r} is an empty shape: write the length of each axis, such as 384,192 (one number is 1)"
        )
    if re.fullmatch(r"\d+(\s*[x×]\s*\d+)+", bare):
        bare = re.sub(r"[x×]", ",", bare)
    axes = [_length(word.strip(), text) for word in bare.split(",")]
    return Spec.of(axes, own if colon else dtype)


def _read_file(path: str) -> Spec:
    """The array of a file, by its header."""
    from outsize.array.run.contents import show

    contents = show(path)
    if contents.count > 1:
        raise InputError(
            f"{path} holds {contents.count} arrays: outsize show {path} lists them, "
            f"outsize size {path}::{contents.arrays[0].key} sizes one"
        )
    return Spec.of(contents.arrays[0].shape, contents.arrays[0].dtype)


def _length(word: str, text: str) -> int:
    if re.fullmatch(r"-\s*\d+", word):
        raise InputError(f"the shape {text!r} has the length {word}: lengths cannot be negative")
    if not re.fullmatch(r"[0-9][0-9_]*", word):
        raise InputError(
            f"the shape {text!r} has {word!r} where a length should be: lengths are whole numbers such as 384"
        )
    if len(word) > _DIGITS:
        raise InputError(f"the shape has a length of {len(word)} digits: no array has such an axis")
    return int(word)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)
