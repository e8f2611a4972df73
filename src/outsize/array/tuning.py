"""Every number that the array room may be tuned by: one frozen value.

`prepare` takes the tuning that is in use and hands it on to the passes, the frames and the device, so that a plan and its
run have the same. Nothing else reads it while work runs. Tests give another one with `with use(replace(Tuning(), ...))`.
This module stands below all others of the room, since kernels need it as well as planners.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Sizes are in bytes and times in seconds, where nothing else is said."""

    # Passes on the host

    chunk: int = 16 << 20
    """A worker's buffer at its most generous: transfers this long lose nothing to their latency."""
    small: int = 2 << 20
    """Work that fits in this runs in one piece on the calling thread."""
    at_once: int = 64 << 20
    """Work that never holds more than this, and not more than a quarter of the budget, may be done at once by NumPy, without a
    plan. 0 plans everything."""
    at_once_seconds: float = 1e-2
    """Work that would take one core longer than this is planned: a plan and its threads cost about as much."""
    at_once_little: int = 1 << 16
    """Work whose nodes are no more than this in all is not looked at any further."""
    unread: int = 8 << 20
    """Work that holds up to this is done without reading what memory the machine has left."""
    largest: int = 256 << 20
    """A tile of a map, or a chunk of a reduction that takes no buffer, is at most this large. Longer runs save nothing that
    fresh memory does not cost, and shorter chunks end sooner where the work is interrupted."""
    shares: tuple[float, ...] = (1.0, 0.8, 0.6, 0.4)
    """Shares of the room to aim at. Boxes are chosen by one in the middle; those at the edges may need a little more."""
    reread: float = 1.25
    """Reads up to this many times the sources' bytes are as good as reading them once."""
    ahead: int = 16
    """Partial results of a reduction that may wait for their turn."""
    light_partial: int = 1 << 16
    """A partial result up to this size may wait."""
    slice: int = 1 << 20
    """A register's slice: a few of them stay in a core's caches, and each is long enough that threads seldom meet at the
    interpreter's lock (128 KiB slices spent most of their time there, 512 KiB ones a third more than these)."""

    # Matrix products on the host

    long_sum: int = 1 << 16
    """Terms of a sum from which float32 is accumulated in float64."""
    small_result: int = 16 << 20
    """A result of a product that is small enough for that."""
    hidden_transfer: float = 25e-6
    """What a transfer costs while BLAS is at work: its latency is hidden, its system call is not."""
    strip: int = 32 << 20
    """Rows that BLAS gets at once, where the budget is large: longer strips are no faster."""
    shortest_strip: int = 256 << 10
    """The shortest strips that BLAS gets."""
    thread_room: int = 4 << 20
    """Room for every thread of BLAS, which takes up to half of it."""
    whole_product: int = 16 << 20
    """A product up to this size is done in one piece."""
    as_good: float = 1.03
    """Cuts of a product that cost up to this many times the best one's time are as good."""
    edge: int = 32
    """Elements along the edge of the smallest blocks that are multiplied."""
    panel_seconds: float = 2e-4
    """What a panel costs whatever its size. It keeps panels from becoming slivers when data is in memory."""

    narrow: int = 48
    """Rows or columns of a tile up to which one thread of BLAS multiplies as fast as a disk reads; several wait for each other
    most of the time (2 GFLOP/s instead of 74 for 30 x 8,000 x 512 on a busy machine)."""
    alone: int = 32 << 20
    """A matrix up to this size is factored by one thread of LAPACK, for the same reason."""

    # Tiles

    disk_rate: float = 4e9
    """Bytes a second of a plain NVMe disk. Only the ratio to `transfer` matters for the choice of tiles."""
    transfer: float = 40e-6
    """What a transfer of that disk costs whatever its size."""
    worth_it: float = 0.98
    """A box is doubled only where that brings its cost below this share."""
    least_box: int = 8 << 20
    """A box grows up to this even if nothing is saved: a tile has a cost of its own in Python."""

    # Schedules and runs

    local_lane: int = 8 << 20
    """A lane up to this size is reduced, summed up or sorted inside the pass that reads the result, where that pass has room for
    whole lanes."""

    tiny_result: int = 1 << 16
    """A result up to this size always stays in memory."""
    modest: int = 512 << 20
    """Room of a pass beyond which it seldom gains: the rest of a budget keeps what later passes read again."""
    kept_sources: int = 1 << 30
    """Sources up to this size are read into memory for several passes: beyond it, fresh memory costs more than a second
    read."""
    journaled: int = 32 << 20
    """An output from this size on keeps a journal; a smaller one is done again in a moment."""
    journaled_result: int = 64 << 20
    """Results of finished passes up to this size are put aside in the journal."""
    sync_every: float = 0.25
    """Time between two syncs, at the least."""
    sync_share: int = 20
    """Syncs may take one part in so many of the time."""

    spread: int = 0
    """Workers of a cluster that passes are planned for: results between passes go to storage that all of them reach, and tiles
    are cut so that each has some. 0 where the work runs in this process."""
    worker_cores: int = 0
    """Processors of each of them."""
    tasks: int = 4
    """Tasks of a pass for each of these workers: enough that all end at about the same time."""
    task_bytes: int = 32 << 30
    """What a task of several tiles moves at most: a lost worker costs no more."""
    shared_stream: int = 32 << 20
    """Streams of a decomposition over so much are shared by the workers of a cluster; what is smaller is done where it is
    asked for."""
    fan: int = 32
    """Partial results that one task of a cluster joins."""

    # Lanes, sorting, filtering and indices

    turned: int = 32 << 20
    """Lanes across the rows of an array from this size on are first turned along them, in a pass of its own, whatever the budget;
    those of a smaller one where that moves less."""
    ranked_lane: int = 1 << 20
    """A lane up to this size is read whole for its median or quantiles; a longer one is gone through in reductions."""
    rank_piece: int = 1 << 15
    """Elements of such a lane that are counted at a time, so that their keys stay in cache."""
    tall_matrix: int = 64 << 20
    """A matrix of few columns larger than this is factored by blocks of its rows, a quarter of this each."""
    sorted_lane: int = 4 << 20
    """A lane up to this size is sorted whole."""
    transformed_lane: int = 16 << 20
    """A lane up to this size, in complex numbers, is transformed by NumPy at once."""
    search_piece: int = 1 << 18
    """Elements of a sorted array that are searched at a time."""
    made_now: int = 1 << 20
    """Results up to this size that are made at once, and indices, stay in memory."""
    sort_grain: int = 128 << 10
    """A sorted run is the geometric mean of this and the lane, so that runs and what tells them apart grow alike."""
    filter_block: int = 1 << 16
    """Elements of a mask that are counted together."""

    # Passes on a device

    device_chunk: int = 64 << 20
    """A worker's page-locked memory at its most generous."""
    device_slot: int = 256 << 20
    """A slot on the device beyond which longer copies gain nothing."""
    device_slots: int = 4
    """Chunks on the device at once: one arriving, one computed, one leaving, one ready."""
    device_workers: int = 12
    """Threads that read at most: enough to keep a disk at its best."""
    device_slice: int = 1 << 26
    """Elements of a register on the device at most: longer kernels gain nothing."""
    device_least: int = 64 << 20
    """Bytes of results of earlier passes that are not sent to a device again for an elementwise chain over them alone."""
    send_seconds: float = 2e-4
    """Time of the interpreter that sending a chunk costs whatever its size."""
    device_strip: int = 8 << 20
    """Strips of a product's result shorter than this are not worth their copies."""
    small_block: int = 1 << 20
    """Elements of a small block of a product: long sums of float32 into it are added up in float64, so that long panels cost no
    accuracy."""
    deepest_panel: int = 1 << 26
    """Elements of a panel of such a product at the most."""
    panel_part: int = 1024
    """Rows of such a panel that are added up by themselves, where parts are."""
    return_ring: int = 1 << 30
    """Page-locked memory at most through which a product's result comes back where the device does not reach its place: a
    few strips, so that nothing waits for one to be emptied."""
    return_least: int = 128 << 20
    """That memory where the result is small: locking pages takes time."""
    return_share: int = 16
    """Where the result is larger, that memory is at most one part in so many of it."""
    return_pieces: int = 32
    """Pieces of that memory at most."""
    return_piece: int = 16 << 20
    """A piece of it that is worth the interpreter's time: there are fewer where they would be shorter, and four at least."""
    return_threads: int = 4
    """Threads that empty them at most."""
    stage_piece: int = 6 << 20
    """A piece of staging memory: long enough for the link and for the interpreter, which every piece needs, and short enough
    that all pieces together stay in a processor's last cache, so that staging costs its memory one read and no write."""
    stage_threads: int = 10
    """Staging threads at most. Eleven to fourteen are no faster on sixteen processors, and half as fast where others keep
    five of these busy: a thread that holds the interpreter must not wait for a processor."""
    stage_spare: int = 10
    """Pieces that are under way to the device while every thread fills one, at most."""
    stage_share: int = 8
    """Staging takes at most one part in so many of the host's room."""
    stage_pause: float = 5e-5
    """Time between two questions whether a piece has arrived."""
    direct_part: int = 64 << 10
    """A copy that is worth a call; what would cross in shorter ones is staged."""
    direct_row: int = 512
    """A row that is worth the time which the link takes for each."""

    # Whether a device pays

    core_flops: float = 3e10
    """Operations a second of a core of the processor in a product of float64."""
    core_bytes: float = 6e9
    """Bytes a second that a core brings through one plain operation of a fused chain."""
    core_slow_bytes: float = 1e9
    """The same through a function such as exp or tanh."""
    device_margin: float = 1.25
    """The processor must be slower than the device by this factor."""
    device_moment: float = 0.1
    """Work that takes the processor less time than this is not worth a device."""


_in_use: contextvars.ContextVar[Tuning] = contextvars.ContextVar("tuning", default=Tuning())  # noqa: B039  (it is frozen)


def current() -> Tuning:
    return _in_use.get()


@contextlib.contextmanager
def use(tuning: Tuning) -> Iterator[Tuning]:
    """Another tuning for whatever is planned meanwhile."""
    token = _in_use.set(tuning)
    try:
        yield tuning
    finally:
        _in_use.reset(token)
