"""Remedies for a device: what its allocator, its neighbours and the program on it can give back."""

from __future__ import annotations

from collections.abc import Iterator

from outsize.core.failure import Remedy
from outsize.core.noun import Known
from outsize.core.units import format_bytes as said
from outsize.failure.case import Case, make_remedy
from outsize.failure.framework import APPROXIMATE, ROUNDING


def expandable(case: Case) -> Iterator[Remedy]:
    """Segments that grow instead of many that do not fit together."""
    if case.expandable or not case.on_torch_gpu or not case.slack or case.slack < (case.gap or 0):
        return
    name = "PYTORCH_HIP_ALLOC_CONF" if (case.failure.device or "").startswith("hip") else "PYTORCH_CUDA_ALLOC_CONF"
    yield make_remedy(
        "let the allocator's segments grow",
        case.slack,
        f"{name}=expandable_segments:True python train.py",
        "nothing; set it before the first use of the device",
        known=Known.BOUND,
    )


def steady_sizes(case: Case) -> Iterator[Remedy]:
    """What cuts the cache to pieces are sizes that change."""
    if case.on_torch_gpu and case.slack:
        yield make_remedy(
            "pad inputs to a few fixed sizes, and make the largest first",
            case.slack,
            "DataLoader(..., collate_fn=pad_to_a_multiple_of_512)   # the longest batch first",
            "some padding",
            ROUNDING,
        )


def stop_others(case: Case) -> Iterator[Remedy]:
    """End them, or go to another card."""
    for pid, size in case.strangers[:3]:
        yield make_remedy(
            f"end process {pid} if it is yours and no longer needed",
            size,
            f"kill {pid}",
            "that process",
            known=Known.EXACT,
        )
    tool = {"hip": "rocm-smi", "xpu": "xpu-smi ps", "npu": "npu-smi info"}.get(
        (case.failure.device or "").partition(":")[0], "nvidia-smi"
    )
    if not case.strangers:
        yield make_remedy("end what else is on the card", case.others, f"{tool}  # then: kill PID", "those processes")
    if (case.failure.device or "").startswith(("cuda", "hip")):
        index = (case.failure.device or "").partition(":")[2]
        other = "1" if index in ("", "0") else "0"
        variable = "HIP_VISIBLE_DEVICES" if (case.failure.device or "").startswith("hip") else "CUDA_VISIBLE_DEVICES"
        yield make_remedy("use a card that is free", None, f"{variable}={other} python train.py", "another card")


def raise_fraction(case: Case) -> Iterator[Remedy]:
    """The limit the program set itself."""
    failure = case.failure
    limit, total, held, need = failure.limit_bytes, failure.total_bytes, case.held, case.need
    if not case.on_torch_gpu or limit is None or not total or held is None or need is None or held + need > total:
        return
    fraction = min(1.0, (held + need) / total * 1.02)
    can = min(total, held + (failure.free_bytes if failure.free_bytes is not None else total)) - limit
    if can > 0:
        yield make_remedy(
            "raise the memory fraction",
            can,
            f"torch.cuda.set_per_process_memory_fraction({fraction:.3f})",
            "leaves less of the card to others",
            known=Known.EXACT,
        )


def fewer_graphs(case: Case) -> Iterator[Remedy]:
    """What graphs captured stays."""
    yield make_remedy(
        "run without CUDA graphs, or capture fewer sizes into one shared pool",
        case.extra("private_pool_bytes"),
        'torch.compile(model, mode="default")  # not "reduce-overhead"; vLLM: --enforce-eager',
        "launch overhead of small kernels",
        known=Known.BOUND,
    )


def train_smaller(case: Case) -> Iterator[Remedy]:
    """A step of PyTorch: the batch in slices, then recomputation, exact and any amount; then what costs results."""
    if not case.on_torch or (case.on_host and case.failure.framework not in ("pytorch", "linux")):
        return
    on_device = case.failure.device not in (None, "cpu")
    room = case.device_room if on_device else case.host_room
    budget = f', budget="{room * (9 if on_device else 8) // 10 // 2**20}MiB"' if room and room >= 2**21 else ""
    missing = max(0, (case.gap or 0) - (case.slack or 0)) or None
    short = f"  # {said(missing)} are missing" if missing else ""
    yield make_remedy(
        "training: slice the batch and recompute activations inside a budget",
        None,
        f"fitted = outsize.fit(model, loss, optimizer, batch{budget}){short}",
        "some time for recomputation",
        ROUNDING,
    )
    halved = case.need // 2 if case.need is not None and case.need >= 2**28 else None
    yield make_remedy(
        "halve the batch and accumulate two of them",
        halved if halved is not None and halved >= (missing or 0) else None,
        "(loss / 2).backward()  # twice, then optimizer.step(): same effective batch",
        "BatchNorm sees half batches",
        ROUNDING,
    )
    yield make_remedy(
        "shorter sequences or smaller images: activations shrink with them",
        None,
        "tokenizer(texts, truncation=True, max_length=512)   # half of yours",
        "the end of long texts",
        APPROXIMATE,
    )
    yield make_remedy("evaluation: do not record gradients", None, "with torch.inference_mode(): output = model(batch)")
    yield make_remedy(
        "keep the optimizer's state in 8 bits",
        None,
        "torchao.optim.AdamW8bit(model.parameters(), lr=1e-4)",
        "state in lower precision",
        APPROXIMATE,
    )


def shorter_requests(case: Case) -> Iterator[Remedy]:
    """vLLM's cache for one request, and its share of the card."""
    if case.failure.framework != "vllm":
        return
    extra, free, total = case.failure.extra, case.failure.free_bytes, case.failure.total_bytes
    share = extra.get("gpu_memory_utilization")
    if share is not None and free is not None and total and free < (case.need or 0):
        fits = int(free / total * 100) / 100
        yield make_remedy(
            "let vLLM take only what is free", None, f"--gpu-memory-utilization {fits:.2f}", "a smaller KV cache"
        )
        return
    longest, tokens = extra.get("max_seq_len"), extra.get("kv_tokens")
    length = extra.get("max_model_len") or (tokens and tokens // 16 * 16)
    if not length and longest and case.need and free:
        length = int(longest * free / case.need) // 16 * 16
    if longest and not (length and length < longest):
        length = longest // 2
    yield make_remedy(
        "serve shorter requests",
        case.gap,
        f"--max-model-len {length}" if length else "--max-model-len 4096   # less than yours",
        "shorter context",
        known=Known.BOUND,
    )
    yield make_remedy(
        "keep the KV cache in 8 bits",
        None if case.need is None else case.need // 2,
        "--kv-cache-dtype fp8",
        "slightly other logits",
        APPROXIMATE,
    )
    if share is None or share < 0.95:
        yield make_remedy("give vLLM more of the card", None, "--gpu-memory-utilization 0.95", "leaves less to others")
