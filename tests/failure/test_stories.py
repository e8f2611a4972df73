# ruff: noqa: E501  messages are kept whole
"""What the words and the log around a message tell: who ran out at all, growth, rows that multiply, whose limit it was not, what
the program itself says would fit, and how much the process could reach."""

import re

import pytest

import outsize
from outsize.core.failure import CauseName
from outsize.failure.growth import rise
from outsize.failure.message import read

GiB, MiB = 2**30, 2**20
MESSAGE = (
    "CUDA out of memory. Tried to allocate 96.00 MiB (GPU 0; {total} total capacity; {held} already allocated; 40.00 MiB "
    "free; {reserved} reserved in total by PyTorch)"
)


def first(text):
    diagnosis = outsize.explain(text)
    assert diagnosis.failure is not None, text
    return diagnosis.cause.name, diagnosis.remedies[0].how


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (
            "what(): Error while calling cudaMalloc(&block, count*sizeof(double)) in file /src/tensors/storage.cpp:77. code: 2, reason: out of memory",
            "cuda",
        ),
        ("cuMemAllocAsync(&pointer, bytes, stream) at pool.cu:12 returned: 2 (out of memory)", "cuda"),
        ("terminate called after throwing 'mylib::cuda_error'  what(): memory allocation failed", "cuda"),
        (
            "The run crashed in validation: the allocator failed to find a contiguous block of free memory for the batch.",
            None,
        ),
        ("The job was killed by the kernel after three hours of training.", None),
        (
            "# GPU OOM with two nodes only\n\nOne node is fine. I tried smaller batches.\nTraceback (most recent call last):\n",
            None,
        ),
        ("# Out of memory errors whatever the batch\n\nEvery card fills at once.", None),
        ("Each card fills up until finally running out of memory before the first step.", None),
    ],
)
def test_is_a_failure(text, place):
    failure = read(text)
    assert failure is not None
    assert failure.device == place


@pytest.mark.parametrize(
    "text",
    [
        "cudaMalloc returns an error if the device has no memory left, and cudaMallocAsync takes it from a pool.",
        "The allocator may fail to find a contiguous block of memory when the heap is fragmented.",
        "If it holds too much, a process can be killed by the kernel.",
        "# Avoiding OOM\n\nI use smaller batches. Here is my model.",
        "# How to handle out of memory\n\nI have written a guide.",
        "The cache grows until you run out of memory.",
        '{"OOMKilled": false, "ExitCode": 0}',
    ],
)
def test_prose_is_no_failure(text):
    assert read(text) is None


@pytest.mark.parametrize(
    ("total", "held", "reserved", "most"),
    [
        ("8.00 GiB", "6.00 GiB", "6.20 GiB", 6.20 * GiB + 40 * MiB),
        ("1000.00 MiB", "200.00 MiB", "210.00 MiB", 250 * MiB),
        ("24.00 GiB", "23.00 GiB", "23.10 GiB", 23.10 * GiB + 40 * MiB),
    ],
)
def test_a_budget_is_within_reach(total, held, reserved, most):
    text = "in train_step\n" + MESSAGE.format(total=total, held=held, reserved=reserved)
    hows = [remedy.how for remedy in outsize.explain(text).remedies]
    budget = next(int(found.group(1)) for how in hows if (found := re.search(r'budget="([0-9]+)MiB"', how)))
    assert 0.8 * most < budget * MiB < most


def test_most_of_a_card_out_of_reach_is_told_and_looked_at_first():
    text = "in train_step\n" + MESSAGE.format(total="1000.00 MiB", held="200.00 MiB", reserved="210.00 MiB")
    diagnosis = outsize.explain(text)
    assert not diagnosis.cause.certain
    assert "neither free nor PyTorch's" in diagnosis.cause.text
    assert diagnosis.remedies[0].how.startswith("nvidia-smi")


def test_a_fraction_is_not_raised_beyond_what_is_free():
    text = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 16.00 GiB of which 1.00 GiB is free. "
        "8.00 GiB allowed; Of the allocated memory 7.00 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but "
        "unallocated."
    )
    assert not any("memory_fraction(" in remedy.how for remedy in outsize.explain(text).remedies)


def test_what_the_message_says_would_fit_comes_first():
    text = (
        "ValueError: To serve at least one request with the model's max seq len (65536), 6.00 GiB KV cache is needed, which is "
        "larger than the available KV cache memory (5.00 GiB). Based on the available memory, the estimated maximum model length "
        "is 54608. Try increasing `gpu_memory_utilization` or decreasing `max_model_len`."
    )
    assert first(text) == (CauseName.TRUE_NEED, "--max-model-len 54608")


