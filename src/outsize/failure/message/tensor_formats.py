"""What array libraries on a host or a GPU print: TensorFlow, JAX/XLA, NumPy and kin, CuPy, RMM, and their kin."""

from __future__ import annotations

from outsize.failure.message.grammar import Format, Pattern, form

# Rows of tables: name, framework, anchor, further parts.
# fmt: off

_TF_DEVICES = (
    Pattern(r"device:GPU:{index}"),
    Pattern(r"on (?:/device:)?GPU:{index}"),
    Pattern(r"GPU_{index}_bfc"),
    Pattern(r"by allocator (?:cpu|cpu_pool|mklcpu|cuda_host)", device="cpu"),
    Pattern(r"device:CPU:[0-9]", device="cpu"),
    Pattern(r"task:[0-9]{1,6}/gpu:{index}"),
    Pattern(r"task:[0-9]{1,6}/cpu:[0-9]", device="cpu"),
)
_XLA_BASES = (
    Pattern("HIP_ERROR|rocm_driver|hipError", base="hip"),
    Pattern("GPU_[0-9]_bfc|device ordinal|CUDA_ERROR", base="cuda"),
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
    form("tensor", "tensorflow", r"OOM when allocating tensor(?: with| of)? shape ?{shape}",
         r"shape ?[\[(][0-9, ]{0,200}[\])] and type {dtype} on",
         r"shape ?[\[(][0-9, ]{0,200}[\])] and type {dtype}\b", r"type {dtype} on /job:[^ ]{1,80}device:GPU:{index}",
         r"on /job:[^ ]{1,80}/device:GPU:{index}", Pattern(r"on /job:[^ ]{1,80}/device:CPU:[0-9]", device="cpu"),
         *_TF_DEVICES, r"by allocator {allocator:word}", *_TF_STATS, fills=("tensorflow",), whole=True),
    form("tensor-elided", "tensorflow", r"OOM when allocating tensor", r"and type {dtype} on", *_TF_DEVICES,
         *_TF_STATS, fills=("tensorflow",), whole=True),
    form("async", "tensorflow", r"cuMemAllocAsync failed to allocate {requested:count} bytes",
         r"Free memory/Total memory: {free:count}/{total:count}", r"gpu_async_{index}\b", *_TF_STATS, device="cuda",
         whole=True),
    form("bfc-jax", "jax", r"external/(?:xla|org_tensorflow)/[^\n]{0,200}?\bran out of memory trying to allocate",
         r"trying to allocate [0-9.]{1,24} ?[KMGTP]?i?B \(rounded to {requested:count}\)",
         r"ran out of memory trying to allocate {requested}", r"Allocator \(GPU_{index}_bfc\)",
         Pattern("The caller indicates that this is not a failure", not_a_failure=True), *_TF_STATS, whole=True,
         fills=("jax",)),
    form("bfc-warning", "tensorflow", r"(?:Allocator \(?{allocator:word}\)? )?\bran out of memory trying to allocate",
         r"trying to allocate [0-9.]{1,24} ?[KMGTP]?i?B \(rounded to {requested:count}\)",
         r"ran out of memory trying to allocate {requested}", r"Allocator \(GPU_{index}_bfc\)",
         Pattern(r"Allocator \((?:cpu|cpu_pool|xla_cpu|cuda_host_bfc|mklcpu)\)", device="cpu"),
         Pattern("The caller indicates that this is not a failure", not_a_failure=True), *_TF_STATS, whole=True,
         fills=("tensorflow",)),
    form("ten-percent", "tensorflow",
         r"Allocation of (?:{requested:count}|\w{1,12}) exceeds {percent:int}% of (?:free )?system memory",
         device="cpu", extra={"not_a_failure": True}),
    form("host", "tensorflow",
         r"failed to alloc(?:ate)? (?:[0-9.]{1,24} ?[KMGTP]?i?B? \()?{requested:count} bytes\)? on host|"
         r"could not allocate pinned host memory of",
         r"could not allocate pinned host memory of (?:size|bytes): ?{requested:count}", device="cpu"),
    form("driver", "tensorflow",
         r"ailed to allocate [0-9.]{1,24} ?[KMGTP]?i?B? ?\({requested:count} bytes\) from device",
         r"device ordinal {index}\b", r"device {index}\b", *_XLA_BASES, device="cuda"),
    form("driver-plain", "tensorflow", r"failed to allocate {requested} from device: ?CUDA_ERROR_OUT_OF_MEMORY",
         device="cuda"),
    form("context", "tensorflow", r"(?:cuDevicePrimaryCtxRetain|cuCtxCreate|cuInit|failed initializing "
         r"StreamExecutor)[^\n]{0,300}?CUDA_ERROR_OUT_OF_MEMORY|CUDA runtime implicit initialization[^\n]{0,60}out "
         r"of memory", r"device ordinal {index}\b",
         r"total memory reported: {total:count}", device="cuda", whole=True, unless="numba|cupy|pycuda|tensorrt"),
    form("dst", "tensorflow", "Dst tensor is not initialized", r"to [^ ]{0,60}GPU:{index}", r"GPU:{index}\b",
         *_TF_STATS, device="cuda", whole=True),
    form("dump", "tensorflow", r"Sum Total of in-use chunks|MaxInUse: ?[0-9]|memory_limit_: ?[0-9]|"
         r"Chunks of size [0-9]{1,20} totalling", *_TF_STATS,
         *_TF_DEVICES, whole=True),
    form("failed-memory", "tensorflow",
         r"(?:ResourceExhausted(?:Error)?|RESOURCE_EXHAUSTED)[^\n]{0,200}?failed to allocate memory", *_TF_DEVICES,
         *_TF_STATS, whole=True),
]

