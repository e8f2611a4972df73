"""What serving engines and inference runtimes print: vLLM, llama.cpp, TensorRT, ONNX Runtime, Paddle, MXNet."""

from __future__ import annotations

from outsize.failure.message.grammar import Format, Pattern, form

ENGINES: list[Format] = [
    form(
        "vllm-startup",
        "vllm",
        "onstartupisless",
        r"on startup is less than desired GPU memory utilization|on startup is less than desired",
        r"Free memory on device(?: cuda:[0-9]{1,3})? \({free_gib:float}/{total_gib:float} GiB\)",
        r"Free memory on device cuda:{index}\b",
        r"desired GPU memory utilization \({gpu_memory_utilization:float}, {requested}\)",
        Pattern(r"on device cuda", base="cuda"),
        whole=True,
    ),
    form(
        "vllm-kv",
        "vllm",
        "kvcacheisneeded",
        r"KV cache is needed, which is larger than the available KV cache memory|KV cache is needed, which is larger",
        r"{requested} KV cache is needed",
        r"available KV cache memory \({free}\)",
        r"estimated maximum model length is {max_model_len:int}",
        r"max seq len \({max_seq_len:int}\)",
        extra={"requested_is": "KV cache needed for one request"},
        whole=True,
    ),
    form(
        "vllm-tokens",
        "vllm",
        "storedinkvcache",
        r"max seq len \({max_seq_len:int}\) is larger than the maximum number of tokens that can be stored in KV "
        r"cache \({kv_tokens:int}\)",
    ),
    form("vllm-blocks", "vllm", "memoryforthecacheblocks", "No available memory for the cache blocks"),
    form(
        "sglang", "sglang", "mem-fraction-static", r"Not enough memory\.? ?Please try to increase --mem-fraction-static"
    ),
    form(
        "ollama",
        "ollama",
        "requiresmoresystemmemory",
        r"requires more system memory \({requested}\) than is available \({free}\)",
        device="cpu",
    ),
    form(
        "ggml-cuda",
        "ggml",
        ("cudamallocfailed", "ggml_backend_cuda", "bufferofsize", "cudabuffer", "cuda0buffer"),
        r"allocating {said_bytes} on device {index}: cudaMalloc failed: out of memory|failed to allocate "
        r"CUDA[0-9]{1,2} buffer of size|"
        r"cudaMalloc failed: out of memory|unable to allocate CUDA[0-9]{1,2} buffer",
        r"failed to allocate CUDA{index} buffer of size {requested:count}",
        r"allocating {requested} on device {index}",
        r"unable to allocate CUDA{index} buffer",
        r"device {index}: cudaMalloc",
        device="cuda",
        whole=True,
        unless="retry failed",
    ),
    form(
        "ggml-rocm",
        "ggml",
        ("rocm0buffer", "rocm1buffer", "rocmbuffer", "rocm"),
        r"failed to allocate ROCm{index} buffer of size {requested:count}",
        device="hip",
    ),
    form("ggml-sycl", "ggml", "sycl", r"failed to allocate SYCL{index} buffer of size {requested:count}", device="xpu"),
    form(
        "ggml-vulkan",
        "ggml",
        (
            "ggml_vulkan",
            "erroroutofdevicememory",
            "vulkan0buffer",
            "error_out_of_device_memory",
            "erroroutofhostmemory",
        ),
        r"ggml_vulkan: ?(?:Device|Host) memory allocation of size|failed to allocate Vulkan[0-9]{1,2} buffer of "
        r"size|ErrorOutOf(?:Device|Host)Memory|"
        r"VK_ERROR_OUT_OF_(?:DEVICE|HOST)_MEMORY",
        r"memory allocation of size {requested:count}",
        r"Vulkan[0-9]{1,2} buffer of size {requested:count}",
        r"Requested buffer size[^0-9\n]{0,20}{requested:count}",
        device="vulkan",
        whole=True,
    ),
    form(
        "metal",
        "metal",
        ("kiogpucommandbuffer", "ggml_metal", "ggml_backend_metal", "[metal]", "insufficientmemory(00000008"),
        r"kIOGPUCommandBufferCallbackErrorOutOfMemory|(?:ggml_metal|ggml_backend_metal)\w{0,60}: error: failed to "
        r"allocate|"
        r"Insufficient Memory \(0000000[0-9]|failed to allocate Metal buffer",
        r"failed to allocate (?:'\w{1,24}' )?buffer,? (?:of )?size ?=? ?{requested}",
        device="metal",
        whole=True,
    ),
    form(
        "ggml-pinned",
        "ggml",
        "pinnedmemory",
        r"failed to allocate {requested} of pinned memory",
        device="cpu",
        extra={"not_a_failure": True},
    ),
    form(
        "ggml-cpu",
        "ggml",
        ("ggml_aligned_malloc", "cpubuffer", "cpu_", "ggml_backend_cpu", "_hostbuffer"),
        r"ggml_aligned_malloc: insufficient memory|failed to allocate (?:CPU\w{0,20}|\w{1,12}_Host) buffer of size|"
        r"ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate",
        r"attempted to allocate {requested}",
        r"buffer of size {requested:count}",
        device="cpu",
    ),
    form(
        "ggml-other",
        "ggml",
        "bufferofsize",
        r"(?:ggml\w{0,60}|alloc_tensor_range|llama\w{0,40}): failed to allocate \w{1,24} buffer of "
        r"size {requested:count}",
    ),
    form(
        "tensorrt",
        "tensorrt",
        (
            "amountofgpumemory",
            "errorcode2:outofmemory",
            "outofmemory(",
            "cudaerrorinallocate",
            "cudaruntime(outofmemory",
        ),
        r"Requested amount of GPU memory[^\n]{0,60}? could not be allocated|Error Code 2: OutOfMemory|"
        r"OutOfMemory \((?:no further|Requested size was)|Cuda Error in allocate: 2|Cuda Runtime \(out of memory\)",
        r"Requested amount of GPU memory \({requested:count} bytes\)",
        r"Requested size was {requested:count} bytes",
        r"memory of size {requested:count}",
        device="cuda",
        whole=True,
    ),
    form(
        "tensorrt-tactic",
        "tensorrt",
        "devicememoryisinsufficient",
        r"Device request: {requested} Available: {free}\.? ?Device memory is insufficient",
        device="cuda",
        extra={"not_a_failure": True},
    ),
    form(
        "tensorrt-skip",
        "tensorrt",
        "insufficientmemoryonrequestedsize",
        r"due to insufficient memory on requested size of {requested:count}",
        device="cuda",
        extra={"not_a_failure": True},
    ),
    form(
        "onnxruntime",
        "onnxruntime",
        ("requestedbufferofsize", "smallerthanrequestedbytes"),
        r"Failed to allocate memory for requested buffer of size|"
        r"Available memory of [^ \n]{1,24} is smaller than requested bytes",
        r"smaller than requested bytes of {requested:count}",
        r"requested buffer of size {requested:count}",
        r"Available memory of {free:count} is",
        Pattern(r"\bCUDA|CUDAExecutionProvider|cuda_", device="cuda"),
        r"GPU={index}\b",
        whole=True,
    ),
    form(
        "onnxruntime-cuda",
        "onnxruntime",
        "cudafailure2",
        r"CUDA failure 2: ?out of memory",
        r"GPU={index}\b",
        device="cuda",
    ),
    form(
        "paddle",
        "paddle",
        ("memoryerrorongpu", "memoryongpu", "memoryerroron"),
        r"Out of memory error on (?:GPU|XPU)(?: Virtual Memory)? {index}|Cannot allocate {r2:size} memory on "
        r"GPU(?: Virtual Memory)? {i2:int}",
        r"Cannot allocate {requested} memory on GPU(?: Virtual Memory)? {index}",
        r"{allocated} memory has been allocated",
        r"available memory is only {free}",
        device="cuda",
        whole=True,
    ),
    form("paddle-cpu", "paddle", "failtoallocmemory", r"Fail to alloc memory of {requested:count} size", device="cpu"),
    form(
        "mxnet",
        "mxnet",
        ("retryfailed:outofmemory", "mxnet"),
        r"cudaMalloc (?:retry )?failed: out of memory|mxnet[^\n]{0,200}?(?:out of memory|Memory allocation failed)",
        device="cuda",
    ),
    form(
        "nvdec",
        "nvdec",
        ("cuvid", "nvdec", "nvenc"),
        r"(?:cuvid\w{0,40}|nvdec|nvenc)[^\n]{0,200}?(?:CUDA_ERROR_OUT_OF_MEMORY|out of memory)",
        device="cuda",
    ),
    form(
        "mxnet-bare",
        "mxnet",
        "pooled_storage_manager",
        r"pooled_storage_manager[^\n]{0,80}out of memory",
        device="cuda",
    ),
]
