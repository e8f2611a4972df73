"""A message as a terminal prints it: what its wording, its frames and its numbers decide before anything else."""

import pytest

import outsize
from outsize.failure.case import Case
from outsize.failure.explain import diagnose
from outsize.failure.message.read import read
from outsize.machine import memory

DENSE = """  File "fit.py", line 40, in <module>
    table = counts.toarray()
  File "/usr/lib/python3/dist-packages/scipy/sparse/_base.py", line 1187, in _process_toarray_args
    return np.zeros(self.shape, dtype=self.dtype, order=order)
MemoryError
"""
HANDLE = """  File "tune.py", line 31, in main
    engine.backward(loss)
  File "/opt/lib/python3.11/site-packages/deepspeed/runtime/engine.py", line 1827, in backward
    self.optimizer.backward(loss)
RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`
"""
RANKS = """  File "/opt/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1326, in convert
    return t.to(
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 128.00 MiB. GPU 0 has a total capacity of 79.10 GiB of which \
11.00 MiB is free. Process 911 has 0 bytes memory in use. Process 913 has 0 bytes memory in use. Process 912 has 0 bytes memory \
in use. Including non-PyTorch memory, this process has 0 bytes memory in use. Of the allocated memory 9.50 GiB is allocated by \
PyTorch, and 90.00 MiB is reserved by PyTorch but unallocated.
"""
LOADED = """[rank1]:   File "/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1329, in convert
[rank1]:     return t.to(
[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 462.00 MiB. GPU 1 has a total capacity of 79.19 GiB of \
which 405.00 MiB is free. Including non-PyTorch memory, this process has 78.79 GiB memory in use. Of the allocated memory \
77.40 GiB is allocated by PyTorch, and 416.38 MiB is reserved by PyTorch but unallocated.
[rank2]: Traceback (most recent call last):
[rank2]:   File "/work/train.py", line 109, in <module>
[rank2]:     trainer.train()
"""
BROUGHT = """moving pipeline to cuda
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 80.00 MiB. GPU 0 has a total capacity of 15.98 GiB of which 84.00 \
MiB is free. Of the allocated memory 15.44 GiB is allocated by PyTorch, and 26.59 MiB is reserved by PyTorch but unallocated.
"""
TPU_PIPE = """  File "draw.py", line 9, in <module>
    images = pipe(prompt, params, jit=True).images
  File "/usr/lib/python3/site-packages/diffusers/pipelines/pipeline_flax_stable_diffusion.py", line 275, in __call__
RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 21.90G of 7.48G hbm.
"""
TPU_PIECES = (
    "RESOURCE_EXHAUSTED: Attempting to reserve 6.50G at the bottom of memory. That was not possible. There are 6.80G free, 0B "
    "reserved, and 3.30G reservable."
)
XLA = """W tsl/framework/bfc_allocator.cc:485] Allocator (GPU_0_bfc) ran out of memory trying to allocate 30.00GiB
Execution of replica 0 failed: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 32212254720 bytes."""
ADAM = """tensorflow.ResourceExhaustedError: OOM when allocating tensor with shape[131072,2048]
     [[Node: training/Adam/mul_3 = Mul[T=DT_FLOAT, _device="/job:localhost/replica:0/task:0/gpu:0"](Adam/beta, Variable/read)]]"""
PICTURE = """\
OOM when allocating tensor with shape[1,64,1600,1300] and type float on /job:localhost/replica:0/task:0/device:GPU:0 \
by allocator GPU_0_bfc
     [[node Conv2D_10 = Conv2D[T=DT_FLOAT](transpose, encoder/conv1_2/kernel/read)]]"""
CPU = (
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate {} bytes. Error code 12 (Cannot allocate memory)"
)
GATHERED = '  File "dump.py", line 88, in dump\n    out = torch.cat(all_features, dim=0)\nRuntimeError: ' + CPU
READ = '  File "/lib/python3.9/site-packages/torch/serialization.py", line 1116, in load_tensor\nRuntimeError: ' + CPU