_SPACE = "(?:hbm|[vsc]mem|sflag)"

XLA: list[Format] = [
    form("tpu-hbm", "jax", rf"Ran out of memory in memory space {_SPACE}|Exceeded {_SPACE} capacity by",
         rf"Used {{used_bytes}} of {{limit}} {_SPACE}", rf"Exceeded {_SPACE} capacity by {{exceeded_bytes}}",
         r"Total hbm usage >= {total_usage_bytes}", Pattern(r"\bTPU\b|tpu_", device="tpu"), whole=True),
    form("tpu-allocate", "jax", r"RESOURCE_EXHAUSTED: (?:[A-Z][\w ]{1,60}: )?Attempting to (?:allocate|reserve)|"
         r"Attempting to (?:allocate|reserve) [0-9.]{1,12} ?[KMGTPE]?i?B?(?: at the bottom of memory)?\. ?That was not",
         r"Attempting to (?:allocate|reserve) {requested}", r"(?:There are|Only|\.\.\.) {free} free",
         r"{reservable_bytes} reservable", Pattern(r"\bTPU\b|tpu_", device="tpu"), whole=True),
    form("tpu-usage", "jax", r"Hbm usage:? {used_bytes}[^\n]{0,120}?exceeding available bytes: {limit}",
         r"TensorCore Hbm usage:? {tensorcore_used_bytes}", r"SparseCore Hbm usage:? {sparsecore_used_bytes}",
         Pattern(r"\bTPU\b|tpu_", device="tpu"), whole=True),
    form("tpu-scoped", "jax", r"Allocation \(size={requested:count}\) would exceed memory \(size={limit:count}\)",
         Pattern(r"\bTPU\b|tpu_|space=[vs]mem|space=hbm", device="tpu"), whole=True),
    form("request", "jax", r"Failed to allocate request for",
         r"request for [0-9.]{1,24} ?[KMGTP]?i?B? ?\({requested:count} ?B(?:ytes)?\)",
         r"Failed to allocate request for {requested}", r"on device ordinal {index}\b", *_XLA_BASES, whole=True),
    form("exhausted", "jax",
         r"Out of memory (?:while trying to allocate|allocating) (?=[0-9])[^(\n]{1,60}(?!\(allocated so far)",
         r"(?:trying to allocate|allocating) [0-9.]{1,24} ?[KMGTP]i?B? ?\({requested:count} ?(?:B|bytes)\)",
         r"(?:trying to allocate|allocating) {requested:count} bytes",
         r"(?:trying to allocate|allocating) {requested}", r"GPU_{index}_bfc", r"device ordinal {index}\b",
         r"parameter allocation: ?{parameter_bytes}", r"preallocated temp allocation: ?{temp_bytes}",
         r"constant allocation: ?{constant_bytes}", r"maybe_live_out allocation: ?{output_bytes}",
         r"total allocation: ?{total_program_bytes}", *_XLA_BASES,
         unless=r"OutOfMemoryError: Out of memory allocating [0-9,]{1,40} bytes \(allocated so far|"
         r"bytes after a total of|\b(?:CPL|VSI)\w{0,24}\(\):"),
    form("assignment", "jax", "BufferAssignment OOM Debugging", r"parameter allocation: ?{parameter_bytes}",
         r"preallocated temp allocation: ?{temp_bytes}", r"total allocation: ?{total_program_bytes}", whole=True),
    form("xla-other", "jax",
         r"(?:RESOURCE_EXHAUSTED|Resource exhausted): ?(?:[^\n]{0,80}?)(?:out of memory|failed to allocate|oom|"
         r"\bmemory\b)", r"(?:failed to allocate|allocate) {requested:count} bytes",
         r"(?:failed to allocate|allocate) {requested}", r"device ordinal {index}\b",
         unless=r"quota|received message larger|rate limit|larger than max|429|too many requests|"
         r"grpc|trying to send message|per minute|shared memory"),
]

