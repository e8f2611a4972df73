"""What PyTorch has printed since 0.4 when memory ran out: CUDA, HIP, XPU, NPU, MPS, CPU, data loaders, libraries."""

from __future__ import annotations

from outsize.failure.message.grammar import Format, Pattern, form

# Rows of tables: name, framework, anchor, further parts.
# fmt: off

_CACHING = (
    "Tried to allocate {requested}",
    r"GPU {index} has a total capaci?ty of {total}",
    r"\((?:GPU|NPU|device) {index}; {total} total capacity",
    "{total} total capacity",
    r"of which {free} is free",
    r"{free} free(?= ?[;)])",
    r"; {free} free",
    "{allocated} already allocated",
    "Of the allocated memory {allocated} is allocated by PyTorch",
    "{allocated} is allocated by PyTorch",
    "{limit} allowed",
    r"Already allocated:? {allocated}",
    "{reserved} reserved in (?:total|PyTorch)",
    "{cached_bytes} cached",
    "with {private_pool_bytes} allocated in private pools",
    "and {reserved_unallocated_bytes} is reserved by PyTorch but unallocated",
    "{reserved_unallocated_bytes} is reserved by PyTorch but unallocated",
    "this process has {process_in_use_bytes} memory in use",
    "{active_bytes} current active",
    r"GPU {index}\b",
    r"\bcuda:{index}\b",
    Pattern(r"expandable_segments:True(?! to avoid)(?! `?to avoid)", hint_expandable=True),
)
_PROCESSES = {"processes": "Process {pid} has {bytes:size} memory in use"}

_LIBRARY = (
    r"(?<!case\s)(?<!return\s\")(?<!::\s)(?:"
    r"(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CURAND|CUTENSOR|HIPBLAS|ROCBLAS|CUBLASLT|NVJPEG)_STATUS_ALLOC(?:ATION)?_FAILED|"
    r"CUDNN_STATUS_\w{0,40}DEVICE_ALLOCATION_FAILED|CUFFT_ALLOC_FAILED|CURAND_STATUS_ALLOCATION_FAILED|"
    r"CUBLAS failure 3\b|rocblas_status_memory_error|miopenStatusAllocFailed|Error out of memory at line [0-9]{1,6} in file"
    r")(?![\"'] in\b)"
)
"""What the vendors' libraries, and bitsandbytes, answer; not where a program's source lists or tests the answers."""

_WORKER = r"ataLoader worker (?:\([^()]{0,80}\) )?"
_WORKER_CLAUSES = (
    r"worker \(pid\(?s?\)? ?{pid}",
    Pattern("ataLoader worker", process="DataLoader worker"),
)

