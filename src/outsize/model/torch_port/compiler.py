"""Dynamo, AOTAutograd and Inductor: private parts of `torch.compile`.

In: a step on tensors without contents that calls compiled functions. Out: the programs that torch's own compiler writes for them,
for a card that need not be there, without the kernels. Autograd cannot follow a tensor on a card that is not there, so graphs are
captured as if they were on the host; their tensors get the card's name before Inductor sees them. Inductor then chooses
layouts, fuses and plans its buffers as it does on that card.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from outsize.core.errors import OutsizeError
from outsize.model.torch_port.fake_cuda import answer
from outsize.model.torch_port.parts import has_part, missing, part
from outsize.model.torch_port.patches import Row, replaced

PROGRAM = "_inductor.graph.GraphLowering._compile_to_module_lines"
"""Takes the text of a program and loads it, kernels and all."""

NEEDED = (
    PROGRAM, "_dynamo.callback.callback_handler", "utils._python_dispatch.is_in_any_mode_without_ignore_compile_internals",
    "_functorch.partitioners.choose_saved_values_set", "_subclasses.meta_utils.MetaTensorDescriber", "_inductor.compile_fx",
)  # fmt: skip
"""What following compiled steps stands on."""


class CompilerFailed(OutsizeError):
    """Torch's compiler could not follow the step on tensors without contents."""


def require_compiler() -> None:
    """An `OutsizeError` where this torch has another compiler than the one that is known."""
    for name in NEEDED:
        if not has_part(name):
            raise CompilerFailed(str(missing(name)))


def reset_compiler() -> None:
    """Forget everything that was compiled in this process: it is compiled again when it is called."""
    part("_dynamo.reset")()


def uncompiled() -> contextlib.AbstractContextManager[None]:
    """What is compiled runs as it was written."""
    stance: contextlib.AbstractContextManager[None] = part("compiler.set_stance")("force_eager")
    return stance


def backend_of(compiled: Any) -> Any:
    """The backend that a compiled function, or a compiled module's own function, was given."""
    context = getattr(compiled, "dynamo_ctx", None)
    found = getattr(compiled, "_torchdynamo_orig_backend", None) if context is None else context.callback
    if found is None:  # a function keeps its context only in what it closes over
        cells = [cell.cell_contents for cell in getattr(compiled, "__closure__", None) or ()]
        found = next((cell.callback for cell in cells if hasattr(cell, "callback")), None)
        found = found or next((cell for cell in cells if hasattr(cell, "_torchdynamo_orig_backend")), None)
    return found


def name_of_backend(backend: Any) -> str:
    """The name under which torch knows a backend."""
    if isinstance(backend, str):
        return backend
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", None)
    return str(name or type(backend).__name__)


def compiled_function(compiled: Any) -> Any:
    """The function that was compiled, None for what is no compiled function."""
    return getattr(compiled, "_torchdynamo_orig_callable", None)


def module_in(compiled: Any) -> Any:
    """The module that `torch.compile(module)` was given."""
    return compiled._orig_mod


def compiled_call(module: Any) -> Any:
    """What a module that was compiled by its own `compile()` is called by; None for other modules."""
    return getattr(module, "_compiled_call_impl", None)


def call_by(module: Any, call: Any) -> None:
    """Let a module be called by what its own `compile()` made; None: as it was written."""
    module._compiled_call_impl = call


def set_compiled_call(module: Any, compile: Callable[..., Any], like: Any) -> None:
    """Compile a module's own call as that of another one was."""
    module._compiled_call_impl = compile(module._call_impl, backend=backend_of(like))


