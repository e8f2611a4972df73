"""These tests run where JAX is, with or without torch."""

import pytest


@pytest.fixture(autouse=True)
def one_thread():
    """In place of torch's, which need not be installed here."""
