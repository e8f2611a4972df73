"""A training or inference step from a transformers configuration, without weights.

In: a `config.json` and how it will be run. Out: a step and its builder for `estimate`. The model is built from the configuration
alone; batches are token numbers, or pixels for vision models.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outsize.core.errors import InputError
from outsize.core.extras import need

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 1e-3}), "momentum": ("SGD", {"lr": 1e-3, "momentum": 0.9}), "adam": ("Adam", {}),
    "adamw": ("AdamW", {}), "adamw-fused": ("AdamW", {"fused": True}), "adagrad": ("Adagrad", {}), "rmsprop": ("RMSprop", {}),
    "adafactor": ("Adafactor", {}),
}  # fmt: skip
"""Name -> torch's class and its options."""

PRECISIONS = {
    "fp32": ("float32", None), "bf16": ("bfloat16", None), "fp16": ("float16", None), "bf16-amp": ("float32", "bfloat16"),
    "fp16-amp": ("float32", "float16"),
}  # fmt: skip
"""Name -> (dtype of the weights, whatever the configuration says they were saved in; autocast's dtype or None)."""

SHARDINGS = {
    "ddp": "DistributedDataParallel: each rank has the whole model, gradients twice (its buckets)",
    "zero1": "DDP with ZeroRedundancyOptimizer: optimizer state is spread",
    "zero2": "fully_shard(reshard_after_forward=False): weights stay gathered from the forward to the backward pass",
    "fsdp": "fully_shard: weights, gradients and state are spread, blocks are gathered when they run (ZeRO-3)",
    "hsdp": "fully_shard inside a node of 8, repeated over nodes",
    "offload": "fully_shard with CPUOffloadPolicy: shards, gradients and state are in host memory",
}
"""Ways to spread a model."""

ORDERED = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModelForImageClassification")
"""Model classes to try if a configuration names none; a model with encoder and decoder keeps both."""

SIZES = (
    "hidden_size", "n_embd", "d_model", "dim", "hidden_sizes", "embed_dim", "text_config", "hidden_dim", "embed_dims",
)  # fmt: skip
"""Fields of which a configuration with sizes has one."""

ONE_LABEL = ("ForSequenceClassification", "ForNextSentencePrediction")
"""Ends of the class names of text models that need one label per sample."""


def step_from(
    path: str, seq: int, optimizer: str | None, precision: str, checkpointing: bool = False, device: str = "cuda",
    change: Callable[[Any], None] | None = None,
) -> tuple[Callable[..., Any], Callable[..., tuple[Any, ...]]]:  # fmt: skip
    """(step, build) of a configuration; without an optimizer it is inference. `change` is done to the model once it is built."""
    config = read_config(path)
    if optimizer is not None and optimizer not in OPTIMIZERS:
        raise InputError(f"unknown optimizer {optimizer!r}: one of {', '.join(OPTIMIZERS)}")
    if precision not in PRECISIONS:
        raise InputError(f"unknown precision {precision!r}: one of {', '.join(PRECISIONS)}")
    weights, cast = PRECISIONS[precision]

    def build(batch: int, length: int = seq) -> tuple[Any, ...]:
        import torch

        model = _model(config).to(getattr(torch, weights))
        if change is not None:
            change(model)
        model = model.to(device)
        inputs = _inputs(config, model, batch, length, device, training=optimizer is not None)
        if optimizer is None:
            return model.eval(), inputs, None
        if checkpointing:
            model.config.use_cache = False
            newer = getattr(model, "activation_checkpointing_enable", None)  # its name since transformers 5
            (newer or model.gradient_checkpointing_enable)()
        name, options = OPTIMIZERS[optimizer]
        return (
            model.train(),
            inputs,
            getattr(torch.optim, name)([p for p in model.parameters() if p.requires_grad], **options),
        )

    def step(model: Any, inputs: dict[str, Any], solver: Any) -> None:
        import torch

        autocast: Any = contextlib.nullcontext()
        if cast is not None:
            autocast = torch.autocast(device, dtype=getattr(torch, cast))
        with torch.set_grad_enabled(solver is not None), autocast:
            out = model(**inputs)
        if solver is not None:
            if getattr(out, "loss", None) is None:
                raise InputError(
                    f"{type(model).__name__} gives no loss from {' and '.join(inputs)}: add --optimizer none to see it "
                    f"without training, or use module:function instead"
                )
            out.loss.backward()
            solver.step()
            solver.zero_grad()

    step.__name__ = config.model_type
    return step, build


def read_config(path: str) -> Any:
    """A transformers configuration from a file or folder; an `InputError` that says what is missing."""
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.exists():
        file = _find_cached(path) or file
    if not file.exists():
        raise InputError(
            f"there is no configuration at {file}: give the config.json of a transformers model, or the name of one that was "
            "downloaded before, such as meta-llama/Llama-3.2-1B"
        )
    try:
        fields = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise InputError(f"{file} is not JSON: line {error.lineno}, {error.msg}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not JSON: byte {error.start} of it is no text") from None
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise InputError(f"{file} names no model_type: it is not the config.json of a transformers model")
    if not any(name in fields for name in SIZES):
        raise InputError(f"{file} has no sizes (hidden_size, n_embd, d_model, ...): the model cannot be built from it")
    transformers = need("transformers", "estimate --hf", "give MODULE:FUNCTION instead")
    try:
        return transformers.AutoConfig.for_model(**fields)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"transformers does not know the model of {file}: {str(error).splitlines()[0]}") from None


def _find_cached(name: str) -> Path | None:
    """The newest configuration that transformers has downloaded for a model of the Hub; nothing is fetched."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return None
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    folder = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{name.replace('/', '--')}" / "snapshots"
    return max(folder.glob("*/config.json"), key=lambda found: found.stat().st_mtime, default=None)


def _model(config: Any) -> Any:
    import transformers

    named = [name for name in (config.architectures or []) if hasattr(transformers, name)]
    if named:
        return getattr(transformers, named[0])._from_config(config)
    config.architectures = []  # some of the classes below go through them
    for auto in ORDERED[1:] if config.is_encoder_decoder else ORDERED:
        with contextlib.suppress(ValueError):
            return getattr(transformers, auto).from_config(config)
    raise InputError(f"no head of transformers fits a {config.model_type} configuration: use module:function instead")


def _inputs(config: Any, model: Any, batch: int, seq: int, device: str, *, training: bool) -> dict[str, Any]:
    """What the model is called with: labels where it is trained and takes them."""
    import torch

    name, takes = type(model).__name__, inspect.signature(model.forward).parameters
    labelled, labels = training and "labels" in takes, [batch]
    if model.main_input_name == "pixel_values":
        inputs = {"pixel_values": _pictures(config, batch, device)}
    elif model.main_input_name == "input_ids":
        tokens = torch.randint(0, config.get_text_config().vocab_size, (batch, seq), device=device)
        inputs = {"input_ids": tokens}
        labels += [] if name.endswith(ONE_LABEL) else [seq]
        if not labelled and "decoder_input_ids" in takes:
            inputs["decoder_input_ids"] = tokens
    else:
        raise InputError(
            f"{name} takes {model.main_input_name}, of which a configuration does not tell the size: use module:function instead"
        )
    return inputs | ({"labels": torch.zeros(labels, dtype=torch.int64, device=device)} if labelled else {})


def _pictures(config: Any, batch: int, device: str) -> Any:
    import torch

    size = getattr(config, "image_size", None)
    if size is None:
        raise InputError(f'the {config.model_type} configuration says no image_size: add it, such as "image_size": 224')
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return torch.rand(batch, getattr(config, "num_channels", 3), height, width, device=device)
