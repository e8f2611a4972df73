"""Remedies for a device: what its allocator, its neighbours and the program on it can give back."""

from __future__ import annotations

import re
from collections.abc import Iterator

from outsize.core.failure import Remedy
from outsize.core.units import format_bytes as said
from outsize.failure import signs
from outsize.failure.case import CONTEXT, Case
from outsize.failure.framework import LAUNCHERS
from outsize.failure.remedies.texts import remedy
from outsize.failure.work import Work, loads_weights

_LANGUAGE_MODEL = re.compile(r"\bLLMs?\b|\bLoRA\b|[0-9]B\b|(?i:llama|qwen|mistral|chatglm|gemma|deepseek|baichuan)")
"""Signs of a model whose weights fill a card before any text does."""


_LESS = {Work.TRAINS: "less_in_training", Work.EVALUATES: "less_in_evaluation", Work.INFERS: "less_in_inference"}
"""Work -> what holds for any program that does it."""

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
    if case.on_windows or case.cannot_grow:
        if (case.can_split or not case.cannot_grow) and not case.split_is_set:
            how = (
                f"set {name}=max_split_size_mb:128"
                if case.on_windows
                else f"{name}=max_split_size_mb:128 python train.py"
            )
            how += "   # from PyTorch 2.1 on, on Linux: expandable_segments:True" if case.cannot_grow else ""
            yield remedy("cut_fewer_blocks", None if little else case.slack, how=how)
        return
    gives = (
        None if little else case.slack
    )  # so little that the next step meets the same end: not the first thing to try
    yield remedy("expandable", gives, name=name, most=f"   # at most {said(case.slack)}" if little else "")


def steady_sizes(case: Case) -> Iterator[Remedy]:
    """What cuts the cache to pieces are sizes that change."""
    if case.on_torch_gpu and case.slack:
        yield remedy("steady_sizes", None if case.cannot_grow else case.slack)


def stop_others(case: Case) -> Iterator[Remedy]:
    """End them, or go to another card."""
    if case.place == "cuda" and not case.strangers and signs.KEPT_AFTER.search(case.text) is not None:
        yield remedy("end_what_was_left")
    if (case.gap == 0 and not case.strangers) or case.format == "vllm-sleep":
        return
    if case.ranks_on_one_card:
        yield remedy("one_card_a_rank", sum(size for _, size in case.strangers if size < CONTEXT) or case.others)
        return
    for pid, size in case.strangers[:3]:
        yield remedy("end_process", size, pid=pid)
    if not case.strangers:
        yield remedy("end_others", case.others, tool=case.tool)
    if (case.failure.device or "").startswith(("cuda", "hip")):
        index = (case.failure.device or "").partition(":")[2]
        other = "1" if index in ("", "0") else "0"
        variable = "HIP_VISIBLE_DEVICES" if (case.failure.device or "").startswith("hip") else "CUDA_VISIBLE_DEVICES"
        yield remedy("use_another_card", variable=variable, other=other)


def take_what_is_free(case: Case) -> Iterator[Remedy]:
    """vLLM asks for a share of the whole card, whoever else is on it."""
    total, free, others = case.failure.total_bytes, case.failure.free_bytes, case.others
    if case.work is Work.SERVES and case.failure.framework == "pytorch" and total and free is not None and others:
        fits = int((case.device_room or 0) / total * 0.9 * 100) / 100
        yield remedy("only_what_others_leave", others, fits=fits)


def see_what_may_be_mapped(case: Case) -> Iterator[Remedy]:
    """Memory is free and yet is refused: what the driver needs of the host is missing, or it was free a moment too late."""
    if "/mnt/c/" in case.text or "wsl" in case.text.lower():
        yield remedy("more_for_wsl")
    if (case.failure.device or "").startswith("xpu") and (case.need or 0) >= 2**31:
        yield remedy("large_blocks_on_xpu")
    yield remedy("see_what_may_be_mapped", tool=case.tool)


