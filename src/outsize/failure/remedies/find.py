"""What would mend it, ranked by the bytes each gives back.

In: a `Case` and its causes. Out: remedies with predicted bytes and the exact line to use. One already on is never offered,
nor one that cannot help: `empty_cache()` (the allocator has emptied its cache before it raised), expandable segments where
the unused memory is smaller than what is missing, pruning masks (they remove no byte), `file_system` sharing for a full
`/dev/shm` (it lives there too). Each maker below is one remedy; `REMEDIES` says which cause asks for which.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from outsize.core.failure import Cause, CauseName, Remedy
from outsize.core.noun import Known
from outsize.failure.advice import Advice
from outsize.failure.case import Case, make_remedy
from outsize.failure.framework import framework
from outsize.failure.program import Program
from outsize.failure.remedies import device, host, tensor
from outsize.failure.remedies.in_use import left_to_do
from outsize.failure.work import Work

Maker = Callable[[Case], Iterator[Remedy]]

REMEDIES: dict[CauseName, tuple[Maker, ...]] = {
    CauseName.IMPOSSIBLE: (tensor.check_length,),
    CauseName.NOT_MEMORY: (),
    CauseName.WARNING: (),
    CauseName.BROADCAST: (tensor.keep_sparse, tensor.fewer_rows, tensor.other_operands),
    CauseName.LARGER_THAN_DEVICE: (
        tensor.fewer_at_once, tensor.less_in_one_step, tensor.smaller_tensor, device.train_smaller, device.shorter_requests,
    ),
    CauseName.LARGER_THAN_MACHINE: (
        tensor.keep_sparse, host.data_by_batches, tensor.open_grid, tensor.fewer_pictures, tensor.pairs_in_blocks,
        tensor.smaller_input, tensor.smaller_tensor, device.train_smaller, host.larger_page_file_too, host.less_in_ram,
    ),
    CauseName.LARGER_THAN_LIMIT: (
        tensor.smaller_tensor, device.raise_fraction, host.raise_limit, device.train_smaller,
    ),
    CauseName.FRAGMENTATION: (device.expandable, device.train_smaller, device.steady_sizes),
    CauseName.MEMORY_FRACTION: (device.raise_fraction, device.train_smaller),
    CauseName.OTHER_PROCESS: (device.take_what_is_free, device.shorter_requests, device.stop_others),
    CauseName.OTHER_ALLOCATIONS: (),
    CauseName.GRAPH_POOLS: (device.fewer_graphs, device.train_smaller),
    CauseName.REFUSED: (
        device.leave_the_card, tensor.less_in_one_step, device.see_what_may_be_mapped, device.stop_others,
    ),
    CauseName.PREALLOCATION: (),
    CauseName.SHARED_MEMORY: (host.more_shm,),
    CauseName.LIMIT: (host.see_which_limit, host.larger_page_file, host.raise_limit, device.train_smaller, host.less_in_ram),
    CauseName.MACHINE: (
        host.lighter_weights, host.name_the_victim, device.train_smaller, host.less_in_ram, host.see_who_holds_ram,
        host.less_for_the_victim, host.add_swap,
    ),
    CauseName.ADDRESS_SPACE: (host.wider_program, host.lift_ulimit, tensor.smaller_tensor, device.train_smaller),
    CauseName.KILLED: (
        host.who_sent_it, host.more_for_the_build, host.lighter_weights, host.in_frames, device.train_smaller,
        host.see_whether_it_was_memory, host.less_in_ram,
    ),
    CauseName.LEAK: (
        device.keep_no_graphs, device.less_at_once, host.stop_growing, device.train_smaller, host.less_in_ram,
    ),
    CauseName.ALREADY_FULL: (
        tensor.keep_sparse, tensor.fewer_pictures, host.larger_page_file, host.lighter_weights, host.see_what_fills_ram,
        device.train_smaller, host.less_in_ram,
    ),
    CauseName.TRUE_NEED: (
        tensor.keep_sparse, host.results_by_batches, host.data_by_batches, tensor.open_grid, tensor.fewer_pictures,
        tensor.pairs_in_blocks, host.in_frames, tensor.was_it_meant,
        tensor.smaller_input,
        host.larger_page_file, host.lighter_weights, device.see_which_of_two,
        tensor.smaller_tensor, device.train_smaller, host.larger_page_file_too, device.expandable, device.shorter_requests,
        host.less_in_ram,
    ),
}  # fmt: skip
"""Cause -> the remedies worth trying; what the framework itself offers comes before those for any program on a host."""

_BATCH = re.compile(r"(?:less at once: )?(?:an? )?(?:smaller batch|halve the batch)")
"""A remedy whose first word is the batch."""
_INPUTS = re.compile(
    r"(?:less|fewer|smaller|shorter|halve|half|a smaller|one)\b(?!.*\b(?:model|weights|bits|layer)\b)"
    r".*\b(?:batch|images?|pictures?|texts?|samples?|inputs?|at once|at a time)\b"
)
"""A remedy that makes inputs smaller, and nothing else."""
_SETTING = re.compile(r"(?:--?)?([a-z][\w-]{3,40})[ =:]{1,2}([0-9][0-9.]{2,20})\b")
"""A setting with a number of three digits and more at the start of a line of advice."""
_FIRST = (tensor.keep_sparse, device.see_which_of_two)
"""What the message itself shows, and the check that tells two causes apart: before any program's own knobs."""
_OF_TORCH = re.compile(r"\btorch\.|\bpipe\.|from_pretrained\(|model\.half\(|BitsAndBytes")
"""Code that only PyTorch runs."""
_DEVICE_ONLY = {device.expandable, device.steady_sizes, device.fewer_graphs, device.raise_fraction}
_HOST_ONLY = {
    host.less_in_ram, host.lift_ulimit, host.add_swap, host.see_whether_it_was_memory, host.see_who_holds_ram,
    host.less_for_the_victim,
}  # fmt: skip


