"""Looks at a model and its loss before anything is changed.

In: the user's work and a few samples of the batch. Out: `Findings`: what the step draws at random, which buffers it
writes, how its loss adds up over slices and why not. Model, optimizer, gradients and random state are left as they were.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from outsize.core.errors import OutOfMemory, OutsizeError
from outsize.core.noun import Noun
from outsize.model.fitting import batch as batches
from outsize.model.fitting.axes import Axes, say_disagreement
from outsize.model.fitting.learn.checked_indices import checked_indices
from outsize.model.fitting.learn.loss_rule import watching_means
from outsize.model.fitting.move.out_of_memory import clear_up, is_out_of_memory, where_room
from outsize.model.fitting.run.chunked_loss import chunked_heads, find_head
from outsize.model.fitting.run.forward_functions import without_cache
from outsize.model.fitting.run.loss import IGNORED, Normaliser, read_loss
from outsize.model.fitting.run.random_sources import GLOBAL, draws, name_arguments, same_draws
from outsize.model.fitting.run.recorder import Recorder
from outsize.model.fitting.run.replayed_draws import Draw, compare_draws
from outsize.model.fitting.run.runner import Work
from outsize.model.fitting.user_errors import in_users_code, say
from outsize.model.torch_port.compiler import uncompiled
from outsize.model.torch_port.dispatch import arguments_of, seeing
from outsize.model.torch_port.objects import batch_norm, buffer_table, hooked

T = TypeVar("T")

SAMPLES = 3
"""Rows that are looked at: cut into two and one, which tells a mean from a sum and from everything else."""

SAME = 1e-6
"""Largest relative difference of buffers that rounding explains: what a second iteration adds is more."""

Written = dict[Any, tuple[str, ...]]
"""Module -> names of the buffers that its forward pass writes."""

MEET = (
    ": samples meet in it (in-batch negatives, statistics over the batch), it is a mean over tokens, whose (total, count) it "
    "could give, or another axis than the first counts samples, which batch_axis could say"
)
"""Why slices do not give the loss of the whole."""

TOLERANCE = 1e-4
"""Relative difference of losses that counts as equal: rounding of float32 sums is far below, a wrong rule far above."""

NOISY = 2e-3
"""Where kernels differ by themselves, as those of TF32 do from one size of a batch to another, at most this counts as equal."""

NOISES = 5.0
"""A difference of so many times their own counts as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings(Noun):
    """What a few samples show."""

    rows: int
    """Samples in the batch."""
    few: int
    """So many of them, from the first on, were looked at: few, or all where the loss fails on few."""
    random: tuple[str, ...]
    """Operators that draw random numbers, and generators beside torch's."""
    sources: tuple[Any, ...]
    """Those generators."""
    written: dict[Any, tuple[str, ...]]
    """Buffers that a forward pass writes, by module."""
    normaliser: Normaliser | None
    """How losses of slices add up, None where they do not."""
    why_not: str
    """Why the batch cannot be cut, empty where it can."""
    heads: tuple[str, ...]
    """Linear layers whose logits go straight into a cross entropy."""
    lower: bool
    """The step computes in a type of fewer than 32 bits somewhere: autocast, or weights in half precision."""
    draws: tuple[Draw, ...] | None = None
    """What is drawn, where slices can be given what the whole batch draws."""
    misread: bool = False
    """Slices fail or do not give the loss of the whole: perhaps another axis counts samples."""
    operators: dict[str, set[str]] = field(default_factory=dict)
    """Operators that each module called in the forward pass, and under the empty name those outside of all."""
    writing: frozenset[str] = frozenset()
    """Modules that change what they are given in place, so that they cannot run twice."""


