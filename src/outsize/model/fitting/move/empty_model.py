"""A model whose parameters take no memory, for weights that are streamed from a file.

In: a block of code that builds a model. Out: the same model with parameters on the meta device; buffers are real, since no
file has those that a module computes for itself.
"""

from __future__ import annotations

import contextlib
from typing import Any

from outsize.model.torch_port.patches import registering_parameters


def without_weights() -> contextlib.AbstractContextManager[None]:
    """`with without_weights(): model = Model(config)`."""
    import torch

    register = torch.nn.Module.register_parameter

    def on_meta(module: Any, name: str, parameter: Any) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    return registering_parameters(on_meta)
