"""What stands beside a message decides: a scheduler's word, a cache that is named, growth that is told, whose container it is."""

import pytest

import outsize

SLURM = """Error: cannot allocate vector of size 3.1 Gb
slurmstepd: error: Detected 1 oom_kill event in StepId=77.batch. Some of the step tasks have been OOM Killed."""
GGML = """ggml_backend_cuda_buffer_type_alloc_buffer: allocating 2048.00 MiB on device 0: cudaMalloc failed: out of memory
llama_kv_cache_init: failed to allocate buffer for kv cache"""
MATLAB = "Error using rand\nRequested 90000x90000 (60.3GB) array exceeds maximum array size preference (15.9GB)."
ABORTED = """terminate called after throwing an instance of 'std::bad_alloc'
make: *** [Makefile:12: check] Aborted (core dumped)"""
XLA = r"""jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 20937965568 bytes.
BufferAssignment stats:
             parameter allocation:    1.10GiB
     preallocated temp allocation:   19.50GiB
		Operator: op_name="jit(train_step)/jit(main)/transpose(jvp(Net))/dot_general"
"""


@pytest.mark.parametrize(
    ("text", "cause", "first"),
    [
        (SLURM, "limit", "ask Slurm for more"),
        (GGML, "true need", "a smaller KV cache"),
        (MATLAB, "request larger than the limit", "smaller arrays"),
        (ABORTED, "true need", "see what it takes"),
        (XLA, "true need", "recompute instead of keeping"),
        ("RAM usage of the server keeps rising with each call until it is killed", "leak", "see"),
        (
            "RAM usage grows when I call net.predict() in a loop until it crashes",
            "leak",
            "call the model instead of its predict",
        ),
        (
            "With num_workers=6 my RAM is full after an hour and the run gets killed",
            "leak",
            "samples in one array instead of Python's objects",
        ),
        ("java.lang.OutOfMemoryError: Direct buffer memory", "limit", "room for the classes, or the direct buffers"),
        (
            "Native memory allocation (mmap) failed to map 715653120 bytes for committing reserved memory.",
            "memory already full",
            "a smaller heap",
        ),
        (
            "systemd-oomd[99]: Killed /user.slice/x.scope due to memory pressure for /user.slice being 61.0% > 50.00% for > 20s",
            "machine out of memory",
            "less at once, or a larger share for the unit",
        ),
        (
            "Task in /kubepods/besteffort/pod7/a killed as a result of limit of /kubepods/besteffort/pod7\n"
            "memory: usage 262144kB, limit 262144kB, failcnt 5\nMemory cgroup out of memory: Kill process 12 (celery) score 9",
            "limit",
            "raise the pod's limit",
        ),
        (
            "The node was low on resource: memory. Container api was using 800Mi, which exceeds its request of 0.",
            "machine out of memory",
            "request what it uses",
        ),
        (
            "OOM when allocating tensor with shape[90000,8192] and type float on /job:localhost/replica:0/task:0/device:GPU:0 by "
            "allocator GPU_0_bfc [Op:StatelessRandomUniformV2]",
            "true need",
            "fewer inputs to that layer",
        ),
        (
            "external/xla/xla/stream_executor/cuda_driver.cc:1060] failed to allocate 30.00GiB (32212254720 bytes) from device: "
            "CUDA_ERROR_OUT_OF_MEMORY: out of memory",
            "preallocation",
            "let JAX take memory as it needs it",
        ),
        (
            "julia> zeros(200_000, 200_000)\nERROR: OutOfMemoryError()",
            "true need",
            "smaller numbers, sparse, or on disk",
        ),
        ("LINK : fatal error LNK1102: out of memory", "true need", "compiler and linker of 64 bits"),
        (
            "# Can't save in background: fork: Cannot allocate memory",
            "memory already full",
            "let the kernel promise memory",
        ),
        (
            "I always run into CUDA out of memory in the second epoch. I sum up epoch_loss += loss in the loop.",
            "leak",
            "keep numbers of a step",
        ),
        (
            "The worker got killed at 99% memory, it does pl.scan_parquet(p).collect()",
            "killed",
            "let Polars stream it",
        ),
        ("Why does sklearn use all of my 32 GB RAM?", "true need", "learn in pieces"),
        (
            "CUDA out of memory. Tried to allocate 9.00 GiB (GPU 0; 11.00 GiB total capacity; 500.00 MiB already allocated; "
            "9.10 GiB free; 20.00 MiB cached)",
            "refused though free",
            "less in that one step",
        ),
        (
            "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 268435456 bytes. Yet the GPU has enough "
            "free memory.",
            "other process",
            "end what else is on the card",
        ),
        (
            "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 268435456 bytes, with 30 GB of memory "
            "still free",
            "other process",
            "end what else is on the card",
        ),
        (
            "MemoryError: Unable to allocate 2.00 GiB for an array with shape (512, 512, 1024) and data type float64. My machine "
            "has plenty of memory.",
            "limit",
            "see which limit it meets",
        ),
        (
            "I don't have enough memory. MemoryError: Unable to allocate 2.00 GiB for an array with shape (512, 512, 1024) and "
            "data type float64",
            "true need",
            "make less of it at once",
        ),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.", "killed", "fewer workers"),
        (
            "ketos, of kraken: RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.",
            "killed",
            "fewer workers",
        ),
        ("step 9\n\n**Killed**\n", "killed", "see whether it was memory"),
        (
            "pip install jax\nmy model ran out of memory trying to allocate 5.00GiB on the GPU",
            "true need",
            "less at once: a smaller batch",
        ),
        (
            "the webui says: DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes. txt2img",
            "true need",
            "a quantized model",
        ),
        (
            "OOM when allocating tensor with shape[400000,512] and type float on /job:localhost/replica:0/task:0/device:GPU:0 by "
            "allocator GPU_0_bfc. A batch size of 8 or 4 did not help",
            "true need",
            "fewer inputs to that layer",
        ),
        (
            "pool.cc:9] Resource exhausted: Failed to allocate request for 32.00MiB (33554432B) on device ordinal 0\n"
            'Traceback (most recent call last):\n  File "use.py", line 3, in <module>\n    net = Net(params)\n'
            '  File "net.py", line 9, in __init__\n    self.state = self.init_xmap(key)\n  File "jax/core.py", line 5, in bind\n',
            "memory already full",
            "weights in 16 bits",
        ),
        ("the 7B model doesn't load in flax: RESOURCE_EXHAUSTED", "true need", "weights in 16 bits"),
        (
            "np.meshgrid(a, b, c)\nMemoryError: Unable to allocate 64.0 GiB for an array with shape (2048, 2048, 2048) and data "
            "type int64",
            "true need",
            "keep the axes of the grid apart",
        ),
        ("I get a memory error when I pickle the data set in train.npy", "true need", "stream large arrays"),
        ("enforce fail at CPUAllocator.cpp in the evaluation, why?", "true need", "evaluation: fewer samples at once"),
        (
            "[enforce fail at CPUAllocator.cpp:56] posix_memalign(&data, gAlignment, nbytes) == 0. 12 vs 0",
            "true need",
            "less at once",
        ),
        (
            "enhance.py: try --tile\nDefaultCPUAllocator: can't allocate memory: you tried to allocate 100663296 bytes.",
            "memory already full",
            "work through the picture in tiles",
        ),
        (
            "CUDA out of memory. Tried to allocate 60.00 MiB (GPU 0; 2.00 GiB total capacity; 1.50 GiB already allocated; "
            "0 bytes free; 1.70 GiB reserved in total by PyTorch)",
            "true need",
            "less at once",
        ),
        (
            "XLA:TPU compile permanent error. Ran out of memory in memory space vmem. Used 40.00M of 16.00M vmem. Exceeded vmem "
            "capacity by 24.00M",
            "request larger than the limit",
            "smaller blocks in that kernel",
        ),
        ("DataLoader worker (pid xxx) is killed by signal, is this a memory problem?", "killed", "fewer workers"),
        (
            "rocm_driver.cc:600] failed to allocate 2.00G (2147483648 bytes) from device: HIP_ERROR_OutOfMemory",
            "preallocation",
            "let TensorFlow",
        ),
        (
            "ComfyUI, KSampler: CUDA out of memory. Tried to allocate 300.00 GiB. GPU 0 has a total capacity of 16.00 GiB of "
            "which 7.00 GiB is free. Of the allocated memory 8.00 GiB is allocated by PyTorch, and 20.00 MiB is reserved by "
            "PyTorch but unallocated.",
            "request larger than the device",
            "a smaller picture",
        ),
        (
            '  File "train.py", line 9, in main\n    data = Data(torch.FloatTensor(features),\nRuntimeError: [enforce fail at '
            "CPUAllocator.cpp:73] data. DefaultCPUAllocator: not enough memory: you tried to allocate 300000000000 bytes.",
            "true need",
            "the data on disk",
        ),
        (
            "In training the memory allocation grows until DefaultCPUAllocator: can't allocate memory: you tried to allocate "
            "34359738368 bytes.",
            "leak",
            "find what grows",
        ),
        (
            "CUDA out of memory. Tried to allocate 64.00 MiB (GPU 0; 4.00 GiB total capacity; 700.00 MiB already allocated; "
            "120.00 MiB free; 740.00 MiB reserved in total by PyTorch)",
            "other process",
            "end what else is on the card",
        ),
        (
            "OOM when allocating tensor with shape[7,7,512,4096] even though a batch is only one picture",
            "true need",
            "a smaller model",
        ),
        (
            "jax: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2147483648 bytes. It is a machine without GPU.",
            "true need",
            "less at once",
        ),
        (
            "bash train.sh\njaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 20000000000 bytes",
            "true need",
            "a smaller batch, accumulated",
        ),
        (
            "Loading word embeddings of glove.txt, def load_dataset(id)\nTraceback (most recent call last):\n"
            '  File "vocabulary.py", line 2, in <module>\nMemoryError',
            "true need",
            "vectors of the words that occur only",
        ),
        (
            '  File "cli.py", line 50, in load_model\n    model.to("mps")\nRuntimeError: MPS backend ran out of memory',
            "true need",
            "a smaller model, in 16 bits",
        ),
        (
            "ogbn-products: DefaultCPUAllocator: can't allocate memory: you tried to allocate 64424509440 bytes. It requires "
            "about 60GB memory.",
            "true need",
            "a part of the graph at a time",
        ),
        (
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 400000800000400 bytes.",
            "broadcast explosion",
            "give both operands the same shape",
        ),
        (
            "object_detection: OOM when allocating tensor with shape[300,17,17,1088] and type float on "
            "/job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc",
            "true need",
            "fewer proposals",
        ),
    ],
)
def test_words_beside_the_message_decide_cause_and_first_advice(text, cause, first):
    found = outsize.explain(text)
    assert str(found.cause.name) == cause
    assert found.remedies[0].name.startswith(first)


@pytest.mark.parametrize(
    "text",
    [
        "The memory usage grows with the batch, and then falls when the step ends.",
        "How to avoid that memory keeps growing until it crashes",
        "RAM usage increases with num_workers; see the table below.",
    ],
)
def test_words_about_memory_that_end_nothing_are_no_failure(text):
    assert outsize.explain(text).failure is None
