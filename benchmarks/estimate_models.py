# ruff: noqa: E501
"""The training and inference steps that the estimate is scored on: name -> how to build model, batch and loss.

Weights are random: only shapes matter. A case is a dictionary with `model`, `batch`, `optimizer`, `precision` and optional
`seq`, `checkpoint`, `accumulate`, `format`, `infer`; `prepare(case, device)` builds it and returns a function that runs one step.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Case = dict[str, Any]

VISION = {
    "alexnet": {}, "resnet18": {}, "resnet50": {}, "resnext50_32x4d": {}, "wide_resnet50_2": {}, "vgg16": {}, "vgg11_bn": {},
    "mobilenet_v2": {}, "mobilenet_v3_large": {}, "mnasnet1_0": {}, "efficientnet_b0": {}, "efficientnet_v2_s": {},
    "densenet121": {}, "convnext_tiny": {}, "swin_t": {}, "vit_b_16": {}, "vit_l_16": {}, "regnet_y_400mf": {}, "regnet_x_3_2gf": {},
    "shufflenet_v2_x1_0": {}, "squeezenet1_1": {}, "resnet101": {}, "densenet169": {}, "mobilenet_v3_small": {}, "swin_v2_t": {}, "convnext_small": {},
    "shufflenet_v2_x0_5": {}, "regnet_y_1_6gf": {}, "efficientnet_b2": {}, "vgg13": {}, "googlenet": {"aux_logits": False, "init_weights": False},
    "inception_v3": {"aux_logits": False, "init_weights": False}, "maxvit_t": {},
}  # fmt: skip
"""torchvision's classifiers."""

