"""Rules for a device whose memory ran out: pieces, fractions, other processes, graphs, programs compiled too large."""

from __future__ import annotations

import re

from outsize.core.failure import Cause, CauseName
from outsize.core.units import format_bytes as said
from outsize.failure.case import CONTEXT, SMALL, Case, make_cause
from outsize.failure.signs import BESIDE_CORE, JAX, KEPT_AFTER
from outsize.failure.work import Work

_COMPUTES = re.compile(
    r"\bin forward\b|\.backward\(|\.contiguous\(|\s@\s|\bF\.\w{1,30}\(|torch\.(?:cat|matmul|bmm|einsum|stack)\(|"
    r"modules/(?!module)|\bbatch|for a while|\bsteps?\b|\biterations?\b"
)
"""Lines that compute: by then the program has filled the card itself."""
_STARTS = re.compile(
    r"barrier\(|init_process_group|set_device\(|_lazy_init|_cuda_init|manual_seed|set_rng_state|torch\.(?:zeros|ones|randn?|tensor|empty)\("
    r"[^\n]{0,40}(?:\.cuda\(|device)|torch\.cuda\.(?:init|mem_get_info|synchronize|current_stream)|mem_get_info|is_available|"
    r"nvidia-smi|other process|all (?:CUDA-capable )?devices"
)
"""Lines with which a program only begins to use a card."""
_USES = (Work.INFERS, Work.PAINTS, Work.SERVES)
"""Work in which the program itself fills the card as a rule."""


def fragmentation(case: Case) -> Cause | None:
    """Enough is unused, but not in one piece."""
    need, free, slack = case.need, case.failure.free_bytes, case.slack
    if need is None or not slack or not case.on_torch_gpu:
        return None
    room = None if free is None else free
    limit = case.failure.limit_bytes
    if limit is not None and limit < 2**57 and case.held is not None:
        room = min(room if room is not None else 2**63, max(0, limit - case.held))
    total = case.failure.total_bytes
    if (room or 0) >= need or (room or 0) + slack < need:
        return None
    if (
        total is not None and (case.failure.allocated_bytes or 0) > total
    ):  # tensors alone are more than the card: lent RAM
        return None
    if case.others is not None and case.others >= max(2 * slack, 0.1 * (total or 0)):
        return None
    if case.slack_is_little or slack < 0.08 * (total or (case.held or 0) + (room or 0)):
        return None  # enough for this request, but the next one meets the same end
    more = "" if room is None else f" and {said(room)} more could be had"
    return make_cause(
        CauseName.FRAGMENTATION,
        f"{said(need)} were asked for while PyTorch held {said(slack)} it did not use{more}: enough, but cut "
        "into pieces between tensors that are still alive, none of them long enough.",
    )


def bfc_fragmentation(case: Case) -> Cause | None:
    """TensorFlow's and JAX's allocator: unused memory in the pool, but no chunk that is long enough."""
    need, limit, used = case.need, case.failure.limit_bytes, case.failure.allocated_bytes
    largest = case.extra("largest_free_bytes")
    if case.failure.framework not in {"tensorflow", "jax"} or need is None or limit is None or used is None:
        return None
    if limit - used < need:
        return None
    return make_cause(
        CauseName.FRAGMENTATION,
        f"{said(need)} were asked for while {said(limit - used)} of the pool's {said(limit)} were not in use"
        + ("" if largest is None or largest >= need else f", the largest free piece being {said(largest)}")
        + ": enough, but cut into pieces.",
        certain=largest is not None and largest < need,
        decide="the lines 'Bin' and 'Chunk' of the allocator's dump: the largest free chunk against the request",
    )


def tpu_pieces(case: Case) -> Cause | None:
    """A TPU that has as much, but not in one piece."""
    need, free, piece = case.need, case.failure.free_bytes, case.extra("reservable_bytes")
    if case.failure.framework != "jax" or need is None or free is None or need > free:
        return None
    longest = "" if piece is None or piece >= need else f", {said(piece)} of them in one piece"
    return make_cause(
        CauseName.FRAGMENTATION,
        f"{said(need)} were asked for while {said(free)} of the TPU's memory were free{longest}: arrays of earlier steps, or of "
        "an earlier program, lie between.",
        certain=bool(longest),
        decide="the arrays that are alive before the step: jax.live_arrays()",
    )