def leave_the_card(case: Case) -> Iterator[Remedy]:
    """A card that gives nothing at all."""
    if case.holds_nothing:
        yield remedy("leave_the_card")


def see_which_of_two(case: Case) -> Iterator[Remedy]:
    """A library of the card found no room: full, or a call before it failed."""
    if case.is_library:
        yield remedy("see_which_of_two", tool=case.tool)


_READS = re.compile(r"torch\.load\(|\b_?(?:cuda_deserialize|restore_location|persistent_load|legacy_load)\b")
_TO_RAM = re.compile(r"map_location\W{1,3}(?:torch\.device\(.)?cpu")


def for_the_phase(case: Case) -> Iterator[Remedy]:
    """What belongs to one moment of any program: a file read onto the card, weights gathered to be saved."""
    if not case.on_torch_gpu:
        return
    if case.work is Work.SAVES:
        yield remedy("gather_in_ram")
    elif (
        _READS.search(case.text) is not None
        and _TO_RAM.search(case.text) is None
        and 4 * (case.others or 0) < (case.failure.total_bytes or 1)
    ):
        yield remedy("read_into_ram")


def less_of_work(case: Case) -> Iterator[Remedy]:
    """A user's story of a model in RAM."""
    if case.place != "cpu" or case.failure.framework != "unknown":
        return
    if case.work is Work.TRAINS:
        yield remedy("less_data_in_ram")
    elif case.work in _LESS:
        yield from _less(case)


def see_who_holds(case: Case) -> Iterator[Remedy]:
    """The last resort, for a program that nothing here knows."""
    yield from _less(case)
    yield remedy("see_who_holds", tool=case.tool)


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
        yield remedy("raise_fraction", can, torch_module=case.torch_module, fraction=fraction)


def fewer_graphs(case: Case) -> Iterator[Remedy]:
    """What graphs captured stays."""
    yield remedy("fewer_graphs", case.extra("private_pool_bytes"))


_BY_WORK = {
    Work.LOADS: ("lighter_weights", "four_bits", "offload"),
    Work.SAVES: ("gather_in_ram",),
    Work.INFERS: ("one_at_a_time", "lighter_weights"),
    Work.PAINTS: ("low_vram", "smaller_pictures", "smaller_model"),
    Work.SERVES: ("fewer_requests", "smaller_share"),
}
_ON_A_MAC = {
    Work.LOADS: ("for_a_mac",),
    Work.INFERS: ("one_at_a_time", "for_a_mac"),
    Work.PAINTS: ("smaller_pictures", "smaller_model"),
}
"""The same where RAM is the card's: nothing is gained by moving weights."""
_IN_RAM = {Work.PAINTS: ("smaller_model", "smaller_pictures"), Work.LOADS: ("lighter_weights_in_ram",)}
"""The same where RAM is what ran out."""
_WITH_ONE_LARGE_REQUEST = {Work.PAINTS: ("smaller_pictures", "low_vram", "smaller_model")}
"""Work -> what to do: the weights out of the way, then less at once; the other way round where one request is large."""


def _less(case: Case) -> Iterator[Remedy]:
    """What holds for any program that does such work; no smaller batch where that was tried."""
    shorter = case.one_at_a_time and case.work is Work.TRAINS
    yield remedy("shorter_samples" if shorter else _LESS.get(case.work, "less_of_it"))


def keep_no_graphs(case: Case) -> Iterator[Remedy]:
    """What a loop keeps on the device, step after step."""
    on_card = case.on_device or (case.failure.framework == "unknown" and case.place != "cpu")
    if case.grows and on_card and not case.shows_torch:
        yield remedy("see_how_it_rises", tool=case.tool)
    if case.shows_torch and case.grows:
        held = None if case.programs else case.failure.allocated_bytes
        yield remedy("keep_numbers", held)


def less_at_once(case: Case) -> Iterator[Remedy]:
    """What holds for any program that does such work, where nobody says which one it is."""
    if case.failure.framework == "unknown" and case.place != "cpu":
        yield from _less(case)


