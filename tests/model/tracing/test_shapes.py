"""What is remembered of an operator is what torch says, and steps that are not played are those that change nothing."""

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

from outsize.allocator import CudaSettings, PhaseEvent, replay
from outsize.allocator.replay import STEPS
from outsize.core.allocation import AllocationEvent
from outsize.model.tracing.records.replay import replay_on_card
from outsize.model.tracing.rules.operators import look_up
from outsize.model.tracing.rules.result_shapes import Shapes

aten = torch.ops.aten


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def look_of(value):
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.untyped_storage().nbytes(), value.storage_offset()
    return [look_of(item) for item in value] if isinstance(value, (tuple, list)) else value


CALLS = [
    (aten.mm.default, lambda: (empty(3, 4), empty(5, 4).t()), {}),
    (aten.add.Tensor, lambda: (empty(3, 1, dtype=torch.bfloat16), empty(1, 4)), {"alpha": 2}),
    (aten.native_layer_norm.default, lambda: (empty(2, 3, 8), [8], empty(8), None, 1e-5), {}),
    (aten._to_copy.default, lambda: (empty(2, 3).t(),), {"dtype": torch.bfloat16}),
    (aten.convolution.default,
     lambda: (empty(2, 3, 8, 8), empty(4, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1), {}),
    (aten._foreach_add.List, lambda: ([empty(2), empty(3)], [empty(2), empty(3)]), {}),
    (aten.native_layer_norm_backward.default,
     lambda: (empty(2, 8), empty(2, 8), [8], empty(2, 1), empty(2, 1), empty(8), None, [True, True, False]), {}),
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: str(call[0]))
def test_the_second_answer_is_that_of_torch(call):
    func, make, kwargs = call
    shapes = Shapes()
    expected = look_of(func(*make(), **kwargs))
    assert [look_of(shapes.run(look_up(func), make(), dict(kwargs))) for _ in range(3)] == [expected] * 3


def test_what_differs_in_layout_dtype_or_a_number_is_asked_anew():
    shapes, copy, total = Shapes(), look_up(aten.clone.default), look_up(aten.sum.dim_IntList)
    for made in (empty(2, 3), empty(3, 2).t(), empty(2, 3, dtype=torch.float16)):
        assert look_of(shapes.run(copy, (made,), {})) == look_of(made.clone())
    assert [shapes.run(total, (empty(2, 3), [0], keep), {}).shape for keep in (False, True)] == [(3,), (1, 3)]
    whole = look_up(aten.mul.Scalar)
    kinds = [shapes.run(whole, (empty(2, dtype=torch.int64), by), {}).dtype for by in (1, 1.0, True)]
    assert kinds == [torch.int64, torch.float32, torch.int64]


def test_views_and_writes_in_place_stay_what_they_are():
    shapes = Shapes()
    for _ in range(3):
        x = empty(4, 6)
        assert (
            shapes.run(look_up(aten.view.default), (x, [24]), {}).untyped_storage()._cdata == x.untyped_storage()._cdata
        )
        assert shapes.run(look_up(aten.add_.Tensor), (x, empty(4, 6)), {}) is x
        assert shapes.run(look_up(aten._foreach_add_.Scalar), ([x], 1.0), {}) is None
        shapes.run(look_up(aten.resize_.default), (x, [48]), {})
        assert x.shape == (48,)
        with pytest.raises(RuntimeError):
            shapes.run(look_up(aten.mm.default), (empty(2, 3), empty(2, 3)), {})


SIZES = st.integers(1, 60).map(lambda n: n * 700_000)


@examples(60)
@given(
    kept=st.lists(SIZES, max_size=4), sizes=st.lists(SIZES, min_size=1, max_size=25), order=st.randoms(use_true_random=False),
    part=st.floats(0.5, 1.2), expandable=st.booleans(),
)  # fmt: skip
def test_steps_that_are_not_played_would_have_changed_nothing(kept, sizes, order, part, expandable):
    again, alive = [], []
    for id, size in enumerate(sizes):
        again.append(PhaseEvent(True, id, size, "forward"))
        alive.append(again[-1])
        while alive and order.random() < 0.4:
            again.append(alive.pop(order.randrange(len(alive)))._replace(alloc=False, phase="backward"))
    again += [move._replace(alloc=False, phase="backward") for move in alive]
    moves = list(again)
    for id, size in enumerate(kept, 1000):
        moves.insert(order.randrange(len(moves) + 1), PhaseEvent(True, id, size, "optimizer"))
    every = [*moves, *((STEPS - 1) * again)]
    name = "cuda-expandable" if expandable else "cuda"

    def whole(events, limit=None):
        numbered = [AllocationEvent(n, alloc, id, size) for n, (alloc, id, size, _) in enumerate(events)]
        return replay(numbered, name, settings=CudaSettings(limit=limit), samples=True)

    free = whole(every)
    played = replay_on_card(tuple(moves), tuple(again), expandable=expandable)
    assert played.reserved == free.peak.reserved and not played.failed and not played.retries
    for phase, peak in played.peaks.items():
        assert peak == max(s.allocated for s, move in zip(free.samples, every, strict=True) if move.phase == phase)
    limit = int(part * free.peak.reserved)
    limited, before = whole(every, limit), whole(every[: -len(again)], limit)
    played = replay_on_card(tuple(moves), tuple(again), limit, expandable)
    assert played.failed == (limited.out_of_memory is not None)
    assert played.failed or played.retries == limited.retries - before.retries
