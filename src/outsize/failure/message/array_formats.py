"""What array libraries on a host or a GPU print: TensorFlow, JAX/XLA, NumPy and kin, CuPy, RMM, and other languages."""

from __future__ import annotations

from outsize.failure.message.grammar import Format, Pattern, form

_TF_DEVICES = (
    Pattern(r"device:GPU:{index}"),
    Pattern(r"on (?:/device:)?GPU:{index}"),
    Pattern(r"GPU_{index}_bfc"),
    Pattern(r"by allocator (?:cpu|cpu_pool|mklcpu|cuda_host)", device="cpu"),
    Pattern(r"device:CPU:[0-9]", device="cpu"),
)
_TF_STATS = (
    r"Stats: ?Limit: {limit:count}",
    r"\bLimit: {limit:count}",
    r"\bInUse: {allocated:count}",
    r"memory_limit_: {limit:count}",
    r"MaxInUse: {max_in_use_bytes:count}",
    r"MaxAllocSize: {max_alloc_size_bytes:count}",
    r"LargestFreeBlock: {largest_free_bytes:count}",
    r"available bytes: {pool_available_bytes:count}",
    r"Sum Total of in-use chunks: {sum_in_use_bytes}",
    r"Free memory/Total memory: {free:count}/{total:count}",
)

TENSORFLOW: list[Format] = [
    form(
        "tensor", "tensorflow", "oomwhenallocating", r"OOM when allocating tensor(?: with| of)? shape ?{shape}",
        r"shape ?{shape2:shape} and type {dtype} on", r"shape ?{shape2:shape} and type {dtype}\b",
        r"type {dtype} on /job:[^ ]{1,80}device:GPU:{index}", r"on /job:[^ ]{1,80}/device:GPU:{index}",
        Pattern(r"on /job:[^ ]{1,80}/device:CPU:[0-9]", device="cpu"), *_TF_DEVICES, r"by allocator {allocator:word}",
        *_TF_STATS, device=None, fills=("tensorflow",), whole=True,
    ),
    form("tensor-elided", "tensorflow", "oomwhenallocating", r"OOM when allocating tensor", r"and type {dtype} on", *_TF_DEVICES, *_TF_STATS,
         fills=("tensorflow",), whole=True),
    form(
        "async", "tensorflow", "cumemallocasync", r"cuMemAllocAsync failed to allocate {requested:count} bytes",
        r"Free memory/Total memory: {free:count}/{total:count}", r"gpu_async_{index}\b", *_TF_STATS, device="cuda", whole=True,
    ),
    form(
        "bfc-warning", "tensorflow", "ranoutofmemorytryingtoallocate",
        r"Allocator \(?{allocator:word}\)? ran out of memory trying to allocate {said_bytes}",
        r"trying to allocate [0-9.]{1,24} ?[KMGTP]?i?B \(rounded to {requested:count}\)",
        r"ran out of memory trying to allocate {requested}", r"Allocator \(GPU_{index}_bfc\)",
        Pattern(r"Allocator \((?:cpu|cpu_pool|xla_cpu|cuda_host_bfc|mklcpu)\)", device="cpu"),
        Pattern("The caller indicates that this is not a failure", not_a_failure=True), *_TF_STATS, device=None, whole=True,
        fills=("tensorflow",),
    ),
    form("ten-percent", "tensorflow", "%offreesystemmemory",
         r"Allocation of {requested:count} exceeds {percent:int}% of (?:free )?system memory", device="cpu",
         extra={"not_a_failure": True}),
    form("host", "tensorflow", ("onhost:", "pinnedhostmemory"),
         r"failed to alloc(?:ate)? (?:{said_bytes} \()?{requested:count} bytes\)? on host|could not allocate pinned host memory of",
         r"could not allocate pinned host memory of (?:size|bytes): ?{requested:count}", device="cpu"),
    form(
        "driver", "tensorflow", "fromdevice",
        r"failed to allocate {said_bytes} ?\({requested:count} bytes\) from device", r"device ordinal {index}\b",
        r"device {index}\b", device="cuda",
    ),
    form("driver-plain", "tensorflow", "fromdevice", r"failed to allocate {requested} from device: ?CUDA_ERROR_OUT_OF_MEMORY",
         device="cuda"),
    form(
        "context", "tensorflow", "cuda_error_out_of_memory",
        r"(?:cuDevicePrimaryCtxRetain|cuCtxCreate|cuInit|failed initializing StreamExecutor)[^\n]{0,300}?CUDA_ERROR_OUT_OF_MEMORY",
        r"device ordinal {index}\b", device="cuda", whole=True,
    ),
    form("dst", "tensorflow", "dsttensorisnotinitialized", "Dst tensor is not initialized", r"to [^ ]{0,60}GPU:{index}",
         r"GPU:{index}\b", device="cuda", whole=True),
    form("dump", "tensorflow", ("maxinuse:", "memory_limit_:", "sumtotalofin-usechunks"),
         r"bfc_allocator\.cc|Sum Total of in-use chunks|MaxInUse: ?[0-9]", *_TF_STATS, *_TF_DEVICES, whole=True),
    form("failed-memory", "tensorflow", ("failedtoallocatememory",),
         r"(?:ResourceExhausted(?:Error)?|RESOURCE_EXHAUSTED)[^\n]{0,200}?failed to allocate memory", *_TF_DEVICES, *_TF_STATS,
         whole=True),
]  # fmt: skip

