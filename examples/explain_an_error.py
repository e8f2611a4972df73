"""An out-of-memory message explained: the cause, the evidence, and what to do."""

import outsize

MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB of which "
    "1.32 GiB is free. Of the allocated memory 20.89 GiB is allocated by PyTorch, and 1.02 GiB is reserved by PyTorch but "
    "unallocated."
)
diagnosis = outsize.explain(MESSAGE)
print(diagnosis)

assert diagnosis.failure.requested_bytes == 2 * 2**30
assert diagnosis.remedies
