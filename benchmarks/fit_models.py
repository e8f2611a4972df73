"""The models that fit is measured on, and what people do today to make their step smaller.

`build(name, device, tiny)` gives (model, loss, batch): weights without training, tokens and pictures without meaning.
`WAYS` are the peers: each makes a step function from model, loss, optimizer and batch. `tiny` is for trying the script out.
"""

import contextlib

MODELS = ("gpt2", "vit_b_16", "gpt2-medium", "resnet50", "llama-1.3b", "t5-small")
BLOCKS = ("GPT2Block", "LlamaDecoderLayer", "T5Block", "EncoderBlock", "Bottleneck")


def build(name, device, tiny=False):
    """(model, loss, batch) on a device."""
    import torch

    torch.manual_seed(0)
    if name in ("resnet50", "vit_b_16"):
        return _pictures(name, device, tiny)
    import transformers

    transformers.logging.set_verbosity_error()
    small = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 2, "d_kv": 32} if tiny else {}
    with torch.device(device):
        if name == "t5-small":
            config = transformers.T5Config(dropout_rate=0.0, decoder_start_token_id=0, **small)
            model, rows, length, words = transformers.T5ForConditionalGeneration(config), 32, 512, 32000
        elif name == "llama-1.3b":
            width, layers, heads = (64, 2, 2) if tiny else (2048, 24, 16)
            config = transformers.LlamaConfig(
                hidden_size=width, intermediate_size=width * 43 // 16, num_hidden_layers=layers,
                num_attention_heads=heads, vocab_size=32000,
            )  # fmt: skip
            model, rows, length, words = transformers.LlamaForCausalLM(config), 8, 1024, 32000
        else:
            shape = {"gpt2": (768, 12, 12), "gpt2-medium": (1024, 24, 16)}[name]
            width, layers, heads = (64, 2, 2) if tiny else shape
            config = transformers.GPT2Config(
                n_embd=width, n_layer=layers, n_head=heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
            )
            model, rows, length, words = transformers.GPT2LMHeadModel(config), 16 if name == "gpt2" else 8, 1024, 50257
        tokens = torch.randint(0, words, (rows, 32 if tiny else length))
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False
    return model.train(), lambda m, b: m(**b).loss, {"input_ids": tokens, "labels": tokens}


def _pictures(name, device, tiny):
    import torch
    import torchvision
    from torch.nn import functional

    with torch.device(device):
        model = getattr(torchvision.models, name)()
        batch = {"x": torch.randn(4 if tiny else 128, 3, 224, 224), "y": torch.randint(0, 1000, (4 if tiny else 128,))}
    return model.train(), lambda m, b: functional.cross_entropy(m(b["x"]), b["y"]), batch


def cut_step(model, loss, optimizer, batch, size):
    """One step by gradient accumulation over slices of `size` samples."""
    rows = next(iter(batch.values())).shape[0]

    def step():
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for start in range(0, rows, size):
            part = batch if size >= rows else {key: value[start : start + size] for key, value in batch.items()}
            lost = loss(model, part) * (min(size, rows - start) / rows)
            lost.backward()
            total = total + lost.detach()
        optimizer.step()
        return total

    return step


@contextlib.contextmanager
def checkpointed(model):
    """Every block is computed again."""
    from torch.utils.checkpoint import checkpoint

    changed = [module for module in model.modules() if type(module).__name__ in BLOCKS]
    for module in changed:
        forward = module.forward
        module.forward = lambda *a, forward=forward, **k: checkpoint(forward, *a, use_reentrant=False, **k)
    try:
        yield
    finally:
        for module in changed:
            del module.forward


@contextlib.contextmanager
def saved_on_host(model):
    """Everything that autograd saves goes to pinned host memory."""
    import torch

    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        yield


WAYS = {
    "micro2": (2, contextlib.nullcontext), "micro4": (4, contextlib.nullcontext), "micro8": (8, contextlib.nullcontext),
    "checkpoint": (1, checkpointed), "save_on_cpu": (1, saved_on_host),
}  # fmt: skip
"""Way -> (slices, what is on around the step)."""


def finder_sizes(rows):
    """Batch sizes that accelerate's finder tries, each after the one before ran out of memory."""
    size = rows
    while size > 0:
        yield size
        size = int(size * 0.9)
