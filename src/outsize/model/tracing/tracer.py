"""Runs a real step on tensors without contents and records every storage that is allocated and freed.

In: the user's own code. Out: a ledger of allocations with device, kind, module and line. Every tensor is on torch's
meta device, where torch knows the shapes of results but computes nothing. The tracer is a dispatch mode, below
autograd and autocast. So it sees the calls that the card's kernels would get, in the same order, backward pass
included.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from outsize.core.errors import InputError
from outsize.model.compiled.follow import Follower
from outsize.model.kernels import attention
from outsize.model.kernels.layouts import ON_CARD
from outsize.model.torch_port.dispatch import (
    are_wrappers,
    arguments_of,
    dispatch_mode,
    in_backward,
    no_functions,
    tensors_in,
)
from outsize.model.torch_port.objects import holders_of, key_of, storage_key
from outsize.model.torch_port.patches import wrapping_backward
from outsize.model.torch_port.sharding import following_buffers
from outsize.model.tracing.autocast import Autocast
from outsize.model.tracing.fake_card import label_for, make_function_mode, pretend
from outsize.model.tracing.generation import longest_generation
from outsize.model.tracing.records.attribution import Owners
from outsize.model.tracing.records.blocks import Blocks
from outsize.model.tracing.records.ledger import Held, Ledger
from outsize.model.tracing.rules import host_calls, rewrites
from outsize.model.tracing.rules import known_values as values
from outsize.model.tracing.rules import packed_sequences as packed
from outsize.model.tracing.rules.attention_calls import attention_for
from outsize.model.tracing.rules.draws import Draws
from outsize.model.tracing.rules.operators import Operator, look_up
from outsize.model.tracing.rules.other_tensors import explained, refuse_nested
from outsize.model.tracing.rules.result_shapes import SHAPES


class DevicesDiffer(InputError):
    """Operands of one operator are on the host and on a card."""


class Tracer:
    """One trace: the fake device, the ledger, and the rules for what torch does not show."""

    def __init__(
        self,
        device: str = "cuda:0",
        capability: tuple[int, int] = (9, 0),
        total: int = 80 * 2**30,
        everything: str | None = None,
    ) -> None:
        self.device = device
        self.everything = everything
        """Device on which host tensors are counted, for a step that never moves anything."""
        self.capability = capability
        self.total = total
        self.ledger = Ledger()
        self.owners = Owners(self.ledger)
        self.autocasts = {"cuda": Autocast("cuda", self.on_card), "cpu": Autocast("cpu", self.on_host)}
        self.casting: tuple[str, ...] = ("cuda", "cpu")
        """Kinds of devices whose casts are made here: torch's own kernels do not know the tensors."""
        self.notes: dict[str, None] = {}
        """Sentences about what was assumed, in order."""
        self.guesses: dict[str, None] = {}
        """The notes on which sizes may depend: a real run may take more than the trace saw."""
        self.blocks = Blocks(self.ledger, self.owners, capability)
        self._draws = Draws(self)
        self._places = threading.local()
        self._lock = threading.RLock()
        """Held during an operator: a script may have threads."""
        self._stand_ins: dict[int, tuple[Any, Any]] = {}
        self._mode: Any = None
        self._rewritten: dict[str, Callable[..., Any]] = {}
        """Composite operator -> what stands for it."""
        self._alone = 2
        self.reuse = True
        """Follow autograd where it would write in place on its own; off for comparing with another mode in Python."""
        # what rules read and write (`Trace` says what each is)
        self.guessing = False
        self.in_linear = False
        self.alone = False
        self.counted = False
        self.keep = values.KEEP_ELEMENTS
        self.strict = False
        """Operands on two devices are an error, as they are in a real run."""
        self.touched = False
        """True once a step has called an operator."""
        self.drew = False
        self.region: str | None = None
        """Label of the device for which something is being compiled now; None: nothing is."""
        self.uncompiled = ""
        """Why compiled functions are traced as they were written, empty where they are compiled."""
        self.compiled = Follower(self, attention_for(self))
        """What the step gives to `torch.compile`."""
        self.chance = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Tracing is on while the block runs."""
        tracer = self

        class Mode(dispatch_mode()):  # type: ignore[misc]
            @classmethod
            def ignore_compile_internals(cls) -> bool:
                return True

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if types and are_wrappers(types):
                    return NotImplemented  # it calls the operator again, on this rank's parts
                refuse_nested(types, func, tracer.owners.place)
                if tracer.region is not None:  # the compiler at work
                    return func(*args, **(kwargs or {}))
                with tracer._lock, no_functions():  # in here a tensor's device is the real one: meta
                    try:
                        return tracer.dispatch(func, args, kwargs or {})
                    except NotImplementedError as error:
                        raise explained(error, func, tracer.owners.place) from error

        self._mode = Mode
        probe = torch.empty(1, device="meta")
        self._alone = holders_of(storage_key(probe))
        fake_card = make_function_mode(self)
        try:
            with contextlib.ExitStack() as stack:
                # Python code inside a backward pass (checkpointing, custom functions) needs the fake card too, and the call that
                # started the pass has turned it off.
                stack.enter_context(wrapping_backward(self._function_mode))
                stack.enter_context(pretend(self, self.capability, self.total))
                for kind in self.casting:
                    stack.enter_context(self.autocasts[kind].installed())
                self._rewritten = stack.enter_context(rewrites.installed(self))
                stack.enter_context(self.owners.watching())
                stack.enter_context(following_buffers(self.resized))
                stack.enter_context(self.compiled.running())
                stack.enter_context(longest_generation())
                stack.enter_context(Mode())
                stack.enter_context(fake_card)
                yield
        finally:
            self.ledger.closed = True
            self._draws.restore()

    def _function_mode(self) -> Any:
        """The mode that answers Python's calls into torch; none for the compiler's."""
        return make_function_mode(self) if self.region is None else contextlib.nullcontext()

    @contextlib.contextmanager
    def in_thread(self) -> Iterator[None]:
        """Tracing is on in another thread too; modes belong to threads."""
        with self._mode(), make_function_mode(self):
            yield

    @property
    def _placing(self) -> str | None:
        """The device on which this thread makes tensors, if one was named."""
        return getattr(self._places, "label", None)

    @contextlib.contextmanager
    def placing(self, label: str) -> Iterator[None]:
        """What is made inside is on this device."""
        before, self._places.label = self._placing, label
        try:
            yield
        finally:
            self._places.label = before

    def on_host(self, tensor: Any) -> bool:
        """True for a tensor that the step believes to be in the host's memory."""
        return self.label_of(tensor) == "cpu"

    def on_card(self, tensor: Any) -> bool:
        """True for a tensor that the step believes to be on a card."""
        return str(self.label_of(tensor)).startswith("cuda")

    def label_of(self, tensor: Any) -> str | None:
        """Device that a tensor believes to be on, None for one that the trace has not seen."""
        return self.ledger.label_of(tensor) if self.region is None else self.region

    def note(self, sentence: str) -> None:
        """Add a note, which makes the result an estimate."""
        self.notes.setdefault(sentence)

    def note_value(self, what: str, held: Held | None, guess: bool = False) -> None:
        """Note a value that had to be chosen, and where. Filling weights with random numbers changes no size and needs
        no note. `guess`: sizes may depend on it, and another value may take more memory.
        """
        if self.ledger.step < 0 and self.owners.filling():
            return
        place = self.owners.place()
        sentence = f"{what} was chosen, not computed{f' ({place})' if place else ''}"
        (self.guess if guess else self.note)(sentence)

    def guess(self, sentence: str) -> None:
        """Add a note on which sizes may depend."""
        self.note(sentence)
        self.guesses.setdefault(sentence)

    def compile(self, model: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Stands for `torch.compile`."""
        if model is None:
            return functools.partial(self.compile, **kwargs)
        if self.uncompiled:
            self.note(f"the step was traced uncompiled, which usually takes more: {self.uncompiled}")
            return model
        return self.compiled.compile(model, **kwargs)

    def real_value(self, tensor: Any, what: str) -> Any:
        """A real tensor with the contents, for Python code that wants them."""
        return values.real(self, self.adopt(tensor), what)

    def adopt(self, tensor: Any) -> Any:
        """The meta tensor that stands for a real tensor from outside; any other tensor unchanged."""
        if tensor.device.type == "meta":
            if self.ledger.of(tensor) is None:
                self.ledger.add(tensor, self._placing or self.device, "given")
            return tensor
        storage = tensor.untyped_storage()
        found = self._stand_ins.get(key_of(storage))
        if found is None or found[0]() is not storage:
            with values.unseen():
                base = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
            self.ledger.add(base, label_for(self, tensor.device), "given")
            values.keep(self, base, storage)
            key = key_of(storage)  # the stand-in goes when the real one does
            found = self._stand_ins[key] = (weakref.ref(storage, lambda _: self._stand_ins.pop(key, None)), base)
        with values.unseen(), no_functions():
            return _laid_over(found[1], tensor)

    def take_over(self, tensor: Any) -> Any:
        """The meta tensor for a real one that was just made and that nobody else has; its contents stay known."""
        with values.unseen(), no_functions():
            storage = tensor.untyped_storage()
            base = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
            stand_in = _laid_over(base, tensor)
            self.ledger.add(stand_in, label_for(self, tensor.device), "given")
            self.ledger.values[storage_key(stand_in)] = storage
        return stand_in

    def resized(self, tensor: Any) -> None:
        """The storage of a weight was emptied or filled again, past the dispatcher."""
        held = self.ledger.add(tensor, self.device, "resize")
        held.kind = held.kind or "weights"

    def met(self) -> set[int]:
        """Addresses of the real tensors from outside that are still alive."""
        storages = [storage() for storage, _ in self._stand_ins.values()]
        return {storage.data_ptr() for storage in storages if storage is not None}

    @property
    def card(self) -> str:
        """The card that is meant where none is named."""
        return self.device if self.device.startswith("cuda") else "cuda:0"

    # what happens at the dispatcher

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """One operator: run it on shapes, write down what it allocates."""
        operator = look_up(func)
        if operator.decomposes:
            with self._mode():
                rewritten = self._rewritten.get(operator.name.removeprefix("aten.").removesuffix(".default"))
                return (rewritten or func.decompose)(*args, **kwargs)
        flat = tensors_in(args)
        self.touched |= self.ledger.step >= 0
        if self.strict and operator.base in _TOGETHER:
            self._check_devices(operator, flat)
        label = self._label(func, flat, kwargs)
        for leaf in flat:
            if not leaf.is_meta and (leaf.dim() or len(flat) == 1):
                args = values.replace_tensors(args, self.adopt)
                flat = tensors_in(args)
                break
        name = operator.name
        if self.reuse and self._reuses(name, args):
            out = args[0]
        else:
            out = self._compute(operator, args, kwargs, flat, label)
        if isinstance(out, torch.Tensor):
            if self.guesses and operator.base in _CUTTING and not out.numel() and args[0].numel():
                self._refuse_empty(out)
            fresh = [out]
        else:
            results = out if isinstance(out, tuple | list) else ()
            fresh = [r for r in results if isinstance(r, torch.Tensor)] + [
                t for r in results if isinstance(r, list) for t in r if isinstance(t, torch.Tensor)
            ]
        if label == "cpu":
            events, fresh = host_calls.follow(self, operator, args, kwargs, out, fresh, flat)
            self.blocks.write_events(events, fresh, label, name)
        else:
            if name.startswith("aten.convolution") and label.startswith("cuda") and torch.backends.cudnn.benchmark:
                self.guess(
                    "torch.backends.cudnn.benchmark is on: the first call of each convolution tries kernels, and what these take "
                    "is not known"
                )
            self.blocks.write(name, args, fresh, label)
        if name in _RESIZING:
            self.ledger.add(args[0], label, name)
        return out

    def _check_devices(self, operator: Operator, flat: list[Any]) -> None:
        """An error where operands of more than one number are on the host and on a card."""
        labels = {self.ledger.label_of(tensor) for tensor in flat if tensor.dim()}
        cards = [label for label in labels if label is not None and label.startswith("cuda")]
        if cards and "cpu" in labels:
            place = self.owners.place()
            raise DevicesDiffer(
                f"{operator.name} gets tensors on the host and on {cards[0]}{f' at {place}' if place else ''}, which fails in a "
                "real run: move them to one device with .to(device)"
            )

    def _refuse_empty(self, out: Any) -> None:
        place = self.owners.place()
        raise InputError(
            f"a tensor of shape {tuple(out.shape)} was cut out{f' at {place}' if place else ''} by a number that is not known: "
            f"{next(iter(self.guesses))}; give the step that number without reading it from a tensor"
        )

    def _reuses(self, name: str, args: Any) -> bool:
        """True if a real backward pass would write into its first argument, although here a new tensor is requested.
        Autograd adds two gradients in place if nothing else refers to the first, and fills fresh zeros in place. While
        a Python mode is active it does neither, because the mode refers to every tensor.
        """
        if name == "aten.add.Tensor" and not isinstance(args[1], torch.Tensor):
            return False
        if name == "aten.add.Tensor" and self.in_linear and args[1].dim() == 1:
            return True
        if name not in _REUSING or not in_backward():
            return False
        first = args[0]
        storage = first.untyped_storage()
        held = self.ledger.live.get(key_of(storage))
        if held is None or held.phase != "backward" or holders_of(key_of(storage)) > self._alone:
            return False
        if name == "aten.add.Tensor":  # the engine adds what an earlier node left; a node's own sums are new tensors
            return bool(first.shape == args[1].shape and held.node != self.owners.node())
        return True

    def _label(self, func: Any, flat: list[Any], kwargs: dict[str, Any]) -> str:
        """Device the result believes to be on; the real `device` argument becomes meta."""
        label = self._named(func, flat, kwargs)
        return self.everything if label == "cpu" and self.everything is not None else label

    def _named(self, func: Any, flat: list[Any], kwargs: dict[str, Any]) -> str:
        device = kwargs.get("device")
        if kwargs.pop("pin_memory", None) and self._placing is None:
            kwargs["device"] = "meta"
            return "pinned"
        if device is not None:
            kwargs["device"] = "meta"
            if self._placing is None and device.type != "meta":
                return label_for(self, device)
            return self._placing or (self.ledger.label_of(flat[0]) if flat else None) or self.device
        if self._placing is not None and flat:
            return self._placing
        for tensor in flat:
            label = self.ledger.label_of(tensor)
            if label is not None and (tensor.dim() or len(flat) == 1):
                return label
        labels = [self.ledger.label_of(tensor) for tensor in flat]
        known = [label for label in labels if label is not None]
        if known:
            return next((label for label in known if label.startswith("cuda")), known[0])
        if not flat and any(argument.name == "device" for argument in arguments_of(func)):
            kwargs["device"] = "meta"
        return self._placing or "cpu"

    def _compute(self, operator: Operator, args: Any, kwargs: Any, flat: list[Any], label: str) -> Any:
        func, name = operator.func, operator.name
        generator = kwargs.get("generator")
        if "generator" in kwargs:  # a host generator does not go with the meta device, and some operators want the word
            kwargs["generator"] = None
        rule = packed.RULES.get(name)
        if rule is not None and not self._all_known(flat):
            return rule(self, func, args, kwargs)
        if name == "aten._local_scalar_dense.default":
            return values.item(self, args[0])
        if name in ("aten.lift_fresh.default", "aten.lift.default"):
            return args[0]
        if name in packed.RULES:  # contents are known: the real operator says the shape
            real = values.run_on_contents(self, func, args, kwargs)
            if not isinstance(real, torch.Tensor | tuple):
                return real
            return values.replace_tensors(real, lambda t: self.known_like(t, label))
        try:
            shape = rewrites.SHAPES.get(name) or (ON_CARD.get(name) if label.startswith("cuda") else None)
            out = SHAPES.run(operator, args, kwargs) if shape is None else shape(func, args, kwargs)
        except NotImplementedError as error:
            rule = attention.UNKNOWN.get(name)
            out = values.run_on_zeros(self, func, args, kwargs) if rule is None else rule(*args, **kwargs)
            if out is None:
                raise InputError(
                    f"torch cannot tell the result shape of {name} without running it ({str(error).splitlines()[0]}): "
                    "give the operator a fake implementation with torch.library.register_fake"
                ) from error
        drawn = False
        if operator.draws and isinstance(out, torch.Tensor):
            if label == "cpu":
                self._draws.advance(operator, args, kwargs, out, generator)
            known = self._placing in (None, "cpu") and self._all_known(flat)
            drawn = self._draws.draw(operator, args, kwargs, out, generator, known)
        if not drawn:
            self._follow(operator, args, kwargs, flat, out)
        return out

    def known_like(self, real: Any, label: str) -> Any:
        stand_in = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
        self.ledger.add(stand_in, label, "values")
        if real.numel() <= self.keep:
            self.ledger.values[storage_key(stand_in)] = real.untyped_storage()
        return stand_in

    def _all_known(self, flat: list[Any]) -> bool:
        known = self.ledger.values
        return all(t.is_cpu or storage_key(t) in known for t in flat)

    def _forget(self, flat: list[Any]) -> None:
        for tensor in flat:
            self.ledger.values.pop(storage_key(tensor), None)

    def _follow(self, operator: Operator, args: Any, kwargs: Any, flat: list[Any], out: Any) -> None:
        """Keep the contents of small host tensors up to date, and forget those that are overwritten with unknown
        values."""
        followed = operator.known and self._is_followed(operator, flat, out)
        real = None
        if followed:
            try:
                real = values.run_on_contents(self, operator.func, args, kwargs)
            except Exception:
                followed = False
        if not followed:
            if operator.mutable:
                self._forget(flat)
            return
        known, drawn = self.ledger.values, any(storage_key(t) in self.ledger.drawn for t in flat)
        for made, contents in zip(tensors_in(out), tensors_in(real), strict=False):
            key = storage_key(made)
            if drawn:
                self.ledger.drawn.add(key)
            if key not in known and made.numel() <= self.keep:
                known[key] = contents.untyped_storage()

    def _is_followed(self, operator: Operator, flat: list[Any], out: Any) -> bool:
        """True where all operands are small and known; of what is made from none, where it is small and on the host."""
        if not flat:
            small = isinstance(out, torch.Tensor) and out.numel() <= self.keep
            return small and (self._placing in (None, "cpu") or operator.base in values.PLAIN)
        seen = bool(self.ledger.values) or any(t.is_cpu for t in flat)
        return seen and self._all_known(flat) and sum(t.numel() for t in flat) <= 4 * self.keep


def _laid_over(base: Any, tensor: Any) -> Any:
    """A tensor without contents that lies on a base as a real one lies on its storage."""
    made = torch.empty(0, dtype=tensor.dtype, device="meta")
    return made.set_(base.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


_TOGETHER = {
    "mm", "addmm", "bmm", "baddbmm", "convolution", "embedding", "native_layer_norm", "native_batch_norm", "native_group_norm",
    "add", "sub", "mul", "div", "cat", "nll_loss_forward", "mse_loss",
}  # fmt: skip
"""Operators whose operands have to be on one device, but for single numbers."""

_CUTTING = {"slice", "narrow"}
"""Operators that cut a piece out of a tensor."""

_RESIZING = {"aten.resize_.default", "aten.set_.source_Storage_storage_offset", "aten.resize_as_.default"}

_REUSING = {
    "aten.add.Tensor", "aten.scatter_add.default", "aten.index_put.default", "aten.index_add.default", "aten.scatter.src",
    "aten.scatter.value",
}  # fmt: skip
"""Operators that backward passes run in place where they can."""
