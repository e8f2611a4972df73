"""The rules for what kernels take inside, against numbers recorded on an H200 and resident bytes of a CPU."""

import pytest

torch = pytest.importorskip("torch")

from outsize.model.kernels import cpu as onednn  # noqa: E402
from outsize.model.kernels.attention import UNKNOWN, choose  # noqa: E402
from outsize.model.kernels.convolution import layer_of  # noqa: E402
from outsize.model.kernels.convolution_table import table, transfer  # noqa: E402
from outsize.model.kernels.cuda import Scratch, blocks_of  # noqa: E402
from outsize.model.kernels.reduction import buffer_bytes  # noqa: E402
from outsize.model.tracing import autocast  # noqa: E402


def meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("tensor", "axes", "expected"),
    [
        (meta(2048, 768), {0}, (12_582_912, 24)),
        (meta(1568, 768), {0}, (9_830_400, 24)),
        (meta(1568, 3072), {0}, (39_321_600, 96)),
        (meta(6304, 3072), {0}, (138_412_032, 96)),
        (meta(197, 64, 2304, dtype=torch.bfloat16), {0, 1}, (139_198_464, 72)),
        (meta(8, 512), {1}, ()),
    ],
)
def test_a_split_reduction_takes_the_buffer_that_was_recorded(tensor, axes, expected):
    assert buffer_bytes(tensor, axes, processors=132) == expected


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((4, 12, 512, 64), 6_297_600), ((8, 12, 197, 64), 6_297_600), ((4, 12, 128, 80), 3_147_264), ((2, 8, 333, 128), 3_147_264),
     ((2, 4, 256, 256), 2_098_176), ((3, 6, 49, 32), 295_200)],
)  # fmt: skip
def test_memory_efficient_attention_takes_the_workspace_that_was_recorded(shape, expected):
    q = meta(*shape)
    blocks = blocks_of(
        Scratch((9, 0)), "aten._scaled_dot_product_efficient_attention_backward.default", (q, q, q, q), [], "backward"
    )
    assert blocks.after[-1] == expected


def test_cudnn_attention_takes_the_workspace_that_was_recorded():
    for shape, expected in (
        ((4, 12, 512, 64), 6_390_016),
        ((8, 12, 197, 64), 4_917_376),
        ((2, 4, 256, 256), 2_105_600),
    ):
        q = meta(*shape, dtype=torch.bfloat16)
        name = "aten._scaled_dot_product_cudnn_attention_backward.default"
        blocks = blocks_of(Scratch((9, 0)), name, (q, q, q, q), [], "backward")
        assert abs(blocks.after[0] - expected) <= 512


@pytest.mark.parametrize("name", list(UNKNOWN))
def test_results_of_fused_attention_are_laid_out_as_torch_lays_them_out(name):
    func = getattr(torch.ops.aten, name.split(".")[1]).default
    q, k = (torch.empty(2, 4, rows, 16, dtype=torch.float16, device="meta") for rows in (40, 24))
    args = (q, k, k) if "flash" in name else (q, k, k, None, True)
    try:
        expected = func(*args)
    except NotImplementedError:
        pytest.skip("this torch has no rule of its own")
    for ours, theirs in zip(UNKNOWN[name](*args)[:2], expected[:2], strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)


def test_the_attention_kernel_follows_dtype_and_card():
    half, full = meta(2, 8, 128, 64, dtype=torch.bfloat16), meta(2, 8, 128, 64)
    assert choose((9, 0), half, half, half, None, 0.0, False, True) == "cudnn"
    assert choose((8, 9), half, half, half, None, 0.0, False, True) == "flash"
    assert choose((9, 0), full, full, full, None, 0.0, False, True) == "efficient"
    grouped = meta(2, 2, 128, 64)
    assert choose((9, 0), full, grouped, grouped, None, 0.0, True, True) == "math"


def test_a_measured_convolution_is_answered_from_the_file():
    x, weight = meta(32, 64, 56, 56), meta(64, 64, 3, 3)
    found = table().look_up(layer_of(x, weight, (32, 64, 56, 56), [1, 1], [1, 1], 1, False))
    assert found.forward == 25_837_584


def test_an_unmeasured_layer_takes_the_buffers_of_a_similar_one():
    x, weight = meta(31, 65, 56, 56), meta(67, 65, 3, 3)
    layer = layer_of(x, weight, (31, 67, 56, 56), [1, 1], [1, 1], 1, False)
    found = table().look_up(layer)
    assert 0 <= found.forward <= 2 * layer.copies


def test_buffers_carry_over_from_layer_to_layer():
    small = layer_of(meta(4, 8, 16, 16), meta(8, 8, 3, 3), (4, 8, 16, 16), [1, 1], [1, 1], 1, False)
    large = layer_of(meta(16, 64, 64, 64), meta(32, 64, 3, 3), (16, 32, 64, 64), [1, 1], [1, 1], 1, False)
    assert transfer(small.copies, small, large) == large.copies


def test_every_casting_rule_names_an_operator_that_torch_casts():
    registered = {
        name.removeprefix("aten::") for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    }
    named = {*autocast.PROMOTE, *autocast.RESULT} - registered
    assert not named, named
    assert len(set(autocast.LOWER) & registered) > 25


def _peak_inside(moves: list[onednn.CallEvent], results: list[int]) -> int:
    """Most bytes alive at once while a call runs."""
    live, left, peak, made = {}, list(results), 0, 0
    for move in moves:
        if move.what == "take":
            live[move.name] = move.bytes
        elif move.what == "free":
            del live[move.name]
        else:
            made += left.pop(0)
        peak = max(peak, made + sum(live.values()))
    return peak


def test_a_convolution_on_the_cpu_takes_blocked_copies_of_input_and_output() -> None:
    x, weight = torch.empty(4, 30, 32, 32, device="meta"), torch.empty(50, 30, 3, 3, device="meta")
    out = torch.empty(4, 50, 32, 32, device="meta")
    args = (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    plane = 4 * 4 * 32 * 32
    moves = list(onednn.events_of("aten.convolution.default", args, [out]))
    assert _peak_inside(moves, [50 * plane]) == max(32 * plane + 4 * weight.numel() + 64 * plane, (64 + 50) * plane)


def test_a_convolution_with_channels_last_is_computed_where_it_lies() -> None:
    x = torch.empty(4, 32, 32, 32, device="meta").to(memory_format=torch.channels_last)
    args = (x, torch.empty(32, 32, 3, 3, device="meta"), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    taken = [move.bytes for move in onednn.events_of("aten.convolution.default", args, [x]) if move.what == "take"]
    assert taken == [4 * 32 * 32 * 9]  # a copy of the weights, none of the pictures


def test_the_gradients_of_a_convolution_are_made_in_the_order_of_the_results() -> None:
    x, weight = torch.empty(4, 32, 16, 16, device="meta"), torch.empty(32, 32, 3, 3, device="meta")
    for wanted in ([True, True, True], [False, True, True], [True, False, False]):
        args = (x, x, weight, [32], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, wanted)
        moves = list(onednn.events_of("aten.convolution_backward.default", args, []))
        assert sum(move.what == "result" for move in moves) == sum(wanted[:2])
