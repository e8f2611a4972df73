"""Smaller models: `shrink` measures on the user's data what each method saves and costs, and takes the cheapest set.

`outsize.compression.load(model, "small.safetensors")` makes a fresh model into the one that was saved.
"""

from outsize.compression.files import load as load

__all__ = ["load"]
