"""Reading the text that users give torch's allocator."""

import contextlib

import forks
import hypothesis.strategies as st
import pytest
from hypothesis import given

from outsize.allocator import CudaSettings, parse_settings, replay, settings_from_environment
from outsize.core.allocation import AllocationEvent
from outsize.core.errors import InputError
from outsize.core.units import GiB, MiB


def test_no_text_gives_the_defaults_of_torch():
    assert parse_settings("") == CudaSettings()
    assert CudaSettings().changed() == ""


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("expandable_segments:True", "expandable_segments", True),
        ("expandable_segments:False", "expandable_segments", False),
        ("max_split_size_mb:128", "max_split_size", 128 * MiB),
        ("large_segment_size_mb:32", "large_segment_size", 32 * MiB),
        ("max_non_split_rounding_mb:40", "max_non_split_rounding", 40 * MiB),
        ("garbage_collection_threshold:0.8", "garbage_collection_threshold", 0.8),
        ("per_process_memory_fraction:0.5", "memory_fraction", 0.5),
        ("per_process_memory_fraction:1.0", "memory_fraction", 1.0),
        ("backend:cudaMallocAsync", "backend", "cudaMallocAsync"),
        ("backend:hipMallocAsync", "backend", "cudaMallocAsync"),
        ("pinned_reserve_segment_size_mb:2048", "pinned_reserve_segment_size", 2 * GiB),
        ("pinned_max_round_threshold_mb:1", "pinned_max_round_threshold", MiB),
        ("pinned_max_cached_size_mb:0", "pinned_max_cached_size", 0),
        ("roundup_power2_divisions:4", "roundup_power2_divisions", (4,) * 16),
        ("pinned_num_register_threads:8", "without_effect", (("pinned_num_register_threads", "8"),)),
        ("from_the_future:[a:1,b:2]", "unknown", (("from_the_future", "[a:1,b:2]"),)),
        (" max_split_size_mb : 64 ,", "max_split_size", 64 * MiB),
    ],
)
def test_a_key_is_read_into_its_field(text, field, value):
    assert getattr(parse_settings(text), field) == value


def test_several_keys_are_read_and_those_that_differ_are_named():
    got = parse_settings(
        "max_split_size_mb:64,roundup_power2_divisions:[256:1,512:2,1024:4,>:8],expandable_segments:True"
    )
    assert got.max_split_size == 64 * MiB
    assert got.expandable_segments
    # Below the first interval as the first, `>` only what is above the last: as torch 2.11 was seen to do.
    assert got.roundup_power2_divisions == (1,) * 9 + (2, 4) + (8,) * 5
    assert got.changed().startswith("expandable_segments=True, max_split_size=67108864")


def test_intervals_between_two_that_are_named_stay_off():
    assert parse_settings("roundup_power2_divisions:[1:2,8:4,>:8]").roundup_power2_divisions == (2, 0, 0, 4) + (8,) * 12


@pytest.mark.parametrize(
    "text",
    [
        "expandable_segments:true",
        "expandable_segments:1",
        "max_split_size_mb:19",
        "max_split_size_mb:-5",
        "max_split_size_mb:lots",
        "max_split_size_mb",
        "large_segment_size_mb:10",
        "large_segment_size_mb:32,max_split_size_mb:25",
        "max_non_split_rounding_mb:3",
        "garbage_collection_threshold:1.0",
        "garbage_collection_threshold:0",
        "garbage_collection_threshold:often",
        "per_process_memory_fraction:1.5",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:0",
        "roundup_power2_divisions:[200:2]",
        "roundup_power2_divisions:[256]",
        "backend:jemalloc",
        "pinned_num_register_threads:3",
        ":",
        "a:b]",
    ],
)
def test_a_value_that_makes_no_sense_is_refused_in_one_sentence(text):
    with pytest.raises(InputError) as caught:
        parse_settings(text)
    assert "\n" not in str(caught.value)


@given(st.text(alphabet="abexpandable_segments:True,[]0123456789>. ", max_size=60))
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(InputError):
        assert isinstance(parse_settings(text), CudaSettings)


def test_the_environment_is_read_in_the_order_of_torch():
    both = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:100", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:200"}
    assert settings_from_environment({}) == CudaSettings()
    assert settings_from_environment({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}).expandable_segments
    assert settings_from_environment(both).max_split_size == 200 * MiB
    assert settings_from_environment({**both, "PYTORCH_CUDA_ALLOC_CONF": ""}).max_split_size is None
    assert settings_from_environment({"PYTORCH_HIP_ALLOC_CONF": "max_split_size_mb:300"}).max_split_size == 300 * MiB
    assert not settings_from_environment({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}).caching


def test_torch_itself_reads_the_variables_in_that_order(monkeypatch):
    torch = pytest.importorskip("torch")
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        pytest.skip("this torch does not say which settings it read")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:100")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:200")
    code = "import torch\nprint(torch._C._accelerator_getAllocatorSettings())"  # which it reads when it is first asked
    out, err = forks.start(code, imported=forks.TORCH).communicate()
    assert not err and out.strip() == "max_split_size_mb:200"


def test_the_drivers_own_pool_is_not_pretended_to_be_known():
    with pytest.raises(InputError, match="cudaMallocAsync"):
        replay([AllocationEvent(0, True, 0, 10)], settings=parse_settings("backend:cudaMallocAsync"))


def test_without_caching_every_block_goes_back_at_once():
    events = [AllocationEvent(0, True, 0, 1000), AllocationEvent(1, False, 0, 0), AllocationEvent(2, True, 1, 1)]
    result = replay(events, settings=CudaSettings(caching=False), samples=True)
    assert [sample.reserved for sample in result.samples] == [1024, 0, 512]


def test_a_memory_fraction_needs_to_know_of_what():
    chosen = parse_settings("per_process_memory_fraction:0.5")
    with pytest.raises(InputError, match="needs the device's capacity"):
        replay([AllocationEvent(0, True, 0, 10)], settings=chosen)
    half = replay([AllocationEvent(0, True, 0, 60 * MiB)], settings=chosen, capacity=100 * MiB)
    assert half.out_of_memory is not None
    assert half.out_of_memory.free == 100 * MiB
