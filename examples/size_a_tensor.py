"""The exact bytes of a tensor, and where it fits: before anything is allocated."""

import outsize

sizing = outsize.size((1, 256, 1024, 1021), "float32", card="rtx4090")
print(sizing)

assert sizing.bytes == 1_070_596_096
assert outsize.size((1, 256, 1024, 1021), "float16").bytes == sizing.bytes // 2
