"""A folder that `outsize run` puts on the PYTHONPATH of the program it watches; only `sitecustomize` is loaded from it."""