XLA: list[Format] = [
    form(
        "tpu-hbm", "jax", ("memoryspacehbm", "hbmcapacity"),
        r"Ran out of memory in memory space (?:hbm|vmem|smem|cmem)|Exceeded (?:hbm|vmem|smem) capacity by",
        r"Used {used_bytes} of {limit} (?:hbm|vmem|smem|cmem)", r"Exceeded (?:hbm|vmem|smem) capacity by {exceeded_bytes}",
        r"Total hbm usage >= {total_usage_bytes}", Pattern(r"\bTPU\b|tpu_", device="tpu"), whole=True,
    ),
    form(
        "tpu-allocate", "jax", "thatwasnotpossible",
        r"Attempting to (?:allocate|reserve) {requested}(?: at the bottom of memory)?\. ?That was not possible",
        r"There are {free} free", r"{reservable_bytes} reservable", Pattern(r"\bTPU\b|tpu_", device="tpu"), whole=True,
    ),
    form("tpu-usage", "jax", "exceedingavailablebytes", r"Hbm usage:? {used_bytes}[^\n]{0,120}?exceeding available bytes: {limit}",
         r"TensorCore Hbm usage:? {tensorcore_used_bytes}", r"SparseCore Hbm usage:? {sparsecore_used_bytes}",
         Pattern(r"\bTPU\b|tpu_", device="tpu"), whole=True),
    form(
        "request", "jax", "failedtoallocaterequestfor",
        r"Failed to allocate request for (?:{said_bytes} ?\({requested:count} ?B\)|{plain_bytes})(?: on device ordinal {index}\b)?",
        r"Failed to allocate request for {requested}", r"on device ordinal {index}\b",
    ),
    form(
        "exhausted", "jax", ("outofmemorywhiletryingtoallocate", "outofmemoryallocating"),
        r"Out of memory (?:while trying to allocate|allocating) {said_bytes}(?! \(allocated so far)(?!, limit)",
        r"(?:trying to allocate|allocating) [0-9.]{1,24} ?[KMGTP]i?B? ?\({requested:count} ?(?:B|bytes)\)",
        r"(?:trying to allocate|allocating) {requested:count} bytes", r"(?:trying to allocate|allocating) {requested}",
        r"GPU_{index}_bfc", r"device ordinal {index}\b",
        r"parameter allocation: ?{parameter_bytes}", r"preallocated temp allocation: ?{temp_bytes}",
        r"constant allocation: ?{constant_bytes}", r"maybe_live_out allocation: ?{output_bytes}",
        r"total allocation: ?{total_program_bytes}", Pattern(r"GPU_[0-9]_bfc|device ordinal|CUDA_ERROR", base="cuda"),
        device=None, unless=r"OutOfMemoryError: Out of memory allocating [0-9,]{1,40} bytes \(allocated so far",
    ),
    form("assignment", "jax", "bufferassignmentoomdebugging", "BufferAssignment OOM Debugging",
         r"parameter allocation: ?{parameter_bytes}", r"preallocated temp allocation: ?{temp_bytes}",
         r"total allocation: ?{total_program_bytes}", whole=True),
    form(
        "xla-other", "jax", ("resource_exhausted", "resourceexhausted"),
        r"(?:RESOURCE_EXHAUSTED|Resource exhausted): ?(?:[^\n]{0,200}?)(?:out of memory|failed to allocate|oom|\bmemory\b)",
        r"(?:failed to allocate|allocate) {requested:count} bytes", r"(?:failed to allocate|allocate) {requested}",
        r"device ordinal {index}\b", unless=r"quota|received message larger|rate limit|larger than max|429|too many requests|"
        r"grpc|trying to send message|per minute|shared memory",
    ),
]  # fmt: skip

