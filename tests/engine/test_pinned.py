"""Page-locked memory without a card: the same interface over ordinary memory."""

import numpy as np
import pytest

from outsize.core.errors import InputError
from outsize.engine.pinned import can_lock, is_locked, lock_array, lock_memory


def test_locked_memory_has_exactly_the_size_that_was_asked_for():
    for size in (0, 1, 4097, (3 << 20) + 5):
        with lock_memory(size) as memory:
            assert memory.nbytes == memory.array.nbytes == size
            assert memory.locked == (can_lock() and size > 0)


def test_a_tensor_of_locked_memory_shares_it():
    torch = pytest.importorskip("torch")
    with lock_memory(4096) as memory:
        memory.array[:] = 7
        tensor = memory.tensor()
        assert tensor.dtype == torch.uint8 and int(tensor.sum()) == 7 * 4096
        tensor[0] = 1
        assert memory.array[0] == 1


def test_an_array_is_locked_where_it_lies():
    for order in "CF":
        array = np.asarray(np.arange(24.0).reshape(4, 6), order=order)
        with lock_array(array) as memory:
            assert np.may_share_memory(memory.array, array)
            assert memory.nbytes == array.nbytes
            assert memory.locked == is_locked(array) == can_lock()
        assert not is_locked(array)


def test_a_view_with_gaps_is_refused():
    with pytest.raises(InputError, match="not contiguous"):
        lock_array(np.zeros((4, 6))[:, ::2])
