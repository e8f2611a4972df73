"""Stub."""
from outsize.core.failure import Diagnosis
from outsize.failure.message import read
def explain(what):
    return Diagnosis(failure=read(what), cause=None)