def find_remedies(case: Case, causes: tuple[Cause, ...]) -> tuple[Remedy, ...]:
    """Every remedy that can help, what the message itself states first, then most
    bytes first; those whose bytes cannot be told keep the order of the table, a smaller
    batch last where it was tried. Where nothing is known that helps, what to look at: a failure is never
    left without a next move."""
    found: dict[str, Remedy] = {}
    alone = causes[0].name in (CauseName.BROADCAST, CauseName.IMPOSSIBLE)
    for place, cause in enumerate(causes[: 1 if alone else 2]):
        for offered in _remedies(case, cause.name):
            remedy = None if _is_foreign(case, offered) else left_to_do(offered, case.text)
            if remedy is not None and (
                remedy.saves is None or remedy.saves > 0
            ):  # what a candidate's way gives is given only if it is the cause
                known = replace(remedy, saves=None) if place or _was_tried(case, remedy) else remedy
                found.setdefault(remedy.name, known)
    if not found and causes[0].name != CauseName.WARNING:
        last = host.see_what_it_takes(case) if case.place == "cpu" else device.see_who_holds(case)
        found = {remedy.name: remedy for remedy in (*device.less_of_work(case), *last)}
    return tuple(sorted(found.values(), key=lambda remedy: _rank(case, remedy)))


def _rank(case: Case, remedy: Remedy) -> tuple[bool, int, bool]:
    """What comes first has the least."""
    return not _is_stated(case, remedy), -(remedy.saves or 0), _was_tried(case, remedy) or _is_no_way(case, remedy)


def _is_foreign(case: Case, remedy: Remedy) -> bool:
    """True where another framework's card is full than the one whose code the remedy is."""
    other = case.failure.framework in ("jax", "tensorflow") and case.on_device
    return other and _OF_TORCH.search(remedy.how.partition("   #")[0]) is not None


