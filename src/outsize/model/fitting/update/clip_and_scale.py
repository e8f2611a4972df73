"""What has to see all gradients before the first parameter is updated: a norm to clip to, a GradScaler.

In: gradients on the device, one after the other as they are complete. Out: the factor that clips them, and whether the
step is skipped. Each gradient is unscaled, checked and measured where it is made, by the same operators as in the user's
own loop, so that none has to come back for it; the scale takes the course that it takes there.
"""

from __future__ import annotations

from typing import Any

import torch

from outsize.core.errors import InputError
from outsize.model.torch_port.objects import device_of, forget_optimizer


class _One:
    """An optimizer of one parameter, as `GradScaler.unscale_` wants it."""

    def __init__(self, parameter: Any) -> None:
        self.param_groups = [{"params": [parameter]}]


def clip_factor(norms: list[Any], clip: float) -> Any:
    """By which all gradients are multiplied, as `torch.nn.utils.clip_grad_norm_` does: from the norm of their norms."""
    total = torch.linalg.vector_norm(torch.stack(norms), 2.0)
    return torch.clamp(clip / (total + 1e-6), max=1.0)


class GradientCheck:
    """Looks at the gradients of one step, one by one."""

    def __init__(self, model: Any, optimizer: Any, clip: float | None, scaler: Any) -> None:
        self.mine = {id(p) for group in (optimizer.param_groups if optimizer else ()) for p in group["params"]}
        """ids of the optimizer's parameters."""
        self._model = model
        self._clip = clip
        self._scaler = scaler
        self._norms: dict[int, Any] = {}
        self._seen: list[_One] = []
        self._before: dict[str, Any] | None = None
        """The scaler's state before this step changed it."""

    def scale(self, loss: Any) -> Any:
        """The loss whose gradients are wanted."""
        self._before = None
        return loss if self._scaler is None else self._scaler.scale(loss)

    def see(self, parameter: Any, holder: Any) -> None:
        """Unscale a gradient, which is in `holder.grad`, and add to the norm of all."""
        if self._scaler is not None and id(parameter) in self.mine:
            one = _One(holder)
            self._scaler.unscale_(one)
            self._seen.append(one)  # the scaler knows it by its id
        if self._clip is not None:
            self._norms[id(parameter)] = torch.linalg.vector_norm(holder.grad.detach(), 2.0)

    def factor(self) -> Any:
        """That clips them; None: they are not clipped."""
        norms = [self._norms[id(p)] for p in self._model.parameters() if id(p) in self._norms]
        self._norms.clear()
        return clip_factor(norms, self._clip) if norms and self._clip is not None else None

    def skips(self) -> bool:
        """True where a gradient was not finite; the scale is brought up to date."""
        if self._scaler is None or not self._seen:
            return False
        self._before = self._scaler.state_dict()
        self._scaler.update()
        self._seen.clear()
        return bool(self._scaler.get_scale() < self._before["scale"])

    def reset(self) -> None:
        """A step has failed: what was seen does not count."""
        for one in self._seen:
            forget_optimizer(self._scaler, one)
        if self._before is not None:
            self._scaler.load_state_dict(self._before)
            self._before = None
        self._seen.clear()
        self._norms.clear()


def check_scaler(scaler: Any, device: Any) -> Any:
    """The scaler if it does something; an `InputError` where its way to unscale is not torch's own."""
    if scaler is None or not getattr(scaler, "is_enabled", lambda: True)():
        return None
    if not isinstance(scaler, torch.amp.GradScaler) or type(scaler).unscale_ is not torch.amp.GradScaler.unscale_:
        raise InputError(
            f"{type(scaler).__name__} unscales gradients in its own way, and here they are unscaled one by one: use "
            "torch.amp.GradScaler, or bfloat16, which needs none"
        )
    kind = device_of(scaler)
    if kind != device.type:
        raise InputError(
            f"the GradScaler is for {kind} and the step runs on {device.type}: GradScaler({device.type!r})"
        )
    return scaler
