"""`outsize.fit` for JAX: parameters, a loss, an optax optimizer, one batch and a budget in; a jitted step inside it out.

Each candidate's bytes are XLA's own for its compilation, so a plan is exact before anything runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outsize.core.errors import InputError
from outsize.core.memory import HOST, Allowance, Pool
from outsize.machine import allowance_of
from outsize.model.jax.compiled import PLATFORMS, find_device
from outsize.model.jax.fitting.choice import KEYS
from outsize.model.jax.fitting.fitted import Fitted, key_of
from outsize.model.jax.fitting.planner import Request
from outsize.model.jax.fitting.planner import plan as make_plan
from outsize.model.jax.private_parts import require_jax


def fit(
    model: Any, loss: Any, optimizer: Any, batch: Any, *, budget: int | str | None = None, device: Any = None,
    host: int | str | None = None, weights: Any = None, allow: str = "exact", own_step: bool = False,
    clip: float | None = None, scaler: Any = None, without: tuple[str, ...] = (), batch_axis: Any = None,
    dry_run: bool = False, plan: Any = None,
) -> Fitted:  # fmt: skip
    """Make a step of JAX run inside `budget` bytes of its device: parameters, gradients, optimizer state, batch and temporaries.

    `model` is a pytree of parameters, `loss(params, batch)` gives a scalar or (total, count), `optimizer` is optax's.
    `host` limits what waits in page-locked memory of the host. `without` names remedies not to use: slices, checkpoint, order,
    offload; with timing no first steps are timed to find the fastest plan.
    """
    jax = require_jax()
    _check(loss, optimizer, own_step, without)
    _refuse(weights=weights, clip=clip, scaler=scaler, allow=None if allow == "exact" else allow, plan=plan)
    leaves = jax.tree_util.tree_leaves((model, batch))
    if not jax.tree_util.tree_leaves(model):
        raise InputError("the parameters have no arrays: there is nothing to fit")
    real = not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    there = _device(device, model)
    request = Request(
        params=model, loss=loss, optimizer=None if own_step else optimizer, device=there, allowance=_allowance(budget, there),
        host=_host_bytes(host, there), without=frozenset(without), batch_axis=batch_axis, real=real,
    )  # fmt: skip
    runs = real and not dry_run
    timed = replace(request, timed=runs and "timing" not in without)
    return Fitted(
        make_plan(timed, model, batch),
        optimizer,
        key_of(model, batch),
        lambda params, other: make_plan(request, params, other)[0],
        runs,
    )


def _check(loss: Any, optimizer: Any, own_step: bool, without: Any) -> None:
    if not callable(loss):
        raise InputError(f"fit needs a function loss(params, batch), not {type(loss).__name__}")
    if optimizer is None and not own_step:
        raise InputError(
            "fit of JAX needs an optimizer such as optax.adam(1e-3), or own_step=True for the gradients alone"
        )
    if optimizer is not None and not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise InputError(f"fit needs an optimizer such as optax.adam(1e-3), not {type(optimizer).__name__}")
    if not isinstance(without, tuple | list | set | frozenset):
        raise InputError(f"without={without!r} is no tuple of remedies: without=('slices',) leaves one out")
    unknown = [name for name in without if name not in KEYS]
    if unknown:
        raise InputError(f"without names {unknown[0]!r}, which is no remedy for JAX: one of {', '.join(KEYS)}")


MEANINGLESS = {
    "weights": "parameters of JAX stay on their device",
    "clip": "put optax.clip_by_global_norm into the optimizer",
    "scaler": "scale the loss in your own function",
    "allow": "every remedy for JAX is exact",
    "plan": "XLA compiles a step anew in every process, and says its bytes then",
}
"""Options of torch's fit -> what to do instead."""


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise InputError(f"{name}={value!r} means nothing for JAX: {MEANINGLESS[name]}")


def _device(device: Any, model: Any) -> Any:
    """The one device that the step is compiled for."""
    jax = require_jax()
    if device is None:
        held = {
            one for leaf in jax.tree_util.tree_leaves(model) for one in getattr(getattr(leaf, "sharding", None), "device_set", ())
        }  # fmt: skip
        if len(held) > 1:
            raise InputError(f"the parameters are on {len(held)} devices: fit of JAX works on one")
        return held.pop() if held else jax.devices()[0]
    if hasattr(device, "platform"):
        return device
    found = find_device(str(device)) if str(device).partition(":")[0] in PLATFORMS else None
    if found is None:
        raise InputError(
            f"jax has no device {device!r} here, and bytes are known from compiling for it: leave device out"
        )
    return found


def _host_bytes(host: int | str | None, device: Any) -> int | None:
    """Bytes that may wait on the host; None where the device is the host."""
    if device.platform != "cpu":
        return allowance_of(HOST, host, "the host").bytes
    if host is not None:
        raise InputError(f"host={host!r} means nothing here: the device is the host, so nothing waits elsewhere")
    return None


def _allowance(budget: int | str | None, device: Any) -> Allowance:
    pool = HOST if device.platform == "cpu" else Pool(kind="device", index=device.id)
    arena = None if pool == HOST else (device.memory_stats() or {}).get("bytes_limit")
    if budget is None and arena is not None:
        return Allowance(pool=pool, bytes=arena, reason="XLA's arena")
    return allowance_of(pool, budget, device)
