"""Makes the networks beside this file importable; one thread, since tiny operators only wait for each other on more."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))


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