@pytest.mark.parametrize(
    ("text", "cause", "first"),
    [
        (DENSE, "true need", "keep it sparse"),
        (HANDLE, "true need", "see which of two it is"),
        (RANKS, "other process", "let each rank open its own card only"),
        (LOADED, "true need", "weights that take less of the card"),
        (BROUGHT, "true need", "weights that take less of the card"),
        (TPU_PIPE, "true need", "less at once"),
        (TPU_PIECES, "fragmentation", "let go of arrays of earlier steps"),
        (XLA, "true need", "less at once"),
        (ADAM, "true need", "fewer inputs to that layer"),
        (PICTURE, "true need", "smaller images"),
        (GATHERED.format(26_214_400_000), "true need", "write what each batch gives to disk"),
        (READ.format(180_355_072), "memory already full", "read the weights in 16 bits"),
        (
            "alloc_cpu() seems to have been called with negative number: 18446744072009756672",
            "impossible request",
            "look where the length comes from",
        ),
        (
            "Unable to allocate 135. TiB for an array with shape (18588824900024,) and data type int64",
            "impossible request",
            "look where the length comes from",
        ),
        (
            "MemoryError: Unable to allocate 113. GiB for an array with shape (9992, 3033596) and data type float32",
            "true need",
            "see whether 3,033,596 x 9,992 was meant",
        ),
        ('  File "a.py", line 2, in f\n    x = np.insert(x, 0, 1)\nMemoryError`', "true need", "stream large arrays"),
        (
            "DefaultCPUAllocator: not enough memory: you tried to allocate 1069551616 bytes.",
            "true need",
            "enlarge the page file",
        ),
    ],
)
def test_the_message_alone_decides(text, cause, first):
    found = outsize.explain(text)
    assert str(found.cause.name) == cause
    assert found.remedies[0].name.startswith(first)


def test_a_phone_has_no_page_file():
    text = "E/AndroidRuntime: DefaultCPUAllocator: not enough memory: you tried to allocate 38400000 bytes."
    assert not any("page file" in remedy.name for remedy in outsize.explain(text).remedies)


@pytest.mark.parametrize(("made", "first"), [("256", "halve the batch"), ("2", "half of axis 0")])
def test_a_batch_that_was_made_smaller_and_is_still_large_can_become_smaller(made, first):
    text = (
        "OOM when allocating tensor with shape[256,192,64,64] and type float on /job:localhost/replica:0/task:0/device:GPU:0 by "
        f"allocator GPU_0_bfc\nI have reduced batch_size to {made} and the error persists."
    )
    assert outsize.explain(text).remedies[0].name.startswith(first)


def test_bytes_of_round_axes_are_no_matrix_of_pairs():
    assert "pair" not in outsize.explain(CPU.format(1_000_000 * 4 * 84 * 84 * 4)).cause.text
    assert "pair" in outsize.explain(CPU.format(116_584**2 * 4)).cause.text


DENSE_LAYER = """ResourceExhaustedError: OOM when allocating tensor with shape[173056,4096]
     18     Dense(4096, activation='relu'),
---> 19     Dense(3)
"""
REPLICATED = """RESOURCE_EXHAUSTED
Traceback (most recent call last):
  File "/app/model.py", line 70, in __init__
    self.params = replicate(params)
  File "/usr/local/lib/python3.8/dist-packages/flax/jax_utils.py", line 56, in replicate
    return jax.device_put_replicated(tree, devices)
"""
RASTER = """  File "osgeo/gdal_array.py", line 422, in BandReadAsArray
    buf_obj = numpy.empty([buf_ysize, buf_xsize], dtype=typecode)
MemoryError: Unable to allocate 11.9 GiB for an array with shape (128069, 99432) and data type uint8
"""
SEPARATED = "Loading htdemucs ... data. DefaultCPUAllocator: not enough memory: you tried to allocate 12845161792 bytes"
MANY_MODELS = (
    "OOM when allocating tensor with shape[25088,4096] and type float on /job:localhost/replica:0/task:0/device:CPU:0 by "
    "allocator cpu [Op:Add] name: fc1_233/random_uniform/"
)