def _rows_for_the_work(case: Case) -> tuple[str, ...]:
    """What fits the work, whatever the numbers; nothing for training and for work that the text does not show."""
    shared = case.failure.device == "mps"  # its RAM is the card's: nothing is gained by moving weights
    large = shared or (case.need or 0) > (case.failure.total_bytes or case.device_room or 2**35) // 8
    there = _ON_A_MAC if shared else _IN_RAM if case.on_host else _WITH_ONE_LARGE_REQUEST if large else {}
    rows = there.get(case.work)
    rows = rows or _BY_WORK.get(case.work, ())
    if "--lowvram" in case.text:
        rows = tuple(row for row in rows if row != "low_vram")
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
    yield from map(remedy, rows)
    if rows:
        return
    if case.one_at_a_time and case.work in (Work.TRAINS, Work.UNKNOWN) and not case.watched:
        rows = ("shorter_samples", "fewer_weights_to_train")
        yield from map(remedy, rows[:: -1 if _LANGUAGE_MODEL.search(case.text) else 1])
    if case.beside and not case.others:
        yield remedy("see_who_holds_most", case.beside, tool=case.tool)
    missing = max(0, (case.gap or 0) - (case.slack or 0)) or None
    halved = case.need // 2 if case.need is not None and case.need >= 2**28 else None
    halved = halved if halved is not None and halved >= (missing or 0) and not case.programs else None
    promised = case.on_windows and case.on_host and not case.is_beyond_page_file
    halved = None if case.one_at_a_time or promised or (case.on_host and case.says_rising) else halved
    if case.work is Work.EVALUATES:
        yield remedy("evaluate_less_at_once", halved or (None if case.programs else case.gap))
        halved = None  # what follows is for training
    less = remedy("less_at_once", halved)
    if case.work is Work.UNKNOWN and not case.watched:
        yield less
    if case.can_be_fitted:
        on_device = case.failure.device not in (None, "cpu")
        room = case.device_room if on_device else case.host_room
        budget = f', budget="{room * (9 if on_device else 8) // 10 // 2**20}MiB"' if room and room >= 2**21 else ""
        short = f"  # {said(missing)} are missing" if missing else ""
        yield remedy("fit", budget=budget, short=short)
    if case.work is Work.UNKNOWN:  # a program that is watched is the user's own: what is exact comes first
        yield from (less, remedy("no_gradients"), remedy("lighter_weights"))
        return
    yield remedy("halve_the_batch", halved)
    yield from map(remedy, ("shorter_inputs", "evaluate_without_gradients", "narrow_optimizer_state"))


def shorter_requests(case: Case) -> Iterator[Remedy]:
    """vLLM's cache for one request, and its share of the card."""
    if case.failure.framework != "vllm":
        return
    extra, free, total = case.failure.extra, case.failure.free_bytes, case.failure.total_bytes
    share = extra.get("gpu_memory_utilization")
    if share is not None and free is not None and total and free < (case.need or 0):
        fits = int(free / total * 100) / 100
        yield remedy("only_what_is_free", fits=fits)
        return
    if case.format == "vllm-sleep":
        yield remedy("leave_more_to_the_trainer")
        return
    longest, tokens = extra.get("max_seq_len"), extra.get("kv_tokens")
    more = remedy("more_for_vllm")
    if case.format == "vllm-blocks":  # the weights leave nothing: no length of request is short enough
        yield more
        yield remedy("smaller_weights_for_vllm")
    length = extra.get("max_model_len") or (tokens and tokens // 16 * 16)
    if not length and longest and case.need and free:
        length = int(longest * free / case.need) // 16 * 16
    if longest and not (length and length < longest):
        length = longest // 2
    yield remedy("shorter_requests", case.gap, length=length or "4096   # less than yours")
    yield remedy("narrow_kv_cache", None if case.need is None else case.need // 2)
    if share is None or share < 0.95:
        yield more
