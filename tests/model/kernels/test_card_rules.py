"""Layers as the card runs them: layouts, normalisation and recurrent layers, against bytes recorded on an H200."""

import pytest

torch = pytest.importorskip("torch")

import outsize  # noqa: E402
from outsize.model.kernels import recurrent  # noqa: E402
from outsize.model.kernels.attention import choose  # noqa: E402
from outsize.model.kernels.convolution_table import pack, read_layer, table, unpack  # noqa: E402
from outsize.model.kernels.cuda import Scratch, _inside  # noqa: E402
from outsize.model.kernels.normalization import backward_blocks, forward_blocks  # noqa: E402
from outsize.model.torch_port.dispatch import fused_rms_norm  # noqa: E402
from outsize.model.tracing.tracer import Tracer  # noqa: E402


def meta(*shape, dtype=torch.float32, last=False):
    made = torch.empty(*shape, dtype=dtype, device="meta")
    return made.to(memory_format=torch.channels_last) if last else made


def traced(function):
    tracer = Tracer()
    with tracer.running():
        tracer.ledger.step = 0
        function()
    return tracer


def sizes(tracer, op, kind=""):
    return [held.bytes for held in tracer.ledger.all if held.op == op and held.kind == kind and held.bytes]


@pytest.mark.parametrize(
    ("shape", "dtype", "forward", "backward"),
    [
        ((16, 32, 112, 112), torch.float32, 1_619_252, 1_071_652),
        ((16, 96, 112, 112), torch.float32, 3_237_432, 2_142_248),
        ((16, 1280, 7, 7), torch.float32, 135_312, 93_296),
        ((16, 32, 56, 56), torch.float16, 163_100, 268_836),
        ((64, 128, 28, 28), torch.float16, 325_128, 536_616),
    ],
)
def test_cudnn_normalises_channels_last_with_the_workspace_that_was_recorded(shape, dtype, forward, backward):
    x, weight = meta(*shape, dtype=dtype, last=True), meta(shape[1])
    assert forward_blocks(x, weight, True) == (forward,)
    assert backward_blocks(x, weight) == (backward,)


@pytest.mark.parametrize(
    ("shape", "forward", "backward"),
    [
        ((32, 64, 112, 112), (131_072, 8), (65_536, 8)),
        ((32, 512, 28, 28), (802_816, 64), (401_408, 64)),
        ((32, 512, 7, 7), (), ()),
    ],
)
def test_bfloat16_is_normalised_with_the_partial_sums_that_were_recorded(shape, forward, backward):
    x, weight = meta(*shape, dtype=torch.bfloat16, last=True), meta(shape[1])
    assert forward_blocks(x, weight, True) == forward
    assert backward_blocks(x, weight) == backward


def test_the_plain_layout_is_normalised_without_a_workspace():
    assert forward_blocks(meta(16, 32, 56, 56), meta(32), True) == ()
    assert backward_blocks(meta(16, 32, 56, 56), meta(32)) == ()


def test_weights_with_the_channels_last_make_a_convolution_hand_its_result_on_like_that():
    found = {}

    def run():
        model = torch.nn.Conv2d(8, 16, 3).cuda().to(memory_format=torch.channels_last)
        x = torch.rand(2, 8, 10, 10, device="cuda")
        out = model(x)
        out.sum().backward()
        found["out"], found["grad"] = out.stride(), model.weight.grad.stride()

    traced(run)
    assert found["out"][1] == 1
    assert found["grad"][1] == 1


def test_a_measured_call_is_its_own_bound_and_another_cards_is_not():
    layer = read_layer([64, [56, 56], 64, [3, 3], [1, 1], [1, 1], [1, 1], 1], "float32", False, 32)
    assert table().sure(layer) == (True, True, True)
    assert all(likely == most for likely, most in _inside(Scratch((9, 0)), layer))
    assert any(likely < most for likely, most in _inside(Scratch((8, 9)), layer))


def test_a_batch_between_two_measured_ones_of_one_kernel_lies_on_their_line():
    layer = read_layer([96, [112, 112], 96, [3, 3], [2, 2], [1, 1], [1, 1], 2], "bfloat16", False, 45)
    assert table().look_up(layer).forward == 4_014_080 * 45 + 147_603


@pytest.mark.parametrize(
    ("kind", "sequences", "both", "packed", "expected"),
    [
        ("LSTM", 24, False, False, 138_412_288),
        ("LSTM", 24, False, True, 94_888_192),
        ("LSTM", 20, True, True, 170_762_496),
        ("LSTM", 20, True, False, 230_686_976),
    ],
)
def test_cudnn_keeps_what_was_recorded_for_the_backward_pass_of_a_recurrent_layer(
    kind, sequences, both, packed, expected
):
    def run():
        layer = getattr(torch.nn, kind)(384, 512, num_layers=2, bidirectional=both, batch_first=True).cuda()
        x = torch.rand(sequences, 256, 384, device="cuda", requires_grad=True)
        if packed:
            lengths = torch.tensor([max(1, 256 - (7 * i) % 256) for i in range(sequences)])
            x = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out = layer(x)[0]
        (out.data if packed else out).sum().backward()

    tracer = traced(run)
    assert expected in [held.bytes for held in tracer.ledger.all if held.op == "aten._cudnn_rnn.default"]
    assert not tracer.notes


