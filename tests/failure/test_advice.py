# ruff: noqa: E501  messages are kept whole
"""The first advice is one that helps: it fits the program, the system it ran on and what it was doing."""

import pathlib
import re

import pytest

import outsize
from outsize.core.failure import CauseName
from outsize.failure.remedies.device import _BY_WORK, _ON_A_MAC
from outsize.failure.remedies.texts import read_texts

CARD = (
    "CUDA out of memory. Tried to allocate {need}. GPU 0 has a total capacity of 16.00 GiB of which {free} is free. Of the "
    "allocated memory {held} is allocated by PyTorch, and {slack} is reserved by PyTorch but unallocated."
)
FULL = CARD.format(need="90.00 MiB", free="12.00 MiB", held="15.20 GiB", slack="200.00 MiB")


def first(text):
    diagnosis = outsize.explain(text)
    return diagnosis.cause.name, diagnosis.remedies[0].how


def test_factors_are_advised_for_data_on_the_host_that_may_be_low_rank():
    numpys = "Unable to allocate {size} for an array with shape {shape} and data type {dtype}"
    for shape, dtype, advised in (
        ((3075200, 512), "float32", True), ((512, 512, 4096), "float64", True), ((2**30,), "float32", False),
        ((3075200, 512), "int32", False), ((2**27, 8), "float32", False),
    ):  # fmt: skip
        ways = outsize.explain(numpys.format(size="5.87 GiB", shape=shape, dtype=dtype)).remedies
        assert any("outsize.decompose(" in way.how for way in ways) == advised
        assert "outsize.decompose" not in ways[0].how  # what is exact comes first
    on_card = (
        "OOM when allocating tensor with shape[256,1024,1021] and type float on /device:GPU:0 by allocator GPU_0_bfc"
    )
    assert not any("outsize.decompose" in way.how for way in outsize.explain(on_card).remedies)