def fraction(case: Case) -> Cause | None:
    """A cap that the program set itself."""
    limit, need, free = case.failure.limit_bytes, case.need, case.failure.free_bytes
    if limit is None or limit >= 2**57 or not case.on_torch_gpu or case.format == "xpu-block":
        return None
    if (
        case.failure.total_bytes is not None and limit >= 0.995 * case.failure.total_bytes
    ):  # the whole card is no fraction
        return None
    if need is None or not (
        case.passes_limit if free is not None and free >= need else (case.held or 0) + need > limit
    ):
        return None
    also = "" if free is None or free < need else f", though {said(free)} of the card were free"
    return make_cause(
        CauseName.MEMORY_FRACTION,
        f"PyTorch was allowed {said(limit)} of the card and held {said(case.held)}; {said(need)} more would pass "
        f"that limit{also}. The limit is `set_per_process_memory_fraction`, not the card.",
        certain=free is None or free >= need,
    )


def own_share(case: Case) -> Cause | None:
    """A share of the card that the framework keeps to, as its message says."""
    share = case.failure.extra.get("fraction")
    if not isinstance(share, float) or share >= 0.9:
        return None
    return make_cause(
        CauseName.MEMORY_FRACTION,
        f"{case.framework.title or case.failure.framework} keeps to {share:.0%} of the card (a setting of its own), and that "
        "is full.",
        decide=case.who_holds,
    )


def gives_nothing(case: Case) -> Cause | None:
    """A card on which not even a few bytes can be had, while the program holds none."""
    if not case.on_device or not case.holds_nothing:
        return None
    return make_cause(
        CauseName.REFUSED,
        f"{said(case.need)} were refused while the program held next to nothing: it is not short of memory, the card gives it "
        "none. A virtual machine without a card of its own, another driver, or a card in exclusive use does that; so do other "
        "programs that fill it.",
        decide=case.who_holds,
    )


def library_room(case: Case) -> Cause | None:
    """The handle of a library, without a number: two causes that look the same."""
    if not case.is_library:
        return None
    return make_cause(
        CauseName.TRUE_NEED,
        "A library of the card (cuBLAS, cuDNN, cuFFT) found no room for its handle. Either the card is full, of this program or "
        "others, or an earlier call on the card had failed already: an index out of range (labels, tokens) looks exactly like "
        "this.",
        decide=f"`{case.tool}` at that moment: nearly full, or not; CUDA_LAUNCH_BLOCKING=1 names an earlier call",
    )


def watermark(case: Case) -> Cause | None:
    """Apple's unified memory under PyTorch's watermark."""
    limit, held = case.failure.limit_bytes, case.failure.allocated_bytes
    if case.failure.device != "mps" or limit is None or held is None:
        return None
    other = case.extra("other_allocations_bytes") or 0
    if other > held:
        return make_cause(
            CauseName.OTHER_ALLOCATIONS,
            f"Of the {said(limit)} allowed, {said(other)} are held outside PyTorch (Metal, other libraries) and "
            f"{said(held)} by it.",
        )
    beside = f", other libraries {said(other)}" if other > 2**27 else ""
    return make_cause(
        CauseName.TRUE_NEED,
        f"PyTorch holds {said(held)}{beside} of the {said(limit)} that its watermark allows on this Mac.",
    )


def left_over(case: Case) -> Cause | None:
    """A user says that the card stays full when its program has ended."""
    if case.place == "cpu" or KEPT_AFTER.search(case.text) is None or case.strangers:
        return None
    return make_cause(
        CauseName.OTHER_PROCESS,
        "The card is said to stay full after a program has ended: what it started (workers, a server, a notebook) or its own "
        "process is still alive and holds it.",
        decide="`sudo fuser -v /dev/nvidia*`: who has the card open, also what nvidia-smi does not list",
    )