@pytest.mark.parametrize(
    ("text", "cause", "first"),
    [
        (DENSE_LAYER, "true need", "fewer inputs to that layer"),
        (DENSE_LAYER.replace("Dense(4096, ", "TransformerBlock("), "true need", "halve the batch"),
        (REPLICATED, "true need", "weights in 16 bits"),
        (RASTER, "true need", "a part of the raster at a time"),
        (SEPARATED, "true need", "a shorter recording"),
        (MANY_MODELS, "memory already full", "forget each model before the next is made"),
        ("RuntimeError: DataLoader worker (pid(s) 14455) exited unexpectedly", "killed", "fewer workers"),
        (
            "DefaultCPUAllocator: not enough memory: you tried to allocate 14643363840 bytes.",
            "true need",
            "less at once",
        ),
    ],
)
def test_what_was_asked_for_decides(text, cause, first):
    found = outsize.explain(text)
    assert str(found.cause.name) == cause
    assert found.remedies[0].name.startswith(first)


def test_a_worker_that_raised_is_not_killed():
    text = "ValueError: bad shape\nRuntimeError: DataLoader worker (pid(s) 14455) exited unexpectedly"
    assert outsize.explain(text).failure is None


FRAMES = """  File "stft.py", line 93, in stft
    windowed_frames = frames * window
MemoryError: Unable to allocate 581. MiB for an array with shape (148776, 512) and data type float64
"""
RECEIVED = """OOM when allocating tensor with shape[2048,4096]
     [[Node: edge = _Recv[tensor_type=DT_FLOAT, _device="/job:localhost/replica:0/task:0/cpu:0"]()]]
"""
POOL = """Limit:                      4928097484
InUse:                      4928097000
MaxInUse:                   4928097000
Execution of replica 0 failed: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 58982400 bytes.
"""
STARTED = """(EngineCore_DP0 pid=98) torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.08 GiB. GPU 0 has a total \
capacity of 62.47 GiB of which 769.28 MiB is free. Of the allocated memory 61.41 GiB is allocated by PyTorch, and 138.26 MiB is \
reserved by PyTorch but unallocated.
Warning: destroy_process_group() was not called before program exit, which can leak resources.
"""
WATERMARK = """MPS backend out of memory on an M1 Max 64 GB
MPS backend out of memory (MPS allocated: 72.40 GB, other allocations: 1.71 GB, \
max allowed: 81.60 GB). Tried to allocate 256 MB"""
TRAINED = (
    '  File "train.py", line 30, in main\n    loss.backward()\nRuntimeError: DefaultCPUAllocator: not enough memory: '
)


@pytest.mark.parametrize(
    ("text", "cause", "first"),
    [
        (FRAMES, "true need", "make a part of it at a time"),
        (FRAMES.replace("frames * window", "np.load(path)"), "true need", "stream it"),
        (RECEIVED, "true need", "halve the batch"),
        (POOL, "memory already full", "less at once"),
        (STARTED, "true need", "smaller weights"),
        (TRAINED + "you tried to allocate 3699376128 bytes.", "true need", "halve the batch"),
        (
            "DefaultCPUAllocator: not enough memory: you tried to allocate %dGB. Buy new RAM!27",
            "true need",
            "less at once",
        ),
        ("command terminated with exit code 137", "killed", "see whether the pod reached its limit"),
    ],
)
def test_the_wording_says_where_and_for_what(text, cause, first):
    found = outsize.explain(text)
    assert str(found.cause.name) == cause
    assert found.remedies[0].name.startswith(first)


