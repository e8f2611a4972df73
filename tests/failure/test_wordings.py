"""Wordings people paste beside the plain ones: numbers left out, titles before the message, other programs' names for the
same failure, and the traces of mail, editors and terminals."""

import json

import pytest

from outsize.failure.message import read

GiB, MiB = 2**30, 2**20


def said(text):
    """What a message says, without what it leaves open."""
    failure = read(text)
    assert failure is not None, text
    names = ("requested_bytes", "shape", "dtype", "device", "total_bytes", "free_bytes", "allocated_bytes")
    names += ("reserved_bytes", "limit_bytes", "pid", "process")
    return {name: value for name in names if (value := getattr(failure, name)) is not None}


WORDINGS = {
    "numpy, number elided": (
        "MemoryError: Unable to allocate ... for an array with shape (70, 9000) and dtype float32",
        {"device": "cpu", "shape": (70, 9000), "dtype": "float32"},
    ),
    "numpy, glued to the next word": (
        "MemoryError: Unable to allocate 3.00 GiB for an array with shape (402653184,) and data type float64Then it died",
        {"device": "cpu", "requested_bytes": 3 * GiB, "shape": (402653184,), "dtype": "float64"},
    ),
    "cupy, numbers elided": (
        "OutOfMemoryError: Out of memory allocating N bytes (allocated so far: M bytes).",
        {"device": "cuda"},
    ),
    "rocm behind a cuda name": (
        "alloc_buffer: allocating 2048.00 MiB on device 1: cudaMalloc failed: out of memory\n"
        "alloc_tensor_range: failed to allocate ROCm1 buffer of size 2147483904",
        {"device": "hip:1", "requested_bytes": 2147483904},
    ),
    "xla on rocm": (
        "E rocm_driver.cc:12] failed to allocate 3.00GiB (3221225472 bytes) from device: HIP_ERROR_OutOfMemory\n"
        "RESOURCE_EXHAUSTED: Failed to allocate request for 3.00GiB (3221225472B) on device ordinal 2",
        {"device": "hip:2", "requested_bytes": 3 * GiB},
    ),
    "tpu scalar memory": (
        "XLA:TPU compile permanent error. Ran out of memory in memory space smem. Used 1.50M of 1.00M smem.",
        {"device": "tpu", "limit_bytes": MiB},
    ),
    "scoped memory of a tpu": (
        "RESOURCE_EXHAUSTED: Allocation (size=25165824) would exceed memory (size=16777216) :: #allocation7 "
        "[shape = 'u8[25165824]{0}', space=vmem, size = 0x1800000, scoped]",
        {"device": "tpu", "requested_bytes": 24 * MiB, "limit_bytes": 16 * MiB},
    ),
    "child sacrificed": (
        "Out of memory: Kill process 700 (launcher) score 900 or sacrifice child\n"
        "Killed process 703 (worker) total-vm:9000kB, anon-rss:8000kB, file-rss:0kB",
        {"pid": 703, "process": "worker"},
    ),
    "kernel without a pid": (
        "Memory cgroup out of memory: Killed process (indexer) total-vm:4096kB",
        {"process": "indexer"},
    ),
    "vllm, numbers elided": (
        "ValueError: Free memory on device cuda:1 (... GiB) on startup is less than desired GPU memory utilization "
        "(0.9, ... GiB).",
        {"device": "cuda:1"},
    ),
    "xla refusal, shortened": (
        "RESOURCE_EXHAUSTED: Attempting to reserve 6.00G ... There are 5.50G free",
        {"requested_bytes": 6 * GiB, "free_bytes": 11 * GiB // 2},
    ),
    "vllm on xpu": (
        "ValueError: Free memory on device xpu:1 (3.5/16.0 GiB) on startup is less than desired GPU memory utilization "
        "(0.5, 8.0 GiB).",
        {"device": "xpu:1", "requested_bytes": 8 * GiB, "total_bytes": 16 * GiB, "free_bytes": 7 * GiB // 2},
    ),
    "ray summary, shortened": ("3 Workers ... killed due to memory pressure (OOM)", {}),
    "mps retold": (
        "MPS backend out of memory (MPS allocated 6.50 GiB, other allocations 1.00 GiB, max 8.00 GiB)",
        {"device": "mps", "allocated_bytes": 13 * GiB // 2, "limit_bytes": 8 * GiB},
    ),
    "cudaMallocAsync retold": (
        "Allocation on device 0 would exceed allowed memory. Currently allocated 9.50 GiB, Requested 1.50 GiB",
        {"device": "cuda:0", "allocated_bytes": 19 * GiB // 2, "requested_bytes": 3 * GiB // 2},
    ),
    "kubernetes event with the process": (
        "Warning  OOMKilled  2m  kubelet  Memory cgroup out of memory: Kill process 88 (api) score 1200 or sacrifice child",
        {"pid": 88, "process": "api"},
    ),
    "tensorrt without the word gpu": (
        "[TRT] [W] Requested amount of memory (268435456 bytes) could not be allocated",
        {"device": "cuda", "requested_bytes": 256 * MiB},
    ),
    "joined in a program's source": (
        '    "Available memory of 4096"\n        + " is smaller than requested bytes of 8192");',
        {"requested_bytes": 8192, "free_bytes": 4096},
    ),
    "loader without a pid": ("DataLoader worker killed by signal: Bus error", {"process": "DataLoader worker"}),
    "caching allocator of an NPU": (
        "NPU out of memory. NPUWorkspaceAllocator tried to allocate 2.50 GiB(NPU 3; 60.00 GiB total capacity; "
        "1.25 GiB free).",
        {"device": "npu:3", "requested_bytes": 5 * GiB // 2, "total_bytes": 60 * GiB, "free_bytes": 5 * GiB // 4},
    ),
    "device named by the graph": (
        "OOM when allocating tensor with shape[7,9,11]\n"
        ' [[Node: t = Transpose[_device="/job:localhost/replica:0/task:0/gpu:1"]]]',
        {"shape": (7, 9, 11), "device": "cuda:1"},
    ),
    "ggml runtime": (
        "CUDA error: out of memory\n  current device: 2, in function alloc at ggml-cuda.cu:44",
        {"device": "cuda:2"},
    ),
    "mlx buffer": (
        "[metal::malloc] Attempting to allocate 9000000000 bytes which is greater than the maximum allowed buffer size of "
        "8000000000 bytes.",
        {"device": "metal", "requested_bytes": 9000000000, "limit_bytes": 8000000000},
    ),
    "php": (
        "Fatal error: Allowed memory size of 268435456 bytes exhausted (tried to allocate 4096 bytes)",
        {"limit_bytes": 268435456, "requested_bytes": 4096},
    ),
    "compiler": ("c++: fatal error: Killed signal terminated program cc1plus", {"process": "cc1plus"}),
    "faiss": (
        "alloc fail type TemporaryMemoryBuffer dev 3 space Device stream 0x1 size 640000 bytes "
        "(cudaMalloc error out of memory [2])",
        {"device": "cuda:3", "requested_bytes": 640000},
    ),
    "arrow growing": ("ArrowMemoryError: realloc of size 123456 failed", {"device": "cpu", "requested_bytes": 123456}),
    "return code": ("RuntimeError: command failed (returncode=-9): solver --all", {}),
    "killed, in quotes": ('the terminal ends with the message "Killed" and nothing else', {}),
    "killed, told": ("After an hour the process gets killed because of the memory that it uses", {}),
    "killed, glued to a line": ("scanning 87% -> 1398103 records doneKilled", {}),
    "low swap of a Mac": (
        "low swap: killing largest compressed process with pid 77 (indexer)",
        {"pid": 77, "process": "indexer"},
    ),
    "told in words": ("I always get an out of memory error", {}),
    "told without a noun": ("I run it on one card and got out of memory.", {}),
    "told in Chinese": ("CUDA 内存不足。尝试分配 2.00 GiB 的内存", {"requested_bytes": 2 * GiB}),
    "memory error, told": ("On this file I get a MemoryError", {}),
    "memory error at the end of a line": ("x = images / 255.0 MemoryError", {}),
    "r, in other words": (
        "Error: can not allocate vector of size 3.0Gb",
        {"device": "cpu", "requested_bytes": 3 * GiB},
    ),
    "semaphores in shared memory": ("    self._rlock = ctx.Lock()\nOSError: [Errno 28] No space left on device", {}),
    "kernel stack": ("oom_kill_process from out_of_memory+0x218/0x34c", {}),
}


@pytest.mark.parametrize(("text", "expected"), WORDINGS.values(), ids=WORDINGS)
def test_another_wording_of_the_same_failure_is_read(text, expected):
    assert said(text) == expected


LOOKALIKES = [
    "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Segmentation fault.",
    '        case CUBLAS_STATUS_ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";',
    "transport/p2p.cc:77 NCCL WARN Cuda failure 217 'peer access is not supported between these two devices'",
    "429 RESOURCE_EXHAUSTED: rate limit exceeded",
    "RuntimeError: DataLoader worker (pid 88) is killed by signal: Terminated.",
    "failed (exitcode: -11) local_rank: 0 (pid: 4) of binary: /usr/bin/python",
    "kernel: OOM killer disabled.",
    "memory.events: low 0 high 0 max 0 oom 0 oom_kill 0",
    "The run peaked at 300 MiB of 512 MiB, with zero OOM or OOM-kill events.",
    "distributed.worker.memory - WARNING - Unmanaged memory use is high. This may indicate a memory leak",
    "ImportError: libgomp.so.1: cannot allocate memory in stat\nic TLS block",
    "Set a lower batch size if you run\nout of memory.",
    "This change fixes an out of memory error.",
    "OSError: [Errno 28] No space left on device: 'model.pt'",
    "Exception in background worker 3:\nValueError: x\nOne or more background workers are no longer alive.",
    "except torch.cuda.OutOfMemoryError:",
    "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE)",
    "The job was killed by the user.",
]


@pytest.mark.parametrize("text", LOOKALIKES)
def test_a_lookalike_stays_one_however_it_is_wrapped(text):
    assert read(text) is None


def test_a_title_without_numbers_does_not_hide_the_message():
    text = "OutOfGPUMemoryError: Out of GPU memory trying to allocate 2.000 GiB\n"
    text += "Effective GPU memory usage: 99.00% (7.500 GiB/8.000 GiB)"
    assert said(text) == {"device": "cuda", "requested_bytes": 2 * GiB, "total_bytes": 8 * GiB}


def test_the_first_of_several_failures_is_the_one_that_is_read():
    text = "".join(
        f"CUDA out of memory. Tried to allocate {n}.00 GiB. GPU {n} has a total capacity of 24.00 GiB\n" for n in (3, 5)
    )
    assert said(text) == {"device": "cuda:3", "requested_bytes": 3 * GiB, "total_bytes": 24 * GiB}


def test_mail_escapes_are_undone_and_plain_equal_signs_are_not():
    assert said("oom-kill:constraint=CONSTRAINT_NONE,global_oom,task=python,pid=2044,uid=0\n x =\n1")["pid"] == 2044
    mail = "> Out of memory: Killed process 1669 (indexer) total-=\nvm:105068kB, UID:1000=20\n> order=3D0"
    assert said(mail) == {"pid": 1669, "process": "indexer"}


LONG = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 72.00 MiB. GPU 0 has a total capacity of 47.50 GiB of which "
    "21.25 MiB is free. 40.00 GiB allowed; Of the allocated memory 39.25 GiB is allocated by PyTorch, and 311.50 MiB is reserved"
)


@pytest.mark.parametrize("width", range(40, 121))
def test_a_terminal_of_any_width_changes_nothing(width):
    cut = [LONG[start : start + width] for start in range(0, len(LONG), width)]
    assert said("\n".join(cut)) == said(LONG)
    assert said("\n".join("    # " + line for line in cut)) == said(LONG)


def test_counted_and_logged_lines_are_read_without_their_counts():
    lines = LONG.replace(". ", ".\n").split("\n")
    assert said("\n".join(f"{number:5d}  {line}" for number, line in enumerate(lines, 88))) == said(LONG)
    assert said("\n".join(f"3: {line}" for line in lines)) == said(LONG)
    assert said("\n".join(json.dumps({"log": line + "\n", "stream": "stderr"}) for line in lines)) == said(LONG)
    assert said("\n".join(f"2031-02-03T04:05:06.7Z stderr F {line}" for line in lines)) == said(LONG)
    assert said("<pre>" + "<br>".join(lines) + "</pre>") == said(LONG)