@pytest.mark.parametrize(
    ("kind", "number", "both", "packed", "expected"),
    [
        ("LSTM", 2, False, False, 105_841_088),
        ("LSTM", 2, False, True, 67_600_640),
        ("GRU", 3, False, False, 88_834_496),
        ("GRU", 3, False, True, 54_747_392),
    ],
)
def test_the_workspace_of_a_recurrent_layer_is_near_the_recorded_one(kind, number, both, packed, expected):
    layer = getattr(torch.nn, kind)(384, 512, num_layers=2, batch_first=True, device="meta")
    lengths = sorted((max(1, 256 - 7 * i) for i in range(24)), reverse=True)
    steps = [sum(length > step for length in lengths) for step in range(256)] if packed else []
    x = meta(sum(steps), 384) if packed else meta(24, 256, 384)
    found = recurrent.workspace(x, list(layer.parameters()), number, 512, 2, both, steps, 0.0)
    assert found == pytest.approx(expected, rel=0.02)


def test_a_recurrent_layers_weights_come_to_the_card_in_one_block():
    tracer = traced(lambda: torch.nn.LSTM(384, 512, num_layers=2).cuda())
    total = 4 * sum(p.numel() for p in torch.nn.LSTM(384, 512, num_layers=2, device="meta").parameters())
    alive = [held.bytes for held in tracer.ledger.all if held.label == "cuda:0"]
    assert total in alive


def test_packed_sequences_are_padded_again_to_the_lengths_they_had():
    found = {}

    def run(device):
        layer = torch.nn.GRU(8, 16, batch_first=True).to(device)
        x = torch.rand(3, 5, 8, device=device)
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3, 2]), batch_first=True)
        out, lengths = torch.nn.utils.rnn.pad_packed_sequence(layer(packed)[0], batch_first=True)
        out.sum().backward()
        found[device] = (tuple(packed.data.shape), tuple(out.shape), lengths.tolist())

    traced(lambda: run("cuda"))
    traced(lambda: run("cpu"))
    assert found == {device: ((10, 8), (3, 5, 16), [5, 3, 2]) for device in ("cuda", "cpu")}


def test_a_gru_cell_keeps_five_values_a_unit_on_the_card():
    def run():
        cell, x = torch.nn.GRUCell(32, 64).cuda(), torch.rand(100, 32, device="cuda")
        cell(x).sum().backward()

    assert 5 * 100 * 64 * 4 in sizes(traced(run), "aten._thnn_fused_gru_cell.default")


def test_attention_with_a_learned_mask_is_memory_efficient_where_its_rows_are_whole():
    q = meta(4, 3, 49, 32, dtype=torch.bfloat16)
    whole = meta(1, 3, 49, 49, dtype=torch.bfloat16).requires_grad_()
    turned = meta(1, 49, 49, 3, dtype=torch.bfloat16).requires_grad_().permute(0, 3, 1, 2)
    assert choose((9, 0), q, q, q, whole, 0.0, False, True) == "efficient"
    assert choose((9, 0), q, q, q, turned, 0.0, False, True) == "math"


def test_fused_sgd_and_libraries_that_compile_while_a_step_runs_go_through():
    def step(model, optimizer):
        @torch.jit.script
        def scaled(x, factor: float):
            return torch.nn.functional.softmax(x * factor, dim=-1)

        scaled(model(torch.rand(4, 16, device="cuda")), 2.0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def build():
        model = torch.nn.Linear(16, 16).cuda()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)

    outsize.estimate(step, build=build)


def test_positions_on_the_card_can_be_read():
    def step():
        positions = torch.arange(7, device="cuda")
        torch.zeros(int(positions[-1].item()), 1024, device="cuda")

    footprint = outsize.estimate(step, build=lambda: ())
    assert footprint.peak_requested.bytes >= 6 * 1024 * 4
    assert not footprint.notes


def test_an_operator_without_a_shape_rule_is_run_on_zeros_and_said():
    with torch.library._scoped_library("outsize_test", "FRAGMENT") as library:
        library.define("halves(Tensor x) -> Tensor")
        library.impl("halves", lambda x: x[::2].clone(), "CPU")

        def step():
            half = torch.ops.outsize_test.halves(torch.rand(1000, device="cuda"))
            assert half.shape == (500,)

        footprint = outsize.estimate(step, build=lambda: ())
    assert any("halves" in note for note in footprint.notes)


fused_norms = pytest.mark.skipif(fused_rms_norm() is None, reason="torch before 2.9 has no kernel for rms_norm on CUDA")


def normed(dtype=torch.float32, weight=torch.float32, device="cuda"):
    x = torch.empty(2, 1024, 512, dtype=dtype, device=device, requires_grad=True)
    scale = torch.ones(512, dtype=weight, device=device, requires_grad=True)
    torch.nn.functional.rms_norm(x, (512,), scale).square().sum().backward()


@fused_norms
def test_rms_norm_on_a_card_keeps_its_input_and_a_number_a_row():
    """Recorded on an H200: a model of 49 norms held 49 activations less than the decomposed norm keeps."""
    tracer = traced(normed)
    assert sorted(sizes(tracer, "aten._fused_rms_norm.default")) == [2 * 1024 * 4, 2 * 1024 * 512 * 4]
    assert sorted(sizes(tracer, "aten._fused_rms_norm_backward.default")) == [512 * 4, 2 * 1024 * 512 * 4]


@fused_norms
@pytest.mark.parametrize("case", [{"device": "cpu"}, {"dtype": torch.bfloat16}])
def test_rms_norm_is_decomposed_where_torch_has_no_kernel_for_it(case):
    assert not sizes(traced(lambda: normed(**case)), "aten._fused_rms_norm.default")


def test_sizes_of_a_layer_are_those_that_were_packed():
    rows = [[1, 5, None, 7], [4, 21, 3, 0], [16, None, 12, 44], [64, 9, 50, 1]]
    assert unpack(pack(rows)) == rows