LIBRARIES: list[Format] = [
    form("numpy", "numpy", r"(?:MemoryError\W{1,3}|Memory Error: )Unable to allocate|"
         r"Unable to allocate (?:[0-9][0-9.]{0,12} [KMGTPE]i?B\b|array with shape|[^\n]{1,12} for an array)",
         r"Unable to allocate {requested}", r"with (?:shape|form) {shape}", r"(?:data type|dtype) {dtype}"),
    form("mlx", "mlx", r"(?:Unable|Attempting) to allocate (?:{requested:count} bytes|\.\.\.)|"
         r"malloc\] Resource limit[^\n]{0,30}exceeded", r"maximum allowed buffer size of {limit:count} bytes"),
    form("arrow", "arrow", r"(?:re|m|c)alloc(?:ation)? of size (?:{requested:count}|\w{1,8}) failed"),
    form("pandas-parser", "pandas", r"\bC error: out of memory"),
    form("hdf5", "hdf5", r"(?:\bH5[A-Za-z_]{1,40}(?:\(\):)? ?|"
         r"(?:Can't|Cannot|Couldn't|Could not|Unable to) [a-z][a-z ]{1,60}\()"
         r"(?:memory allocation failed|(?:unable to|can't|cannot|couldn't|could not) allocate memory)",
         r"memory block of {requested:count} bytes", unless="static TLS block"),
    form("netcdf", "netcdf", r"NetCDF: Memory allocation \(malloc\) failure"),
    form("gdal", "gdal",
         r"CPLE_OutOfMemory|\b(?:CPL|VSI)\w{0,12}(?:Malloc|Calloc|Realloc)\w{0,12}\(\): ?(?:Out of memory|Cannot allocate)",
         r"allocat(?:e|ing) {requested:count} bytes"),
    form("imagemagick", "imagemagick",
         r"\bcache resources exhausted|\bmemory allocation failed [`'\"][^\n@]{1,200}@ error/"),
    form("gromacs", "gromacs",
         r"Not enough memory\. Failed to (?:re|m|c)alloc (?:[0-9]{1,20} elements of size [0-9]{1,20}|{requested:count} bytes)"),
    form("petsc", "petsc", r"PETSC ERROR: Out of memory", r"Memory requested {requested:count}"),
    form("cupy", "cupy",
         r"out of memory (?:allocating|to allocate) (?:{requested:count}|\w{1,12}) bytes ?\((?:allocated so far|total )",
         r"allocated so far: {allocated:count} bytes", r"limit set to:? {limit:count} bytes",
         r"\(total {allocated:count} bytes"),
    form("cupy-short", "cupy", r"cupy[^\n]{0,60}OutOfMemoryError: ?Out of memory allocating {requested:count} bytes"),
    form("rmm", "rmm",
         r"std::bad_alloc: (?:out_of_memory|CUDA error(?!Memory)|RMM failure)|rmm::(?:out_of_memory|bad_alloc)|"
         r"RMM_ERROR_OUT_OF_MEMORY|Maximum pool size exceeded", r"failed to allocate {requested:count} bytes",
         r"failed to allocate {requested}"),
    form("xgboost-worker", "xgboost", r"Memory allocation error on worker|"
         r"(?:updater_gpu_hist|libxgboost|XGBoostError)[^\n]{0,400}?(?:bad_alloc|out of memory)",
         r"Free memory: ?{free}", r"Requested memory: ?{requested}", r"Free memory: ?{free:count}",
         r"Requested memory: ?{requested:count}", whole=True),
    form("lightgbm-opencl", "lightgbm", r"opencl_error[^\n]{0,80}Memory Object Allocation Failure"),
    form("thrust", "thrust", r"thrust::[\w:]{1,60}bad_alloc|std::bad_alloc: cudaErrorMemoryAllocation|"
         r"temporary_buffer::allocate: get_temporary_buffer failed", r"Free memory: ?{free}",
         r"Requested memory: ?{requested}", r"Free memory: ?{free:count}", r"Requested memory: ?{requested:count}"),
    form("thrust-call", "thrust",
         r"(?:parallel_for|trivial_device_copy\w{0,12}|reduce|scan|sort|transform)[^\n]{0,40} failed: out of memory"),
    form("theano", "theano", r"Error allocating {requested:count} bytes of device memory",
         r"Driver report {free:count} bytes free and {total:count} bytes total"),
    form("xgboost", "xgboost", r"- ?Requested memory: ?{requested}", r"- ?Free memory: ?{free}", whole=True),
    form("catboost", "catboost", r"Out of memory\. Requested {requested};? ?(?:Free {free})?"),
    form("faiss", "faiss", r"(?:Failed to cudaMalloc|alloc fail type)[^\n]{0,160}error (?:2 )?out of memory",
         r"cudaMalloc {requested:count} bytes", r"size {requested:count} bytes", r"dev {index} space"),
    form("mindspore", "mindspore", r"memory isn't enough and alloc failed", r"alloc size: {requested}"),
    form("numba", "numba",
         r"cuMemAlloc(?:_v2|Managed|Host)? ?(?:results in|failed)?[^\n]{0,40}?(?:CUDA_ERROR_)?OUT[_ ]OF[_ ]MEMORY|"
         r"Call to cu\w{1,30} results in CUDA_ERROR_OUT_OF_MEMORY"),
    form("julia-cuda-code", "julia", r"CUDA error: out of memory \(code #?2,", device="cuda"),
    form("julia-cuda", "julia", r"Out of GPU memory trying to allocate(?: {requested})?|OutOfGPUMemoryError",
         r"[0-9.]{1,8}% \({used_bytes}/{total}\)", r"Memory pool usage: {allocated} \({reserved} reserved\)",
         r"Memory pool usage: {allocated}", r"CUDA allocator usage: {allocated}", device="cuda"),
]
