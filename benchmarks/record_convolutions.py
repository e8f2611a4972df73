# ruff: noqa: E501
"""Measure what cuDNN takes inside convolutions, on a CUDA card.

    python benchmarks/record_convolutions.py collect LAYERS.json.gz                (anywhere: traces networks)
    python benchmarks/record_convolutions.py plan LAYERS.json.gz CALLS.json.gz     (anywhere: what the shipped table does not answer)
    python benchmarks/record_convolutions.py measure CALLS.json.gz OUT.json.gz [seconds]   (on the card)
    python benchmarks/record_convolutions.py merge OUT.json.gz                     (anywhere: into the shipped table)

A layer is [channels, axes, filters, kernel, stride, padding, dilation, groups], the middle ones lists; a call is [dtype, channels
last, batch, layer, which], `which` 0 for the forward call, 1 for the input's gradient, 2 for the weights' gradient, and a result is a
call with its bytes (None where it failed), and for some the bytes of the kernels that torch falls back to when memory is short.
"""

from __future__ import annotations

import gzip
import itertools
import json
import lzma
import math
import multiprocessing
import os
import sys
import time
from collections import Counter
from typing import Any

import torch

from outsize.model.kernels.convolution_table import pack, unpack

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TABLE = "src/outsize/model/kernels/convolutions_h200.json.xz"
CHAIN = 64 * 2**20
"""Workspaces above this are also measured with too little memory for them."""

Layer = list[Any]
Call = list[Any]


def packed(path: str) -> Any:
    """What opens a file of this name."""
    return lzma.open if str(path).endswith(".xz") else gzip.open


def read(path: str) -> Any:
    with packed(path)(path, "rt") as file:
        return json.load(file)


def write(path: str, value: Any) -> None:
    with packed(path)(path, "wt") as file:
        json.dump(value, file, separators=(",", ":"))


def read_table() -> list[Any]:
    """The table that comes with the package: (layer, dtype, channels last, sizes by batch)."""
    return [[*layer, unpack(found)] for *layer, found in read(TABLE)]


# which layers there are


def networks() -> list[tuple[str, Any]]:
    """(name, a function that runs one forward pass)."""
    import torchvision
    from blind_models import MODELS, Denoiser
    from estimate_models import UNet

    runs: list[tuple[str, Any]] = []

    def pictures(make: Any, *shape: int) -> Any:
        return lambda: make().cuda().eval()(torch.rand(2, *shape, device="cuda"))

    def named(name: str, **options: Any) -> Any:
        return lambda: torchvision.models.get_model(name, weights=None, **options)

    for name in torchvision.models.list_models(module=torchvision.models):
        if not any(part in name for part in ("_h_14", "_32gf", "128gf")):
            runs.append((name, pictures(named(name), 3, *[299 if name == "inception_v3" else 224] * 2)))
    for size in (128, 160, 192, 256, 320, 384):
        for name in ("resnet18", "resnet50", "mobilenet_v2", "efficientnet_b0", "vgg16", "convnext_tiny"):
            runs.append((f"{name} {size}", pictures(named(name), 3, size, size)))
    for name in torchvision.models.list_models(module=torchvision.models.segmentation):
        for size in (224, 320, 512):
            runs.append((f"{name} {size}", pictures(named(name, weights_backbone=None), 3, size, size)))
    for name in ("r3d_18", "mc3_18", "r2plus1d_18", "s3d"):
        runs.append((name, pictures(named(name), 3, 16, 112 if name != "s3d" else 224, 112 if name != "s3d" else 224)))
        runs.append((name, pictures(named(name), 3, 8 if name != "s3d" else 16, *[112 if name != "s3d" else 224] * 2)))
    for width, size in ((32, 128), (32, 256), (64, 128), (64, 256), (64, 512)):
        runs.append((f"unet {width} {size}", pictures(lambda width=width: UNet(width), 3, size, size)))
    for sizes, size in (
        ((128, 256, 384), 64),
        ((128, 256, 256, 512), 64),
        ((320, 640, 1280), 32),
        ((320, 640, 1280), 64),
        ((64, 128, 256), 32),
    ):
        model = lambda sizes=sizes: Denoiser(sizes)  # noqa: E731
        runs.append(
            (
                f"denoiser {sizes}",
                lambda model=model, size=size: model().cuda()(
                    torch.rand(2, 4, size, size, device="cuda"), torch.rand(2, 128, device="cuda")
                ),
            )
        )
    for name, make in MODELS.items():
        if name not in ("generate", "adapters", "mamba", "longformer"):
            runs.append((name, lambda make=make: _loss(make)))
    return runs


def _loss(make: Any) -> None:
    model, loss = make({"batch": 2, "model": ""}, "cuda")
    loss(model.cuda().eval())