@contextlib.contextmanager
def preserved(model: Any, sources: tuple[Any, ...] = ()) -> Iterator[None]:
    """Random state, buffers and gradients as they were, whatever the block does; `sources`: further generators."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with same_draws(sources):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


def calm() -> Any:
    """Random operators give one constant, so that slices can be compared with the whole."""

    def call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        for position, argument in enumerate(arguments_of(func)):
            if argument.name in ("dropout_p", "dropout"):
                if len(args) > position:
                    args = (*args[:position], 0.0, *args[position + 1 :])
                else:
                    kwargs = {**kwargs, argument.name: 0.0}
                return func(*args, **kwargs)
        if func is torch.ops.aten.native_dropout.default:
            return args[0] / max(1.0 - args[1], 1e-3), torch.ones_like(args[0], dtype=torch.bool)
        out = func(*args, **kwargs)
        if not isinstance(out, torch.Tensor):
            return out
        return _still(func.overloadpacket.__name__, name_arguments(func, args, kwargs), out)

    return seeing(call)


def _still(name: str, given: dict[str, Any], out: Any) -> Any:
    """A draw that is the same for every sample, and is one of those that could have come."""
    if name.startswith("randperm"):
        return out.copy_(torch.arange(len(out), device=out.device))
    if name.startswith("bernoulli"):
        return out.fill_(1)
    return out.fill_(0.5 if out.dtype.is_floating_point else given.get("low", given.get("from", 0)))


def look(work: Work, batch: Any) -> Findings:
    """Run a few samples and say what they show."""
    rows = work.axes.count(batch)
    few = min(SAMPLES, rows)
    part = work.axes.take(batch, 0, few)
    with preserved(work.model), without_cache(work.model), checked_indices(work.device):
        before = {m: {n: b.clone() for n, b in buffer_table(m).items() if b is not None} for m in work.model.modules()}
        recorder, failure = attempt(lambda: _record(work, part))
        if recorder is None:
            failure = f"the loss of {few} of {rows} samples fails with {failure}; batch_axis may say which axis counts samples"
            disagreement = say_disagreement(batch)
            with in_users_code("loss(model, batch)" + (f" (note that {disagreement})" if disagreement else "")):
                recorder = _record(replace(work, axes=Axes(whole=failure)), batch)
        written = _written(before)
        sources = recorder.drawn.sources()
        names = [source.name for source in sources if source in GLOBAL]
        with same_draws(sources):
            calls = list(recorder.calls)
            one = work.axes.take(batch, 0, 1)
            heads = () if failure else attempt(lambda: _find_heads(work, one, calls))[0] or ()  # one may be too few
            normaliser: Normaliser | None = None
            why_not = failure or work.axes.whole or "the batch has one sample"
            misread = bool(failure or work.axes.whole)
            if names:
                why_not = f"random numbers are drawn ({', '.join(names)}), which cannot be held still to compare slices"
            elif few > 1 and not failure:
                found, failed = attempt(lambda: _find_rule(work, part, few, written))
                normaliser, why_not = found or (None, f"the loss of a slice of {few} samples fails with {failed}")
                misread = found is None or why_not.endswith(MEET)
            replayable = recorder.random and normaliser is not None
            alone = attempt(lambda: _record(work, one))[0] if replayable else None
            drawn = compare_draws(recorder.draws, alone.draws, few) if alone is not None else None
        if normaliser is not None and (missing := normaliser.find_missing(batch)):
            normaliser, why_not = None, missing
    return Findings(
        rows=rows, few=rows if failure else few, random=(*recorder.random, *names), sources=sources, written=written,
        normaliser=normaliser,
        why_not=why_not, misread=misread, draws=drawn, heads=heads, lower=recorder.lower, writing=frozenset(recorder.writing),
        operators=recorder.operators,
    )  # fmt: skip


def attempt(run: Callable[[], T]) -> tuple[T | None, str]:
    """What the user's code gives, or None and what it failed with; failures of ours, and of memory, are raised."""
    try:
        return run(), ""
    except Exception as error:
        if isinstance(error, OutsizeError) or is_out_of_memory(error):
            raise
        return None, say(error)


def _record(work: Work, part: Any) -> Recorder:
    """Forward and backward pass of the samples, of as many as there is room for, or a forward pass of one."""
    rows = work.axes.count(part)
    for few, train in (*((n, True) for n in range(rows, 0, -1)), (1, False)):
        recorder = Recorder()
        try:
            with recorder.watching(work.model), dropping(work.model), torch.set_grad_enabled(train):
                loss = read_loss(work.loss(work.model, work.axes.take(part, 0, few)))[0]
                if train:
                    loss.backward()
            return recorder
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        finally:
            recorder.drawn.put_back()
        clear_up()
    raise OutOfMemory(
        "not even a forward pass of one sample has room beside the weights on the card: leave the model in host memory and "
        "give fit the device, as in outsize.fit(model, loss, optimizer, batch, device='cuda', budget=...)"
    )


