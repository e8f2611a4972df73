"""Makes the networks beside this file importable; one thread, since tiny operators only wait for each other on more."""

import gc
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))


@pytest.fixture(autouse=True)
def quick_collections_of_this_test(quick_collections):
    """Plans collect garbage several times each: what earlier tests have left and loaded is not looked through again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread():
    try:
        import torch
    except ImportError:  # tests of other frameworks run without it
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
