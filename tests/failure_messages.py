"""Messages of every format in words and numbers of our own, with what a careful reader takes from each."""

GiB, MiB, KiB = 2**30, 2**20, 2**10


def gib(number: float) -> int:
    return round(number * GiB)


def mib(number: float) -> int:
    return round(number * MiB)


V2 = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 3 has a total capacity of "
    "23.65 GiB of which "
    "101.25 MiB is free. Including non-PyTorch memory, this process has 23.54 GiB memory in use. Of the allocated "
    "memory 22.75 GiB "
    "is allocated by PyTorch, and 311.50 MiB is reserved by PyTorch but unallocated. If reserved but unallocated "
    "memory is large "
    "try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for "
    "Memory Management"
)
FRAGMENTED = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 39.50 "
    "GiB of which "
    "1.25 GiB is free. Including non-PyTorch memory, this process has 38.20 GiB memory in use. Of the allocated "
    "memory 27.00 GiB "
    "is allocated by PyTorch, and 10.70 GiB is reserved by PyTorch but unallocated."
)
CROWDED = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 47.50 "
    "GiB of which "
    "900.00 MiB is free. Process 4711 has 30.25 GiB memory in use. Process 815 has 9.00 GiB memory in use. "
    "Including non-PyTorch "
    "memory, this process has 7.30 GiB memory in use. Of the allocated memory 6.80 GiB is allocated by PyTorch, "
    "and 21.00 MiB is "
    "reserved by PyTorch but unallocated."
)
CAPPED = (
    "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 60.00 GiB "
    "is free. Including "
    "non-PyTorch memory, this process has 18.90 GiB memory in use. 19.77 GiB allowed; Of the allocated memory "
    "18.10 GiB is "
    "allocated by PyTorch, and 210.00 MiB is reserved by PyTorch but unallocated."
)
GRAPHS = (
    "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 120.00 MiB "
    "is free. "
    "Including non-PyTorch memory, this process has 78.90 GiB memory in use. Of the allocated memory 78.00 GiB is "
    "allocated by "
    "PyTorch, with 31.00 GiB allocated in private pools (e.g., CUDA Graphs), and 44.00 MiB is reserved by PyTorch "
    "but unallocated."
)
HUGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 150.00 GiB. GPU 0 has a total capacity of "
    "79.10 GiB of which "
    "78.00 GiB is free. Of the allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is reserved by "
    "PyTorch but unallocated."
)
WRAPPED = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 15.90 "
    "GiB of which 9.00 "
    "GiB is free. Including non-PyTorch memory, this process has 17179869184.00 GiB memory in use. 8.00 GiB "
    "allowed; Of the "
    "allocated memory 6.00 GiB is allocated by PyTorch, and 12.00 MiB is reserved by PyTorch but unallocated."
)

