"""What users hold after `shrink`: the smaller model, what it cost, and files of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outsize.compression import files
from outsize.compression.narrow_state import make_narrow
from outsize.compression.training_bytes import BITS
from outsize.core.outcomes.shrinking import Shrinking


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Shrunk:
    """A smaller model."""

    model: Any
    """A `torch.nn.Module` that takes and gives what the user's model does."""
    plan: Shrinking
    difference: list[dict[str, Any]] | str
    """How the model differs from the user's, for files; or why that cannot be said."""
    call: tuple[tuple[Any, ...], dict[str, Any]] | None
    """(arguments, named arguments) of the first call of the model, for exports."""

    make: Callable[[Any], Any] | None = None
    """The user's function parameters -> optimizer; None: AdamW."""

    def optimizer(self) -> Any:
        """An optimizer for what is trained of the model, with its state in as many bits as the plan says."""
        import torch

        make = self.make or torch.optim.AdamW
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        bits = self.model.__dict__.get(BITS, 0)
        return make_narrow(make, trained, bits) if bits else make(trained)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model: `.safetensors` for `compression.load`, `.pt` for `torch.load`, `.pt2` for `torch.export.load`."""
        files.save(self.model, path, self.difference, self.call)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.model(*inputs, **named)

    def __repr__(self) -> str:
        return str(self.plan)

    def _repr_html_(self) -> str | None:
        return self.plan._repr_html_()
