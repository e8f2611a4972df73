"""Make a torch memory snapshot of about 50 MB without a card, for the pages of `outsize report`.

    python benchmarks/large_snapshot.py OUT.pickle [MEGABYTES]

A GPT is trained on tensors without contents. Every storage that the real step would allocate, with the real Python stack that
asked for it, goes through the model of torch's CUDA allocator, which is exact on recordings of a real one. The program keeps
one list of logits too many, and at the end a longer batch asks for more than a card of 24 GB has. What is written has the form of
`torch.cuda.memory._dump_snapshot`: the same keys, frames shared between entries as torch shares them, C++ frames included.
"""

from __future__ import annotations

import pickle
import sys
import time
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outsize.allocator.cuda import CudaCache
from outsize.allocator.driver import CudaDriver
from outsize.allocator.settings import CudaSettings
from outsize.model.tracing.records.ledger import Held, Ledger

GiB = 2**30
NATIVE = (
    "c10::cuda::CUDACachingAllocator::Native::DeviceCachingAllocator::malloc(unsigned long, CUstream_st*)",
    "c10::cuda::CUDACachingAllocator::Native::NativeCachingAllocator::allocate(unsigned long)",
    "at::detail::empty_generic(c10::ArrayRef<long>, c10::Allocator*, c10::DispatchKeySet, c10::ScalarType)",
    "at::native::empty_cuda(c10::ArrayRef<long>, std::optional<c10::ScalarType>, std::optional<c10::Layout>)",
    "at::_ops::empty_memory_format::call(c10::ArrayRef<c10::SymInt>, std::optional<c10::ScalarType>, std::optional<c10::Layout>)",
    "torch::autograd::THPVariable_method(_object*, _object*, _object*)",
)


BETWEEN = ("_PyEval_EvalFrameDefault", "_PyFunction_Vectorcall", "PyObject_Call")
"""C++ frames between two frames of Python."""


class Block(nn.Module):
    """One block of a GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in (q, k, v))
        weights = (q @ k.transpose(-2, -1) / 8).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Embeddings, blocks, logits."""

    def __init__(self, layers: int, width: int, heads: int, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.words.weight.T


class Recorder(TorchDispatchMode):
    """Notes every new storage and the stack that asked for it."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, torch.Tensor):
                self.ledger.add(one, "cuda:0", str(function))
        return made


def train(ledger: Ledger, steps: int) -> None:
    """Steps of AdamW; every third step keeps its logits by mistake, and the last batch is four times as long."""
    model = Gpt(layers=12, width=768, heads=12, words=50304)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    kept = []
    for step in range(steps):
        ledger.step = step
        length = 1024 if step == steps - 1 else 256
        tokens = torch.zeros(8, length, dtype=torch.long)
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.view(-1, 50304), tokens.view(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            kept.append(logits.detach())
    ledger.closed = True


class Writer:
    """Turns the ledger into the entries of a snapshot."""

    def __init__(self, capacity: int) -> None:
        self.frames: dict[tuple[str, int, str], dict[str, Any]] = {}
        self.stacks: list[list[dict[str, Any]]] = []
        self.model = CudaCache(CudaDriver(capacity), CudaSettings(), None)
        self.entries: list[dict[str, Any]] = []
        self.clock = 1_760_000_000_000_000
        self.segments: dict[int, int] = {}

    def note_stack(self, held: Held) -> None:
        """Keep the Python stack of this moment as torch would."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_name != "__torch_dispatch__":
            frame = frame.f_back
        found = [self.frame("??", 0, name) for name in NATIVE]
        while frame is not None:
            name, frame_name = frame.f_code.co_filename, frame.f_code.co_name
            if frame_name not in ("__torch_dispatch__", "main"):
                short = name.replace(sys.prefix, "/opt/env").replace(__file__, "/home/me/train.py")
                found.append(self.frame(short, frame.f_lineno, frame.f_code.co_qualname))
                found += [self.frame("??", 0, name) for name in BETWEEN]
            frame = frame.f_back
        held.node = len(self.stacks)
        self.stacks.append(found)

    def frame(self, filename: str, line: int, name: str) -> dict[str, Any]:
        key = (filename, line, name)
        return self.frames.setdefault(key, {"filename": filename, "line": line, "name": name})

    def add(self, action: str, address: int, size: int, stack: list[dict[str, Any]]) -> None:
        self.clock += 37
        self.entries.append(
            {"action": action, "addr": address, "size": size, "stream": 0, "time_us": self.clock, "compile_context": "N/A",
             "user_metadata": "", "frames": list(stack)}
        )  # fmt: skip

    def watch_segments(self, stack: list[dict[str, Any]]) -> None:
        now = {segment.address: segment.bytes for segment in self.model.segments()}
        for address in now.keys() - self.segments.keys():
            self.add("segment_alloc", address, now[address], stack)
        for address in self.segments.keys() - now.keys():
            self.add("segment_free", address, self.segments[address], stack)
        self.segments = now

    def write(self, ledger: Ledger) -> dict[str, Any]:
        owners: dict[int, Held] = {}
        for alloc, held in ledger.events:
            stack = self.stacks[held.node]
            calls = self.model.driver.calls
            if alloc:
                if not held.bytes:
                    continue
                served = self.model.malloc(held.id, held.bytes, 0)
                if self.model.driver.calls != calls:
                    self.watch_segments(stack)
                if not served:
                    self.entries.append({"action": "oom", "size": held.bytes, "stream": 0, "time_us": self.clock, "device_free":
                                         self.model.driver.capacity - self.model.driver.held, "frames": stack})  # fmt: skip
                    break
                owners[held.id] = held
                piece = self.model.live[held.id]
                self.add("alloc", piece.address, piece.size, stack)
            elif held.id in owners:
                piece = self.model.live[held.id]
                address, size = piece.address, piece.size
                self.model.free(owners.pop(held.id).id)
                self.add("free_requested", address, size, stack)
                self.add("free_completed", address, size, stack)
        return {"segments": self._segments(owners), "device_traces": [self.entries], "allocator_settings": {}}

    def _segments(self, owners: dict[int, Held]) -> list[dict[str, Any]]:
        made = []
        for segment in self.model.segments():
            blocks = []
            for block in segment.blocks:
                used = block.id is not None
                frames = self.stacks[owners[block.id].node] if used else []
                blocks.append({"address": segment.address + block.offset, "size": block.bytes, "requested_size": block.bytes,
                               "state": "active_allocated" if used else "inactive", "frames": frames})  # fmt: skip
            made.append({"device": 0, "address": segment.address, "total_size": segment.bytes, "stream": 0, "segment_type":
                         segment.pool, "segment_pool_id": (0, 0), "is_expandable": False, "blocks": blocks})  # fmt: skip
        return made


def main(path: str, megabytes: int = 50) -> None:
    begin = time.perf_counter()
    ledger, writer = Ledger(), Writer(capacity=int(23.6 * GiB))
    ledger.where = writer.note_stack
    with FakeTensorMode(), Recorder(ledger):
        train(ledger, steps=max(2, round(megabytes * 2.05)))
    snapshot = writer.write(ledger)
    with open(path, "wb") as file:
        pickle.dump(snapshot, file)
        size = file.tell()
    print(f"{path}: {size / 1e6:.1f} MB, {len(writer.entries):,} entries, {len(snapshot['segments'])} segments, "
          f"{time.perf_counter() - begin:.0f} s to make")  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