def dropping(model: Any) -> contextlib.AbstractContextManager[None]:
    """Gradients are let go as they come."""

    def drop(parameter: Any) -> None:
        parameter.grad = None

    return hooked(*(p.register_post_accumulate_grad_hook(drop) for p in model.parameters() if p.requires_grad))


def _find_heads(work: Work, part: Any, ran: list[str]) -> tuple[str, ...]:
    """The last linear layer, where a trial shows that a cross entropy takes its logits and nothing else does."""
    name = find_head(work.model, ran)
    if name is None:
        return ()

    def is_taken(train: bool) -> bool:
        with chunked_heads(work.model, (name,), 1, work.device, always=True) as heads, torch.set_grad_enabled(train):
            read_loss(work.loss(work.model, part))
        return bool(heads.taken and not heads.made)

    taken = where_room(lambda: is_taken(train=True))
    if taken is None:
        taken = where_room(lambda: is_taken(train=False))  # without gradients it takes less room
    return (name,) if taken else ()


def _written(before: dict[Any, dict[str, Any]]) -> dict[Any, tuple[str, ...]]:
    """Buffers that have changed, and averages of BatchNorms that did not run: a few samples need not go everywhere."""
    found = {}
    for module, buffers in before.items():
        names = tuple(
            name for name, copy in buffers.items()
            if buffer_table(module).get(name) is None or not torch.equal(buffer_table(module)[name], copy)
        )  # fmt: skip
        if not names and isinstance(module, batch_norm()) and module.training:
            names = tuple(buffers)
        if names:
            found[module] = names
    return found


def _find_counting(work: Work, part: Any, few: int, written: Written) -> str:
    """A module whose buffers (running averages, power iterations) slices leave otherwise than the whole; empty: none."""
    if not written:
        return ""
    names: dict[Any, str] = {module: name for name, module in work.model.named_modules()}
    states: list[list[tuple[str, Any]]] = []
    with torch.no_grad(), calm():
        for runs in ([(0, few)], [(0, few - 1), (few - 1, few)]):
            with preserved(work.model):
                for run in runs:
                    work.loss(work.model, work.axes.take(part, *run))
                found = [(names[m], buffer_table(m).get(name)) for m, given in written.items() for name in given]
                states.append([(name, buffer.clone()) for name, buffer in found if buffer is not None])
    for (name, whole), (_, sliced) in zip(states[0], states[1], strict=True):
        if whole.shape != sliced.shape or not torch.allclose(whole, sliced, rtol=SAME, equal_nan=True):
            return name
    return ""


def _find_rule(work: Work, part: Any, few: int, written: Written) -> tuple[Normaliser | None, str]:
    """The rule, or why there is none: also slices that leave other buffers than the whole have none."""
    rule, why_not = _find_loss_rule(work, part, few)
    if rule is not None and (name := _find_counting(work, part, few, written)):
        return None, f"{name} writes its buffers in every forward pass, and slices would leave others in them"
    return rule, why_not