FORMATS: list[Format] = [
    form("mps", "pytorch", "MPS backend out of memory", r"(?:MPS |\()allocated:? {allocated}",
         "other allocations: {other_allocations_bytes}", r"\bmax(?: allowed)?:? {limit}",
         "Tried to allocate {requested}", Pattern("on private pool", pool="private"),
         Pattern("on shared pool", pool="shared"), device="mps"),
    form("mps-buffer", "pytorch", "Invalid buffer size: {requested}", device="mps"),
    form("cuda-async", "pytorch", r"Allocation on device(?: {index})? would exceed allowed memory",
         r"Currently allocated ?:? ?{allocated}", r"Requested ?:? ?{requested}", r"Device limit ?: ?{total}",
         r"Free \(according to CUDA\): ?{free}",
         r"PyTorch limit \(set by user-supplied memory fraction\) ?: ?{limit}", device="cuda"),
    form("cuda", "pytorch", r"CUDA out of (?:the )?memory\. ?Tried to allocate", *_CACHING, each=_PROCESSES, device="cuda"),
    form("hip", "pytorch", r"HIP out of memory", *_CACHING, each=_PROCESSES, device="hip"),
    form("xpu", "pytorch", r"XPU out of memory", *_CACHING, each=_PROCESSES, device="xpu"),
    form("xpu-block", "pytorch", r"platform can not allocate memory block with size larger than {limit}", *_CACHING,
         device="xpu"),
    form("npu", "pytorch", r"NPU out of memory", r"\(NPU {index};", *_CACHING, device="npu"),
    form("mtia", "pytorch", r"MTIA out of memory", *_CACHING, device="mtia"),
    form("cuda-1eb", "pytorch", "Tried to allocate more than 1EB memory", device="cuda"),
    form("cuda-elided", "pytorch", r"Tried to allocate {requested}\.? ?\(?(?:GPU|HIP|device) {index}[; ]", *_CACHING,
         each=_PROCESSES, device="cuda", whole=True),
    form("cuda-elided-clauses", "pytorch",
         r"GPU {index} has a total capaci?ty of {total}|GPU [0-9]{1,4}; [0-9.]{1,16} [KMGT]iB total capacity|"
         r"is allocated by PyTorch, (?:with|and) [0-9]", *_CACHING, each=_PROCESSES, device="cuda", whole=True),
    form("cpu", "pytorch", r"DefaultCPUAllocator: ?(?:can't allocate memory|not enough memory)|"
         r"(?:not enough memory|can't allocate memory): you tried to allocate",
         "you tried to allocate {requested:count} bytes", "you tried to allocate {requested}",
         "you tried to allocate {requested:count}", device="cpu"),
    form("cpu-posix", "pytorch", r"posix_memalign failed|alloc_cpu\.cpp:[0-9]{1,5}\] (?:err|data|ptr)", device="cpu"),
    form("loader-killed", "pytorch", rf"{_WORKER}(?:is )?killed by signal: Killed", *_WORKER_CLAUSES,
         extra={"signal": "Killed"}),
    form("loader-bus", "pytorch",
         rf"{_WORKER}(?:is )?killed by signal: Bus error|Unexpected bus error encountered in worker",
         *_WORKER_CLAUSES, extra={"signal": "Bus error"}),
    form("shm-map", "pytorch", r"unable to mmap {requested:count} bytes from file <(?:filename not specified|"
         r"[^>\n]{0,80}torch_\w{1,60})>: ?Cannot allocate memory"),
    form("pinned", "pytorch", r"pin_memory\([^()\n]{0,40}\)[^\n]{0,200}?CUDA error: ?out of memory|"
         r"cudaHostAlloc[^\n]{0,80}(?:out of memory|failed)", device="cpu", extra={"pinned": True}),
    form("shm", "pytorch",
         r"unable to (?:write to|resize|mmap|allocate shared memory\(shm\) for|open)[^:\n]{0,200}?(?:torch_\w{1,60}|"
         r"shm)[^:\n]{0,120}: ?"
         r"(?:No space left on device|Cannot allocate memory|Success)|unable to allocate shared memory ?\(shm\)|"
         r"insufficient shared memory \(shm\)|unable to write to file </?torch_[\w-]{1,80}>|"
         r"No space left on device[^\n]{0,80}/dev/shm|/dev/shm[^\n]{0,80}No space left on device|"
         r"(?:ctx\.Lock\(|SemLock|pandarallel|Memory file system)[^\n]{0,600}No space left on device|"
         r"No space left on device\.? joblib will operate in serial mode",
         r"mmap {requested:count} bytes", r"resize[^\n]{0,120} to {requested:count} bytes",
         extra={"shared_memory": True}),
    form("library-host", "pytorch", r"CUDNN_STATUS_\w{0,40}HOST_ALLOCATION_FAILED"),
    form("library-handle", "tensorflow", rf"(?:failed to create|could not create) cu\w{{2,8}} handle ?[:-] ?{_LIBRARY}",
         r"device ordinal {index}\b", device="cuda"),
    form("lua", "torch7", rf"(?:\.lua:[0-9]|luajit)[^\n]{{0,400}}?(?:{_LIBRARY}|out of memory)", device="cuda", lines=True),
    form("mxnet-library", "mxnet", rf"(?:mxnet|src/operator/)[^\n]{{0,300}}?{_LIBRARY}", device="cuda"),
    form("darknet", "darknet", r"(?:BFLOPs|\bdarknet\b|src/cuda\.c)[^\n]{0,9000}?CUDA Error: out of memory|"
         r"CUDA Error: out of memory[^\n]{0,80}(?:darknet|src/cuda\.c)", device="cuda"),
    form("caffe-success", "caffe", r"Check failed: error == cudaSuccess \(2 vs\. 0\)", device="cuda"),
    form("caffe", "caffe", rf"(?:syncedmem\.cpp|cudnn_\w{{1,30}}\.c\w{{1,3}}|caffe)[^\n]{{0,200}}?Check failed: "
         rf"[^\n]{{0,60}}\(2 vs\. 0\) ?(?:{_LIBRARY}|out of memory)", device="cuda"),
    form("library", "pytorch", _LIBRARY, r"GPU[ =]{index}\b", r"\bcuda:{index}\b", r"device ordinal {index}\b",
         device="cuda"),
    form("nccl", "nccl", r"Cuda failure (?:2 )?'out of memory\b|Failed to CUDA (?:calloc|malloc|"
         r"host alloc)(?: async)? {requested:count} bytes",
         r"Failed to CUDA (?:calloc|malloc|host alloc)(?: async)? {requested:count} bytes"),
    form("workspace", "pytorch", r"Workspace can't be allocated, no enough memory", device="cuda"),
    form("runtime-2", "pytorch", r"cuda runtime error \(2\) ?: ?out of memory|error=2 ?: ?out of memory",
         device="cuda"),
    form("runtime-hip", "pytorch", r"hipErrorOutOfMemory|hipErrorMemoryAllocation|HIP (?:driver |runtime )?(?:error:|"
         r"failed with error) ?out of memory", r"(?:failed to|could not) allocate {requested:count} bytes",
         r"(?:failed to|could not) allocate {requested}", device="hip"),
    form("allocation-on-device", "pytorch", r"OutOfMemoryError: Allocation on device(?: {index}\b)?", device="cuda"),
    form("xpu-native", "pytorch",
         r"(?:UR_RESULT_ERROR|PI_ERROR|ZE_RESULT_ERROR)_OUT_OF_(?:DEVICE_MEMORY|HOST_MEMORY|RESOURCES)", device="xpu"),
]

