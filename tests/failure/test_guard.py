"""The guard: the exception leaves as itself with a note, and nothing is held alive by it."""

import gc
import subprocess
import sys
import textwrap
import threading
import weakref

import numpy as np
import pytest

import outsize
from outsize.failure.live import arrays_of_thread, live_arrays

HUGE = 10**13


class Holder:
    """Something a weak reference can follow."""

    def __init__(self):
        self.array = np.ones(2**18)


def numpy_error():
    try:
        np.empty(HUGE)
    except MemoryError as error:
        return error


def note_of(error):
    return "\n".join(getattr(error, "__notes__", []))


def test_an_out_of_memory_error_leaves_as_itself_with_its_diagnosis():
    with pytest.raises(MemoryError) as caught, outsize.guard():
        np.empty(HUGE)
    note = note_of(caught.value)
    assert type(caught.value) is type(numpy_error())
    assert "cause: request larger than the machine" in note
    assert "when the block began" in note


def test_another_exception_is_left_alone():
    with pytest.raises(ValueError) as caught, outsize.guard():
        raise ValueError("no memory involved")
    assert note_of(caught.value) == ""


def test_it_decorates_with_and_without_brackets():
    @outsize.guard
    def plain(size):
        """Its own words."""
        return np.empty(size)

    @outsize.guard()
    def called(size):
        return np.empty(size)

    assert plain.__doc__ == "Its own words." and plain(3).shape == called(3).shape == (3,)
    for function in (plain, called):
        with pytest.raises(MemoryError) as caught:
            function(HUGE)
        assert "cause:" in note_of(caught.value)


def test_nested_guards_explain_once():
    with pytest.raises(MemoryError) as caught, outsize.guard(), outsize.guard():
        np.empty(HUGE)
    assert len(caught.value.__notes__) == 1


def test_live_arrays_are_told_with_who_refers_to_them():
    def work():
        activations = np.ones((3, 2**20))
        with outsize.guard():
            np.empty(HUGE)
        return activations

    with pytest.raises(MemoryError) as caught:
        work()
    assert "float64[3, 1048576]: `activations` in" in note_of(caught.value)


def test_nothing_is_held_alive_once_the_exception_is_gone():
    def work():
        held = Holder()
        seen.append(weakref.ref(held))
        with outsize.guard():
            np.empty(HUGE)

    seen = []
    try:
        work()
    except MemoryError as error:
        note = note_of(error)
    gc.collect()
    assert "72.76 TiB" in note
    assert seen[0]() is None


def test_a_frame_that_goes_on_keeps_no_copy_of_its_locals():
    def work():
        held = Holder()
        seen = weakref.ref(held)
        try:
            with outsize.guard():
                np.empty(HUGE)
        except MemoryError:
            pass
        del held
        gc.collect()
        return seen()

    assert work() is None


def test_views_of_one_array_are_one_row():
    kept = [np.ones(2**20)]
    kept += [kept[0][1:], kept[0].reshape(2, -1)]
    rows = [part for part in live_arrays() if part.bytes == 8 * 2**20]
    assert len([part for part in rows if "list of 3" in part.name]) <= 1


def run_program(code):
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=900)


def test_install_explains_what_ends_a_program():
    answer = run_program("""
        import outsize
        outsize.explain_uncaught()
        outsize.explain_uncaught()
        import numpy as np
        np.empty(10**13)
    """)
    assert answer.returncode == 1
    assert answer.stderr.count("outsize: why memory ran out") == 1
    assert "ArrayMemoryError" in answer.stderr


def test_install_explains_what_ends_a_thread():
    answer = run_program("""
        import threading, numpy as np, outsize
        outsize.explain_uncaught()
        thread = threading.Thread(target=lambda: np.empty(10**13))
        thread.start(); thread.join()
    """)
    assert "cause: request larger than the machine" in answer.stderr


def test_install_leaves_other_errors_as_they_are():
    answer = run_program("import outsize; outsize.explain_uncaught(); raise KeyError('x')")
    assert answer.returncode == 1 and "outsize" not in answer.stderr


def test_a_tensor_without_a_shape_does_not_stop_the_diagnosis():
    torch = pytest.importorskip("torch")
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(MemoryError) as caught, outsize.guard():
        raise MemoryError(
            "Unable to allocate 34.4 TiB for an array with shape (3075200, 3075200) and data type float32"
        )
    assert nested is not None
    assert any("broadcast" in note for note in caught.value.__notes__)


def test_functions_that_wait_or_yield_are_guarded_for_all_of_their_run():
    import asyncio

    @outsize.guard
    async def wait():
        np.empty(HUGE)

    @outsize.guard()
    def give():
        got = yield 1
        yield got
        np.empty(HUGE)

    for call in (lambda: asyncio.run(wait()), lambda: list(give())):
        with pytest.raises(MemoryError) as caught:
            call()
        assert "why memory ran out" in note_of(caught.value)
    values = give()
    assert [next(values), values.send(5)] == [1, 5]
    with pytest.raises(outsize.InputError, match="inside of it"):

        @outsize.guard
        async def both():
            yield 1


def test_the_arrays_that_a_running_thread_can_name_are_found_and_not_held():
    ready, done = threading.Event(), threading.Event()
    followed = []

    def work():
        here, kept = np.ones(2**18), {"old": [np.ones(2**19)]}
        owner, fixture = Holder(), np.ones(2**20)
        owner.array = np.ones(2**21)
        followed.append((weakref.ref(owner), fixture, weakref.ref(here), kept is None))
        ready.set()
        done.wait()

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    owner, fixture, here, _ = followed[0]
    names = [part.name for part in arrays_of_thread(thread.ident, without=[fixture])]
    done.set()
    thread.join()
    assert [name.split(":")[1].split(" in ")[0].strip() for name in names] == [
        "`owner.array`",
        "`kept['old'][0]`",
        "`here`",
    ]
    assert owner() is None and here() is None
