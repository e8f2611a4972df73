"""Training loops as users write them: a model, an optimizer, accumulation, autocast, clipping, evaluation, averaged weights.

In: a `Loop`, which is data. Out: what its steps held by the allocator's own events, and what the plan said. The loop steps its
optimizer itself; nothing of the plan's arithmetic is used to measure it.
"""

import contextlib
import copy
import functools
import gc
from dataclasses import dataclass

import networks as nets
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves, tree_map

import outsize
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.plan.dry_run import Stage
from outsize.model.fitting.run.runner import Work

MODELS = {
    "language": (
        lambda n: nets.Language(width=32 * n, blocks=3),
        nets.language_loss,
        lambda n: nets.make_tokens(rows=8 * n, length=12 * n),
    ),
    "patches": (
        lambda n: nets.Patches(width=32 * n),
        nets.vision_loss,
        lambda n: nets.make_images(rows=6 * n, size=16),
    ),
    "vision": (
        lambda n: nets.Vision(width=8 * n),
        nets.vision_loss,
        lambda n: nets.make_images(rows=6 * n, size=16 * n),
    ),
    "wide": (lambda n: Wide(64 * n), lambda m, b: m(b[0]).square().mean(), lambda n: (torch.randn(16 * n, 64 * n),)),
}
"""Name -> model and batch, so many times as wide and large, and the loss."""

OPTIMIZERS = {
    "sgd": lambda p, **more: torch.optim.SGD(p, 0.01, momentum=0.9, **more),
    "adamw": lambda p, **more: torch.optim.AdamW(p, 1e-3, **more),
    "adam amsgrad": lambda p, **more: torch.optim.Adam(p, 1e-3, amsgrad=True, **more),
    "rmsprop": lambda p, **more: torch.optim.RMSprop(p, 1e-3, momentum=0.9, centered=True, **more),
    "adagrad": lambda p, **more: torch.optim.Adagrad(p, 1e-3, **more),
    "adamax": lambda p, **more: torch.optim.Adamax(p, 1e-3, **more),
    "own": lambda p, **more: Signs(p),
    "lbfgs": lambda p, **more: torch.optim.LBFGS(p, 1e-3, max_iter=3, history_size=4, line_search_fn="strong_wolfe"),
}

WAYS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
FUSED = ("sgd", "adamw", "adam amsgrad", *(() if torch.cuda.is_available() else ("adagrad",)))
"""Optimizers that have a fused kernel; Adagrad has one for the CPU only."""


class Wide(nn.Module):
    """Few activations, many weights: the update is the highest moment."""

    def __init__(self, width=64):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(24))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


class Signs(torch.optim.Optimizer):
    """An optimizer that nobody knows, with temporaries as large as all gradients."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        signs = [p.grad.sign() for p in parameters]
        for parameter, sign in zip(parameters, signs, strict=True):
            parameter.sub_(sign, alpha=1e-3)


@dataclass(frozen=True)
class Loop:
    model: str = "language"
    optimizer: str = "adamw"
    way: str = "plain"
    accumulation: int = 1
    autocast: str = "none"
    """none, before (also while it is planned) or late."""
    clip: bool = False
    evaluate: bool = False
    average: bool = False
    percent: int = 100
    """Budget in percent of what the plain step holds beside weights, state and gradients; 100: far more than it needs."""

    @classmethod
    def draw(cls, chance):
        """A loop by chance; `chance.choice(list)` chooses."""
        while True:
            loop = cls(
                model=chance.choice(sorted(MODELS)), optimizer=chance.choice(sorted(OPTIMIZERS)), way=chance.choice(sorted(WAYS)),
                accumulation=chance.choice([1, 2, 3]), autocast=chance.choice(["none", "before", "late"]),
                clip=chance.choice([False, True]), evaluate=chance.choice([False, True]), average=chance.choice([False, True]),
                percent=chance.choice([100, 85, 70, 60]),
            )  # fmt: skip
            if loop.possible():
                return loop

    def possible(self):
        """False for what torch has not, or a user cannot write."""
        closures = self.optimizer == "lbfgs" and (self.accumulation > 1 or self.clip)
        return not closures and (self.way != "fused" or self.optimizer in FUSED)


@dataclass(frozen=True)
class Outcome:
    budget: int
    planned: int
    measured: int
    """By the fitted step itself."""
    real: int
    """By the allocator's events, from outside; on a card by its statistics."""
    remedies: tuple[str, ...]
    first: int
    """What the first plan said."""

    @property
    def holds(self):
        return max(self.measured, self.real) <= self.planned <= self.budget


def run(loop, device="cpu", steps=6):
    """The loop's outcome: the last two steps are measured from outside, those before it by the fitted step itself.

    A `BudgetError` where no plan fits; an `OutOfMemory` where a step was seen to hold more and no tighter plan exists.
    """
    torch.manual_seed(0)
    make, loss, batches = MODELS[loop.model]
    times = 1 if device == "cpu" else 8  # a card's allocator has blocks of megabytes
    model = make(times).to(device)
    batch = tree_map(lambda tensor: tensor.to(device), batches(times))
    optimizer = OPTIMIZERS[loop.optimizer](model.parameters(), **WAYS[loop.way])
    average = copy.deepcopy(model).requires_grad_(False) if loop.average else None
    lower = lambda: torch.autocast(device, dtype=torch.bfloat16)  # noqa: E731
    with lower() if loop.autocast == "before" else contextlib.nullcontext():
        budget = _budget(model, loss, optimizer, batch, loop)
        fitted = outsize.fit(model, loss, optimizer, batch, budget=budget, own_step=True)
    real, first = 0, fitted.plan.peak()
    for number in range(steps):
        with lower() if loop.autocast != "none" and (number or loop.autocast == "before") else contextlib.nullcontext():
            measured = number >= steps - 2
            step = functools.partial(_step, loop, fitted, model, optimizer, batch, average)
            real = max(real, _watch(measured, device, model, optimizer, batch, step))
    fitted.undo()
    return Outcome(
        budget, fitted.plan.peak(), fitted.measured or 0, real, tuple(r.name for r in fitted.plan.remedies), first
    )


def _budget(model, loss, optimizer, batch, loop):
    """All of the plain step, or what it holds in any case and a part of the rest."""
    kind = tree_leaves(batch)[0].device.type
    work = Work(model=model, loss=loss, optimizer=optimizer, device=kind, backwards=min(2, loop.accumulation))
    plain = Stage(work, batch).project(Choice())
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    least = min(plain.peak, plain.fixed + gradients * work.backwards)
    return least + (plain.peak - least) * loop.percent // 100 if loop.percent < 100 else 4 * plain.peak + (64 << 20)


def _step(loop, fitted, model, optimizer, batch, average):
    if loop.optimizer == "lbfgs":

        def closure():
            optimizer.zero_grad()
            return fitted.backward(batch)

        optimizer.step(closure)
    else:
        for _ in range(loop.accumulation):
            fitted.backward(batch)
        if loop.clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    if average is not None:
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
    if loop.evaluate:
        fitted.infer(batch, lambda m, part: m(tree_leaves(part)[0]))


def _watch(wanted, device, model, optimizer, batch, step):
    """Peak of a step in bytes."""
    if not wanted:
        step()
        return 0
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_reserved()
    state = [
        value for values in optimizer.state.values() for value in values.values() if isinstance(value, torch.Tensor)
    ]
    optimizer.zero_grad()
    tensors = (*model.parameters(), *model.buffers(), *state, *tree_leaves(batch))
    held = most = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes() if abs(event.nbytes()) != 5056 else 0  # the state of a generator, which no plan counts
        most = max(most, held)
    return most
