"""The user's mistakes in what was asked of fit, named before anything is touched.

In: the arguments of `outsize.fit`. Out: nothing, or an `InputError` that says what was given and what would do.
"""

from __future__ import annotations

import math
from typing import Any

from outsize.core.errors import InputError
from outsize.model.fitting.plan.remedies import ALLOWED, REMEDIES
from outsize.model.fitting.run.optimizer_subset import parameters_of, require_plain_step
from outsize.model.torch_port.objects import is_compiled

KEYS = (*(kind.key for kind in REMEDIES), "pieces")
"""Names that `without` may hold."""


def check_words(
    model: Any, loss: Any, optimizer: Any, allow: Any, without: Any, own_step: bool, clip: Any, scaler: Any
) -> None:
    """What can be said of each argument by itself."""
    import torch

    if not isinstance(model, torch.nn.Module):
        raise InputError(f"fit needs a torch.nn.Module, not {type(model).__name__}")
    compiled = next((name or "the model" for name, module in model.named_modules() if is_compiled(module)), None)
    if compiled is not None:
        raise InputError(
            f"{compiled} is compiled by torch.compile, whose graph fit cannot change: give fit the module as it was before "
            "(a compiled model has it as `_orig_mod`)"
        )
    scripted = next((n or "the model" for n, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)), None)
    if scripted is not None:
        raise InputError(
            f"{scripted} is compiled by TorchScript, whose graph fit cannot change: give fit the module that it was made from"
        )
    _check_modules(model, optimizer)
    if not callable(loss) and not (loss is None and optimizer is None):
        raise InputError(f"fit needs a function loss(model, batch), not {type(loss).__name__}")
    if optimizer is not None and (isinstance(optimizer, type) or not hasattr(optimizer, "param_groups")):
        said = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        raise InputError(f"fit needs an optimizer such as torch.optim.AdamW(model.parameters()), not {said}")
    if allow not in tuple(ALLOWED):
        raise InputError(f"allow={allow!r} is unknown: one of {', '.join(ALLOWED)}")
    if not isinstance(without, tuple | list | set | frozenset):
        raise InputError(f"without={without!r} is no tuple of remedies: without=('stream',) leaves one out")
    unknown = [name for name in without if name not in KEYS]
    if unknown:
        raise InputError(f"without names {unknown[0]!r}, which is no remedy: one of {', '.join(KEYS)}")
    _check_update(own_step, clip, scaler)


def _check_modules(model: Any, optimizer: Any) -> None:
    """Modules that have no weights yet, or gradients whose bytes are not known."""
    from torch.nn.parameter import is_lazy

    empty = next((name for name, parameter in model.named_parameters() if is_lazy(parameter)), None)
    if empty is not None:
        raise InputError(
            f"{empty} has no shape before a first forward pass: run the model once on a batch, then fit it"
        )
    sparse = next((name for name, module in model.named_modules() if getattr(module, "sparse", None) is True), None)
    if optimizer is not None and sparse is not None:
        raise InputError(
            f"{sparse} makes sparse gradients, whose bytes nobody knows beforehand: build it with sparse=False"
        )


def _check_update(own_step: bool, clip: Any, scaler: Any) -> None:
    if clip is not None:
        if isinstance(clip, bool) or not isinstance(clip, int | float) or not 0 < clip < math.inf:
            raise InputError(f"clip={clip!r} is no norm to clip to: give a number above zero, such as 1.0")
        if own_step:
            raise InputError(
                f"clip={clip} is for step(batch): with own_step=True you clip between backward and your own step"
            )
    if scaler is not None and not all(hasattr(scaler, name) for name in ("scale", "unscale_", "step", "update")):
        raise InputError(f"scaler needs a GradScaler such as torch.amp.GradScaler(), not {type(scaler).__name__}")


def check_optimizer(model: Any, optimizer: Any) -> None:
    """Its parameters are the model's, and a step needs no closure."""
    require_plain_step(optimizer)
    known = {id(parameter) for parameter in model.parameters()}
    strange = [p for p in parameters_of(optimizer) if id(p) not in known]
    if strange:
        raise InputError(
            f"the optimizer holds {len(strange)} parameters that the model does not have (the first has shape "
            f"{tuple(strange[0].shape)}): it belongs to another model"
        )
