"""What inference runtimes and serving engines print: vLLM, llama.cpp, TensorRT, ONNX Runtime, Paddle and their kin."""

from __future__ import annotations

from outsize.failure.message.grammar import Format, Pattern, form

# Rows of tables: name, framework, anchor, further parts.
# fmt: off

ENGINES: list[Format] = [
    form("vllm-startup", "vllm",
         r"Free memory on device (?:(?:cuda|xpu|hip):{index}\b)?[^\n]{0,60}is less than desired GPU memory utili[sz]ation",
         Pattern(r"on device xpu\b", base="xpu"), r"\({free:gib}(?: ?- ?[0-9.]{1,12})?/{total:gib} GiB\) on startup",
         r"desired GPU memory utilization \({gpu_memory_utilization:float}, {requested}\)"),
    form("vllm-kv", "vllm",
         r"(?:{requested} )?(?:of )?KV cache is needed, which is larger than the available KV cache memory",
         r"available KV cache memory \({free}\)", r"estimated maximum model length is {max_model_len:int}",
         r"max seq len \({max_seq_len:int}\)", extra={"requested_is": "KV cache needed for one request"}, whole=True),
    form("vllm-tokens", "vllm",
         r"max seq len \({max_seq_len:int}\) is larger than the maximum number of tokens that can be stored in KV "
         r"cache \({kv_tokens:int}\)"),
    form("vllm-blocks", "vllm", "No available memory for the cache blocks", r"Available KV cache memory: {free}",
         whole=True),
    form("vllm-sleep", "vllm", r"CUDA Error: out of memory at [^\n]{0,80}cumem_allocator\.cpp"),
    form("sglang", "sglang", r"Not enough memory\.? ?Please try to increase --mem-fraction-static"),
    form("ollama-runner", "ggml", r"llama runner process (?:has terminated|no longer running)[^\n]{0,200}?out of memory|"
         r"llama runner exited, you may not have enough",
         r"current device: {index}\b", device="cuda"),
    form("ollama-layers", "ggml", r"gpu has too little memory to allocate any layers", extra={"not_a_failure": True}),
    form("ollama", "ollama", r"requires more system memory(?: \({requested}\))? than is available(?: \({free}\))?"),
    form("ggml-compute", "ggml", r"failed to allocate compute (?:pp )?buffers?",
         r"failed to allocate (?:CUDA|ROCm){index} buffer of size {requested:count}",
         r"failed to allocate \w{1,24} buffer of size {requested:count}",
         r"allocating {requested} on device {index}", Pattern(r"ROCm[0-9]{1,2} buffer", base="hip"), device="cuda",
         whole=True),
    form("ggml-rocm", "ggml", r"(?:failed|unable) to allocate ROCm{index} buffer",
         r"ROCm{index} buffer of size {requested:count}", r"allocating {requested} on device {index}", device="hip",
         whole=True),
    form("ggml-cuda", "ggml", r"failed to allocate CUDA[0-9]{1,2} buffer of size|"
         r"cudaMalloc failed: out of memory|unable to allocate CUDA[0-9]{1,2} buffer",
         r"failed to allocate CUDA{index} buffer of size {requested:count}",
         r"allocating {requested} on device {index}", r"unable to allocate CUDA{index} buffer",
         r"device {index}: cudaMalloc", device="cuda", whole=True, unless="retry failed|pooled_storage_manager"),
    form("ggml-sycl", "ggml", r"failed to allocate SYCL{index} buffer of size {requested:count}", device="xpu"),
    form("vulkan", "vulkan", r"VK_ERROR_OUT_OF_(?:DEVICE|HOST)_MEMORY|ErrorOutOf(?:Device|Host)Memory", device="vulkan",
         unless=r"ggml|llama|kompute|whisper|\.gguf|sd\.cpp|Requested buffer size|memory allocation of size"),
    form("ggml-vulkan", "ggml", r"ggml_vulkan: ?(?:Device|Host) memory allocation of size|"
         r"failed to allocate Vulkan[0-9]{1,2} buffer of size|ErrorOutOf(?:Device|Host)Memory|"
         r"VK_ERROR_OUT_OF_(?:DEVICE|HOST)_MEMORY", r"memory allocation of size {requested:count}",
         r"Vulkan[0-9]{1,2} buffer of size {requested:count}",
         r"Requested buffer size[^0-9\n]{0,20}{requested:count}", device="vulkan", whole=True),
    form("metal", "metal", r"kIOGPUCommandBufferCallbackErrorOutOfMemory|(?:ggml_metal|"
         r"ggml_backend_metal)\w{0,60}: error: failed to allocate|"
         r"Insufficient Memory \(0000000[0-9]|failed to allocate Metal buffer|Metal out of memory",
         r"failed to allocate (?:'\w{1,24}' )?buffer,? (?:of )?size ?=? ?{requested}", whole=True),
    form("ggml-pool", "ggml", r"not enough space in the (?:context's memory pool|buffer)",
         r"needed {requested:count}", r"available {free:count}", device="cpu"),
    form("ggml-pinned", "ggml", r"failed to allocate {requested} of pinned memory", device="cpu",
         extra={"not_a_failure": True}),
    form("ggml-cpu", "ggml",
         r"ggml_aligned_malloc: insufficient memory|failed to allocate (?:CPU\w{0,20}|\w{1,12}_Host) buffer of size|"
         r"ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate", r"attempted to allocate {requested}",
         r"buffer of size {requested:count}", device="cpu"),
    form("ggml-other", "ggml",
         r"(?:ggml\w{0,60}|alloc_tensor_range|llama\w{0,40}): failed to allocate \w{1,24} buffer of size "
         r"{requested:count}"),
    form("ggml-load", "ggml", r"error loading model: (?:failed|unable) to allocate (?:backend )?buffer"),
    form("ggml-kv", "ggml", r"failed to allocate buffer for kv cache"),
    form("miner", "miner",
         r"CUDA error (?:'out of memory' )?in func '[^'\n]{1,80}'[^\n]{0,20}line [0-9]{1,6}(?: ?: ?out of memory)?",
         device="cuda", unless=r"CUDA error in func[^\n]{0,120}(?:illegal|launch|invalid|driver)"),
    form("blender", "blender", r"CUDA error: Out of memory in cuMem|System is out of GPU (?:and shared host )?memory",
         device="cuda"),
    form("exllama", "exllama", r"\bInsufficient VRAM\b", unless=r"source=memory\.go"),
    form("openvino-resources", "openvino", r"\[GPU\] out of GPU resources", device="xpu"),
    form("openvino", "openvino", r"Exceeded max size of memory object allocation",
         r"requested {requested:count} bytes", r"max alloc size (?:supported by device )?is {limit:count} bytes"),
    form("directml-video", "pytorch",
         r"(?:Could not allocate tensor with {requested:count} bytes\. )?There is not enough GPU video memory",
         device="dml"),
    form("habana", "pytorch", r"PT_DEVMEM Allocation failed for size::? ?{requested:count}", device="hpu"),
    form("tensorrt", "tensorrt",
         r"Requested amount of (?:GPU )?memory \([^()\n]{1,40}\) could not be allocated|Error Code 2: OutOfMemory|"
         r"OutOfMemory \((?:no further|Requested size was)|OutOfMemory Error in GpuMemory|"
         r"Cuda Error in allocate: 2|Cuda Runtime \(out of memory\)",
         r"Requested amount of (?:GPU )?memory \({requested:count} bytes\)",
         r"Requested size was {requested:count} bytes", r"memory of size {requested:count}",
         r"allocator error allocating {requested:count}-byte buffer", whole=True),
    form("tensorrt-tactic", "tensorrt",
         r"Device request: {requested} Available: {free}\.? ?Device memory is insufficient",
         extra={"not_a_failure": True}),
    form("tensorrt-skip", "tensorrt", r"due to insufficient memory on requested size of {requested:count}",
         extra={"not_a_failure": True}),
    form("onnxruntime", "onnxruntime", r"Failed to allocate memory for requested buffer|"
         r"Available memory of \w{1,24} is smaller than requested bytes|"
         r"AllocateRawInternal[^\n]{0,120}Failed to allocate memory",
         r"smaller than requested bytes of {requested:count}", r"requested buffer of size {requested:count}",
         r"Available memory of {free:count} is", Pattern(r"\bCUDA|CUDAExecutionProvider|cuda_", device="cuda"),
         r"GPU={index}\b", whole=True),
    form("directml", "onnxruntime", r"\bE_OUTOFMEMORY\b|\b(?:0x)?8007000E\b"),
    form("onnxruntime-cuda", "onnxruntime", r"CUDA failure 2: ?out of memory", r"GPU={index}\b", device="cuda"),
    form("paddle", "paddle",
         r"Out of memory error on (?:GPU|XPU) {index}|Cannot allocate [0-9.]{1,24} ?[KMGTP]?i?B memory on GPU",
         r"Cannot allocate {requested} memory on GPU {index}", r"{allocated} memory has been allocated",
         r"available memory is only {free}",
         r"FLAGS_fraction_of_gpu_memory_to_use is {fraction:float} now", device="cuda", whole=True),
    form("paddle-cpu", "paddle", r"Fail to alloc memory of {requested:count} size", device="cpu"),
    form("mxnet", "mxnet",
         r"cudaMalloc (?:retry )?failed: out of memory|mxnet[^\n]{0,200}?(?:out of memory|Memory allocation failed)"),
    form("nvdec", "nvdec", r"(?:cuvid\w{0,40}|nvdec|nvenc)[^\n]{0,200}?(?:CUDA_ERROR_OUT_OF_MEMORY|out of memory)"),
    form("mxnet-bare", "mxnet", r"pooled_storage_manager[^\n]{0,80}out of memory"),
]