def _was_tried(case: Case, remedy: Remedy) -> bool:
    """True where the text says that a smaller batch is no way out, and the remedy is one."""
    return case.one_at_a_time and _BATCH.match(remedy.name) is not None


def _is_no_way(case: Case, remedy: Remedy) -> bool:
    """True where weights did not fit, and the remedy makes only inputs smaller."""
    return (case.makes_weights or case.work in (Work.LOADS, Work.SAVES)) and _INPUTS.match(remedy.name) is not None


def _is_stated(case: Case, remedy: Remedy) -> bool:
    """True where the message itself names the setting and its number: the program has worked out what fits."""
    setting = _SETTING.match(remedy.how)
    if setting is None:
        return False
    name = "[-_ ]".join(re.split("[-_]", setting.group(1)))
    return all(
        re.search(rf"(?<![\w.]){part}(?![\w]|\.[0-9])", case.text) is not None for part in (name, setting.group(2))
    )


def _remedies(case: Case, cause: CauseName) -> Iterator[Remedy]:
    """What the table has for one cause: what the program itself offers first, then the makers and the framework, where it ran,
    and last what holds for any program on a host."""
    killed_by_limit = bool(case.framework.killer) or case.failure.extra.get("scope") == "cgroup"
    promised = case.failure.framework == "windows"  # what is promised, not what a program holds
    own = [] if promised else list(_offers(case, cause, case.programs, named=case.format == "fork"))
    makers = [maker for maker in REMEDIES[cause] if maker not in (_DEVICE_ONLY if case.on_host else ())]
    if own or (case.in_graph and case.work is Work.INFERS):  # the array is not in the user's code
        makers = [maker for maker in makers if maker is not tensor.smaller_tensor]
    late = {*_HOST_ONLY, tensor.smaller_tensor} if case.in_graph else _HOST_ONLY
    yield from _offers(case, cause, case.managers)
    for maker in makers:
        if maker in _FIRST:
            yield from maker(case)
    yield from device.for_the_phase(case)
    if cause == CauseName.KILLED:
        yield from host.more_for_the_build(case)
        yield from host.who_sent_it(case)
        yield from _offers(case, cause, case.places if case.format == "exit-137" else ())
    if not killed_by_limit:
        yield from own
    for maker in makers:
        if maker not in late:
            yield from maker(case)
    yield from own
    yield from _advice(case, cause, (*case.framework.advice, *(framework(case.library or "").advice)), counted=not own)
    yield from _offers(case, cause, case.places)
    for maker in makers:
        if maker in late and not (
            maker in _HOST_ONLY and (case.on_device or (case.failure.framework == "unknown" and case.place != "cpu"))
        ):
            yield from maker(case)


def _offers(case: Case, cause: CauseName, rows: tuple[Program, ...], *, named: bool = False) -> Iterator[Remedy]:
    """What programs offer; `named`: only what is for this very wording."""
    for row in rows:
        yield from _advice(case, cause, tuple(way for way in row.advice if way.formats or not named))


def _advice(case: Case, cause: CauseName, rows: tuple[Advice, ...], *, counted: bool = True) -> Iterator[Remedy]:
    """The rows that fit the cause, the place, the wording and the work, and are not on already; their bytes are told where
    they are `counted`."""
    for row in rows:
        value = case.setting(row.variable)
        if (
            cause in row.causes
            and (row.place in ("", case.place) or (row.place == "device" and case.place != "cpu"))
            and (case.format in row.formats if row.formats or case.format == "graph-message" else True)
            and (not row.works or case.work in row.works)
            and row.process in ("", case.failure.process)
            and case.place not in row.without
            and not (row.already and re.search(row.already, case.text))
            and (not row.only or re.search(row.only, case.text) is not None)
            and (value is None or (row.done and value.lower() != row.done))
        ):
            gives = getattr(case, row.gives) if row.gives else None
            gives = gives if counted or gives == 0 else None
            yield make_remedy(
                row.name, gives, row.how, row.costs, row.exactness, Known.BOUND if row.gives else Known.ESTIMATE
            )