def _find_loss_rule(work: Work, part: Any, few: int) -> tuple[Normaliser | None, str]:
    """The rule under which the losses of two slices give the loss of all, or None and why."""
    modules = [(name, module) for name, module in work.model.named_modules() if isinstance(module, batch_norm())]
    norms = [name for name, module in modules if module.training or module.running_mean is None]
    if norms:
        names = ", ".join(norms[:3]) + (f" and {len(norms) - 3} more" if len(norms) > 3 else "")
        return None, f"BatchNorm takes statistics over the whole batch ({names})"
    runs = [(0, few - 1), (few - 1, few)]
    with torch.no_grad(), calm():
        try:
            with watching_means(work.model, batches.tensors_of(part), few) as means:
                whole, count = read_loss(work.loss(work.model, part))
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            return None, "the loss takes gradients itself, so that it cannot be tried on slices without them"
        if not whole.isfinite().all():
            return None, f"the loss of the first samples is {float(whole)}, so that slices cannot be compared with it"
        if count is not None:
            return _check_counts(work, part, runs, whole, count)
        if not torch.allclose(whole, read_loss(work.loss(work.model, part))[0], rtol=TOLERANCE):
            return None, "the loss of the same samples changes from call to call"
        if means.weighted:
            return None, "the loss is a mean in which classes weigh differently: give (total, count) to have it cut"
        labels = _label_rules(part, means.ignored) if means.counts else []  # no mean leaves labels out
        rules = [Normaliser(rule="samples"), Normaliser(rule="sum"), *labels]
        holding = [rule for rule in rules if _holds(work, rule, part, runs)]
        if not holding and (near := _find_noise(work, part, whole)) > TOLERANCE:
            holding = [rule for rule in rules if _holds(work, rule, part, runs, near)]
        if not holding or (work.axes.at and _is_idle(work, part, runs, whole)):
            return None, (f"the loss of {few} samples is neither the mean nor the sum of their slices' losses{MEET}")
        for rule in holding:
            if rule.rule == "labels" and _tells_apart(work, rule, part, runs, few):
                return rule, ""
    if means.why_unknown:
        return None, f"{means.why_unknown}, so that slices would weigh differently: give (total, count) to have it cut"
    if means.ignored != [IGNORED] and holding[0].rule == "samples":
        return None, (
            f"the loss is a mean over labels that are not {means.ignored[0]}, which are not found in the batch: give "
            "(total, count) to have it cut"
        )
    return _with_all_labels(work, holding[0], labels, part, few)


def why_not_cut(work: Work, batch: Any) -> str:
    """Why a rule that held once does not hold for the loss as it is now, empty where it does: a few samples, whole and cut."""
    few = min(SAMPLES, work.axes.count(batch))
    if few < 2 or not work.splits:
        return "" if work.splits else "the batch is not cut"
    rule, runs = work.normaliser, [(0, few - 1), (few - 1, few)]
    part = work.axes.take(batch, 0, few)
    if rule.rule == "labels":
        part = leave_out(rule, part, work.axes)

    def holds() -> bool:
        if rule.counts:
            whole, count = read_loss(work.loss(work.model, part))
            return _check_counts(work, part, runs, whole, count)[0] is not None
        if _holds(work, rule, part, runs):
            return True
        near = _find_noise(work, part, read_loss(work.loss(work.model, part))[0])
        return near > TOLERANCE and _holds(work, rule, part, runs, near)

    quiet = uncompiled() if work.compiled else contextlib.nullcontext()
    with preserved(work.model, work.sources), without_cache(work.model), quiet, torch.no_grad(), calm():
        found, failed = attempt(holds)
    if failed:
        return f"the loss of a few samples fails with {failed}"
    return "" if found else f"the loss is not {rule} any more, as a few samples show"


def find_sources(work: Work, batch: Any) -> tuple[Any, ...]:
    """The generators beside torch's that a step draws from, as a few samples show."""
    part = work.axes.take(batch, 0, min(SAMPLES, work.axes.count(batch)))
    with preserved(work.model, work.sources), without_cache(work.model):
        return _record(work, part).drawn.sources()


def _with_all_labels(
    work: Work, rule: Normaliser, labels: list[Normaliser], part: Any, few: int
) -> tuple[Normaliser | None, str]:
    """The rule of a loss that is no mean over one tensor's labels, for as long as the means that it has leave out none."""
    counting = []
    with torch.no_grad(), calm():
        for one in labels:
            try:
                if _count(work, leave_out(one, part, work.axes), few) != _count(work, part, few):
                    counting.append((one.path, one.ignored))
            except (IndexError, RuntimeError):  # no labels
                continue
    return replace(rule, whole=tuple(dict.fromkeys(counting))), ""


def _count(work: Work, part: Any, few: int) -> list[int]:
    """Labels that each mean of the loss counts."""
    with watching_means(work.model, batches.tensors_of(part), few) as means:
        work.loss(work.model, part)
    return means.counts


def _check_counts(work: Work, part: Any, runs: Any, whole: Any, count: Any) -> tuple[Normaliser | None, str]:
    pairs = [read_loss(work.loss(work.model, work.axes.take(part, *run))) for run in runs]
    total, counted = sum(float(pair[0]) for pair in pairs), sum(float(pair[1]) for pair in pairs)
    if _near(total, float(whole)) and _near(counted, float(count)):
        return Normaliser(rule="count"), ""
    return None, "the totals or counts that the loss gives for slices do not add up to those of the batch"