LAST: list[Format] = [
    form("cuda-number", "cuda", r"CUDA (?:failed with )?error 2,? out of memory(?! at)", device="cuda"),
    form("ctranslate2", "ctranslate2", r"CUDA failed with error out of memory", device="cuda"),
    form("ggml-runtime", "ggml", r"CUDA error: out of memory[^\n]{0,200}?ggml|ggml[\w./-]{0,60}\.cu:[0-9]{1,6}: "
                                 r"?out of memory", r"current device: {index}\b", device="cuda"),
    form("cuda-bare", "pytorch", r"CUDA\b[ _:]{0,2}(?:runtime |driver )?(?:failed with )?(?:error|"
         r"failure)?(?: 2)?(?: at [^\n]{1,100}?)?[^\w\n]{0,4}2?[^\w\n]{0,4}(?:is |"
         r"ran |gives? )?out of memory(?= ?[.:!?,;)\"'`*<\n\]|/-]| ?$| in cu| current device| CUDA kernel|\serror\b|"
         r"\sexception\b|。|，| \w{0,12}=)",
         r"current device: {index}\b", *_CACHING, device="cuda", lines=True),
    form("torch-name-bare", "pytorch", r"^(?:[^\n:]{0,40}: ?)?torch(?:\.cuda)?\.OutOfMemoryError:? ?$", device="cuda",
         lines=True),
    form("torch-name", "pytorch", r"torch(?:\.cuda)?\.OutOfMemoryError: ?\S", r"Tried to allocate {requested}",
         *_CACHING, device="cuda"),
    form("torch-named", "pytorch", r"(?<!except\s)(?<!\()\btorch(?:\.cuda)?\.OutOfMemoryError\b(?! ?(?:as\b|[,)]))",
         device="cuda"),
]
"""Bare forms, asked only when nothing more telling was found."""