def copying_compiled(compile: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """A copy of a compiled module is compiled by `compile`."""

    def reduce(self: Any) -> Any:
        return functools.partial(compile, backend=backend_of(self)), (self._orig_mod,)

    return replaced(
        [(part("_dynamo.eval_frame.OptimizedModule"), "__reduce__", reduce)] if "torch._dynamo" in sys.modules else []
    )


@contextlib.contextmanager
def watched(begin: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """`begin` and `end` are called around every compilation while the block runs."""
    handler = part("_dynamo.callback.callback_handler")
    first, last = (lambda *args: begin()), (lambda *args: end())
    handler.register_start_callback(first)
    handler.register_end_callback(last)
    try:
        yield
    finally:
        for callbacks, callback in ((handler.start_callbacks, first), (handler.end_callbacks, last)):
            if callback in callbacks:  # a reset has emptied them
                callbacks.remove(callback)


def without_functions() -> Any:
    """No mode for torch functions is on: the compiler would compile what it does."""
    return part("_dynamo.variables.torch_function.TorchFunctionModeStackStateManager")()


def without_hooks() -> contextlib.AbstractContextManager[None]:
    """No hook for all modules is called: the compiler would compile it."""
    owner = part("nn.modules.module")
    names = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_forward_hooks_always_called")
    return replaced([(owner, name, type(vars(owner)[name])()) for name in names if name in vars(owner)])


def without_streams() -> contextlib.AbstractContextManager[None]:
    """Dynamo keeps the streams of an accelerator that is there; a fake one has none to keep."""
    return replaced([(part("accelerator"), "is_available", answer(False))])


_stage = types.SimpleNamespace(capturing=True)
"""`capturing`: graphs are captured now; False while Inductor lowers one, whose tensors have the names of their devices."""


@contextlib.contextmanager
def as_on_host() -> Iterator[None]:
    """Graphs are captured as if tensors without contents were on the host."""
    kind = part("_subclasses.meta_utils.MetaTensorDescriber")
    describe = kind.describe_tensor

    def described(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        found = describe(self, tensor, *args, **kwargs)
        if found.device.type == "meta":
            object.__setattr__(found, "device", torch.device("cpu"))
        return found

    _stage.capturing = True
    mode = part("_subclasses.fake_tensor.FakeTensorMode")
    dispatch = mode.dispatch

    def dispatched(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = (kwargs or {}).get("device") if _stage.capturing else None
        if device is not None and torch.device(device).type in ("cuda", "meta"):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return dispatch(self, func, types, args, kwargs)

    with replaced([(kind, "describe_tensor", described), (mode, "dispatch", dispatched)]):
        yield


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """Nothing is read from caches or written to them, one thread compiles, and no kernel is tried."""
    off = ("cpp_wrapper", "max_autotune", "max_autotune_gemm", "triton.cudagraphs", "benchmark_kernel")
    inductor = {"force_disable_caches": True, "compile_threads": 1} | dict.fromkeys(off, False)
    inductor["force_shape_pad"] = True  # a card measures whether padding a product is faster: it may be
    wanted: dict[str, dict[str, Any]] = {
        "_inductor.config": inductor, "_dynamo.config": {"automatic_dynamic_shapes": False},
        "_functorch.config": {"force_non_lazy_backward_lowering": True, "enable_autograd_cache": False},
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, values in wanted.items():
            owner = part(name)
            stack.enter_context(owner.patch({key: value for key, value in values.items() if _has_setting(owner, key)}))
        yield


def _has_setting(owner: Any, name: str) -> bool:
    try:
        for step in name.split("."):
            owner = getattr(owner, step)
    except AttributeError:
        return False
    return True


def card_for_inductor(capability: tuple[int, int], total: int) -> list[Row]:
    """Rows with which Inductor writes programs for a card that is not there, and for Triton where that is not installed."""
    interface = part("_dynamo.device_interface.CudaInterface")
    properties = types.SimpleNamespace(
        name="outsize card", major=capability[0], minor=capability[1], total_memory=total, multi_processor_count=132,
        warp_size=32, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, max_threads_per_block=1024,
        shared_memory_per_block=49152, shared_memory_per_block_optin=232448, gcnArchName="",
    )  # fmt: skip
    said: dict[str, Any] = {
        "get_device_properties": properties, "current_device": 0, "device_count": 1, "is_triton_capable": True,
        "raise_if_triton_unavailable": None, "get_raw_stream": 0, "synchronize": None, "exchange_device": 0,
        "maybe_exchange_device": 0, "memory_allocated": 0, "is_available": True, "is_bf16_supported": True,
        "get_compute_capability": 10 * capability[0] + capability[1],
    }  # fmt: skip
    rows: list[Row] = [(interface, name, staticmethod(answer(value))) for name, value in said.items()]
    rows += [
        (interface.Worker, name, staticmethod(answer(said[name])))
        for name in ("get_device_properties", "current_device")
    ]
    rows += [(part("_inductor.scheduler"), "has_triton", answer(True))]
    rows += [(part("_subclasses.fake_tensor"), "init_gpu_context", answer(None))]
    padding = part("_inductor.fx_passes.pad_mm")
    rows += [(padding, "check_device", answer(True)), (padding, "has_triton", answer(True))]
    rows += [(part("utils._triton"), "triton_hash_with_backend", answer("none"))]
    return rows


@contextlib.contextmanager
def inductor_for_card(capability: tuple[int, int], total: int) -> Iterator[None]:
    """Inductor believes in a card; what it remembers of cards is forgotten before and after."""
    forget = part("_inductor.runtime.hints.DeviceProperties").__dict__["create"].__func__
    forget.cache_clear()
    try:
        with replaced(card_for_inductor(capability, total)):
            yield
    finally:
        forget.cache_clear()


def move_graph(graph: Any, inputs: Any, device: Any) -> None:
    """The tensors of a captured graph get the name of another device."""
    fake = part("_subclasses.fake_tensor.FakeTensor")

    def rename(value: Any) -> None:
        if isinstance(value, fake):
            value.fake_device = device
        elif isinstance(value, list | tuple):
            for item in value:
                rename(item)

    for node in graph.graph.nodes:
        rename(node.meta.get("val"))
        if node.op == "call_function" and node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": device}
    rename(list(inputs))


Load = Callable[[str], Callable[[list[Any]], Any]]
"""The text of a program -> what runs it: takes a list of tensors, which it empties, and gives the results."""


def inductor(graph: Any, inputs: Any, device: Any, load: Load) -> Any:
    """What Inductor makes of a captured graph on a device, its program loaded by `load`."""
    owner = part("_inductor.graph.GraphLowering")
    begin = owner.__init__

    def lower(self: Any, partitioned: Any, example_inputs: Any = None, *args: Any, **kwargs: Any) -> None:
        if device.type != "cpu":
            move_graph(partitioned, example_inputs or (), device)
        _stage.capturing = False
        begin(self, partitioned, example_inputs, *args, **kwargs)

    def load_lines(self: Any, code: Any) -> Any:
        _stage.capturing = True
        return types.SimpleNamespace(call=load(code.value), __file__="<outsize>")

    with replaced([(owner, "__init__", lower), (owner, "_compile_to_module_lines", load_lines)]):
        return part("_inductor.compile_fx").compile_fx(graph, inputs)


def aot_eager(graph: Any, inputs: Any, device: Any) -> Any:
    """What runs a captured graph operator by operator, forward and backward taken apart, on a device."""
    backends = part("_dynamo.backends.debugging")

    def run(partitioned: Any, given: Any, **kwargs: Any) -> Any:
        if device.type != "cpu":
            move_graph(partitioned, given, device)
        return backends.boxed_nop(partitioned, given)

    return backends.aot_eager(graph, inputs, fw_compiler=run, bw_compiler=run)


def loader_rows(stub: Any) -> list[Row]:
    """Rows with which a program's text can be executed without its kernels."""
    return [(part("_inductor.async_compile"), "AsyncCompile", stub)]


def is_compilers(error: BaseException) -> bool:
    """True for an error of the compiler itself, not of the code that it compiled."""
    return isinstance(error, part("_dynamo.exc.TorchDynamoException"))


def failed(error: BaseException) -> CompilerFailed:
    """The same in one sentence."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = next((line for line in lines if line and not line.endswith("raised:")), type(error).__name__)
    return CompilerFailed(f"torch {torch.__version__} could not compile the step on tensors without contents: {said}")


# what a region saves for its backward pass


class NodeInfo(Protocol):
    """What torch's partitioner knows of the nodes of a joint graph."""

    inputs: list[Any]

    def is_required_fw(self, node: Any) -> bool: ...


NAMED = 0.4999
"""What the share is multiplied with, to be a setting of torch that names it in caches."""

Choose = Callable[[Any, NodeInfo, list[Any]], list[Any]]
"""(joint graph, what is known of its nodes, what torch would save) -> what is saved."""


@contextlib.contextmanager
def saving(choose: Choose, share: float) -> Iterator[None]:
    """What is compiled in the block saves what `choose` says; `share` is its name in torch's caches."""
    owner = part("_functorch.partitioners")
    usual = vars(owner)["choose_saved_values_set"]

    def chosen(joint: Any, info: Any, memory_budget: float = 1.0) -> Any:
        return choose(joint, info, usual(joint, info, memory_budget=1.0))

    # caches know it, `chosen` does not look at it, and nobody sets such a number
    named = {"activation_memory_budget": 1.0 - share * NAMED}
    with (
        part("_functorch.config").patch(named),
        part("_dynamo.config").patch({"automatic_dynamic_shapes": False}),
        replaced([(owner, "choose_saved_values_set", chosen)]),
    ):
        yield


def bytes_of(node: Any) -> int:
    """Bytes of what a node of a graph gives."""
    value = node.meta.get("val")
    return int(value.numel()) * value.element_size() if isinstance(value, torch.Tensor) else 0


def is_tensor(node: Any) -> bool:
    """True for a node that gives one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def storage_of(node: Any) -> Any:
    """The node that made the memory that a node gives: another one for a view."""
    while node.op == "call_function" and node.all_input_nodes:
        source = node.all_input_nodes[0]
        made = source if node.target is operator.getitem else node
        packet = str(getattr(made.target, "overloadpacket", ""))
        if not getattr(made.target, "is_view", False) and packet not in (
            "aten._unsafe_view",
            "aten.view",
            "aten.permute",
        ):
            break
        node = source
    return node


def is_random(node: Any) -> bool:
    """True for a node that draws random numbers; attention without dropout draws none."""
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded not in tags:
        return False
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", argument.default_value)
            return bool(given != 0.0)
    return True


def is_opaque(node: Any) -> bool:
    """True for a node that may do more than compute: a graph inside the graph, a message to other processes."""
    kind = part("_ops.OpOverload")
    inside = isinstance(node.target, part("_ops.HigherOrderOperator"))
    return inside or (isinstance(node.target, kind) and node.target.namespace in ("_c10d_functional", "c10d"))
