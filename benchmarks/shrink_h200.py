"""A Llama-shaped model of 1.3 B parameters on a card: bytes of its weights in fewer bits, of 8-bit state and of factored layers.

    python benchmarks/shrink_h200.py            # on a card: the 1.3 B model
    python benchmarks/shrink_h200.py --small    # anywhere: the same with a few layers of width 128
    python benchmarks/shrink_h200.py --training # the rows with an optimizer alone

For each form of the model `outsize.estimate` says the peak of a step before it runs; the step then runs, and the most that
torch's allocator gave out (on a CPU: the account of `outsize.fit`) stands beside it, with the time of the fastest of `STEPS`
steps. The weights are random: losses mean nothing here. A Markdown table; "off" is the estimate over what was measured.
"""

from __future__ import annotations

import functools
import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import outsize
from outsize.compression.methods.low_rank import factor, linear_chain
from outsize.compression.methods.precision import keep_narrow
from outsize.compression.narrow_state import make_narrow
from outsize.compression.weights import count_bytes, own_parameters, put
from outsize.model.fitting.run.meter import Meter

STEPS = 5
SMALL = "--small" in sys.argv
DEVICE = "cuda" if torch.cuda.is_available() and not SMALL else "cpu"
WIDTH, HEADS, BLOCKS, VOCABULARY, ROWS, LENGTH = (128, 4, 2, 512, 2, 32) if SMALL else (2048, 16, 24, 32_000, 2, 1024)
RANK = WIDTH // 4


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Any) -> Any:
        return functional.rms_norm(x, (WIDTH,), self.weight)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        wide = WIDTH * 8 // 3 // 64 * 64
        self.before, self.after = Norm(), Norm()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(WIDTH, wide, bias=False), nn.Linear(WIDTH, wide, bias=False)
        self.down = nn.Linear(wide, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        y = self.before(x)
        q, k, v = (layer(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.after(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = Norm(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Any) -> Any:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def narrow(model: Any, kind: str) -> Any:
    return keep_narrow(model, [name for name, module in model.named_modules() if own_parameters(module)], kind)


def factored(model: Any) -> Any:
    for layer in [one for block in model.blocks for one in block.modules() if isinstance(one, nn.Linear)]:
        shape = layer.weight.shape  # of random weights no cut is better than another, and a decomposition takes long
        left, right = layer.weight.new_empty(shape[0], RANK), layer.weight.new_empty(RANK, shape[1])
        if SMALL:
            left, right = factor(layer.weight.detach(), RANK)
        put(model, layer, linear_chain(right, left, None))
    return model.train()


FORMS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: model, "int8": functools.partial(narrow, kind="int8"), "int4": functools.partial(narrow, kind="int4"),
    "factored": factored, "LoRA on int4": lambda model: outsize.compression.adapt(model, bits=4, peft=False),
}  # fmt: skip


def answer(model: Any, ids: Any) -> None:
    with torch.no_grad():
        model(ids)


def train(model: Any, optimizer: Any, ids: Any) -> None:
    functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def measure(step: Callable[[], None], held: list[Any]) -> tuple[int, float]:
    """(peak bytes, seconds of the fastest step). On a CPU the first two steps are followed: in the second there is state."""
    meter = Meter(DEVICE)
    if DEVICE == "cpu":
        meter.begin(lambda: held)
    step()
    step()
    peak = meter.end() or 0 if DEVICE == "cpu" else 0
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    fastest = float("inf")
    for _ in range(STEPS):
        began = time.perf_counter()
        step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        fastest = min(fastest, time.perf_counter() - began)
    return (torch.cuda.max_memory_allocated() if DEVICE == "cuda" else peak), fastest


def run(name: str, bits: int | None) -> None:
    """`bits` of the optimizer's state: 0 whole; None: an answer and no training."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = FORMS[name](Llama())
        ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    trained = [one for one in model.parameters() if one.requires_grad]
    make = functools.partial(torch.optim.AdamW, lr=1e-5)
    optimizer = None if bits is None else make_narrow(make, trained, bits) if bits else make(trained)
    given = (answer, model, ids) if optimizer is None else (train, model, optimizer, ids)
    found = outsize.estimate(*given, device=DEVICE, card="H200" if DEVICE == "cuda" else None)
    said = found.peak_allocated.bytes if DEVICE == "cuda" else found.peak_requested.bytes

    peak, seconds = measure(lambda: given[0](*given[1:]), [*model.parameters(), *model.buffers(), ids])
    what = "answer" if bits is None else f"AdamW, {bits}-bit state" if bits else "AdamW"
    off, spent = f"{said / peak - 1:+.2%}", f"{1e3 * seconds:.1f} ms"
    cells = [name, what, f"{count_bytes(model):,}", f"{said:,}", f"{peak:,}", off, spent]
    print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    card = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {card}, width {WIDTH}, {BLOCKS} blocks, {ROWS} x {LENGTH} tokens\n")
    print("| model | step | weights | estimate | measured peak | off | time |\n|---|---|---|---|---|---|---|")
    answers = [] if "--training" in sys.argv else [(name, None) for name in FORMS]
    rows = [*answers, ("plain", 0), ("plain", 8), ("factored", 0), ("LoRA on int4", 0)]
    for name, bits in rows:
        try:
            run(name, bits)
        except (torch.OutOfMemoryError, outsize.OutsizeError) as error:
            print(f"| {name} | state bits {bits} | {type(error).__name__}: {str(error)[:120]} | | | | |", flush=True)
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