@pytest.mark.parametrize("state", ["OOMKilled:false", '"OOMKilled": false', "OOMKilled=false"])
def test_a_container_that_was_spared_by_its_limit(state):
    diagnosis = outsize.explain(f"docker ps: my container exited with code 137\nState: {{{state}, ExitCode: 137}}")
    assert "not by its container's limit" in diagnosis.cause.text
    assert "dmesg" in diagnosis.remedies[0].how
    assert not any("OOMKilled" in remedy.how for remedy in diagnosis.remedies)
    assert all(cause.name != CauseName.LIMIT for cause in diagnosis.candidates)


LOG = "\n".join(f"2024-05-0{day} 10:00:0{day},120 step {day}00 loss 0.{day} RSS {size}G" for day, size in enumerate((4, 4, 19, 60, 118), 1))  # fmt: skip
EPOCHS = "epoch  gpu_mem\n1/90   9.1G\n20/90  10.2G\n60/90  11.9G\n"


def test_a_log_that_rises_is_read():
    assert rise(LOG) == (4 * GiB, 118 * GiB)
    assert rise(EPOCHS) == (round(9.1 * GiB), round(11.9 * GiB))
    assert rise(EPOCHS.replace("11.9G", "9.0G")) is None
    assert rise("downloading into memory\n 10MB done\n 20MB done\n 90MB done\n".replace("done", "downloaded")) is None
    assert rise("a  1.0G\na  2.0G\na  3.0G\n") is None  # nobody says that it is memory


def test_growth_comes_before_the_batch():
    name, how = first(f"{LOG}\nthe process was killed by the system after two hours")
    assert name == CauseName.LEAK
    assert "buffers" in how
    assert "buffers" in first(f"one rank on a GPU node\n{LOG}\nthe process was killed by the system after two hours")[1]
    for story in (EPOCHS, "GPU usage has been increasing with every epoch. "):
        name, how = first(f"training\n{story}\nRuntimeError: CUDA out of memory after some epochs")
        assert name == CauseName.LEAK
        assert ".detach()" in how
    name, how = first("after several epochs: Error while calling cudaMalloc(&p, n) in file a.cpp:1. code: 2, reason: out of memory")  # fmt: skip
    assert name == CauseName.LEAK
    assert "nvidia-smi" in how


@pytest.mark.parametrize("story", ["df = df.explode('items')", "The data frame is only 40 KB.", "left.merge(right, on='key')"])  # fmt: skip
def test_rows_that_multiply(story):
    text = (
        f"{story}\nMemoryError: Unable to allocate 1.49 GiB for an array with shape (2, 100000000) and data type object"
    )
    name, how = first(text)
    assert name == CauseName.BROADCAST
    assert "len(df)" in how


def test_a_sparse_matrix_is_kept_sparse():
    numpys = "MemoryError: Unable to allocate 29.8 GiB for an array with shape (63245, 63246) and data type float64"
    name, how = first("The sparse matrix takes too much.\n" + numpys)
    assert name == CauseName.TRUE_NEED
    assert "scipy.sparse" in how
    assert first(numpys)[0] == CauseName.BROADCAST


@pytest.mark.parametrize(
    "sign",
    [
        'File "/content/sd/modules/processing.py", line 9, in process_images',
        "- [x] The issue exists on a clean installation of webui",
        "stable-diffusion-webui on my laptop",
    ],
)
def test_the_webui_of_automatic1111(sign):
    text = f"{sign}\n" + MESSAGE.format(total="8.00 GiB", held="7.00 GiB", reserved="7.20 GiB")
    name, how = first(text)
    assert name == CauseName.TRUE_NEED
    assert "--medvram" in how
    assert "512 x 512" in how
    assert "--lowvram" in first(text + "\nCOMMANDLINE_ARGS=--medvram")[1]


def test_an_old_tensorflow_gets_the_setting_it_has():
    driver = "{}E tensorflow/stream_executor/cuda/cuda_driver.cc:924] failed to allocate 3.00G (3221225472 bytes) from device: CUDA_ERROR_OUT_OF_MEMORY"  # fmt: skip
    assert first(driver.format("2017-03-02 10:00:00.1: "))[1].startswith("config.gpu_options.allow_growth")
    assert first(driver.format(""))[1].startswith("TF_FORCE_GPU_ALLOW_GROWTH")
