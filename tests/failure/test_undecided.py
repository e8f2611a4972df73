"""What comes first where the text does not decide, and advice that keeps to the version, the numbers and what was tried."""

import pytest

import outsize
from outsize.core.failure import CauseName

OLD = (
    "CUDA out of memory. Tried to allocate 1.48 GiB (GPU 0; 8.00 GiB total capacity; 2.60 GiB already allocated; "
    "282.65 MiB free; "
)
NEW = (
    "CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total capacity of 6.00 GiB of which 0 bytes is free. Of the "
    "allocated memory 2.93 GiB is allocated by PyTorch, and 2.30 GiB is reserved by PyTorch but unallocated."
)
HINT = " If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation."
FULL = (
    "CUDA out of memory. Tried to allocate 64.00 MiB (GPU 0; 8.00 GiB total capacity; 7.60 GiB already allocated; 9.00 MiB free; "
    "7.62 GiB reserved in total by PyTorch)"
)


def hows(text):
    return [remedy.how for remedy in outsize.explain(text).remedies]


def test_what_a_candidate_would_give_is_not_counted_and_comes_last():
    diagnosis = outsize.explain(
        "Unable to allocate 2.00 GiB for an array with shape (46341, 46341) and data type uint8"
    )
    assert diagnosis.cause.name == CauseName.TRUE_NEED
    names = [remedy.name for remedy in diagnosis.remedies]
    assert names[0] != "give both operands the same shape"
    assert next(remedy for remedy in diagnosis.remedies if "same shape" in remedy.name).saves is None


@pytest.mark.parametrize(
    "text", ["python job.py\nKilled", "my python script ended with exit code 137", "./solve\nKilled"]
)
def test_a_kill_without_a_word_is_looked_into_before_it_is_cured(text):
    assert "dmesg" in hows(text)[0]
    assert ("outsize run" in hows(text)[0]) == ("python" in text)


def test_a_container_is_asked_before_the_programs_in_it_are_changed():
    text = "docker ps\nmysql:5.5  Exited (137) 27 hours ago  app_mysql_1\ndocker compose up: exited with code 137"
    assert "docker inspect" in hows(text)[0]


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        (OLD + "3.32 GiB cached)", ""),
        (OLD + "5.92 GiB reserved in total by PyTorch)", ""),
        (OLD + "5.92 GiB reserved in total by PyTorch)" + HINT, "max_split_size_mb:128 python"),
        (OLD + "5.92 GiB reserved in total by PyTorch)" + HINT + "\nPYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64", ""),
        (NEW, "expandable_segments:True python"),
    ],
)
def test_a_setting_of_the_allocator_is_one_that_this_version_has(text, setting):
    diagnosis = outsize.explain(text)
    assert diagnosis.cause.name == CauseName.FRAGMENTATION
    assert (setting in diagnosis.remedies[0].how) if setting else ("ALLOC_CONF" not in str(hows(text)))
    assert any("batch" in remedy.name for remedy in diagnosis.remedies)


@pytest.mark.parametrize("axis", [2**32 - 393_112, 2**31 - 1, 2**31])
def test_a_length_that_wrapped_is_no_need(axis):
    diagnosis = outsize.explain(f"Unable to allocate 32.0 GiB for an array with shape ({axis},) and data type float64")
    assert diagnosis.cause.name == CauseName.IMPOSSIBLE and f"{axis:,}" in diagnosis.cause.text


@pytest.mark.parametrize("axis", [2**32, 2**31 + 5_000_000, 4_000_000_000])
def test_a_length_that_is_only_large_is_a_need(axis):
    diagnosis = outsize.explain(f"Unable to allocate 32.0 GiB for an array with shape ({axis},) and data type float64")
    assert diagnosis.cause.name == CauseName.TRUE_NEED


@pytest.mark.parametrize(
    "sign", [r'File "C:\Python37-32\lib\frame.py", line 9', "python-bits: 32", "I use 32-bit Python"]
)
def test_a_python_of_32_bits_is_told_whatever_the_machine_has(sign):
    diagnosis = outsize.explain(
        f"{sign}\nMemoryError: Unable to allocate 900. MiB for an array with shape (9, 9) and data type int8"
    )
    assert diagnosis.cause.name == CauseName.ADDRESS_SPACE and "64-bit Python" in diagnosis.remedies[0].how


def test_an_editor_in_a_path_is_not_what_ran_out():
    text = (
        r'File "C:\me\PycharmProjects\a.py", line 3'
        + "\nUnable to allocate 9.00 GiB for an array with shape (900, 1342178) and data type float64"
    )
    assert not any("editor" in remedy.name for remedy in outsize.explain(text).remedies)