def test_the_name_of_a_mac_is_no_limit():
    failure = outsize.explain(WATERMARK).failure
    assert failure is not None
    assert failure.limit_bytes == round(81.6 * 2**30)


PAIRS = """  File "/opt/lib/python3.12/site-packages/binner/cluster.py", line 155, in distances
    kl = distance(depth[:, 0], depth[:, 1])
MemoryError: Unable to allocate 2.86 TiB for an array with shape (886662, 886662) and data type float32
"""
EMBEDDED = """\
OOM when allocating tensor with shape[1000,64,77,77] and type float on /job:localhost/replica:0/task:0/device:GPU:0 \
by allocator GPU_0_bfc
     [[Node: conv/Conv2D = Conv2D[T=DT_FLOAT](conv/Relu, conv/weights/read)]]
     [[Node: embeddings/_455 = _Recv[tensor_name="edge_1_embeddings"]()]]
"""
LINKAGE = "MemoryError: Unable to allocate 53.1 GiB for an array with shape (7125374376,) and data type float64"
NO_LINKAGE = "MemoryError: Unable to allocate 53.1 GiB for an array with shape (7125374377,) and data type float64"
ELASTIC = """ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 0 (pid: 78) of binary: \
/opt/bin/python
  File "/opt/lib/python3.10/site-packages/torch/distributed/launch.py", line 193, in <module>
"""
PROJECTS = """  File "C:/Users/someone/PycharmProjects/first/net.py", line 60, in <module>
    net.fit(X, y)
MemoryError
"""
WINDOWS_IN_LINUX = "Command '['/mnt/c/Users/someone/venv/bin/python', 'train.py']' died with <Signals.SIGKILL: 9>."
FREE_CARD = """Total memory: 11.91GiB
Free memory: 11.54GiB
  File "graph.py", line 76, in sample
    batch = matrix[index][:, index]
MemoryError
"""


@pytest.mark.parametrize(
    ("text", "cause", "first"),
    [
        (PAIRS, "true need", "keep only the pairs that matter"),
        (PAIRS.replace("/opt/lib/python3.12/site-packages/binner/", ""), "broadcast explosion", "give both operands"),
        (EMBEDDED, "true need", "halve the batch"),
        (FREE_CARD, "true need", "stream large arrays"),
        ("Loading checkpoint shards killed", "killed", "read the weights in 16 bits"),
        ("`killed`.", "killed", "see whether it was memory"),
        (LINKAGE, "true need", "fewer things at once, or a method that compares"),
        (NO_LINKAGE, "true need", "stream it"),
        (ELASTIC, "killed", "hold less in RAM: each rank"),
        (PROJECTS, "true need", "enlarge the page file"),
    ],
)
def test_what_stands_beside_a_number_is_read_as_what_it_is(text, cause, first):
    found = outsize.explain(text)
    assert str(found.cause.name) == cause
    assert found.remedies[0].name.startswith(first)


def test_a_drive_of_windows_seen_from_linux_is_no_mac():
    assert all("log show" not in remedy.how for remedy in outsize.explain(WINDOWS_IN_LINUX).remedies)


LONG = "MemoryError: Unable to allocate {} TiB for an array with shape ({},) and data type int64"


def case_of(size, length):
    text = LONG.format(size, length)
    return Case(failure=read(text), text=text, reading=memory())


@pytest.mark.parametrize(("size", "length"), [("72.8", 10**13), ("135.", 18588824900024), ("64.0", 2**43)])
def test_a_long_axis_is_measured_against_the_machine_where_it_is_known(size, length):
    assert str(diagnose(case_of(size, length)).cause.name) == "request larger than the machine"


@pytest.mark.parametrize(("size", "length"), [("72.8", 10**13), ("64.0", 2**43)])
def test_a_round_number_is_one_that_somebody_wrote(size, length):
    assert str(outsize.explain(LONG.format(size, length)).cause.name) == "true need"
