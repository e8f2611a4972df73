# ruff: noqa: E501
"""Measure what cuDNN takes inside the convolutions of common networks, on a CUDA card.

    python benchmarks/record_convolutions.py collect LAYERS.json.gz          (anywhere: traces torchvision's networks)
    python benchmarks/record_convolutions.py measure LAYERS.json.gz OUT.json.gz [seconds]   (on the card)

A row of the result is [dtype, channels last, batch, channels, height, width, filters, kernel height, kernel width, stride, padding,
dilation, groups, bytes inside the forward call, inside the input's gradient, inside the weights' gradient]; None where a call failed.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import sys
import time
from typing import Any

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SETTINGS = [("float32", False, n) for n in (32, 64, 16, 128, 8)] + [
    ("bfloat16", False, n) for n in (32, 64, 16, 128, 8)
]
SETTINGS += [
    ("float32", True, 32),
    ("bfloat16", True, 64),
    ("float16", False, 32),
    ("float32", True, 64),
    ("bfloat16", True, 32),
]
SETTINGS += [
    ("float32", False, 4),
    ("bfloat16", False, 256),
    ("float16", False, 64),
    ("bfloat16", False, 4),
    ("float16", True, 32),
]


def collect(path: str) -> None:
    """Every distinct convolution of torchvision's classifiers at their usual size, by tracing them."""
    import torchvision

    from outsize.model.trace import Tracer

    layers: dict[tuple[Any, ...], None] = {}
    for name in torchvision.models.list_models(module=torchvision.models):
        if any(part in name for part in ("_h_14", "_32gf", "128gf", "_b7", "_b6", "_16gf")):
            continue
        size = 299 if name == "inception_v3" else 224
        tracer = Tracer()
        write = tracer._write

        def note(op: str, args: Any, results: Any, label: str, write: Any = write) -> None:
            if op == "aten.convolution.default" and not args[6] and len(args[3]) == 2:
                x, w = args[0].shape, args[1].shape
                layers.setdefault((*x[1:], w[0], *w[2:], args[3][0], args[4][0], args[5][0], args[8], *args[4][1:]))
            write(op, args, results, label)

        tracer._write = note  # type: ignore[method-assign]
        with tracer.running(), torch.no_grad():
            torchvision.models.get_model(name, weights=None).cuda().eval()(torch.rand(2, 3, size, size, device="cuda"))
    with gzip.open(path, "wt") as file:
        json.dump([list(layer) for layer in layers], file)
    print(len(layers), "layers")


def inside(call: Any, expected: int) -> int | None:
    """Bytes that `call` held at its highest moment beyond what was there and its results."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    try:
        out = call()
    except RuntimeError:
        return None
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    del out
    return int(peak - before - expected)


def measure_layer(layer: list[int], dtype: str, last: bool, n: int) -> list[Any] | None:
    c, h, w, k, kh, kw, stride, pad, dilation, groups, *second = layer
    pads = [pad, second[0] if second else pad]
    kind = DTYPES[dtype]
    ho = (h + 2 * pads[0] - dilation * (kh - 1) - 1) // stride + 1
    wo = (w + 2 * pads[1] - dilation * (kw - 1) - 1) // stride + 1
    size = 2 if kind != torch.float32 else 4
    if size * n * max(c * h * w, k * ho * wo) > 2**31:
        return None
    layout = torch.channels_last if last else torch.contiguous_format
    x = torch.empty(n, c, h, w, device="cuda", dtype=kind, memory_format=layout)
    weight = torch.empty(k, c // groups, kh, kw, device="cuda", dtype=kind, memory_format=layout)
    grad = torch.empty(n, k, ho, wo, device="cuda", dtype=kind, memory_format=layout)
    rest = ([stride, stride], pads, [dilation, dilation], False, [0, 0], groups)
    aten = torch.ops.aten
    found = [inside(lambda: aten.convolution(x, weight, None, *rest), grad.numel() * size)]
    for mask, result in (([True, False, False], x), ([False, True, False], weight)):
        found.append(
            inside(
                lambda mask=mask: aten.convolution_backward(grad, x, weight, None, *rest, mask), result.numel() * size
            )
        )
    return [dtype, last, n, c, h, w, k, kh, kw, stride, pad, dilation, groups, *found]


def work(part: int, parts: int, layers: list[list[int]], deadline: float, queue: Any) -> None:
    rows = []
    jobs = [(layer, *setting) for setting in SETTINGS for layer in layers]
    for layer, dtype, last, n in jobs[part::parts]:
        if time.time() > deadline:
            break
        row = measure_layer(layer, dtype, last, n)
        if row is not None:
            rows.append(row)
    queue.put(rows)


def measure(source: str, target: str, seconds: float) -> None:
    with gzip.open(source, "rt") as file:
        layers = json.load(file)
    context = multiprocessing.get_context("fork")
    queue, deadline, parts = context.Queue(), time.time() + seconds, 10
    processes = [context.Process(target=work, args=(part, parts, layers, deadline, queue)) for part in range(parts)]
    for process in processes:
        process.start()
    rows = [row for _ in processes for row in queue.get()]
    with gzip.open(target, "wt") as file:
        json.dump(rows, file, separators=(",", ":"))
    print(len(rows), "rows of", len(layers) * len(SETTINGS))


if __name__ == "__main__":
    if sys.argv[1] == "collect":
        collect(sys.argv[2])
    else:
        measure(sys.argv[2], sys.argv[3], float(sys.argv[4]) if len(sys.argv) > 4 else 120)
