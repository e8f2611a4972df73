"""Remedies for a device: what its allocator, its neighbours and the program on it can give back."""

from __future__ import annotations

import re
from collections.abc import Iterator

from outsize.core.failure import Remedy
from outsize.core.noun import Known
from outsize.core.units import format_bytes as said
from outsize.failure.advice import APPROXIMATE, ROUNDING
from outsize.failure.case import CONTEXT, Case, make_remedy
from outsize.failure.framework import LAUNCHERS
from outsize.failure.work import Work, loads_weights

_LANGUAGE_MODEL = re.compile(r"\bLLMs?\b|\bLoRA\b|[0-9]B\b|(?i:llama|qwen|mistral|chatglm|gemma|deepseek|baichuan)")
"""Signs of a model whose weights fill a card before any text does."""


_LESS = {
    Work.TRAINS: ("a smaller batch, smaller images, shorter texts", "batch_size=1, then half the height, width or length"),
    Work.EVALUATES: ("evaluation: fewer samples at once, results off the card",
                     "validation batch size 1   # no gradients; bring each result to RAM before the next"),
    Work.INFERS: ("one at a time, and smaller", "one input at a time, half the height, width or length"),
}  # fmt: skip
"""Work -> what holds for any program that does it: what to do, the setting."""


_ANSWERS = re.compile(
    r"execute_model|_model_forward|profile_run|determine_num_available|_dummy_run|capture_model|long context"
)
"""Signs that the weights are in place, and requests or graphs take the rest."""


def expandable(case: Case) -> Iterator[Remedy]:
    """Segments that grow instead of many that do not fit together."""
    if case.expandable or not case.on_torch_gpu or not case.slack or case.slack < (case.gap or 0):
        return
    if (case.failure.allocated_bytes or 0) > (
        case.failure.total_bytes or 2**63
    ):  # tensors alone are more than the card
        return
    place = (case.failure.device or "").partition(":")[0]
    name = "PYTORCH_ALLOC_CONF" if place == "xpu" else f"PYTORCH_{place.upper()}_ALLOC_CONF"
    little = case.slack_is_little
    if case.on_windows:  # where segments cannot grow
        how = "set PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128"
        yield make_remedy(
            "cut fewer large blocks", None if little else case.slack, how, "perhaps slower", known=Known.BOUND
        )
        return
    yield make_remedy(
        "let the allocator's segments grow",
        None if little else case.slack,  # so little that the next step meets the same end: not the first thing to try
        f"{name}=expandable_segments:True python train.py" + (f"   # at most {said(case.slack)}" if little else ""),
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
    if (case.gap == 0 and not case.strangers) or case.format == "vllm-sleep":
        return
    if case.ranks_on_one_card:
        yield make_remedy(
            "let each rank open its own card only",
            sum(size for _, size in case.strangers if size < CONTEXT),
            'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))   # before anything else; torch.load(..., map_location="cpu")',
            known=Known.BOUND,
        )
        return
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
            "end what else is on the card", case.others, f"{case.tool}  # then: kill PID", "those processes"
        )
    if (case.failure.device or "").startswith(("cuda", "hip")):
        index = (case.failure.device or "").partition(":")[2]
        other = "1" if index in ("", "0") else "0"
        variable = "HIP_VISIBLE_DEVICES" if (case.failure.device or "").startswith("hip") else "CUDA_VISIBLE_DEVICES"
        yield make_remedy("use a card that is free", None, f"{variable}={other} python train.py", "another card")


def take_what_is_free(case: Case) -> Iterator[Remedy]:
    """vLLM asks for a share of the whole card, whoever else is on it."""
    total, free, others = case.failure.total_bytes, case.failure.free_bytes, case.others
    if case.work is Work.SERVES and case.failure.framework == "pytorch" and total and free is not None and others:
        fits = int((case.device_room or 0) / total * 0.9 * 100) / 100
        how = f"--gpu-memory-utilization {fits:.2f}   # of the whole card: the others' part does not count for vLLM"
        yield make_remedy(
            "let vLLM take only what the others leave", others, how, "a smaller KV cache", known=Known.BOUND
        )


