"""Weights kept in fewer bits, computed with as before: bfloat16, float8, int8, int4.

Matrices and kernels are kept in the asked format; what else a layer has (biases, norms) is kept in bfloat16. A layer's weights
are decoded when it reads them, so activations keep their dtype. torchao has kernels for such weights, but only for `Linear`, and
its int4 only on cards (0.18 says "Requires mslk" on a CPU). These serve every layer on every device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from outsize.compression.codecs import Grouped, Narrow, RowScaled
from outsize.compression.derived import as_parameters, derive
from outsize.compression.method import Candidate, Method, Stage, Subject
from outsize.compression.weights import Site, get, own_parameters, sites_of
from outsize.model.torch_port.objects import parameter_table


class Precision(Method):
    """Weights in one narrower format."""

    stage = Stage.PRECISION
    needs = "floating-point parameters that are wider"

    def __init__(self, name: str) -> None:
        self.name, self.trains = name, name == "bf16"  # whole numbers have no gradient

    def candidates(self, subject: Subject) -> list[Candidate]:
        return [
            self.candidate(site.name, self.name, site.modules, keep_narrow, names=site.modules, kind=self.name)
            for site in sites_of(subject.model)
            if any(_codec(tensor, self.name) for tensor in _own(subject.model, site))
        ]


def _own(model: Any, site: Site) -> list[Any]:
    return [tensor for name in site.modules for tensor in own_parameters(get(model, name))]


def keep_narrow(model: Any, names: Sequence[str], kind: str) -> Any:
    """The weights of these modules in a narrow format. Weights that several modules share stay shared."""
    done: dict[int, tuple[Any, dict[str, Any]]] = {}
    for module in _holders(model, names):
        for key, tensor in list(parameter_table(module).items()):
            codec = _codec(tensor, kind)
            if codec is None:
                continue
            if id(tensor) not in done:
                done[id(tensor)] = codec, as_parameters(codec, codec.encode(tensor.detach()), tensor.requires_grad)
            derive(module, key, *done[id(tensor)])
    return model


def _holders(model: Any, names: Sequence[str]) -> Iterator[Any]:
    """The modules that hold the weights now: those below it where a module was replaced by a chain of factors."""
    for name in names:
        module = get(model, name)
        if module is not None:
            yield from [module] if own_parameters(module) or not name else module.modules()


def _codec(tensor: Any, kind: str) -> Any:
    """How this parameter is kept, None where that saves nothing."""
    if tensor is None or not tensor.is_floating_point() or hasattr(tensor, "__tensor_flatten__"):
        return None
    dtype, size = str(tensor.dtype).removeprefix("torch."), tensor.dtype.itemsize
    codec: Any = Narrow("bfloat16", dtype) if size > 2 else None
    if tensor.dim() >= 2 and size > 1 and kind != "bf16":
        row = tensor[0].numel() if tensor.shape[0] else 0
        if kind == "int4":
            codec = Grouped("int4", dtype, tuple(tensor.shape)) if tensor.numel() >= 64 else codec
        elif row + size < row * 2:
            codec = RowScaled(kind, dtype)
    return codec