@pytest.mark.parametrize(
    ("text", "cause", "how"),
    [
        (FULL, CauseName.TRUE_NEED, "batch_size=1"),
        ("in train_step\n" + FULL, CauseName.TRUE_NEED, "outsize.fit("),
        ("pipe = FluxPipeline.from_pretrained(name)\n" + FULL, CauseName.TRUE_NEED, "cpu_offload"),
        ("texts = model.generate(ids)\n" + FULL, CauseName.TRUE_NEED, "device_map"),
        ("loss.backward(); model.generate(ids)\n" + FULL, CauseName.TRUE_NEED, "outsize.fit("),
        ("In ComfyUI: " + FULL.replace("90.00 MiB", "8.00 GiB"), CauseName.TRUE_NEED, "512 x 512"),
        (
            CARD.format(need="2.00 MiB", free="9.00 GiB", held="5.00 GiB", slack="1.00 GiB"),
            CauseName.REFUSED,
            "ulimit -v",
        ),
        (
            "/mnt/c/train: " + CARD.format(need="2.00 MiB", free="9.00 GiB", held="5.00 GiB", slack="0 bytes"),
            CauseName.REFUSED,
            "wslconfig",
        ),
        ("OSError: [WinError 1455] The paging file is too small. Error loading a.dll", CauseName.LIMIT, "Virtual memory"),
        (
            r"[enforce fail at ..\c10\core\impl\alloc_cpu.cpp:72] data. DefaultCPUAllocator: not enough memory: you tried to "
            "allocate 4096 bytes.",
            CauseName.ALREADY_FULL,
            "Virtual memory",
        ),
        ("The model's max seq len (900) is larger than the maximum number of tokens that can be stored in KV cache (512).",
         CauseName.TRUE_NEED, "--max-model-len 512"),
        ("cudaMalloc failed: out of memory\nggml_gallocr_reserve_n: failed to allocate CUDA0 buffer of size 9000000000\n"
         "failed to allocate compute buffers", CauseName.TRUE_NEED, "-ub 128"),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4194304 bytes.\nBufferAssignment OOM Debugging.\n"
         "total allocation: 8.00MiB", CauseName.OTHER_PROCESS, "nvidia-smi"),
        ("OOM when allocating tensor with shape[8,4,4,8]", CauseName.ALREADY_FULL, "batch_size"),
        ("Container killed by YARN for exceeding memory limits. 9.1 GB of 4 GB virtual memory used.",
         CauseName.ADDRESS_SPACE, "vmem-check-enabled=false"),
        ("Container killed by YARN for exceeding memory limits. 4.1 GB of 4 GB physical memory used.",
         CauseName.LIMIT, "memoryOverhead"),
        ("updater_gpu_hist.cu:7: Memory allocation error on worker 0: std::bad_alloc: out of memory\n- Free memory: 800\n"
         "- Requested memory: 9000", CauseName.TRUE_NEED, "max_bin"),
        ("terminate called: opencl_error what(): Memory Object Allocation Failure", CauseName.TRUE_NEED, "max_bin"),
        ("Error: cannot allocate vector of size 9.1 Mb", CauseName.ALREADY_FULL, "gc()"),
        ("Error: cannot allocate vector of size 640.0 Gb", CauseName.TRUE_NEED, "sparse"),
        ("Unable to allocate 58.0 GiB for an array with shape (176351, 176460) and data type uint16",
         CauseName.BROADCAST, "print the shapes"),
        ("[ERROR] [launch.py:3:sigkill_handler] ['python', 'a.py'] exits with return code = -9", CauseName.KILLED, "nvme"),
        ("The exit codes of the workers are {SIGKILL(-9), SIGKILL(-9)}", CauseName.KILLED, "n_jobs=2"),
        ("ERROR: CUDA error: out of memory (code #2, ERROR_OUT_OF_MEMORY)", CauseName.TRUE_NEED, "CUDA.reclaim()"),
        ("HIP out of memory. Tried to allocate 4.00 MiB. GPU 0 has a total capacity of 64.00 GiB of which 60.00 GiB is free. "
         "2.05 GiB allowed; Of the allocated memory 2.00 GiB is allocated by PyTorch, and 46.00 MiB is reserved by PyTorch but "
         "unallocated.", CauseName.MEMORY_FRACTION, "set_per_process_memory_fraction"),
        ("NPU out of memory. Tried to allocate 4.00 GiB (NPU 1; 32.00 GiB total capacity; 20.00 GiB already allocated; 1.00 GiB "
         "free; 29.00 GiB reserved in total by PyTorch)", CauseName.FRAGMENTATION, "PYTORCH_NPU_ALLOC_CONF"),
        ("cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 900,000,000 bytes (allocated so far: 300,000,000 bytes, "
         "limit set to: 1,000,000,000 bytes).", CauseName.LIMIT, "set_limit(size=18"),
        ("Error: cannot allocate vector of size 2.0 Gb\nReached total allocation of 8000Mb: see help(memory.size)",
         CauseName.LIMIT, "R_MAX_VSIZE"),
        ("(-4:Insufficient memory) Failed to allocate 70368744177664 bytes in function 'OutOfMemoryError'",
         CauseName.IMPOSSIBLE, "print the shape"),
        ("Out of memory error on GPU 0. Cannot allocate 9.0MB memory on GPU 0, available memory is only 1.0MB.\n"
         "FLAGS_fraction_of_gpu_memory_to_use is 0.30 now", CauseName.MEMORY_FRACTION, "FLAGS_fraction"),
        ("RuntimeError: unable to mmap 512 bytes from file </torch_1_2_3>: Cannot allocate memory (12)",
         CauseName.ADDRESS_SPACE, "max_map_count"),
        ("RuntimeError: unable to mmap 9000000000 bytes from file </m/model.safetensors>: Cannot allocate memory (12)",
         CauseName.ADDRESS_SPACE, "overcommit_memory"),
        ("No available memory for the cache blocks.", CauseName.TRUE_NEED, "--gpu-memory-utilization"),
        ("Error tokenizing data. C error: out of memory", CauseName.TRUE_NEED, "chunksize"),
        ("memory allocation of 9000000000 bytes failed", CauseName.TRUE_NEED, "streaming"),
        ("    return tensor.pin_memory()\nRuntimeError: CUDA error: out of memory", CauseName.LIMIT, "pin_memory=False"),
        ("The command '/bin/sh -c make' returned a non-zero code: 137", CauseName.KILLED, "Docker Desktop"),
        ("npm ERR! code ELIFECYCLE\nnpm ERR! errno 137\nnpm ERR! Exit status 137", CauseName.KILLED, "killed process"),
        ("x = pd.get_dummies(y)\nMemoryError: Unable to allocate 900. MiB for an array with shape (900, 1048576) and data type uint8",
         CauseName.TRUE_NEED, "sparse=True"),
        ("    return m.toarray()\nMemoryError", CauseName.TRUE_NEED, "sparse=True"),
        ("XPU out of memory. Tried to allocate 5.00 GiB. GPU 0 has a total capacity of 15.00 GiB. Of the allocated memory 1.00 GiB "
         "is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated.", CauseName.REFUSED, "RELAXED"),
        ("XPU out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.00 GiB. Of the allocated memory 14.00 GiB "
         "is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated.", CauseName.TRUE_NEED, "batch_size=1"),
        ("[rank1]: CUDA out of memory. Tried to allocate 2.00 MiB. GPU 1 has a total capacity of 40.00 GiB of which 3.00 MiB is free. "
         "Including non-PyTorch memory, this process has 36.00 GiB memory in use. Process 7 has 500.00 MiB memory in use. Process 8 "
         "has 500.00 MiB memory in use. Process 9 has 500.00 MiB memory in use. Of the allocated memory 35.00 GiB is allocated by "
         "PyTorch, and 9.00 MiB is reserved by PyTorch but unallocated.", CauseName.OTHER_PROCESS, "LOCAL_RANK"),
        ("    dist.barrier()\nRuntimeError: CUDA error: out of memory", CauseName.OTHER_PROCESS, "nvidia-smi"),
        ("Error: llama runner process has terminated: CUDA error: out of memory", CauseName.TRUE_NEED, "OLLAMA_CONTEXT"),
        ("don't be silly!: your machine has a 4Gb address\nError: cannot allocate vector of size 90.0 Mb",
         CauseName.ADDRESS_SPACE, "arch"),
        ("OpenCV Error: Insufficient memory (Failed to allocate 900000000 bytes) in void* cv::OutOfMemoryError",
         CauseName.TRUE_NEED, "cv2.imread"),
        ('{"type":"circuit_breaking_exception","reason":"[parent] Data too large, data for [a] would be [20/20b], which is larger than '
         'the limit of [10/10b]"}', CauseName.LIMIT, "ES_JAVA_OPTS"),
        ("fatal: Out of memory, malloc failed (tried to allocate 900000000 bytes)", CauseName.TRUE_NEED, "pack.windowMemory"),
        ("command not allowed when used memory > 'maxmemory'.", CauseName.LIMIT, "CONFIG SET maxmemory"),
        ("ERROR:  out of memory\nDETAIL:  Failed on request of size 900000000 in memory context", CauseName.TRUE_NEED, "work_mem"),
        ("g++: fatal error: Killed signal terminated program cc1plus", CauseName.KILLED, "make -j2"),
        ("CUDA error: Out of memory in cuMemAlloc(&pointer, size), line 5", CauseName.TRUE_NEED, "Simplify"),
        ("distributed.scheduler.KilledWorker: Attempted to run task x on 3 different workers, but all those workers died while "
         "running it.", CauseName.KILLED, "memory_limit"),
        ("HIP out of memory. Tried to allocate 80.00 MiB. GPU 0 has a total capacity of 16.00 GiB of which 84.00 MiB is free. Of the "
         "allocated memory 15.50 GiB is allocated by PyTorch, and 260.00 MiB is reserved by PyTorch but unallocated.",
         CauseName.TRUE_NEED, "batch_size=1"),
        ("CUDA out of memory. Tried to allocate 9.00 MiB. GPU 0 has a total capacity of 8.00 GiB of which 0 bytes is free. Of the "
         "allocated memory 12.00 GiB is allocated by PyTorch, and 900.00 MiB is reserved by PyTorch but unallocated.",
         CauseName.TRUE_NEED, "batch_size=1"),
        ("[GPU] out of GPU resources", CauseName.TRUE_NEED, "CPU"),
        ('File "a.py", line 3, in load\n    text = f.read()\nMemoryError', CauseName.TRUE_NEED, "outsize.open"),
        ('File "a.py", line 3, in evaluate\nCUDA out of memory. Tried to allocate 30.00 GiB (GPU 0; 8.00 GiB total capacity; 1.00 GiB '
         "already allocated; 6.00 GiB free; 1.10 GiB reserved in total by PyTorch)", CauseName.LARGER_THAN_DEVICE, "batch_size=1"),
        ("Unable to allocate 96.0 MiB for an array with shape (4096, 2048, 3) and data type float32",
         CauseName.ALREADY_FULL, "outsize run"),
        ("allocating 900.00 MiB on device 0: cudaMalloc failed: out of memory\nggml_gallocr_reserve_n: failed to allocate ROCm0 "
         "buffer of size 943718400\ngraph_reserve: failed to allocate compute buffers", CauseName.TRUE_NEED, "-ub 128"),
        ('File "module.py", line 9, in convert\n    return t.to(device)\n' + FULL, CauseName.TRUE_NEED, "bfloat16"),
        ('File "diffusers/models/attention_processor.py", line 9\n' + FULL, CauseName.TRUE_NEED, "cpu_offload"),
        ("Generating a single picture fails\n" + FULL.replace("90.00 MiB", "9.00 GiB"), CauseName.TRUE_NEED, "inference_mode"),
        ("txt2img, comfy/model.py\n" + FULL, CauseName.TRUE_NEED, "--lowvram"),
        ('File "site-packages/vllm/worker.py", line 3, in profile_run\n' + CARD.format(need="9.00 GiB", free="3.00 GiB", held="12.00 GiB",
         slack="0 bytes"), CauseName.TRUE_NEED, "--max-num-seqs"),
        ('File "site-packages/vllm/loader.py", line 3, in load_model\n' + FULL, CauseName.TRUE_NEED, "--quantization"),
        ("RuntimeError: CUDA Error: out of memory at /w/csrc/cumem_allocator.cpp:9", CauseName.OTHER_PROCESS, "gpu_memory_utilization"),
        ("y = (a @ b).contiguous() RuntimeError: CUDA error: out of memory", CauseName.TRUE_NEED, "batch_size=1"),
        ("ComfyUI: MPS backend out of memory (MPS allocated: 6.00 GB, other allocations: 1.00 MB, max allowed: 6.77 GB).",
         CauseName.TRUE_NEED, "512 x 512"),
        ("C:\\w\\a.py\n" + CARD.format(need="2.00 GiB", free="9.00 MiB", held="11.00 GiB", slack="3.00 GiB"),
         CauseName.FRAGMENTATION, "max_split_size_mb"),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9000000 bytes.", CauseName.ALREADY_FULL, "outsize run"),
        ("Unable to allocate 20.1 GiB for an array with shape (52000, 52000) and data type float64", CauseName.TRUE_NEED, "sparse"),
        ("Unable to allocate 67.1 GiB for an array with shape (300000, 30001) and data type float64", CauseName.TRUE_NEED,
         "print(x.shape)"),
        ("pandas/core/reshape/merge.py\nUnable to allocate 1.90 GiB for an array with shape (51, 5000000) and data type float64",
         CauseName.TRUE_NEED, "duplicated()"),
        ("df1.merge(df2)\n[1] 900 killed python", CauseName.KILLED, "astype"),
        ("terminate called after throwing an instance of 'std::bad_alloc'", CauseName.TRUE_NEED, "/usr/bin/time"),
        ("MemoryError: bad allocation", CauseName.TRUE_NEED, "Virtual memory"),
        ("    self.pid = os.fork()\nOSError: [Errno 12] Cannot allocate memory", CauseName.ALREADY_FULL, "num_workers"),
        ("Error: spawn ENOMEM\n    at ChildProcess.spawn", CauseName.ALREADY_FULL, "--maxWorkers"),
        ("Stats:\nLimit: 9000000000\nInUse: 8000000000\nOOM when allocating tensor with shape[32,1000,1000,16] and type float on "
         "/job:x/device:GPU:0", CauseName.TRUE_NEED, "batch_size"),
        ("OOM when allocating tensor with shape[9000,4096] and type float on /job:x/device:GPU:0\n[[Node: a/weights/Initializer/x]]",
         CauseName.OTHER_PROCESS, "nvidia-smi"),
        ("OOM when allocating tensor with shape[1,5000,4000,3]", CauseName.TRUE_NEED, "tf.image.resize"),
        ("Failed to create cublas handle - CUBLAS_STATUS_ALLOC_FAILED", CauseName.PREALLOCATION, "ALLOW_GROWTH"),
        ("Allocator (GPU_0_bfc) ran out of memory trying to allocate 2.00GiB. The caller indicates that this is not a failure\n"
         "failed to allocate 300.00M (314572800 bytes) from device: CUDA_ERROR_OUT_OF_MEMORY", CauseName.TRUE_NEED, "batch_size"),
        ("2025-01-01 20:28:59.8: W external/xla/xla/tsl/bfc_allocator.cc:5] Allocator (GPU_0_bfc) ran out of memory trying to allocate 2.00TiB",
         CauseName.LARGER_THAN_DEVICE, "jax.lax.map"),
        ("init.lua:7: Error in CuDNN: CUDNN_STATUS_ALLOC_FAILED (find)", CauseName.TRUE_NEED, "batch_size = 16"),
        ("MXNetError: src/operator/nn/a.h:7: cuDNN: CUDNN_STATUS_ALLOC_FAILED", CauseName.TRUE_NEED, "batch_size = 16"),
        ("CUDA failed with error out of memory", CauseName.TRUE_NEED, "compute_type"),
        ("CUDA error in func 'miner::init' at line 9 : out of memory.", CauseName.TRUE_NEED, "Virtual memory"),
        ("allocating 30000.00 MiB on device 0: cudaMalloc failed: out of memory\nerror loading model", CauseName.TRUE_NEED, "-ngl"),
        ("model requires more system memory (9.0 GiB) than is available (4.0 GiB)", CauseName.TRUE_NEED, "ollama run"),
        ("Your session crashed after using all available RAM.", CauseName.TRUE_NEED, "usecols"),
        ("OutOfMemoryError: Container killed due to memory usage", CauseName.LIMIT, "task definition"),
        ("SBATCH --mem=64G\nslurmstepd: error: Detected 1 oom_kill event in StepId=9.0.", CauseName.LIMIT, "--mem=98304M"),
        ("java invoked oom-killer: gfp_mask=0xd0, order=0\n[<ff>] mem_cgroup_oom_synchronize+0x5/0x8", CauseName.LIMIT, "--memory"),
        ("gmain invoked oom-killer: gfp_mask=0x24201ca, order=0", CauseName.MACHINE, "killed process"),
        ("mem avail: 300 of 5000 MiB (6 %) <= min 10 %, swap free: 0 of 0 MiB", CauseName.MACHINE, "ps -eo rss"),
        ("FATAL ERROR: CALL_AND_RETRY_LAST Allocation failed - process out of memory", CauseName.LIMIT, "max-old-space"),
        ("MemoryError                               Traceback (most recent call last)\n----> 1 x = pd.merge(a, b)",
         CauseName.TRUE_NEED, "duplicated()"),
        ("Loading checkpoint shards:   0%|    | 0/3 [00:00<?, ?it/s]Killed", CauseName.KILLED, "low_cpu_mem_usage"),
        ("Loading checkpoint shards:   0%|   | 0/3 [00:00<?, ?it/s][1]    900 killed     python a.py", CauseName.KILLED, "bfloat16"),
        (" x = np.zeros((900, 900))\nMemoryError", CauseName.TRUE_NEED, "outsize.open"),
        ("CUDA error: out of memory\nIt runs for a while, then this", CauseName.TRUE_NEED, "batch_size=1"),
        ("python -m vllm.entrypoints.openai.api_server\n" + FULL, CauseName.TRUE_NEED, "--tensor-parallel-size"),
        ("Error for a shard: CUDA Error 2, out of memory", CauseName.TRUE_NEED, "nvidia-smi"),
        ("The Daemon will expire after running out of JVM Metaspace.", CauseName.LIMIT, "org.gradle.jvmargs"),
        ("OOM when allocating tensor with shape[32,1000,100,640]\nAllocator (GPU_0_bfc) ran out of memory trying to allocate 9.0MiB. "
         "The caller indicates that this is not a failure", CauseName.TRUE_NEED, "batch_size"),
    ],
)  # fmt: skip
def test_the_first_advice_is_one_that_helps(text, cause, how):
    said = first(text)
    assert said[0] == cause and how in said[1]