def see_what_may_be_mapped(case: Case) -> Iterator[Remedy]:
    """Memory is free and yet is refused: what the driver needs of the host is missing, or it was free a moment too late."""
    if "/mnt/c/" in case.text or "wsl" in case.text.lower():
        yield make_remedy(
            "give WSL2 more of the machine: its driver maps the card through RAM",
            None,
            "memory=32GB   # under [wsl2] in %UserProfile%\\.wslconfig, then: wsl --shutdown",
            "RAM of Windows",
        )
    if (case.failure.device or "").startswith("xpu"):
        how = "UR_L0_ENABLE_RELAXED_ALLOCATION_LIMITS=1 python train.py   # or tensors under 4 GiB"
        yield make_remedy("allow blocks of more than 4 GiB", None, how)
    yield make_remedy(
        "see what keeps the driver from mapping it",
        None,
        f"{case.tool}; ulimit -v; free -g; cat /sys/fs/cgroup/memory.max   # then dmesg: the driver's own words",
    )


def see_who_holds(case: Case) -> Iterator[Remedy]:
    """The last resort, for a program that nothing here knows."""
    look = f"{case.tool}   # who holds it, and how much is left for this one"
    less = _LESS.get(case.work)
    if less is not None:
        yield make_remedy(less[0], None, less[1], "more passes, or smaller results", APPROXIMATE)
    yield make_remedy("see what holds the device, then give the program less at once", None, look)