HOST: list[Format] = [
    form(
        "numpy", "numpy", ("unabletoallocate",),
        r"Unable to allocate (?:{requested} for an array|array with shape|{r2:size})",
        r"Unable to allocate {requested}",
        r"with shape {shape}", r"data type {dtype}", device="cpu",
    ),
    form("mlx", "mlx", ("[malloc", "malloc_or_wait", "maximumallowedbuffersize"),
         r"(?:Unable|Attempting) to allocate {requested:count} bytes", r"maximum allowed buffer size of {limit:count} bytes",
         device="metal"),
    form("arrow", "arrow", ("allocofsize", "allocationofsize"), r"(?:re|m|c)alloc(?:ation)? of size {requested:count} failed", device="cpu"),
    form("pandas-parser", "pandas", "cerror:outofmemory", "C error: out of memory"),
    form(
        "cupy", "cupy", ("outofmemoryallocating", "outofmemorytoallocate"),
        r"out of memory (?:allocating|to allocate) {requested:count} bytes ?\(",
        r"allocated so far: {allocated:count} bytes", r"limit set to: {limit:count} bytes", r"\(total {allocated:count} bytes\)",
        device="cuda",
    ),
    form("cupy-short", "cupy", "cupy", r"cupy[^\n]{0,60}OutOfMemoryError: ?Out of memory allocating {requested:count} bytes",
         device="cuda"),
    form(
        "rmm", "rmm", ("std::bad_alloc", "rmm"),
        r"std::bad_alloc: (?:out_of_memory|CUDA error|RMM failure)|rmm::(?:out_of_memory|bad_alloc)|Maximum pool size exceeded",
        r"failed to allocate {requested:count} bytes", r"failed to allocate {requested}", device="cuda",
    ),
    form("thrust", "thrust", ("thrust::", "bad_alloc:cuda", "cudaerrormemoryallocation"),
         r"thrust::[\w:]{1,60}bad_alloc|std::bad_alloc: cudaErrorMemoryAllocation|temporary_buffer::allocate: get_temporary_buffer failed",
         r"Free memory: ?{free}", r"Requested memory: ?{requested}", r"Free memory: ?{free:count}", r"Requested memory: ?{requested:count}",
         device="cuda"),
    form("thrust-call", "thrust", "failed:outofmemory", r"(?:parallel_for|trivial_device_copy\w{0,12}|reduce|scan|sort|transform)[^\n]{0,40} failed: out of memory",
         device="cuda"),
    form("theano", "theano", "bytesofdevicememory", r"Error allocating {requested:count} bytes of device memory",
         r"Driver report {free:count} bytes free and {total:count} bytes total", device="cuda"),
    form("xgboost", "xgboost", "requestedmemory:", r"- ?Requested memory: ?{requested}", r"- ?Free memory: ?{free}", device="cuda",
         whole=True),
    form("catboost", "catboost", "toutofmemory", r"Out of memory\. Requested {requested};? ?(?:Free {free})?", device="cuda"),
    form("numba", "numba", "cumemalloc",
         r"cuMemAlloc(?:_v2|Managed|Host)? ?(?:results in|failed)?[^\n]{0,40}?(?:CUDA_ERROR_)?OUT[_ ]OF[_ ]MEMORY", device="cuda"),
    form(
        "julia-cuda", "julia", ("outofgpumemory",), r"Out of GPU memory(?: trying to allocate {requested})?",
        r"Effective GPU memory usage: [0-9.]{1,8}% \({used_bytes}/{total}\)", r"Memory pool usage: {allocated} \({reserved} reserved\)",
        r"Memory pool usage: {allocated}", r"CUDA allocator usage: {allocated}", device="cuda",
    ),
    form("julia", "julia", "outofmemoryerror()", r"OutOfMemoryError\(\)"),
    form(
        "r", "r", ("cannotallocatevector", "cannotallocatememoryblock", "vectormemory", "memoryexhausted(limit", "reachedtotalallocation"),
        r"cannot allocate (?:vector|memory block|buffer) of (?:size|length) {requested}|vector memory (?:limit of {limit} reached|exhausted)|"
        r"cannot allocate (?:vector|memory block) of (?:size|length)|"
        r"memory exhausted \(limit reached|Reached total allocation of {l2:size}",
        r"cannot allocate (?:vector|memory block|buffer) of (?:size|length) {requested}", r"vector memory limit of {limit} reached",
        r"Reached total allocation of {limit}", device="cpu",
    ),
    form("rust", "rust", "memoryallocationof", r"memory allocation of {requested:count} bytes failed", device="cpu"),
    form(
        "java-native", "java", ("nativememoryallocation", "os::commit_memory"),
        r"Native memory allocation \((?:mmap|malloc)\) failed to (?:map|allocate) {requested:count} bytes|"
        r"os::commit_memory\(0x[0-9a-f]{1,16}, {r2:count}, [0-9]\) failed",
        r"failed to (?:map|allocate) {requested:count} bytes", r"os::commit_memory\(0x[0-9a-f]{1,16}, {requested:count},",
    ),
    form(
        "java", "java", "outofmemoryerror",
        r"java\.lang\.OutOfMemoryError|OutOfMemoryError: (?:Java heap space|GC overhead limit exceeded|Requested array size|"
        r"Metaspace|Direct buffer memory|Compressed class space|PermGen)",
        unless="unable to create (?:new )?native thread",
    ),
    form("java-direct", "java", "directmemory", r"failed to allocate {requested:count} byte\(s\) of direct memory \(used: {allocated:count}, max: {limit:count}\)"),
    form("spark", "spark", "unabletoacquire", r"Unable to acquire {requested:count} bytes of memory, got {free:count}"),
    form("node", "node", ("javascriptheapoutofmemory", "reachedheaplimit"), r"JavaScript heap out of memory|Reached heap limit"),
    form("go", "go", ("runtime:outofmemory", "runtime:cannotallocate"),
         r"fatal error: (?:runtime: )?(?:out of memory|cannot allocate memory)|runtime: out of memory|runtime: cannot allocate",
         r"cannot allocate {requested:count}-byte block \({allocated:count} in use\)"),
    form("openblas", "openblas", "openblas", r"OpenBLAS ?(?:error|warning)?:? ?(?:Memory allocation|malloc)[^\n]{0,40}?failed|"
         r"OpenBLAS[^\n]{0,40}allocat[^\n]{0,40}fail"),
    form("opencv", "opencv", "insufficientmemory", r"\(-4:Insufficient memory\) Failed to allocate {requested:count} bytes",
         device="cpu"),
    form("opencv-gpu", "opencv", "gpuapicall", r"\(-217:Gpu API call\) out of memory", device="cuda"),
    form("duckdb", "duckdb", ("outofmemoryerror:failed", "outofmemoryerror:could", "outofmemoryexception"),
         r"(?:failed to|could not) (?:allocate|pin) (?:data|block) of size {requested} ?\({allocated}/{limit} used\)",
         device="cpu"),
    form("matlab", "matlab", "arraysize", r"Requested {dims:word} \({requested}\) array exceeds maximum array size preference \({limit}\)",
         device="cpu"),
    form("postgres", "postgres", "failedonrequestofsize", r"Failed on request of size {requested:count}", device="cpu"),
]  # fmt: skip

