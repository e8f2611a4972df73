"""What stands beside a message decides: a scheduler's word, a cache that is named, a program that aborted, growth that is told."""

import pytest

import outsize

SLURM = """Error: cannot allocate vector of size 3.1 Gb
slurmstepd: error: Detected 1 oom_kill event in StepId=77.batch. Some of the step tasks have been OOM Killed."""
GGML = """ggml_backend_cuda_buffer_type_alloc_buffer: allocating 2048.00 MiB on device 0: cudaMalloc failed: out of memory
llama_kv_cache_init: failed to allocate buffer for kv cache"""
MATLAB = "Error using rand\nRequested 90000x90000 (60.3GB) array exceeds maximum array size preference (15.9GB)."
ABORTED = """terminate called after throwing an instance of 'std::bad_alloc'
make: *** [Makefile:12: check] Aborted (core dumped)"""
XLA = r"""jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 20937965568 bytes.
BufferAssignment stats:
             parameter allocation:    1.10GiB
     preallocated temp allocation:   19.50GiB
		Operator: op_name="jit(train_step)/jit(main)/transpose(jvp(Net))/dot_general"
"""


@pytest.mark.parametrize(
    ("text", "cause", "first"),
    [
        (SLURM, "limit", "ask Slurm for more"),
        (GGML, "true need", "a smaller KV cache"),
        (MATLAB, "request larger than the limit", "smaller arrays"),
        (ABORTED, "true need", "see what it takes"),
        (XLA, "true need", "recompute instead of keeping"),
        ("RAM usage of the server keeps rising with each call until it is killed", "leak", "see"),
        (
            "RAM usage grows when I call net.predict() in a loop until it crashes",
            "leak",
            "call the model instead of its predict",
        ),
        (
            "With num_workers=6 my RAM is full after an hour and the run gets killed",
            "leak",
            "samples in one array instead of Python's objects",
        ),
    ],
)
def test_words_beside_the_message_decide_cause_and_first_advice(text, cause, first):
    found = outsize.explain(text)
    assert str(found.cause.name) == cause
    assert found.remedies[0].name.startswith(first)


@pytest.mark.parametrize(
    "text",
    [
        "The memory usage grows with the batch, and then falls when the step ends.",
        "How to avoid that memory keeps growing until it crashes",
        "RAM usage increases with num_workers; see the table below.",
    ],
)
def test_words_about_memory_that_end_nothing_are_no_failure(text):
    assert outsize.explain(text).failure is None