MESSAGES: list[tuple[str, str, dict[str, object]]] = [
    (
        "pytorch",
        V2,
        {
            "requested_bytes": mib(512),
            "device": "cuda:3",
            "total_bytes": gib(23.65),
            "free_bytes": mib(101.25),
            "allocated_bytes": gib(22.75),
        },
    ),
    ("pytorch", FRAGMENTED, {"requested_bytes": gib(2.5), "device": "cuda:0", "free_bytes": gib(1.25)}),
    (
        "pytorch",
        CROWDED,
        {"requested_bytes": gib(1.5), "device": "cuda:0", "allocated_bytes": gib(6.8), "limit_bytes": None},
    ),
    ("pytorch", CAPPED, {"limit_bytes": gib(19.77), "free_bytes": gib(60)}),
    ("pytorch", GRAPHS, {"allocated_bytes": gib(78), "reserved_bytes": None}),
    ("pytorch", HUGE, {"requested_bytes": gib(150), "allocated_bytes": 0}),
    ("pytorch", WRAPPED, {"limit_bytes": gib(8)}),
    (
        "pytorch",
        "RuntimeError: CUDA out of memory. Tried to allocate 96.00 MiB (GPU 1; 7.79 GiB total capacity; 6.01 GiB "
        "already "
        "allocated; 44.81 MiB free; 6.70 GiB reserved in total by PyTorch)",
        {
            "requested_bytes": mib(96),
            "device": "cuda:1",
            "total_bytes": gib(7.79),
            "free_bytes": mib(44.81),
            "allocated_bytes": gib(6.01),
            "reserved_bytes": gib(6.7),
        },
    ),
    (
        "pytorch",
        "RuntimeError: CUDA out of memory. Tried to allocate 12.50 MiB (GPU 0; 5.93 GiB total capacity; 4.80 GiB "
        "already "
        "allocated; 9.94 MiB free; 61.20 MiB cached)",
        {"requested_bytes": mib(12.5), "reserved_bytes": None, "free_bytes": mib(9.94)},
    ),
    (
        "pytorch",
        "RuntimeError: cuda runtime error (2) : out of memory at /build/aten/src/THC/THCStorage.cu:58",
        {"device": "cuda"},
    ),
    (
        "pytorch",
        "THCudaCheck FAIL file=/build/THC/generic/THCStorage.cu line=58 error=2 : out of memory",
        {"device": "cuda"},
    ),
    (
        "pytorch",
        "RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        {"device": "cuda"},
    ),
    ("pytorch", "torch.AcceleratorError: CUDA error: out of memory", {"device": "cuda"}),
    (
        "pytorch",
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.75 GiB. GPU 2 has a total capacity of "
        "63.98 GiB of "
        "which 812.00 MiB is free. Of the allocated memory 60.20 GiB is allocated by PyTorch, and 1.01 GiB is "
        "reserved by PyTorch but "
        "unallocated.",
        {"device": "hip:2", "requested_bytes": gib(1.75)},
    ),
    (
        "pytorch",
        "RuntimeError: XPU out of memory. Tried to allocate 900.00 MiB (GPU 0; 15.11 GiB total capacity; 14.00 "
        "GiB already "
        "allocated; 14.30 GiB reserved in total by PyTorch)",
        {"device": "xpu:0", "reserved_bytes": gib(14.3), "free_bytes": None},
    ),
    (
        "pytorch",
        "RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB (NPU 5; 60.97 GiB total capacity; 58.00 GiB "
        "already "
        "allocated; 58.00 GiB current active; 1.04 GiB free; 59.00 GiB reserved in total by PyTorch)",
        {"device": "npu:5", "free_bytes": gib(1.04)},
    ),
    (
        "pytorch",
        "RuntimeError: MPS backend out of memory (MPS allocated: 8.10 GiB, other allocations: 512.00 KiB, max "
        "allowed: 9.07 "
        "GiB). Tried to allocate 1.20 GiB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable "
        "upper limit",
        {"device": "mps", "requested_bytes": gib(1.2), "allocated_bytes": gib(8.1), "limit_bytes": gib(9.07)},
    ),
    (
        "pytorch",
        "torch.cuda.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently "
        "allocated     : 11.20 GiB\nRequested               : 75.00 MiB\nDevice limit            : 11.99 "
        "GiB\nFree (according to CUDA): "
        "0 bytes\nPyTorch limit (set by user-supplied memory fraction)\n                        : 17179869184.00 GiB",
        {
            "device": "cuda:0",
            "requested_bytes": mib(75),
            "total_bytes": gib(11.99),
            "free_bytes": 0,
            "allocated_bytes": gib(11.2),
        },
    ),
    (
        "pytorch",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:114] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried "
        "to allocate 987654321098 bytes. Error code 12 (Cannot allocate memory)",
        {"device": "cpu", "requested_bytes": 987654321098},
    ),
    (
        "pytorch",
        "RuntimeError: [enforce fail at C:\\build\\c10\\core\\impl\\alloc_cpu.cpp:72] data. DefaultCPUAllocator: "
        "not enough "
        "memory: you tried to allocate 4096000 bytes.",
        {"device": "cpu", "requested_bytes": 4096000},
    ),
    (
        "pytorch",
        "RuntimeError: DataLoader worker (pid 31337) is killed by signal: Bus error. It is possible that "
        "dataloader's workers "
        "are out of shared memory.",
        {"pid": 31337, "process": "DataLoader worker", "device": None},
    ),
    (
        "pytorch",
        "RuntimeError: DataLoader worker (pid 99) is killed by signal: Killed.",
        {"pid": 99, "process": "DataLoader worker"},
    ),
    (
        "pytorch",
        "RuntimeError: unable to write to file </torch_77_12345_0>: No space left on device (28)",
        {"device": None},
    ),
    (
        "pytorch",
        "RuntimeError: unable to mmap 8388608 bytes from file </torch_12_9>: Cannot allocate memory (12)",
        {"requested_bytes": 8388608},
    ),
    (
        "pytorch",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        {"device": "cuda"},
    ),
    ("pytorch", "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", {"device": "cuda"}),
    (
        "nccl",
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
        {"device": "cuda"},
    ),
    (
        "tensorflow",
        "ResourceExhaustedError: OOM when allocating tensor with shape[1,256,1024,1021] and type float on "
        "/job:localhost/replica:0/task:0/device:GPU:1 by allocator GPU_1_bfc [Op:AddV2]",
        {"shape": (1, 256, 1024, 1021), "dtype": "float", "device": "cuda:1", "requested_bytes": None},
    ),
    (
        "tensorflow",
        "Resource exhausted: OOM when allocating tensor with shape[384,192] and type half on "
        "/job:localhost/replica:0/task:0/device:CPU:0 by allocator cpu",
        {"shape": (384, 192), "dtype": "half", "device": "cpu"},
    ),
    (
        "tensorflow",
        "OOM when allocating tensor of shape [3,3,512,512] and type double",
        {"shape": (3, 3, 512, 512), "dtype": "double"},
    ),
    (
        "tensorflow",
        "Allocator (GPU_0_bfc) ran out of memory trying to allocate 1.27GiB (rounded to 1363654656)requested by "
        "op Conv2D",
        {"requested_bytes": 1363654656, "device": "cuda:0"},
    ),
    (
        "tensorflow",
        "Stats: \nLimit:                      6000000000\nInUse:                      5900000000\nMaxInUse:       "
        "           "
        " 5950000000\nNumAllocs:                      12345\nMaxAllocSize:               1200000000\n",
        {"limit_bytes": 6000000000, "allocated_bytes": 5900000000},
    ),
    (
        "tensorflow",
        "W tensorflow/core/framework/cpu_allocator_impl.cc:82] Allocation of 617283072 exceeds 10% of free system "
        "memory.",
        {"requested_bytes": 617283072, "device": "cpu"},
    ),
    (
        "tensorflow",
        "failed to allocate 10.20G (10952166605 bytes) from device: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
        {"requested_bytes": 10952166605, "device": "cuda"},
    ),
    (
        "tensorflow",
        "failed to alloc 8589934592 bytes on host: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
        {"requested_bytes": 8589934592, "device": "cpu"},
    ),
    (
        "tensorflow",
        "gpu_async_0 cuMemAllocAsync failed to allocate 29491200 bytes: CUDA error: out of memory\n Reported by "
        "CUDA: Free "
        "memory/Total memory: 3735552/6442123264",
        {"requested_bytes": 29491200, "free_bytes": 3735552, "total_bytes": 6442123264, "device": "cuda:0"},
    ),
    (
        "tensorflow",
        "InternalError: Failed copying input tensor from /job:localhost/device:CPU:0 to "
        "/job:localhost/device:GPU:0 in order to "
        "run _EagerConst: Dst tensor is not initialized.",
        {"device": "cuda:0"},
    ),
    (
        "jax",
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate "
        "21474836480 bytes.",
        {"requested_bytes": 21474836480, "device": None},
    ),
    (
        "jax",
        "RESOURCE_EXHAUSTED: Failed to allocate request for 32.50GiB (34896609280B) on device ordinal 2",
        {"requested_bytes": 34896609280, "device": "cuda:2"},
    ),
    (
        "jax",
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 18.10G "
        "of 15.48G hbm. "
        "Exceeded hbm capacity by 2.62G.",
        {"device": "tpu", "limit_bytes": gib(15.48), "requested_bytes": None},
    ),
    (
        "jax",
        "RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 128.00M. That was not "
        "possible. There are 68.85M "
        "free.; (0x0x0_HBM0)",
        {"requested_bytes": mib(128), "free_bytes": mib(68.85)},
    ),
    (
        "numpy",
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 34.4 TiB for an array with shape (3075200, "
        "3075200) and data "
        "type float32",
        {"shape": (3075200, 3075200), "dtype": "float32", "device": "cpu", "requested_bytes": round(34.4 * 2**40)},
    ),
    (
        "numpy",
        "MemoryError: Unable to allocate 96. GiB for an array with shape (12884901888,) and data type <U7",
        {"shape": (12884901888,), "dtype": "<U7", "requested_bytes": 96 * GiB},
    ),
    (
        "numpy",
        "MemoryError: Unable to allocate array with shape (81, 900000, 40) and data type object",
        {"shape": (81, 900000, 40), "dtype": "object"},
    ),
    (
        "arrow",
        "pyarrow.lib.ArrowMemoryError: realloc of size 2147483712 failed",
        {"requested_bytes": 2147483712, "device": "cpu"},
    ),
    (
        "cupy",
        "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 2,500,000,256 bytes (allocated so far: "
        "9,000,000,000 bytes, limit "
        "set to: 10,000,000,000 bytes).",
        {"requested_bytes": 2500000256, "allocated_bytes": 9000000000, "limit_bytes": 10**10, "device": "cuda"},
    ),
    (
        "rmm",
        "MemoryError: std::bad_alloc: out_of_memory: RMM failure at:/opt/rmm/pool_memory_resource.hpp:257: "
        "Maximum pool size exceeded "
        "(failed to allocate 5.00 GiB)",
        {"requested_bytes": 5 * GiB, "device": "cuda"},
    ),
    (
        "xgboost",
        "Memory allocation error on worker 0: std::bad_alloc: cudaErrorMemoryAllocation: out of memory\n- Free "
        "memory: 1.50GB\n- "
        "Requested memory: 2.25GB",
        {"free_bytes": gib(1.5), "requested_bytes": gib(2.25)},
    ),
    (
        "numba",
        "numba.cuda.cudadrv.driver.CudaAPIError: [2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY",
        {"device": "cuda"},
    ),
    (
        "onnxruntime",
        "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : "
        "/onnxruntime_src/onnxruntime/core/framework/bfc_arena.cc:342 Failed to "
        "allocate memory for requested buffer of size 51539607552",
        {"requested_bytes": 51539607552, "device": None},
    ),
    (
        "onnxruntime",
        "CUDA failure 2: out of memory ; GPU=1 ; hostname=box ; expr=cudaMalloc((void**)&p, size);",
        {"device": "cuda:1"},
    ),
    (
        "tensorrt",
        "[E] Error Code 1: Cuda Runtime (out of memory)\n[W] Requested amount of GPU memory (4294967296 bytes) "
        "could not be "
        "allocated.",
        {"requested_bytes": 4294967296, "device": "cuda"},
    ),
    (
        "vllm",
        "ValueError: Free memory on device cuda:1 (20.10/23.64 GiB) on startup is less than desired GPU memory "
        "utilization (0.9, "
        "21.28 GiB).",
        {"device": "cuda:1", "free_bytes": gib(20.1), "total_bytes": gib(23.64), "requested_bytes": gib(21.28)},
    ),
    (
        "vllm",
        "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is "
        "needed, which is "
        "larger than the available KV cache memory (5.25 GiB).",
        {"requested_bytes": 16 * GiB, "free_bytes": gib(5.25)},
    ),
    ("vllm", "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.", {}),
    (
        "ggml",
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 7605.34 MiB on device 1: cudaMalloc failed: out "
        "of memory\n"
        "alloc_tensor_range: failed to allocate CUDA1 buffer of size 7974777344",
        {"requested_bytes": 7974777344, "device": "cuda:1"},
    ),
    (
        "ggml",
        "ggml_vulkan: Device memory allocation of size 2147483648 failed.\nggml_vulkan: vk::Device::allocateMemory: "
        "ErrorOutOfDeviceMemory",
        {"requested_bytes": 2147483648, "device": "vulkan"},
    ),
    (
        "metal",
        "ggml_metal_graph_compute: command buffer 0 failed with status 5\nerror: Insufficient Memory "
        "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        {"device": "metal"},
    ),
    (
        "ollama",
        "Error: model requires more system memory (21.5 GiB) than is available (12.3 GiB)",
        {"requested_bytes": gib(21.5), "free_bytes": gib(12.3), "device": "cpu"},
    ),
    (
        "paddle",
        "ResourceExhaustedError: Out of memory error on GPU 3. Cannot allocate 2.250000GB memory on GPU 3, "
        "9.125000GB memory has been "
        "allocated and available memory is only 1.750000GB.",
        {"device": "cuda:3", "requested_bytes": gib(2.25), "allocated_bytes": gib(9.125), "free_bytes": gib(1.75)},
    ),
    (
        "mxnet",
        "mxnet.base.MXNetError: [10:11:12] src/storage/./pooled_storage_manager.h:161: cudaMalloc retry failed: "
        "out of memory",
        {"device": "cuda"},
    ),
    (
        "julia",
        "Out of GPU memory trying to allocate 2.500 GiB\nEffective GPU memory usage: 97.10% (7.700 GiB/7.930 "
        "GiB)\nMemory pool usage: "
        "6.500 GiB (7.250 GiB reserved)",
        {
            "requested_bytes": gib(2.5),
            "total_bytes": gib(7.93),
            "allocated_bytes": gib(6.5),
            "reserved_bytes": gib(7.25),
        },
    ),
    ("r", "Error: cannot allocate vector of size 7.5 Gb", {"requested_bytes": gib(7.5), "device": "cpu"}),
    ("rust", "memory allocation of 34359738368 bytes failed", {"requested_bytes": 34359738368, "device": "cpu"}),
    ("java", 'Exception in thread "main" java.lang.OutOfMemoryError: GC overhead limit exceeded', {"device": None}),
    (
        "java",
        "# There is insufficient memory for the Java Runtime Environment to continue.\n# Native memory allocation "
        "(mmap) failed to map "
        "715849728 bytes for committing reserved memory.",
        {"requested_bytes": 715849728},
    ),
    ("node", "FATAL ERROR: Reached heap limit Allocation failed - JavaScript heap out of memory", {}),
    (
        "ray",
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\nMemory on the "
        "node (IP: 10.1.2.3, ID: "
        "abc) where the task (task ID: def, name=load_shard, pid=5150, memory used=11.50GB) was running was "
        "60.25GB / 62.50GB (0.964), which "
        "exceeds the memory usage threshold of 0.95.",
        {"pid": 5150, "process": "load_shard", "total_bytes": gib(62.5)},
    ),
    (
        "dask",
        "distributed.nanny.memory - WARNING - Worker tcp://127.0.0.1:41001 (pid=2020) exceeded 95% memory budget. "
        "Restarting...",
        {"pid": 2020},
    ),
    (
        "spark",
        "Container killed by YARN for exceeding memory limits. 11.1 GB of 11 GB physical memory used.",
        {"limit_bytes": 11 * GiB},
    ),
    (
        "slurm",
        "slurmstepd: error: Detected 2 oom-kill event(s) in StepId=777.0. Some of your processes may have been "
        "killed by the cgroup "
        "out-of-memory handler.",
        {"pid": None},
    ),
    (
        "slurm",
        "job.sh: line 7: 90210 Killed                  ./bin/solver --all\nslurmstepd: error: Detected 1 oom_kill "
        "event in "
        "StepId=88.batch.",
        {"pid": 90210, "process": "solver"},
    ),
    (
        "slurm",
        "slurmstepd: error: Job 1234 exceeded memory limit (9000000 > 8388608), being killed",
        {"limit_bytes": None},
    ),
    (
        "kubernetes",
        "    Limits:\n      cpu:     2\n      memory:  768Mi\n    Last State:     Terminated\n      Reason:       "
        "OOMKilled\n      "
        "Exit Code:    137",
        {"limit_bytes": mib(768)},
    ),
    (
        "linux",
        "[91234.5] Out of memory: Killed process 4242 (train.py) total-vm:98765432kB, anon-rss:61234567kB, "
        "file-rss:0kB, shmem-rss:0kB",
        {"pid": 4242, "process": "train.py", "limit_bytes": None},
    ),
    (
        "linux",
        "python3 invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0\nmemory: usage 1048576kB, limit "
        "1048576kB, failcnt 12\nMemory "
        "cgroup out of memory: Killed process 616 (python3) total-vm:2097152kB, anon-rss:1040000kB, file-rss:0kB",
        {"pid": 616, "process": "python3", "limit_bytes": GiB},
    ),
    (
        "systemd",
        "systemd-oomd[400]: Killed /user.slice/app.scope due to memory pressure for /user.slice being 61.20% > "
        "50.00% for > 20s",
        {},
    ),
    ("linux", "OSError: [Errno 12] Cannot allocate memory", {"device": None}),
    (
        "c++",
        "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc",
        {"device": None},
    ),
    ("python", 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nMemoryError', {"device": None}),
    (
        "hdf5",
        "OSError: Unable to synchronously create file (unable to allocate memory block of 1073741824 bytes)",
        {"requested_bytes": GiB, "device": "cpu"},
    ),
    (
        "hdf5",
        "IOError: Can't prepare for writing data (memory allocation failed for raw data chunk)",
        {"device": "cpu"},
    ),
    (
        "hdf5",
        "HDF5-DIAG: Error detected in HDF5 (1.14.3) thread 1:\n  #000: H5D.c line 1061 in H5Dread(): can't read data\n"
        "    major: Dataset\n    minor: Read failed\n  #004: H5Dchunk.c line 4470 in H5D__chunk_lock(): memory "
        "allocation failed for raw data chunk\n    major: Resource unavailable\n    minor: No space available for allocation",
        {"requested_bytes": None, "device": "cpu"},
    ),
    (
        "hdf5",
        'HDF5ExtError: HDF5 error back trace\n\n  File "H5Dio.c", line 173, in H5Dread\n    can\'t read data\n'
        '  File "H5Dchunk.c", line 3074, in H5D__chunk_lock\n    memory allocation failed for raw data chunk',
        {"device": "cpu"},
    ),
    ("netcdf", "RuntimeError: NetCDF: Memory allocation (malloc) failure", {"device": "cpu"}),
    ("gdal", "ERROR 2: CPLMalloc(): Out of memory allocating 805306368 bytes.", {"requested_bytes": mib(768)}),
    ("gdal", "CPLE_OutOfMemoryError: raster.cpp, 90: cannot allocate 5x70000000 bytes", {"requested_bytes": None}),
    ("imagemagick", "convert: memory allocation failed `in.tif' @ error/tiff.c/ReadTIFFImage/1800.", {"device": "cpu"}),
    (
        "gromacs",
        "Not enough memory. Failed to realloc 805306368 bytes for nbl->ci, nbl->ci=0x0",
        {"requested_bytes": mib(768)},
    ),
    (
        "petsc",
        "[0]PETSC ERROR: Out of memory. This could be due to allocating too large an object\n[0]PETSC ERROR: Memory "
        "requested 3221225472",
        {"requested_bytes": 3 * GiB},
    ),
    ("pytorch", "Error out of memory at line 71 in file /src/csrc/ops.cu", {"device": "cuda"}),
    ("ggml", "llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache", {}),
    (
        "mxnet",
        "MXNetError: [09:00:00] src/storage/./pooled_storage_manager.h:161: cudaMalloc failed: out of memory",
        {"device": "cuda"},
    ),
    (
        "openvino",
        "[GPU] Exceeded max size of memory object allocation: requested 6442450944 bytes, but max alloc size supported "
        "by device is 4294959104 bytes.",
        {"requested_bytes": 6 * GiB, "limit_bytes": 4294959104},
    ),
    (
        "pytorch",
        "RuntimeError: Could not allocate tensor with 536870912 bytes. There is not enough GPU video memory available!",
        {"requested_bytes": mib(512), "device": "dml"},
    ),
    (
        "pytorch",
        "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::536870912 (512)MB",
        {"requested_bytes": mib(512)},
    ),
    ("node", "#\n# Fatal process out of memory: Zone\n#", {}),
    ("javascript", "Uncaught RangeError: Array buffer allocation failed", {"device": "cpu"}),
    ("compiler", "collect2: fatal error: ld terminated with signal 9 [Killed]", {}),
    (
        "compiler",
        "cc1plus: out of memory allocating 131072 bytes after a total of 9999360 bytes",
        {"requested_bytes": 131072},
    ),
    ("matlab", 'Out of memory. Type "help memory" for your options.', {"device": "cpu"}),
    ("fortran", "Error allocating 6442450944 bytes\nError termination. Backtrace:", {"requested_bytes": 6 * GiB}),
    (
        "mysql",
        "ERROR 1037: Out of memory; restart server and try again (needed 262144 bytes)",
        {"requested_bytes": 2**18},
    ),
    (
        "datafusion",
        "Resources exhausted: Failed to allocate additional 4194304 bytes for ExternalSorter[0] with 8388608 bytes "
        "already allocated - maximum available is 1048576",
        {"requested_bytes": mib(4), "allocated_bytes": mib(8)},
    ),
    ("trino", "Query exceeded per-node memory limit of 12GB [Allocated: 11GB, Delta: 2GB]", {"limit_bytes": 12 * GiB}),
    ("macos", "Python(9) malloc: *** mmap(size=16777216) failed (error code=12)", {"requested_bytes": mib(16)}),
    ("linux", "sort: memory exhausted", {"device": "cpu"}),
    ("spark", "The executor with id 6 exited with exit code 137(SIGKILL, possible container OOM).", {}),
    (
        "spark",
        "ExecutorLostFailure (executor 2 exited caused by one of the running tasks) Reason: Container from a bad node. "
        "Exit status: 137.",
        {},
    ),
    ("slurm", "slurmstepd: error: Step 12.0 exceeded virtual memory limit (9000000 > 8388608), being killed", {}),
    (
        "lambda",
        "REPORT RequestId: 1-2 Memory Size: 512 MB Max Memory Used: 512 MB\nRequestId: 1-2 Error: Runtime exited with "
        "error: signal: killed",
        {"limit_bytes": mib(512)},
    ),
    ("notebook", "Your session crashed after using all available RAM.", {}),
    ("docker", '"State": {"Status": "exited", "OOMKilled": true, "ExitCode": 137}', {}),
    ("linux", "WorkerLostError: Worker exited prematurely: signal 9 (SIGKILL) Job: 3.", {}),
    ("linux", "job.service: Main process exited, code=killed, status=9/KILL", {}),
    ("linux", "The command '/bin/sh -c make' returned a non-zero code: 137", {}),
    ("linux", "Killed", {"pid": None}),
    ("linux", "Command exited with code 137", {}),
]
"""(framework, text, fields that must be exactly so)."""

LOOKALIKES = [
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "RuntimeError: CUDA error: device-side assert triggered",
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x100 and 128x10)",
    "OSError: [Errno 28] No space left on device",
    "OSError: [Errno 24] Too many open files",
    "ImportError: libgomp.so.1: cannot allocate memory in static TLS block",
    "MemoryError: Cannot allocate write+execute memory for ffi.callback()",
    "grpc RESOURCE_EXHAUSTED: Received message larger than max (5000000 vs. 4194304)",
    "google.api_core.exceptions.ResourceExhausted: 429 Quota exceeded for requests per minute",
    "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072, Hardware limit: 101376.",
    "slurmstepd: error: *** JOB 9 ON n1 CANCELLED AT 2024-01-01T00:00:00 DUE TO TIME LIMIT ***",
    "Last State: Terminated\n Reason: Error\n Exit Code: 143",
    '"State": {"Status": "exited", "OOMKilled": false, "ExitCode": 1}',
    "java.lang.OutOfMemoryError: unable to create native thread: possibly out of memory or process/resource "
    "limits reached",
    "UserWarning: resource_tracker: There appear to be 3 leaked shared_memory objects to clean up at shutdown",
    "ValueError: operands could not be broadcast together with shapes (3,4) (4,3)",
    "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "AttributeError: module 'torch.cuda' has no attribute 'OutOfMemoryError'",
    "OSError: Unable to synchronously open file (file signature not found)",
    "OSError: Can't synchronously read data (filter returned failure during read)",
    "HDF5-DIAG: #005: H5MF.c line 700 in H5MF_alloc(): file allocation request failed\n  major: Resource unavailable\n"
    "  minor: No space available for allocation",
    "RuntimeError: NetCDF: HDF error",
    "lmdb.MapFullError: mdb_put: MDB_MAP_FULL: Environment mapsize limit reached",
    "ExecutorLostFailure (executor 3 exited caused by one of the running tasks) Reason: Remote RPC client disassociated.",
    "job.service: Main process exited, code=exited, status=1/FAILURE",
    "Query exceeded maximum time limit of 5.00m",
    "then V8 will crash with V8::FatalProcessOutOfMemory.",
    "Error an illegal memory access was encountered at line 118 in file /src/csrc/ops.cu",
    "Segmentation fault (core dumped)",
    "",
    "epoch 3: loss 0.31, memory 11.2 GiB allocated, 14.0 GiB reserved",
]
"""Failures, warnings and logs that are not out of memory."""
