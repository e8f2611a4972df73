"""Smaller models: `shrink` measures on the user's data what each method saves and costs, and takes the cheapest set.

`outsize.compression.load(model, "small.safetensors")` makes a fresh model into the one that was saved.
`outsize.compression.adapt(model, rank=16, bits=4)` freezes a model and puts adapters beside its layers.
"""

from outsize.compression.files import load as load
from outsize.compression.methods.adapters import adapt as adapt

__all__ = ["adapt", "load"]
