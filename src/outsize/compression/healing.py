"""A short training that heals a smaller model, inside a memory budget (`outsize.fit`).

Weights in a narrow format are trained in full and rounded in every forward pass, with the gradient handed through the rounding.
After the last step they are rounded for good. Structure (factors, fewer blocks) is trained as it is.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from outsize.compression.derived import as_parameters, derive, underive
from outsize.compression.evaluation import FEW_BATCHES, fingerprint, read_batches
from outsize.compression.judge import build
from outsize.compression.method import Candidate, Stage, Subject
from outsize.compression.narrow_state import make_narrow
from outsize.compression.training_bytes import BITS
from outsize.compression.weights import get
from outsize.core.errors import InputError
from outsize.model.fitting.fit import fit
from outsize.model.torch_port.objects import parameter_table

NO_FUNCTION = "optimizer is a function here, parameters -> optimizer: the smaller model has parameters of its own"
RATE = 3e-4
"""Learning rate of the first step; it falls to 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Healing:
    """What a healing is done with."""

    steps: int
    batches: Iterable[Any]
    """The training data: gone through again where the steps are more."""
    seen: Sequence[Any]
    """Some of them: what methods are fitted to."""
    optimizer: Callable[[Any], Any] | None
    """parameters -> optimizer; None: AdamW."""
    budget: int | str | None
    """Memory that a step may hold."""
    left_out: frozenset[bytes] = frozenset()
    """Fingerprints of batches that are not trained on, since the loss is measured on them (`overlap.py`)."""

    def walk(self) -> Iterable[Any]:
        """The batches that are trained on, once."""
        for batch in self.batches:
            if not self.left_out or fingerprint(batch) not in self.left_out:
                yield batch


def read_healing(steps: int, training: Any, optimizer: Any, budget: Any) -> Healing | None:
    """What was asked for, checked; None where nothing was."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise InputError(f"heal is {steps!r}: give the number of training steps")
    if steps == 0:
        if training is not None:
            raise InputError("training= is for heal=: say how many steps to train, such as heal=200")
        return None
    if training is None:
        raise InputError("heal trains the smaller model: give training=, batches that are not those it is measured on")
    if optimizer is not None and not callable(optimizer):
        raise InputError(NO_FUNCTION)
    if isinstance(training, Iterator):
        raise InputError(
            f"training is a {type(training).__name__}, which can be gone through only once: give a list or loader"
        )
    seen, _ = read_batches(training, FEW_BATCHES, what="training")
    if isinstance(training, tuple | dict) or hasattr(training, "shape"):
        training = [training]
    return Healing(steps=steps, batches=training, seen=seen, optimizer=optimizer, budget=budget)


@dataclass(frozen=True, slots=True)
class Rounded:
    """A weight in full that is rounded when it is read. The gradient goes to the full one."""

    codec: Any
    trains: ClassVar[tuple[str, ...]] = ("full",)

    @property
    def name(self) -> str:
        return f"{self.codec.name} while it is trained"

    def decode(self, stored: dict[str, Any]) -> Any:
        full = stored["full"]
        return full + (self.codec.decode(self.codec.encode(full.detach())) - full.detach())


def heal(subject: Subject, chosen: Sequence[Candidate], healing: Healing) -> Any:
    """A model with these candidates, trained."""
    import torch

    full = copy.deepcopy(build(subject, [one for one in chosen if one.stage < Stage.PRECISION]))
    narrow = build(replace(subject, model=full), [one for one in chosen if one.stage >= Stage.PRECISION])
    adapted = any(one.stage is Stage.ADAPTERS for one in chosen)  # then only adapters are trained
    opened = [] if adapted else _open(narrow, full)
    narrow.train()
    trained = [parameter for parameter in narrow.parameters() if parameter.requires_grad]
    if not trained:
        raise InputError("the smaller model has no parameters that can be trained: leave heal out")
    make = healing.optimizer or functools.partial(torch.optim.AdamW, lr=RATE, weight_decay=0)
    bits = narrow.__dict__.get(BITS, 0)
    optimizer = make_narrow(make, trained, bits) if bits else make(trained)
    rates = [group["lr"] for group in optimizer.param_groups]
    batches = _cycle(healing)
    fitted = None
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for step, batch in enumerate(batches):
            if fitted is None:
                fitted = fit(
                    narrow, subject.loss, None if bits else optimizer, batch, budget=healing.budget, own_step=bool(bits)
                )
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * (1 - step / healing.steps)
            if bits:
                fitted.backward(batch)
                optimizer.step()
                optimizer.zero_grad()
            else:
                fitted.step(batch)
    if fitted is not None:
        fitted.undo()
    _close(opened)
    return narrow.eval()


def _open(narrow: Any, full: Any) -> list[tuple[Any, str]]:
    """Make narrow weights full ones that are rounded when they are read; which they are."""
    import torch

    opened = []
    made: dict[int, Any] = {}  # modules that share a weight go on sharing it
    for path, module in narrow.named_modules():
        for name, (codec, _) in list(module.__dict__.get("derived", {}).items()):
            source = get(full, path)
            weight = None if source is None else parameter_table(source).get(name)
            if weight is None or not hasattr(codec, "encode"):
                continue
            underive(module, name)
            parameter = made.setdefault(id(weight), torch.nn.Parameter(weight.detach().clone(), weight.requires_grad))
            derive(module, name, Rounded(codec), {"full": parameter})
            opened.append((module, name))
    return opened


def _close(opened: list[tuple[Any, str]]) -> None:
    """Round what was opened, for good."""
    made: dict[int, Any] = {}
    for module, name in opened:
        codec = module.derived[name][0].codec
        full = underive(module, name)["full"]
        if id(full) not in made:
            made[id(full)] = as_parameters(codec, codec.encode(full.detach()), full.requires_grad), full
        derive(module, name, codec, made[id(full)][0])


def _cycle(healing: Healing) -> Iterable[Any]:
    """As many batches as there are steps."""
    done = 0
    while done < healing.steps:
        began = done
        for batch in healing.walk():
            yield batch
            done += 1
            if done == healing.steps:
                return
        if done == began:
            raise InputError("training has no more batches: give a list, or a loader that can be gone through again")