@pytest.mark.parametrize(
    "words",
    [
        "Besides changing the batch size, what can I do in training?",
        "I tried reducing the batch size in training but it still fails",
        "training: lowering the batch_size to 4, the error persists",
        "training with batch_size:1.\n",
    ],
)
def test_a_smaller_batch_is_not_advised_where_it_was_tried(words):
    for text in (f"{words} {FULL}", f"{words} my graphics card runs out of memory"):
        first = outsize.explain(text).remedies[0]
        assert "not fewer" in first.name and "batch" not in first.how
    rows = outsize.explain(
        f"{words} OOM when allocating tensor with shape[64,900,900,8] and type float on /device:GPU:0"
    ).remedies
    assert "batch" not in rows[0].name


def test_an_evaluation_is_not_told_to_accumulate_gradients():
    text = (
        "in validate\nCUDA out of memory. Tried to allocate 25.49 GiB (GPU 0; 23.70 GiB total capacity; 57.77 MiB already "
        "allocated; 22.24 GiB free; 84.00 MiB reserved in total by PyTorch)"
    )
    assert "inference_mode" in hows(text)[0] and "backward" not in hows(text)[0]
    assert "no gradients" in hows("when the model is evaluated during its training, I get a cuda memory error")[0]


def test_where_one_sample_is_too_large_it_becomes_smaller_first():
    text = "OOM when allocating tensor with shape[5,64,4890,4890] and type float on /device:GPU:0"
    assert "resize" in hows(text)[0]
    assert "batch_size" in hows(text.replace("4890,4890", "489,489"))[0]


def test_a_request_of_many_cards_is_not_halved():
    text = "CUDA out of memory. Tried to allocate 512.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which 25.38 GiB is free."
    assert "1/13" in outsize.explain(text).remedies[0].name
    assert "which axis" not in outsize.explain(text.replace("512.00", "96.00")).remedies[0].name


def test_points_and_pictures_are_no_sparse_matrix():
    text = "Unable to allocate 6.41 GiB for an array with shape (35019, 16384, 3) and data type float32"
    assert not any("sparse" in how for how in hows(text))


def test_pythons_float_has_64_bits():
    diagnosis = outsize.explain("unable to allocate 15.4 GiB for an array shape (10, 207313296) and data type float")
    assert "15.45 GiB" in diagnosis.cause.text


def test_who_shows_no_code_is_told_what_to_put_in():
    message = "unable to allocate 920. MiB for an array with shape (600020, 201) and data type complex64"
    assert "recording" in hows(f"Error occurred: {message}\nWhat does it mean?")[0]
    assert "recording" not in str(
        hows(f'File "a.py", line 9\n  y = stft(x)\nMemoryError: {message}\nWhat does it mean?')
    )


def test_ram_that_cannot_be_locked_is_not_a_full_card():
    text = "failed to alloc 4294967296 bytes on host: CUDA_ERROR_OUT_OF_MEMORY\ncould not allocate pinned host memory of size: 9"
    diagnosis = outsize.explain(text)
    assert diagnosis.cause.name == CauseName.LIMIT and "HOST_MEM_LIMIT" in diagnosis.remedies[0].how


def test_what_a_tpu_needs_is_the_sum_of_its_cores():
    text = "RESOURCE_EXHAUSTED: TPU TensorCore Hbm usage: 34.82G, SparseCore Hbm usage 174.10G, exceeding available bytes: 95.74G"
    assert "208.92 GiB of 95.74 GiB" in outsize.explain(text).cause.text
    assert not any(
        "XLA_PYTHON" in how for how in hows("Ran out of memory in memory space hbm. Used 19.46G of 15.48G hbm")
    )


def test_blocks_of_4_gib_are_for_large_requests():
    text = (
        "XPU out of memory. Tried to allocate {}. GPU 3 has a total capacity of 31.89 GiB of which 13.22 GiB is free."
    )
    assert not any("RELAXED" in how for how in hows(text.format("192.00 MiB")))
    assert any("RELAXED" in how for how in hows(text.format("5.00 GiB")))


@pytest.mark.parametrize(
    "words",
    [
        "training: I changed BATCH_SIZE_PER_IMAGE in the yaml to 1, but I still get it.",
        "training runs out of memory even batch size is reduced to 2",
        "training does not work, even if I reduce the batchsize.",
    ],
)
def test_a_smaller_batch_that_was_tried_is_seen_in_other_words(words):
    assert "not fewer" in outsize.explain(f"{words} {FULL}").remedies[0].name


def test_a_smaller_batch_that_is_only_wished_for_is_advised():
    assert (
        "batch"
        in outsize.explain(f"i think i have to reduce the batch size but don't know how. {FULL}").remedies[0].name
    )


def test_a_test_of_a_model_is_no_training():
    assert "backward" not in hows(f"I run the test code and get this. The train code is fine. {FULL}")[0]
    assert (
        outsize.explain('testing a model with a picture, out of memory error arise. "cuda":false')
        .remedies[0]
        .how.startswith("/usr/bin")
    )
