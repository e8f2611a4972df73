"""Follows compiled functions and modules in a trace.

In: what the step gave to `torch.compile`. Out: the same, compiled by torch's own compiler for the device that the step
believes in, with a backend that writes the programs and no kernels. Dynamo finds the regions between graph breaks, AOTAutograd
takes forward and backward apart, Inductor plans the buffers; the trace sees the programs run on tensors without contents.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from outsize.core.errors import OutsizeError
from outsize.model.compiled.programs import load_program
from outsize.model.torch_port import compiler
from outsize.model.torch_port.dispatch import leaves_of, no_functions
from outsize.model.torch_port.objects import is_compiled_copy

KNOWN = ("inductor", "aot_eager", "eager")
"""Backends that are followed; the last two run graphs operator by operator."""

TUNING = 64 * 2**20
"""What Triton takes while it times a kernel: at most as much as a card's second cache holds."""

GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes with CUDA graphs."""


class Tracing(Protocol):
    """What following needs of a trace."""

    device: str
    capability: tuple[int, int]
    total: int
    ledger: Any
    """Every storage that it has seen."""
    region: str | None
    """Label of the device for which something is being compiled now; None: nothing is."""

    def placing(self, label: str) -> contextlib.AbstractContextManager[None]: ...
    def label_of(self, tensor: Any) -> str | None: ...
    def note(self, sentence: str) -> None: ...
    def guess(self, sentence: str) -> None: ...


class Follower:
    """The compiled functions of one trace."""

    def __init__(self, trace: Tracing, attend: Callable[..., Any]) -> None:
        self.trace = trace
        self._compile = torch.compile
        self.attend = attend
        """Attention by the kernel that the device would choose."""
        self.graphs = 0
        """Graphs that were compiled."""
        self.used = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """What was compiled while the block ran is forgotten after it."""
        try:
            yield
        finally:
            if self.used:
                compiler.reset_compiler()

    def compile(self, target: Any, backend: Any = "inductor", **options: Any) -> Any:
        """What stands for `torch.compile(target, ...)`."""
        compiler.require_compiler()
        name = compiler.name_of_backend(backend)
        if name not in KNOWN:
            raise compiler.CompilerFailed(
                f"the backend {name} of torch.compile is not followed ({', '.join(KNOWN)} are)"
            )
        self._note_options(name, options)
        if not self.used:
            compiler.reset_compiler()
            self.used = True
        kept = {key: options[key] for key in ("fullgraph", "dynamic") if key in options}
        made = self._compile(target, backend=functools.partial(self._compile_graph, name), **kept)
        if not isinstance(target, torch.nn.Module):
            return functools.wraps(made)(functools.partial(self._call, made, None))
        made.forward = functools.partial(self._call, made.forward, target)
        return made

    def follow(self, model: Any) -> None:
        """Everything compiled in a model is followed from now on; its modules are changed."""
        for module in list(model.modules()):
            own = compiler.compiled_call(module)
            if own is not None:
                compiler.set_compiled_call(module, self.compile, own)
            elif is_compiled_copy(module):
                original = compiler.module_in(module)
                module.__dict__["forward"] = self.compile(original, backend=compiler.backend_of(module)).forward

    def _note_options(self, name: str, options: dict[str, Any]) -> None:
        mode, chosen = options.get("mode"), options.get("options") or {}
        if name != "inductor":
            return
        if mode in GRAPHS or chosen.get("triton.cudagraphs"):
            self.trace.guess(f"mode={mode!r} keeps memory of CUDA graphs for itself, which is not modelled")
        elif str(mode).startswith("max-autotune") or chosen.get("max_autotune"):
            self.trace.guess("max_autotune tries kernels while it compiles, and what these take is not known")

    def _call(self, made: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        """A call of something compiled: Dynamo sees neither the trace's modes for torch functions nor its hooks."""
        if self.trace.region is not None:  # inside another compiled function
            return made(*args, **kwargs)
        label = self._label((args, kwargs), module)
        begin, end = functools.partial(self._begin, label), functools.partial(self._begin, None)
        with contextlib.ExitStack() as stack:
            stack.enter_context(compiler.without_functions())
            stack.enter_context(compiler.without_hooks())
            stack.enter_context(compiler.without_streams())
            stack.enter_context(compiler.watched(begin, end))
            stack.enter_context(compiler.as_on_host())
            stack.enter_context(compiler.settings())
            stack.enter_context(_quiet())
            if label != "cpu":
                stack.enter_context(compiler.inductor_for_card(self.trace.capability, self.trace.total))
            try:
                return made(*args, **kwargs)
            except Exception as error:
                if compiler.is_compilers(error) and not isinstance(error, OutsizeError):
                    raise compiler.failed(error) from error
                raise

    def _begin(self, label: str | None) -> None:
        self.trace.region = label

    def _label(self, given: Any, module: Any) -> str:
        tensors = [leaf for leaf in leaves_of(given) if isinstance(leaf, torch.Tensor)]
        tensors += [] if module is None else list(module.parameters())
        labels = [label for tensor in tensors if (label := self.trace.label_of(tensor)) is not None]
        return next((label for label in labels if label.startswith("cuda")), labels[0] if labels else self.trace.device)

    def _compile_graph(self, name: str, graph: Any, inputs: Any, **kwargs: Any) -> Any:
        """The backend: a graph that Dynamo has captured -> what runs it on tensors without contents."""
        self.graphs += 1
        label = self.trace.region or self.trace.device
        _replace_attention(graph, self.attend)
        device = torch.device(label)
        if name == "eager":
            compiler.move_graph(graph, (), device)
            return graph
        if name == "aot_eager":
            return compiler.aot_eager(graph, inputs, device)
        if label != "cpu":
            self.trace.guess(
                f"compiled steps are followed with the buffers that Inductor of torch {torch.__version__} plans for the card: "
                "the kernels that it chooses there may hold more (two of eight measured steps held 6 and 9 % more)"
            )
        copied = functools.partial(self._copied, label)
        load = functools.partial(load_program, make=functools.partial(self._make, label), copied=copied)
        return compiler.inductor(graph, inputs, device, load)

    def _make(self, label: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, kind: str) -> Any:
        """A buffer of a program; `kind` is `cpu` for the few that a program for a card keeps on the host."""
        with no_functions(), self.trace.placing(label if kind in label else kind):
            return torch.empty_strided(shape, strides, dtype=dtype, device="meta")

    def _copied(self, label: str, tensors: list[Any]) -> None:
        """Copies that a kernel may be tuned on: part of the bound."""
        with no_functions():
            sizes = [tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor)]
        sizes.append(TUNING)
        blocks = [self.trace.ledger.allocate(0, label, "autotuning") for _ in sizes]
        for block, size in zip(blocks, sizes, strict=True):
            block.most, block.kind = size, "workspace"
        for block in blocks:
            self.trace.ledger.free(block)


def _replace_attention(graph: Any, attend: Callable[..., Any]) -> None:
    """Calls of attention in a graph, and in the graphs inside it, go to another function."""
    known = (torch.nn.functional.scaled_dot_product_attention,)
    for module in graph.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                if node.op == "call_function" and node.target in known:
                    node.target = attend
            module.recompile()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What the compiler says of its work is for those who run it."""
    names = ("torch._inductor", "torch._dynamo", "torch._functorch")
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