def other_process(case: Case) -> Cause | None:
    """The card is full of somebody else."""
    others, gap = case.others, case.gap
    if others is None or gap is None or not gap:
        return None
    if case.strangers and others >= gap:
        names = ", ".join(f"pid {pid} {said(size)}" for pid, size in case.strangers[:3])
        mine = case.mine or 0
        return make_cause(
            CauseName.OTHER_PROCESS,
            f"Other processes hold {said(others)} of the card ({names}); this one holds {said(mine)}. {said(gap)} "
            "were missing: without them it would have fitted.",
            certain=others >= mine or others - gap >= 2**30,
            decide=case.who_holds,
        )
    if others >= gap and case.mine is not None and others > max(CONTEXT // 2, 0.1 * (case.failure.total_bytes or 0)):
        return make_cause(
            CauseName.OTHER_PROCESS,
            f"{said(others)} of the card are held by nobody this message names: this process holds "
            f"{said(case.mine)} of {said(case.failure.total_bytes)} and {said(case.failure.free_bytes)} were free. "
            "Another process, another user or the desktop has the rest.",
            certain=case.in_use is not None and others > 0.25 * (case.failure.total_bytes or 0),
            decide=case.who_holds,
        )
    return None


def others_too(case: Case) -> Cause | None:
    """Other processes hold part of the card, whatever else is wrong."""
    if not case.strangers or case.others is None or not case.gap:
        return None
    enough = "enough for this request" if case.others >= case.gap else f"of the {said(case.gap)} that were missing"
    return make_cause(
        CauseName.OTHER_PROCESS,
        f"Other processes hold {said(case.others)} of the card: {enough}.",
        decide=case.who_holds,
    )


def graph_pools(case: Case) -> Cause | None:
    """CUDA graphs keep what they captured."""
    private, gap, held = case.extra("private_pool_bytes"), case.gap, case.failure.allocated_bytes or 0
    if not case.on_torch_gpu or private is None or not gap or private < max(gap, 0.1 * held):
        return None
    return make_cause(
        CauseName.GRAPH_POOLS,
        f"{said(private)} sit in the private pools of CUDA graphs, which no other allocation may use and which "
        f"stay until the graphs are destroyed; {said(gap)} were missing.",
        certain=private >= 0.25 * max(1, held),
        decide="run once without CUDA graphs (`mode='default'`, `--enforce-eager`): does it fit?",
    )


def refused_though_free(case: Case) -> Cause | None:
    """More was free than was asked for."""
    need, free = case.need, case.failure.free_bytes
    if need is None or free is None or case.failure.framework == "vllm" or case.on_host:
        return None
    if case.gap:
        return None
    if case.format == "snapshot":
        return make_cause(
            CauseName.MEMORY_FRACTION,
            f"{said(need)} were refused while the driver still had {said(free)}: PyTorch did not ask it, because "
            f"`set_per_process_memory_fraction` allows little more than the {said(case.held)} it held.",
            decide="the exception's text: it then says how much was 'allowed'",
        )
    if case.takes_all_free:
        return make_cause(
            CauseName.REFUSED,
            f"One request of {said(need)} is {need / free:.0%} of the {said(free)} that were free: a card has nearly all that is "
            "free hardly ever in one piece, and a little of it is the driver's own.",
        )
    return make_cause(
        CauseName.REFUSED,
        f"{said(need)} were refused while {said(free)} were free when the message was made. Something freed memory "
        "in between (another process, a worker that died), or the driver could not map it (a limit on host memory "
        "or address space, WSL2, MIG).",
        decide=f"run again while watching `{case.tool}`; check `ulimit -v` and the container's memory limit",
    )


def free_though(case: Case) -> Cause | None:
    """The text says that the card had room, and TensorFlow's or JAX's pool had none."""
    if not case.told_enough or case.on_host or case.need is None or case.failure.allocated_bytes is not None:
        return None
    told = "enough is" if case.told_free is None else f"{said(case.told_free)} are"
    return make_cause(
        CauseName.OTHER_PROCESS,
        f"{said(case.need)} were refused while {told} said to be there: either another process, or another framework in this "
        "one, had taken the card when it started (TensorFlow and JAX both do), or arrays of this program fill it after all.",
        decide=case.who_holds,
    )


def refused_block(case: Case) -> Cause | None:
    """Little was held, and yet it was refused: nobody says how much was free."""
    need, total, held = case.need, case.failure.total_bytes, case.held
    if not case.on_torch_gpu or case.failure.free_bytes is not None or need is None or total is None or held is None:
        return None
    if held + need > 0.9 * total or case.failure.limit_bytes is not None:
        return None
    return make_cause(
        CauseName.REFUSED,
        f"{said(need)} were refused while PyTorch held {said(held) if held else 'nothing'} of {said(total)}: others hold the "
        "rest, or the driver gives out no single block that large (4 GiB on many Intel cards).",
        decide=case.who_holds,
    )


def kept(case: Case) -> Cause | None:
    """It went well for a while: each step keeps something, or the largest batch came late."""
    if not case.grows or case.work not in (Work.TRAINS, Work.EVALUATES, Work.UNKNOWN):
        return None
    known = case.on_device and case.failure.framework in ("cuda", "tensorflow", "jax")
    told = case.failure.framework == "unknown" and case.place == "cuda" and case.work is not Work.UNKNOWN
    if not (case.shows_torch or known or told):
        return None
    if case.strangers or (case.others or 0) > 0.4 * (
        case.failure.total_bytes or 2**63
    ):  # that much others do not grow into
        return None
    look = "torch.cuda.memory_allocated()" if case.shows_torch else case.tool
    shown = "" if case.rise is None else f", its memory rising from {said(case.rise[0])} to {said(case.rise[1])}"
    return make_cause(
        CauseName.LEAK,
        f"It fitted at first and failed later{shown}: each step, or each validation, keeps something on the card (a loss with "
        "its graph, outputs in a list), or the longest batch came late.",
        decide=f"{look} after each step: rising is a leak, flat and then a jump is a large batch",
    )


def driver_refused(case: Case) -> Cause | None:
    """The driver's own words, without the numbers that PyTorch's allocator prints."""
    if case.format != "cuda-bare" or case.need is not None or not case.on_torch_gpu:
        return None
    if case.work in _USES or _COMPUTES.search(case.text) or not _STARTS.search(case.text):
        return None
    return make_cause(
        CauseName.OTHER_PROCESS,
        "The driver refused before the program had done anything on the card: as a rule another process, or another rank of the "
        "same job, already fills it.",
        decide=case.who_holds,
    )


LARGE_WEIGHT = 2**29
"""Bytes of a weight that hardly any layer is meant to have."""


def weights_refused(case: Case) -> Cause | None:
    """A weight of a graph: it is made before any batch."""
    if not case.makes_weights or case.on_host or case.failure.allocated_bytes is not None:
        return None
    if (case.weights_of_graph or 0) >= LARGE_WEIGHT:
        return make_cause(
            CauseName.TRUE_NEED,
            f"One weight alone takes {said(case.weights_of_graph)}; its gradient and the optimizer's copies take as much each. "
            "No batch makes it smaller: the layer has too many inputs or outputs.",
        )
    if case.one_at_a_time:
        return make_cause(
            CauseName.TRUE_NEED,
            "The tensor is a weight, or an optimizer's copy of one, and the batch is as small as it gets: the model, with what "
            "its optimizer keeps beside each weight, is too large for the card, unless another process holds part of it.",
            decide=case.who_holds,
        )
    return make_cause(
        CauseName.OTHER_PROCESS,
        "The tensor is a weight, or an optimizer's copy of one, so the batch hardly matters: another process holds the card, or "
        "the model alone is too large for it.",
        decide=case.who_holds,
    )


def tpu(case: Case) -> Cause | None:
    """XLA's own sum of a program."""
    used, limit = case.extra("used_bytes") or case.extra("total_usage_bytes"), case.failure.limit_bytes
    sparse = case.extra("sparsecore_used_bytes")
    used = used if used is None or sparse is None else used + sparse
    if case.failure.framework != "jax" or used is None or limit is None or used <= limit:
        return None
    if BESIDE_CORE.search(case.text) is not None:
        return make_cause(
            CauseName.LARGER_THAN_LIMIT,
            f"A kernel needs {said(used)} of the {said(limit)} that stand beside one core of a TPU (vmem, smem). HBM is not what "
            "is short: a smaller batch helps only where it makes the kernel's blocks smaller.",
        )
    return make_cause(
        CauseName.TRUE_NEED,
        f"The compiled program needs {said(used)} of {said(limit)}: {said(used - limit)} too much, before a step "
        f"has run.",
    )


def small_program(case: Case) -> Cause | None:
    """A compiled program that needs next to nothing, and does not get it."""
    total = case.extra("total_program_bytes")
    if case.failure.framework != "jax" or total is None or total >= SMALL or case.on_host:
        return None
    return make_cause(
        CauseName.OTHER_PROCESS,
        f"The whole compiled program needs {said(total)}, so something else fills the card: another process, or another "
        "framework in this one (TensorFlow takes the whole card when it starts).",
        decide=case.who_holds,
    )


def kv_cache(case: Case) -> Cause | None:
    """vLLM's cache for one request, or its share of the card."""
    need, free = case.need, case.failure.free_bytes
    if case.failure.framework != "vllm":
        return None
    if case.format == "vllm-startup" and need is not None and free is not None:
        held = (case.failure.total_bytes or 0) - free
        return make_cause(
            CauseName.OTHER_PROCESS,
            f"vLLM wants {said(need)} of the card at start and {said(free)} are free: {said(held)} are already "
            f"held by something else.",
            decide=case.who_holds,
        )
    if need is not None and free is not None:
        return make_cause(
            CauseName.TRUE_NEED,
            f"One request of the longest length needs a KV cache of {said(need)}; after the weights {said(free)} "
            f"are left.",
        )
    if case.format == "vllm-sleep":
        return make_cause(
            CauseName.OTHER_PROCESS,
            "vLLM took its memory back after sleeping, and the card was no longer free: what ran meanwhile, as a rule the "
            "trainer of the same job, still holds part of it.",
            decide=case.who_holds,
        )
    tokens, longest = case.failure.extra.get("kv_tokens"), case.failure.extra.get("max_seq_len")
    if tokens is not None and longest is not None:
        return make_cause(
            CauseName.TRUE_NEED,
            f"The KV cache has room for {tokens:,} tokens beside the weights, and one request may have {longest:,}.",
        )
    return make_cause(
        CauseName.TRUE_NEED,
        "The weights and the profiled activations leave no room for the KV cache.",
        decide="the lines of vLLM's start: weights, peak activation, memory left for the KV cache",
    )


def prealloc(case: Case) -> Cause | None:
    """TensorFlow takes the card at start; the driver says no."""
    if case.failure.framework == "tensorflow" and case.format == "library-handle":
        return make_cause(
            CauseName.PREALLOCATION,
            "A library of the card found no room for its handle: TensorFlow takes nearly the whole card when it starts, this one "
            "or another that runs beside it.",
            decide=case.who_holds,
        )
    computes = "ran out of memory trying to allocate" in case.text  # by then it has long started
    if case.failure.framework != "tensorflow" or case.format not in {"driver", "driver-plain", "context"} or computes:
        return None
    size = f" ({said(case.need)})" if case.need else ""
    who = "JAX" if JAX.search(case.text) else "TensorFlow"
    return make_cause(
        CauseName.PREALLOCATION,
        f"{who} takes nearly the whole card when it starts{size} and the driver refused: another process, "
        f"often another {who} or a notebook kernel, already holds part of it. It then tries smaller pieces, "
        "so this alone may end nothing.",
        decide=case.who_holds,
    )