def raise_fraction(case: Case) -> Iterator[Remedy]:
    """The limit the program set itself."""
    failure = case.failure
    limit, total, held, need = failure.limit_bytes, failure.total_bytes, case.held, case.need
    if not case.on_torch_gpu or limit is None or not total or held is None or need is None or held + need > total:
        return
    if failure.free_bytes is not None and need > failure.free_bytes:  # the card has not got it, whatever is allowed
        return
    fraction = min(1.0, (held + need) / total * 1.02)
    can = min(total, held + (failure.free_bytes if failure.free_bytes is not None else total)) - limit
    if can > 0:
        yield make_remedy(
            "raise the memory fraction",
            can,
            f"{case.torch_module}.set_per_process_memory_fraction({fraction:.3f})",
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


# Rows of tables: what to do, bytes, the line, what it costs, what it does to results.
# fmt: off
_TRAINING = (
    make_remedy("shorter sequences or smaller images: activations shrink with them", None,
                "tokenizer(texts, truncation=True, max_length=512)   # half of yours", "the end of long texts", APPROXIMATE),
    make_remedy("evaluation: do not record gradients", None, "with torch.inference_mode(): output = model(batch)"),
    make_remedy("keep the optimizer's state in 8 bits", None, "torchao.optim.AdamW8bit(model.parameters(), lr=1e-4)",
                "state in lower precision", APPROXIMATE),
)
_ONE_AT_A_TIME = make_remedy(
    "one at a time, smaller, and without gradients", None,
    "with torch.inference_mode(): output = model(x)   # half the height, width or length; then model.half()",
    "smaller results, or the time of several passes", APPROXIMATE)
_OFFLOAD = make_remedy(
    "keep the weights in RAM, and bring each layer when it is needed", None,
    'from_pretrained(..., device_map="auto")   # diffusers: pipe.enable_sequential_cpu_offload()', "several times slower")
_FOUR_BITS = make_remedy(
    "weights in 4 bits", None, "from_pretrained(..., quantization_config=BitsAndBytesConfig(load_in_4bit=True))",
    "weights in lower precision", APPROXIMATE)
_NO_GRADIENTS = make_remedy("do not record gradients", None, "with torch.inference_mode(): output = model(batch)")
_LIGHTER_WEIGHTS = make_remedy(
    "weights that take less of the card: in 16 or 4 bits, or partly in RAM", None,
    'model.half()   # transformers: from_pretrained(..., torch_dtype=torch.bfloat16, device_map="auto"); else a smaller model',
    "lower precision, or slower", APPROXIMATE)
_SMALLER_PICTURES = make_remedy(
    "a smaller picture, one at a time, decoded in tiles", None,
    "512 x 512, batch 1; VAE Decode (Tiled)   # webui: Tiled VAE, no hires fix", "smaller results, or time", APPROXIMATE)
_LOW_VRAM = make_remedy(
    "let the program keep its weights in RAM", None, "--lowvram   # when it is started; webui: --medvram first", "slower")
_FOR_A_MAC = make_remedy(
    "a smaller model, in 16 bits, or one in 4 bits made for a Mac", None,
    "torch_dtype=torch.float16   # 4 bits: an MLX or GGUF version of the model, run by mlx-lm or llama.cpp",
    "lower precision", APPROXIMATE)
_BATCH_OF_ONE = (
    make_remedy("shorter texts or smaller images: one sample alone is too large", None,
                "max_length=512, or half the height and width   # activations shrink with them",
                "less is seen of each sample", APPROXIMATE),
    make_remedy("fewer weights to train, in fewer bits", None,
                "BitsAndBytesConfig(load_in_4bit=True) with LoRA   # else 16 bits and an optimizer of 8 bits",
                "lower precision", APPROXIMATE),
)
_SMALLER_MODEL = make_remedy(
    "a quantized model", None, "fp8 or GGUF weights of the same model", "weights in lower precision", APPROXIMATE)
_FEWER_REQUESTS = make_remedy(
    "fewer and shorter requests at once, and room beside vLLM's share", None,
    "--max-num-seqs 16 --max-model-len 4096 --gpu-memory-utilization 0.85   # less than yours", "fewer requests at once")
_SMALLER_SHARE = make_remedy(
    "smaller weights, or part of them on another card", None,
    "a model with AWQ or GPTQ weights   # or --quantization fp8; --tensor-parallel-size 2 where there is another card",
    "weights in lower precision, or another card", APPROXIMATE)
_BY_WORK = {
    Work.LOADS: (_LIGHTER_WEIGHTS, _FOUR_BITS, _OFFLOAD),
    Work.INFERS: (_ONE_AT_A_TIME, _LIGHTER_WEIGHTS),
    Work.PAINTS: (_LOW_VRAM, _SMALLER_PICTURES, _SMALLER_MODEL),
    Work.SERVES: (_FEWER_REQUESTS, _SMALLER_SHARE),
}
_ON_A_MAC = {
    Work.LOADS: (_FOR_A_MAC,),
    Work.INFERS: (_ONE_AT_A_TIME, _FOR_A_MAC),
    Work.PAINTS: (_SMALLER_PICTURES, _SMALLER_MODEL),
}
"""The same where RAM is the card's: nothing is gained by moving weights."""
_WITH_ONE_LARGE_REQUEST = {
    Work.PAINTS: (_SMALLER_PICTURES, _LOW_VRAM, _SMALLER_MODEL),
}
"""Work -> what to do: the weights out of the way, then less at once; the other way round where one request is large."""
# fmt: on


def keep_no_graphs(case: Case) -> Iterator[Remedy]:
    """What a loop keeps on the device, step after step."""
    if case.grows and case.on_device and not case.shows_torch:
        how = f"{case.tool} after each epoch   # rising: find what is kept; a jump: one larger input, so cut inputs to one size"
        yield make_remedy(
            "see whether it rises step by step or jumps, then a smaller mini-batch", None, how, "more steps", ROUNDING
        )
    if case.shows_torch and case.grows:
        how = "total += loss.item(); outputs.append(y.detach().cpu())   # validation under torch.no_grad()"
        held = None if case.programs else case.failure.allocated_bytes
        yield make_remedy("keep numbers of a step, not its tensors", held, how, known=Known.BOUND)


def less_at_once(case: Case) -> Iterator[Remedy]:
    """What holds for any program that does such work, where nobody says which one it is."""
    less = _LESS.get(case.work)
    if less is not None and case.failure.framework == "unknown" and case.place != "cpu":
        yield make_remedy(less[0], None, less[1], "more passes, or smaller results", APPROXIMATE)


def _rows_for_the_work(case: Case) -> tuple[Remedy, ...]:
    """What fits the work, whatever the numbers; nothing for training and for work that the text does not show."""
    shared = case.failure.device == "mps"  # its RAM is the card's: nothing is gained by moving weights
    large = shared or (case.need or 0) > (case.failure.total_bytes or case.device_room or 2**35) // 8
    rows = _ON_A_MAC.get(case.work) if shared else _WITH_ONE_LARGE_REQUEST.get(case.work) if large else None
    rows = rows or _BY_WORK.get(case.work, ())
    if "--lowvram" in case.text:
        rows = tuple(row for row in rows if row is not _LOW_VRAM)
    filled = (case.failure.allocated_bytes or 0) > 0.9 * (case.failure.total_bytes or 2**63)  # by weights
    if case.work is Work.SERVES and (loads_weights(case.text) or (filled and _ANSWERS.search(case.text) is None)):
        rows = rows[::-1]
    return rows


def train_smaller(case: Case) -> Iterator[Remedy]:
    """A step of PyTorch: what fits the work; for training the batch in slices, then recomputation, exact and any amount."""
    if not case.on_torch or (case.on_host and case.failure.framework not in ("pytorch", "linux")):
        return
    if case.format in LAUNCHERS:
        return
    rows = _rows_for_the_work(case)
    yield from rows
    if rows:
        return
    if case.one_at_a_time and case.work in (Work.TRAINS, Work.UNKNOWN) and not case.watched:
        yield from _BATCH_OF_ONE[:: -1 if _LANGUAGE_MODEL.search(case.text) else 1]
    if case.beside and not case.others:
        look = f"{case.tool}   # who holds it; then smaller images and batches, or a larger card"
        name = "see who holds most of the card: PyTorch could reach the smaller part of it only"
        yield make_remedy(name, case.beside, look, known=Known.BOUND)
    missing = max(0, (case.gap or 0) - (case.slack or 0)) or None
    halved = case.need // 2 if case.need is not None and case.need >= 2**28 else None
    halved = halved if halved is not None and halved >= (missing or 0) and not case.programs else None
    halved = None if case.one_at_a_time else halved
    if case.work is Work.EVALUATES:
        how = "DataLoader(..., batch_size=1); with torch.inference_mode(): ...   # results to .cpu() one by one"
        yield make_remedy(
            "evaluation: fewer samples at once, without gradients, results off the card",
            None if case.programs else case.gap,
            how,
            "time",
        )
    less = make_remedy(
        "less at once: a smaller batch, smaller images, shorter texts",
        halved,
        "batch_size=1, then half the height, width or max_length",
        "more passes, or smaller results",
        APPROXIMATE,
    )
    if case.work is Work.UNKNOWN and not case.watched:
        yield less
    if case.can_be_fitted:
        on_device = case.failure.device not in (None, "cpu")
        room = case.device_room if on_device else case.host_room
        budget = f', budget="{room * (9 if on_device else 8) // 10 // 2**20}MiB"' if room and room >= 2**21 else ""
        short = f"  # {said(missing)} are missing" if missing else ""
        how = f"fitted = outsize.fit(model, loss, optimizer, batch{budget}){short}"
        name = "training: slice the batch and recompute activations inside a budget"
        yield make_remedy(name, None, how, "some time for recomputation", ROUNDING)
    if case.work is Work.UNKNOWN:  # a program that is watched is the user's own: what is exact comes first
        yield from (less, _NO_GRADIENTS, _LIGHTER_WEIGHTS)
        return
    yield make_remedy(
        "halve the batch; in training, accumulate two of them",
        halved,
        "(loss / 2).backward()  # twice, then optimizer.step(): same effective batch",
        "BatchNorm sees half batches",
        ROUNDING,
    )
    yield from _TRAINING


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
    if case.format == "vllm-sleep":
        name = "leave more of the card to the trainer"
        yield make_remedy(name, None, "gpu_memory_utilization=0.5   # less than yours", "a smaller KV cache")
        return
    longest, tokens = extra.get("max_seq_len"), extra.get("kv_tokens")
    more = make_remedy("give vLLM more of the card", None, "--gpu-memory-utilization 0.95", "leaves less to others")
    if case.format == "vllm-blocks":  # the weights leave nothing: no length of request is short enough
        yield more
        yield make_remedy(
            "smaller weights, or part of them on another card",
            None,
            "--quantization fp8   # or a quantized model; --tensor-parallel-size 2",
            "weights in lower precision, or another card",
            APPROXIMATE,
        )
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
        yield more
