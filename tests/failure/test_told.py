"""A user's own words without the message of any program: what happened is read, what a manual says is not."""

import pytest

import outsize
from outsize.core.failure import CauseName
from outsize.failure.message import read


@pytest.mark.parametrize(
    ("text", "framework", "format_"),
    [
        ("How do I avoid RuntimeError: CUDA out of memory when fitting? I have two old cards.", "unknown", "told"),
        ("CUDA runs out of memory while training without using it", "unknown", "told"),
        ("I make x = jnp.ones((9, 9)) on the GPU and an error for resource exhaustion is thrown.", "jax", "told"),
        ("my keras model on the GPU is huge and ends in an out of memory exception", "tensorflow", "told"),
        ("Estoy usando pd.read_sql y arroja un Memory Error. ¿Cómo lo soluciono?", "python", "told"),
        ("np.where() and copies throw memory errors on my raster", "python", "told"),
        ("After pd.read_csv('plays.csv') the kernel dies. Is the table too large?", "notebook", "notebook"),
        ("I tried the library with a large dataset and colab seems to crash", "notebook", "notebook"),
        ("the script getting killed before the report. What is the reason?", "linux", "killed"),
        ("a 2 GB table hangs every open application, and my machine has 16 GB RAM", "unknown", "all-used"),
        ("My program's memory usage keeps growing, call after call. Please help", "unknown", "all-used"),
        ("if I set the period to 1000, i get the CUDA out of memory  eror.", "unknown", "told"),
    ],
)
def test_a_story_without_a_message_is_read(text, framework, format_):
    failure = read(text)
    assert failure is not None and (failure.framework, failure.extra["format"]) == (framework, format_)


@pytest.mark.parametrize(
    "text",
    [
        "A large and trivial memory leak in the list of objects has been plugged.",
        "# Lexsort memory error\nv = np.array([1, 2, 3])",
        "We can call this to avoid an out of memory condition on the device.",
        "The name is shown in the kernel log. Non-ASCII is replaced with '?'.",
        "my process got a segmentation fault when the memory was freed, out of memory bounds?",
        "# How to handle out of memory\n\nI have written a guide.",
        "DataLoader worker (pid 88) is killed by signal: Terminated. What now?",
        "How can I make my training faster? The GPU is idle.",
        "my kernel restarts when I click the button",
        "x" * 7000 + " I get an out-of-core memory error?",
    ],
)
def test_a_manual_a_list_of_changes_and_other_failures_are_no_story(text):
    assert read(text) is None


def test_a_notebook_that_died_is_not_said_to_be_short_of_memory():
    diagnosis = outsize.explain("after pd.read_csv(path) my kernel died")
    assert diagnosis.cause.name == CauseName.KILLED and not diagnosis.cause.certain
    assert "looks the same" in diagnosis.cause.text and "log of Jupyter" in diagnosis.cause.decide


def test_growth_is_told_where_it_is():
    on_card = outsize.explain("GPU memory usage increasing during training, I get OOM at iteration 5k")
    assert on_card.cause.name == CauseName.LEAK and "nvidia-smi" in on_card.remedies[0].how
    in_ram = outsize.explain("Instead of using the GPU, the memory usage keeps increasing and I run out of memory")
    assert in_ram.cause.name == CauseName.LEAK and "card" not in in_ram.cause.text
    assert not any("nvidia-smi" in remedy.how for remedy in in_ram.remedies)