def generic() -> list[Layer]:
    """A grid for networks that nobody has seen yet."""
    out: list[Layer] = []
    for size in (8, 16, 28, 32, 56, 64, 112, 128):
        for c in (16, 32, 64, 96, 128, 256, 512, 1024):
            if c * size * size > 2_200_000 or c * size < 1000:
                continue
            for k, kernel, stride, dilation, groups in (
                (c, 3, 1, 1, 1),
                (2 * c, 3, 2, 1, 1),
                (2 * c, 1, 1, 1, 1),
                (c, 5, 1, 1, 1),
                (c, 3, 1, 2, 1),
                (c, 3, 1, 1, 8),
                (c, 3, 1, 1, c),
                (c, 7, 1, 1, c),
                (c, 4, 2, 1, 1),
            ):
                out.append(
                    [
                        c,
                        [size] * 2,
                        k,
                        [kernel] * 2,
                        [stride] * 2,
                        [(kernel - 1) // 2 * dilation] * 2,
                        [dilation] * 2,
                        groups,
                    ]
                )
    return out


def collect(path: str) -> None:
    """Every distinct convolution of many networks, by tracing them."""
    from outsize.model.tracing.tracer import Tracer

    layers: dict[str, None] = {}
    for name, run in networks():
        tracer = Tracer()
        write_down = tracer._write

        def note(op: str, args: Any, results: Any, label: str, write_down: Any = write_down) -> None:
            if op == "aten.convolution.default":
                x, w, transposed = args[0].shape, args[1].shape, args[6]
                if transposed:  # the input's gradient of a plain one
                    x = results[0].shape
                filters = w[0]
                layers.setdefault(
                    json.dumps(
                        [x[1], list(x[2:]), filters, list(w[2:]), list(args[3]), list(args[4]), list(args[5]), args[8]]
                    )
                )
            write_down(op, args, results, label)

        tracer._write = note  # type: ignore[method-assign]
        before = len(layers)
        try:
            with tracer.running(), torch.no_grad():
                run()
        except Exception as error:
            print(name, repr(error)[:160])
        print(name, len(layers) - before, flush=True)
    for layer in generic():
        layers.setdefault(json.dumps(layer))
    write(path, [json.loads(layer) for layer in layers])
    print(len(layers), "layers")


# which calls are worth making


def output_axes(layer: Layer) -> list[int]:
    _, axes, _, kernel, stride, pad, dilation, _ = layer
    return [
        (a + 2 * p - d * (k - 1) - 1) // s + 1
        for a, k, s, p, d in zip(axes, kernel, stride, pad, dilation, strict=True)
    ]


def largest(layer: Layer, n: int, element: int) -> int:
    return element * n * max(layer[0] * math.prod(layer[1]), layer[2] * math.prod(output_axes(layer)))


def plan(source: str, target: str) -> None:
    """New layers at a few batches; known ones in between where the kernel changes, and with the channels last."""
    from outsize.model.kernels.convolution_table import same_kernel

    known = {
        json.dumps([dtype, last, layer]): {n: sizes for n, *sizes in found}
        for layer, dtype, last, found in read_table()
    }
    chains: list[Call] = []
    between: list[Call] = []
    last_ones: list[Call] = []
    new: list[Call] = []
    for name, series in known.items():
        dtype, last, layer = json.loads(name)
        if dtype == "float16":
            continue
        points = sorted(series)
        for below, above in itertools.pairwise(points):
            middle = (below + above) // 2
            for which in range(3):
                first, second = series[below][which], series[above][which]
                if (
                    None not in (first, second)
                    and not same_kernel(below, first, above, second)
                    and max(first, second) > 2**20
                ):
                    between.append([dtype, last, middle, layer, which])
        if not last and 64 in series:
            chains += [[dtype, last, 64, layer, which, True] for which in range(3) if (series[64][which] or 0) > CHAIN]
        if last:
            last_ones += [[dtype, last, 16, layer, which] for which in range(3) if 16 not in series]
    seen = {json.dumps(json.loads(name)[2]) for name in known}
    for layer in read(source):
        if json.dumps(layer) in seen:
            continue
        for dtype, last, batches in (
            ("float32", False, (8, 32)),
            ("bfloat16", False, (16, 64)),
            ("bfloat16", True, (32,)),
            ("float32", True, (16,)),
        ):
            room = 2**29 if len(layer[1]) < 3 else 2**28
            fits = [n for n in batches if largest(layer, n, 4) < room] or (
                [2, 4] if largest(layer, 4, 4) < 2**30 else [2]
            )
            found = [
                [dtype, last, n, layer, which] for n in fits if not (last and len(layer[1]) == 1) for which in range(3)
            ]
            (last_ones if last else new).extend(found)
    calls: list[Call] = []
    for part in (chains, between, new, last_ones):
        calls += [part[i] for i in sorted(range(len(part)), key=lambda i: (i * 2654435761) % 2**32)]
    write(target, calls)
    print(
        len(chains),
        "chains,",
        len(between),
        "between,",
        len(new),
        "of new layers,",
        len(last_ones),
        "with the channels last",
    )


def merge(source: str) -> None:
    """Put measured calls into the table that is shipped."""
    table = {
        json.dumps([layer, dtype, last]): {n: list(sizes) for n, *sizes in found}
        for layer, dtype, last, found in read_table()
    }
    chains: Counter[str] = Counter()
    for dtype, last, n, layer, which, size, *chain in read(source):
        name = json.dumps([layer, dtype, last])
        table.setdefault(name, {}).setdefault(n, [None, None, None])[which] = size
        if chain and chain[0][0] != size:
            chains["at once" if chain[0][0] == 0 else "in steps" if chain[0][-1] == 0 else "not to nothing"] += 1
    rows = [
        [*json.loads(name), [[n, *sizes] for n, sizes in sorted(found.items())]]
        for name, found in sorted(table.items())
    ]
    write(TABLE, [[*layer, pack(found)] for *layer, found in rows])
    print(len(table), "series; with too little room, calls fell back to no workspace:", dict(chains))


# on the card


def prepare_call(call: Call) -> tuple[Any, int]:
    """(the call, bytes of its result)."""
    dtype, last, n, layer, which = call[:5]
    c, axes, k, kernel, stride, pad, dilation, groups = layer
    kind = DTYPES[dtype]
    layout = {2: torch.channels_last, 3: torch.channels_last_3d}[len(axes)] if last else torch.contiguous_format
    x = torch.empty(n, c, *axes, device="cuda", dtype=kind, memory_format=layout)
    weight = torch.empty(k, c // groups, *kernel, device="cuda", dtype=kind, memory_format=layout)
    rest = (stride, pad, dilation, False, [0] * len(axes), groups)
    shape = (n, k, *output_axes(layer))
    aten, size = torch.ops.aten, 2 if kind != torch.float32 else 4
    if which == 0:
        return lambda: aten.convolution(x, weight, None, *rest), math.prod(shape) * size
    grad = torch.empty(*shape, device="cuda", dtype=kind, memory_format=layout)
    mask = [which == 1, which == 2, False]
    result = x if which == 1 else weight
    return lambda: aten.convolution_backward(grad, x, weight, None, *rest, mask), result.numel() * size


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


def fallbacks(call: Any, expected: int, first: int) -> list[int | None]:
    """What the call takes where each time the memory is 2 MiB short for what it took before; None where it fails then."""
    total = torch.cuda.get_device_properties(0).total_memory
    step, found = 2 * 2**20, [first]
    pages = lambda size: -(-size // step) * step  # noqa: E731
    try:
        while len(found) < 8 and found[-1] is not None and found[-1] > 4 * step:
            torch.cuda.empty_cache()
            limit = torch.cuda.memory_reserved() + max(20 * 2**20, pages(expected)) + pages(found[-1]) - step
            torch.cuda.set_per_process_memory_fraction(limit / total)
            found.append(inside(call, expected))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    return found[1:]


def work(part: int, parts: int, calls: list[Call], deadline: float, queue: Any) -> None:
    rows: list[Any] = []
    chained = 0
    for call in calls[part::parts]:
        if time.time() > deadline:
            break
        try:
            run, expected = prepare_call(call)
            size = inside(run, expected)
            row = [*call[:5], size]
            if size is not None and size > CHAIN and not call[1] and (len(call) > 5 or chained < len(rows) // 20):
                row.append(fallbacks(run, expected, size))
                chained += 1
            rows.append(row)
            del run
        except torch.OutOfMemoryError:
            continue
    queue.put(rows)


def measure(source: str, target: str, seconds: float) -> None:
    calls, parts = read(source), int(os.environ.get("PARTS", "10"))
    context = multiprocessing.get_context("fork")
    queue, deadline = context.Queue(), time.time() + seconds
    processes = [context.Process(target=work, args=(part, parts, calls, deadline, queue)) for part in range(parts)]
    for process in processes:
        process.start()
    rows = []
    for _ in processes:
        rows += queue.get()
        write(target, rows)
    print(len(rows), "of", len(calls), "calls")


if __name__ == "__main__":
    if sys.argv[1] == "measure":
        measure(sys.argv[2], sys.argv[3], float(sys.argv[4]) if len(sys.argv) > 4 else 120)
    else:
        {"collect": collect, "plan": plan, "merge": merge}[sys.argv[1]](*sys.argv[2:])