TEXT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("AutoModelForCausalLM", "GPT2Config", {}),
    "gpt2-eager": ("AutoModelForCausalLM", "GPT2Config", {"attn_implementation": "eager"}),
    "bert": ("AutoModelForMaskedLM", "BertConfig", {}),
    "distilbert": ("AutoModelForMaskedLM", "DistilBertConfig", {}),
    "roberta": ("AutoModelForMaskedLM", "RobertaConfig", {"max_position_embeddings": 1026}),
    "electra": ("AutoModelForMaskedLM", "ElectraConfig", {}),
    "opt": ("AutoModelForCausalLM", "OPTConfig", {}),
    "neox": ("AutoModelForCausalLM", "GPTNeoXConfig",
             {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}),
    "t5": ("AutoModelForSeq2SeqLM", "T5Config", {"decoder_start_token_id": 0}),
    "llama300m": ("AutoModelForCausalLM", "LlamaConfig",
                  {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16,
                   "num_attention_heads": 16, "num_key_value_heads": 8}),
    "qwen2": ("AutoModelForCausalLM", "Qwen2Config",
              {"vocab_size": 50000, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 12,
               "num_attention_heads": 14, "num_key_value_heads": 2}),
    "mistral": ("AutoModelForCausalLM", "MistralConfig",
                {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8,
                 "num_attention_heads": 16, "num_key_value_heads": 4, "sliding_window": 256}),
    "albert": ("AutoModelForMaskedLM", "AlbertConfig",
               {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}),
    "bart": ("AutoModelForSeq2SeqLM", "BartConfig", {"d_model": 768, "encoder_layers": 6, "decoder_layers": 6,
             "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "encoder_attention_heads": 12, "decoder_attention_heads": 12}),
    "gpt_neo": ("AutoModelForCausalLM", "GPTNeoConfig", {"hidden_size": 768, "num_layers": 8, "num_heads": 12,
                "attention_types": [[["global", "local"], 4]]}),
    "bloom": ("AutoModelForCausalLM", "BloomConfig", {"hidden_size": 768, "n_layer": 8, "n_head": 12, "vocab_size": 50000}),
    "phi": ("AutoModelForCausalLM", "PhiConfig", {"hidden_size": 768, "num_hidden_layers": 8, "num_attention_heads": 12,
            "intermediate_size": 3072}),
    "gemma": ("AutoModelForCausalLM", "GemmaConfig", {"vocab_size": 64000, "hidden_size": 768, "num_hidden_layers": 6,
              "num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 128, "intermediate_size": 4096}),
    "deberta": ("AutoModelForMaskedLM", "DebertaV2Config", {"hidden_size": 512, "num_hidden_layers": 6,
                "num_attention_heads": 8, "intermediate_size": 2048, "vocab_size": 50000, "relative_attention": True,
                "pos_att_type": ["p2c", "c2p"], "position_buckets": 256}),
    "qwen3": ("AutoModelForCausalLM", "Qwen3Config", {"vocab_size": 50000, "hidden_size": 768, "num_hidden_layers": 8,
              "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 3072}),
    "mixtral": ("AutoModelForCausalLM", "MixtralConfig", {"vocab_size": 32000, "hidden_size": 512, "num_hidden_layers": 4,
                "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 1024, "num_local_experts": 4}),
    "falcon": ("AutoModelForCausalLM", "FalconConfig", {"hidden_size": 768, "num_hidden_layers": 8, "num_attention_heads": 12,
               "vocab_size": 50000}),
}  # fmt: skip
"""transformers' models from their configurations."""

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-4),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-4),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
    "adamw-loop": lambda p: torch.optim.AdamW(p, lr=1e-4, foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-4),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-4),
}


class LSTMTagger(torch.nn.Module):
    """An embedding, a stacked LSTM and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(30000, 512)
        self.rnn = torch.nn.LSTM(512, 768, num_layers=2, batch_first=True, dropout=0.1)
        self.head = torch.nn.Linear(768, 30000)

    def forward(self, tokens: Any) -> Any:
        return self.head(self.rnn(self.embed(tokens))[0])


class UNet(torch.nn.Module):
    """Four levels of convolutions with skips, as image segmentation uses them."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        sizes = [3, width, 2 * width, 4 * width, 8 * width]
        self.down = torch.nn.ModuleList(self._block(a, b) for a, b in itertools.pairwise(sizes))
        self.up = torch.nn.ModuleList(torch.nn.ConvTranspose2d(b, a, 2, 2) for a, b in itertools.pairwise(sizes[1:]))
        self.merge = torch.nn.ModuleList(self._block(2 * a, a) for a in sizes[1:-1])
        self.head = torch.nn.Conv2d(width, 21, 1)

    @staticmethod
    def _block(a: int, b: int) -> Any:
        layers = [torch.nn.Conv2d(a, b, 3, padding=1), torch.nn.GroupNorm(8, b), torch.nn.SiLU()]
        return torch.nn.Sequential(
            *layers, torch.nn.Conv2d(b, b, 3, padding=1), torch.nn.GroupNorm(8, b), torch.nn.SiLU()
        )

    def forward(self, x: Any) -> Any:
        skips = []
        for index, block in enumerate(self.down):
            x = block(x if index == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for up, merge in zip(reversed(self.up), reversed(self.merge), strict=True):
            x = merge(torch.cat([up(x), skips.pop()], 1))
        return self.head(x)


def _encoder() -> Any:
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    return torch.nn.Sequential(
        torch.nn.Embedding(30000, 512), torch.nn.TransformerEncoder(layer, 6), torch.nn.Linear(512, 30000)
    )


OWN: dict[str, tuple[Callable[[], Any], str]] = {
    "lstm": (LSTMTagger, "tokens"),
    "unet": (UNet, "pixels"),
    "encoder": (_encoder, "tokens"),
}
"""Plain torch models: name -> (class, kind of batch)."""


def build(name: str) -> Any:
    """The model on the CPU."""
    if name in OWN:
        return OWN[name][0]()
    if name in VISION:
        import torchvision

        return getattr(torchvision.models, name)(weights=None, **VISION[name])
    import transformers

    auto, config, options = TEXT[name]
    return getattr(transformers, auto).from_config(getattr(transformers, config)(**options))


def make_batch(case: Case, device: str) -> tuple[Any, ...]:
    """Inputs of one step on the device."""
    n, seq = case["batch"], case.get("seq", 512)
    if case["model"] in VISION:
        size = 299 if case["model"] == "inception_v3" else 224
        images = torch.rand(n, 3, size, size, device=device)
        if case.get("format") == "channels_last":
            images = images.to(memory_format=torch.channels_last)
        return images, torch.randint(0, 1000, (n,), device=device)
    if OWN.get(case["model"], ("", ""))[1] == "pixels":
        return torch.rand(n, 3, 128, 128, device=device), torch.randint(0, 21, (n, 128, 128), device=device)
    return (torch.randint(5, 30000, (n, seq), device=device),)


def loss_of(case: Case, model: Any, data: tuple[Any, ...]) -> Any:
    """The scalar to minimise."""
    if case["model"] in TEXT:
        return model(input_ids=data[0], labels=data[0]).loss
    target = data[-1]
    if case.get("checkpoint") and case["model"] in VISION:
        out = torch.utils.checkpoint.checkpoint(model.__call__, data[0], use_reentrant=False)
    else:
        out = model(data[0])
    if OWN.get(case["model"], ("", ""))[1] == "tokens":
        return F.cross_entropy(out.flatten(0, 1).float(), target.flatten())
    return F.cross_entropy(getattr(out, "logits", out).float(), target)


def prepare(case: Case, device: str = "cuda") -> Callable[[], Any]:
    """Build model, data and optimizer of a case; the function returned runs one step."""
    model = build(case["model"])
    if case["precision"] == "bf16":
        model = model.bfloat16()
    model = model.to(device).train()
    if case.get("format") == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    if case.get("checkpoint") and case["model"] in TEXT:
        options = {"use_reentrant": case["checkpoint"] == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    data = make_batch(case, device)
    if case["precision"] == "bf16" and data[0].is_floating_point():
        data = (data[0].bfloat16(), *data[1:])
    if case.get("infer"):
        model.eval()
        return lambda: _infer(case, model, data)
    optimizer = OPTIMIZERS[case["optimizer"]](model.parameters())
    scaler = torch.amp.GradScaler("cuda") if case["precision"] == "fp16-amp" else None
    return lambda: _train(case, model, data, optimizer, scaler)


def _autocast(case: Case) -> contextlib.AbstractContextManager[Any]:
    kinds = {"amp": torch.bfloat16, "fp16-amp": torch.float16}
    kind = kinds.get(case["precision"])
    return contextlib.nullcontext() if kind is None else torch.autocast("cuda", dtype=kind)


def _infer(case: Case, model: Any, data: tuple[Any, ...]) -> None:
    with torch.no_grad(), _autocast(case):
        model(data[0])


def _train(case: Case, model: Any, data: tuple[Any, ...], optimizer: Any, scaler: Any) -> None:
    rounds = case.get("accumulate", 1)
    for _ in range(rounds):
        with _autocast(case):
            loss = loss_of(case, model, data) / rounds
        (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad(set_to_none=case.get("set_to_none", True))