def test_an_allocation_beside_pytorch_is_counted_on_a_mac():
    text = "MPS backend out of memory (MPS allocated: 6.00 GB, other allocations: 1.00 GB, max allowed: 6.77 GB)."
    assert "other libraries 1.00 GiB" in outsize.explain(text).cause.text


def test_a_setting_that_gives_next_to_nothing_is_offered_last_and_says_so():
    ways = [remedy.how for remedy in outsize.explain(FULL).remedies]
    assert "at most 200.00 MiB" in ways[-1]


def test_what_looks_at_a_device_is_its_vendors():
    text = "HIP out of memory. Tried to allocate 9.00 MiB. GPU 0 has a total capacity of 8.00 GiB of which 5.00 GiB is free."
    assert "nvidia" not in str(outsize.explain(text))


def test_of_several_victims_of_the_kernel_the_largest_is_named():
    line = "Out of memory: Killed process {} (python) total-vm:900kB, anon-rss:{}kB, file-rss:0kB, shmem-rss:0kB\n"
    failure = outsize.explain(line.format(7, 4) + line.format(8, 900_000) + line.format(9, 40)).failure
    assert failure.pid == 8 and failure.extra["anon_rss_bytes"] == 900_000 * 1024


def test_every_row_of_words_belongs_to_a_remedy_and_every_remedy_has_a_row():
    folder = pathlib.Path(outsize.__file__).parent / "failure/remedies"
    code = "".join((folder / f"{name}.py").read_text() for name in ("device", "host", "tensor"))
    assert {name for name in read_texts() if f'"{name}"' not in code} == set()
    assert set(re.findall(r'remedy\("(\w+)"', code)) - set(read_texts()) == set()
    assert {name for names in (*_BY_WORK.values(), *_ON_A_MAC.values()) for name in names} - set(read_texts()) == set()