BARE: list[Format] = [
    form("windows-1455", "windows", ("1455", "pagingfile"),
         r"\[WinError 1455\]|os error 1455|paging file is too small for this operation"),
    form("bad-alloc", "c++", ("std::bad_alloc", "bad_array_new_length", "badallocation"), r"std::bad_alloc|: bad allocation"),
    form("errno12", "linux", ("errno12", "cannotallocatememory", "oserror:[errno12", "enomem"),
         r"\[?Errno 12\]?:? ?(?:Cannot allocate memory|Not enough space)|fork(?:: retry)?: (?:Resource temporarily unavailable: )?Cannot allocate memory|"
         r"(?:mmap|malloc|calloc|realloc|vfork|clone|sbrk|mlock|allocation|error)\(?\)?[^\n]{0,60}?: ?Cannot allocate memory|"
         r"\bENOMEM\b|Cannot allocate memory",
         r"mmap(?:\(|ing )? ?{requested:count} bytes",
         unless=r"static TLS block|write\+execute"),
    form("python", "python", "memoryerror", r"^(?:[\w.]{1,80}: )?(?:builtins\.)?MemoryError ?(?:$|: ?$|\(\)$|: std::bad_alloc)", lines=True),
    form("python-said", "python", "memoryerror", r"(?:^|[\s'\"`(])MemoryError: ?[^\s{]", r"(?:allocate|allocating) {requested:count} bytes",
         r"(?:allocate|allocating) {requested}",
         unless=r"static TLS block|write\+execute", lines=True),
]  # fmt: skip
"""Words that say no more than that it failed; asked last."""
