"""Fine-tuning with frozen weights in 16, 8 or 4 bits and small layers beside them (LoRA, QLoRA).

In: a model. Out: another that shares its tensors and gives the same at first: its weights are not trained, and beside every
`Linear` layer stand two thin ones that are. Gradients and optimizer state then are those of the thin layers alone.
"""

from __future__ import annotations

import functools
from typing import Any

from outsize.compression.methods.low_rank import find_linear, matrix_of
from outsize.compression.methods.precision import keep_narrow
from outsize.compression.weights import get, own_parameters, put, share
from outsize.core.errors import InputError
from outsize.core.extras import has
from outsize.model.torch_port.objects import parameter_table
from outsize.model.torch_port.parts import require_torch

FORMATS = {None: None, 16: "bf16", 8: "int8", 4: "int4"}
"""Bits -> how frozen weights are kept; None: as they are."""
RANK, SCALE = 16, 2.0


def adapt(model: Any, rank: int = RANK, bits: int | None = None, scale: float = SCALE, peft: bool | None = None) -> Any:
    """The model with frozen weights of so many `bits` and trained adapters of this rank beside its linear layers.

    Your model is as it was. `peft`: the adapters are those of peft (None: where it is installed and the model is one of
    transformers, so that `peft.get_peft_model_state_dict` saves them), else plain ones.
    """
    require_torch("outsize.compression.adapt")
    import torch

    if not isinstance(model, torch.nn.Module):
        raise InputError(f"model is {type(model).__name__}: adapt takes a torch.nn.Module")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise InputError(f"rank is {rank!r}: give a whole number of at least 1, such as 16")
    if bits not in FORMATS:
        raise InputError(f"bits is {bits!r}: frozen weights are kept in 16, 8 or 4 bits, or as they are (None)")
    names = find_adapted(model)
    if not names:
        raise InputError("the model has no Linear layer whose weights it does not share: there is nothing to adapt")
    if peft is None:
        peft = has("peft") and hasattr(model, "get_output_embeddings")
    return add_adapters(share(model), names, rank, bits, scale, peft)


def find_adapted(model: Any) -> list[str]:
    """The layers that get adapters: linear ones whose weights are not shared, but not the output head."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return [name for name, layer in find_linear(model).items() if name and layer is not head]


def add_adapters(model: Any, names: list[str], rank: int, bits: int | None, scale: float, peft: bool) -> Any:
    """A copy that shares its tensors, changed in place. An adapter at first adds nothing."""
    import torch

    freeze(model)
    there = [name for name in names if get(model, name) is not None]
    layers: dict[str, Any] = {name: get(model, name) for name in there}
    lengths = {name: (matrix_of(layer).shape, layer.weight) for name, layer in layers.items()}
    kind = FORMATS[bits]
    if kind is not None:
        others = [name for name, module in model.named_modules() if own_parameters(module) and name not in there]
        keep_narrow(model, there, kind)
        keep_narrow(model, others, "bf16")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if peft:
            return _with_peft(model, there, rank, scale)
        for name in there:
            shape, weight = lengths[name]
            model = put(model, get(model, name), make_adapted(get(model, name), shape, weight, rank, scale))
    return model


def freeze(model: Any) -> None:
    """None of the parameters is trained; those of the user's model stay as they are."""
    import torch

    done: dict[int, Any] = {}
    for module in model.modules():
        table = parameter_table(module)
        for name, old in table.items():
            if old is not None:
                table[name] = done.setdefault(id(old), torch.nn.Parameter(old.detach(), requires_grad=False))


def _with_peft(model: Any, names: list[str], rank: int, scale: float) -> Any:
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=rank, lora_alpha=round(rank * scale), lora_dropout=0.0, target_modules=names)
    return inject_adapter_in_model(config, model)


def make_adapted(base: Any, shape: tuple[int, int], like: Any, rank: int, scale: float) -> Any:
    """A layer of `shape` (outputs x inputs) with an adapter."""
    import torch

    rank = min(rank, *shape)
    chain = {"dtype": like.dtype, "device": like.device, "bias": False}
    down, up = torch.nn.Linear(shape[1], rank, **chain), torch.nn.Linear(rank, shape[0], **chain)
    torch.nn.init.zeros_(up.weight)
    return _adapted_class()(scale, base, down, up)


def make_empty(scale: float) -> Any:
    """One without its three layers, for files."""
    return _adapted_class()(scale)


@functools.cache
def _adapted_class() -> Any:
    import torch

    class Adapted(torch.nn.Module):  # type: ignore[misc]
        """A frozen layer and two thin ones beside it."""

        def __init__(self, scale: float, *layers: Any) -> None:
            super().__init__()
            self.scale = scale
            for name, layer in zip(("base", "down", "up"), layers, strict=False):
                self.add_module(name, layer)

        def forward(self, x: Any) -> Any:
            return self.base(x) + self.up(self.down(x)) * self.scale

        @property
        def weight(self) -> Any:
            """As one matrix, for code that reads it (torch's own encoder layer does)."""
            added = self.up.weight @ self.down.weight * self.scale
            base = self.base.weight
            return base + (added if base.shape == added.shape else added.T)

        @property
        def bias(self) -> Any:
            return self.base.bias

        def __reduce_ex__(self, protocol: Any) -> Any:
            return make_empty, (self.scale,), self.__dict__

    return Adapted