def _near(a: float, b: float, tolerance: float = TOLERANCE) -> bool:
    return math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-6 * TOLERANCE)


def _is_idle(work: Work, part: Any, runs: Any, whole: Any) -> bool:
    """True where every slice has the loss of the whole to the last bit: then a tensor is cut that the loss does not look at."""
    return all(bool(read_loss(work.loss(work.model, work.axes.take(part, *run)))[0] == whole) for run in runs)


def _find_noise(work: Work, part: Any, whole: Any) -> float:
    """Relative difference of losses that the operators themselves make: every sample twice has the same mean, or twice the sum,
    but runs in kernels of another size. What changes a loss by more than such noise is no noise."""
    doubled = work.axes.double(part)
    if doubled is None:
        return TOLERANCE
    found, _ = attempt(lambda: float(read_loss(work.loss(work.model, doubled))[0]))
    expected = float(whole)
    noise = (
        math.inf if found is None else min(abs(found - expected), abs(found / 2 - expected)) / max(abs(expected), 1e-30)
    )
    return min(NOISES * noise, NOISY) if noise < NOISY else TOLERANCE


def _holds(work: Work, rule: Normaliser, part: Any, runs: Any, tolerance: float = TOLERANCE) -> bool:
    whole = float(read_loss(work.loss(work.model, part))[0])
    total = 0.0
    for run, weight in zip(runs, rule.weigh(part, runs, work.axes), strict=True):
        piece = work.axes.take(part, *run)
        total += weight * float(read_loss(work.loss(work.model, piece))[0]) if weight else 0.0
    return math.isfinite(total) and _near(total, whole, tolerance)


def _label_rules(part: Any, ignored: list[int]) -> list[Normaliser]:
    """Means over labels, for every tensor of the batch that could hold labels."""
    rules = []
    for path, tensor in batches.tensors_of(part).items():
        named = "label" in path.lower() or "target" in path.lower()
        whole = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex and tensor.dtype != torch.bool
        if whole and tensor.dim() and (named or tensor.device.type == "cpu"):
            for label in ignored:
                if not torch.iinfo(tensor.dtype).min <= label <= torch.iinfo(tensor.dtype).max:
                    continue
                rules.append(Normaliser(rule="labels", path=path, ignored=label))
                if tensor.dim() > 1:
                    rules.append(Normaliser(rule="labels", path=path, shifted=True, ignored=label))
    return rules


def leave_out(rule: Normaliser, part: Any, axes: Axes) -> Any:
    """The same samples with half the labels in the first: this shows what a mean over labels does without them."""

    def plant(path: str, tensor: Any) -> Any:
        if path != rule.path:
            return tensor
        tensor = tensor.clone()
        first = axes.part(path, tensor, 0, 1)
        counted = (first != rule.ignored).nonzero().unbind(1)
        first[tuple(index[len(index) // 2 :] for index in counted)] = rule.ignored
        return tensor

    return batches.transform(part, plant)


def _tells_apart(work: Work, rule: Normaliser, part: Any, runs: Any, few: int) -> bool:
    """True where leaving out some labels of the first sample still agrees with this rule, and changes the loss."""
    planted = leave_out(rule, part, work.axes)
    try:
        if not _holds(work, rule, planted, runs):
            return False
        losses, counts = [], []
        for one in (part, planted):
            with watching_means(work.model, batches.tensors_of(one), few) as means:
                losses.append(float(read_loss(work.loss(work.model, one))[0]))
            counts.append(means.counts)
    except (IndexError, RuntimeError):  # these numbers are no labels: an embedding refuses the one that was planted
        return False
    others = any(number != rule.measure(planted) for number in means.divisors)
    if means.picked or means.made or not means.counts or others:
        return False  # something else is counted as well
    if all(len(found) == 1 for found in counts):  # what was counted is known: losses of samples may be too much alike
        return counts == [[rule.measure(part)], [rule.measure(planted)]] and counts[0] != counts[1]
    return not _near(*losses)
