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
    if case.expandable or not case.on_torch_gpu or not case.slack or case.gap is None or case.slack < case.gap:
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
    if not case.strangers:
        yield make_remedy(
            "end what else is on the card", case.others, "nvidia-smi  # then: kill PID", "those processes"
        )
    if (case.failure.device or "").startswith(("cuda", "hip")):
        index = (case.failure.device or "").partition(":")[2]
        other = "1" if index in ("", "0") else "0"
        variable = "HIP_VISIBLE_DEVICES" if (case.failure.device or "").startswith("hip") else "CUDA_VISIBLE_DEVICES"
        yield make_remedy("use a card that is free", None, f"{variable}={other} python train.py", "another card")


def raise_fraction(case: Case) -> Iterator[Remedy]:
    """The limit the program set itself."""
    failure = case.failure
    limit, total, held, need = failure.limit_bytes, failure.total_bytes, case.held, case.need
    if limit is None or not total or held is None or need is None or held + need > total:
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


def fit_training(case: Case) -> Iterator[Remedy]:
    """The batch in slices, then recomputation: exact, and any amount."""
    if not case.on_torch_gpu and case.failure.device not in {"mps"}:
        return
    room = case.failure.limit_bytes or case.failure.total_bytes
    budget = f', budget="{room * 9 // 10 // 2**20}MiB"' if room else ""
    missing = max(0, (case.gap or 0) - (case.slack or 0)) or None
    short = f"  # {said(missing)} are missing" if missing else ""
    yield make_remedy(
        "training: slice the batch and recompute activations inside a budget",
        None,
        f"fitted = outsize.fit(model, loss, optimizer, batch{budget}){short}",
        "some time for recomputation",
        ROUNDING,
    )
    yield make_remedy("evaluation: do not record gradients", None, "with torch.inference_mode(): output = model(batch)")
    if case.need is not None and case.need >= 2**28:
        yield make_remedy(
            "halve the batch and accumulate two of them",
            case.need // 2 if case.need // 2 >= (missing or 0) else None,
            "(loss / 2).backward()  # twice, then optimizer.step(): same effective batch",
            "BatchNorm sees half batches",
            ROUNDING,
        )
    yield make_remedy(
        "keep the optimizer's state in 8 bits",
        None,
        "torchao.optim.AdamW8bit(model.parameters(), lr=1e-4)",
        "state in lower precision",
        APPROXIMATE,
    )


def shorter_requests(case: Case) -> Iterator[Remedy]:
    """vLLM's cache for one request."""
    if case.failure.framework != "vllm":
        return
    length = case.failure.extra.get("max_model_len")
    if length is None and case.need and case.failure.free_bytes and case.failure.extra.get("max_seq_len"):
        length = int(case.failure.extra["max_seq_len"] * case.failure.free_bytes / case.need) // 16 * 16
    yield make_remedy(
        "serve shorter requests", case.gap, f"--max-model-len {length or 8192}", "shorter context", known=Known.BOUND
    )
    yield make_remedy(
        "keep the KV cache in 8 bits",
        None if case.need is None else case.need // 2,
        "--kv-cache-dtype fp8",
        "slightly other logits",
        APPROXIMATE,
    )
    yield make_remedy("give vLLM more of the card", None, "--gpu-memory-utilization 0.95", "leaves less to others")
