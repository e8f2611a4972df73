"""Training and inference on a device that the model does not fit on: weights live in host memory or in a file.

`verb.fit_hosted` is what `outsize.fit(..., device=...)` calls.
"""
