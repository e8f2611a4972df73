"""What array libraries on a host or a GPU print: NumPy and kin, CuPy, RMM, XGBoost, and other languages."""

from __future__ import annotations

from outsize.failure.message.grammar import Format, form

HOST: list[Format] = [
    form(
        "numpy",
        "numpy",
        ("unabletoallocate",),
        r"Unable to allocate (?:{requested} for an array|array\b|{r2:size}|[^\n]{1,24}? for an array)",
        r"Unable to allocate {requested}",
        r"with shape {shape}",
        r"data type {dtype}",
        device="cpu",
    ),
    form(
        "mlx",
        "mlx",
        ("[malloc", "malloc_or_wait", "maximumallowedbuffersize"),
        r"(?:Unable|Attempting) to allocate {requested:count} bytes",
        r"maximum allowed buffer size of {limit:count} bytes",
        device="metal",
    ),
    form(
        "arrow",
        "arrow",
        ("allocofsize", "allocationofsize"),
        r"(?:re|m|c)alloc(?:ation)? of size (?:{requested:count}|[^ \n]{1,24}) failed",
        device="cpu",
    ),
    form("pandas-parser", "pandas", "cerror:outofmemory", "C error: out of memory"),
    form(
        "cupy",
        "cupy",
        ("outofmemoryallocating", "outofmemorytoallocate"),
        r"out of memory (?:allocating|to allocate) {requested:count} bytes ?\(",
        r"allocated so far: {allocated:count} bytes",
        r"limit set to: {limit:count} bytes",
        r"\(total {allocated:count} bytes\)",
        device="cuda",
    ),
    form(
        "cupy-short",
        "cupy",
        "cupy",
        r"cupy[^\n]{0,60}OutOfMemoryError: ?Out of memory allocating {requested:count} bytes",
        device="cuda",
    ),
    form(
        "rmm",
        "rmm",
        ("std::bad_alloc", "rmm"),
        r"std::bad_alloc: (?:out_of_memory|CUDA error(?= ?(?:at|\())|RMM failure)|rmm::(?:out_of_memory|"
        r"bad_alloc)|Maximum pool "
        r"size exceeded",
        r"failed to allocate {requested:count} bytes",
        r"failed to allocate {requested}",
        device="cuda",
    ),
    form(
        "thrust",
        "thrust",
        ("thrust::", "bad_alloc:cuda", "cudaerrormemoryallocation"),
        r"thrust::[\w:]{1,60}bad_alloc|std::bad_alloc: cudaErrorMemoryAllocation|temporary_buffer::allocate: "
        r"get_temporary_buffer failed",
        r"Free memory: ?{free}",
        r"Requested memory: ?{requested}",
        r"Free memory: ?{free:count}",
        r"Requested memory: ?{requested:count}",
        device="cuda",
    ),
    form(
        "thrust-call",
        "thrust",
        "failed:outofmemory",
        r"(?:parallel_for|trivial_device_copy\w{0,12}|reduce|scan|sort|transform)[^\n]{0,40} failed: out of memory",
        device="cuda",
    ),
    form(
        "theano",
        "theano",
        "bytesofdevicememory",
        r"Error allocating {requested:count} bytes of device memory",
        r"Driver report {free:count} bytes free and {total:count} bytes total",
        device="cuda",
    ),
    form(
        "xgboost",
        "xgboost",
        "requestedmemory:",
        r"- ?Requested memory: ?{requested}",
        r"- ?Free memory: ?{free}",
        device="cuda",
        whole=True,
    ),
    form(
        "catboost",
        "catboost",
        "toutofmemory",
        r"Out of memory\. Requested {requested};? ?(?:Free {free})?",
        device="cuda",
    ),
    form(
        "numba",
        "numba",
        "cumemalloc",
        r"cuMemAlloc(?:_v2|Managed|Host)? ?(?:results in|failed)?[^\n]{0,40}?(?:CUDA_ERROR_)?OUT[_ ]OF[_ ]MEMORY",
        device="cuda",
    ),
    form(
        "julia-cuda",
        "julia",
        ("outofgpumemory",),
        r"Out of GPU memory(?: trying to allocate {requested})?",
        r"[0-9.]{1,8}% \({used_bytes}/{total}\)",
        r"Memory pool usage: {allocated} \({reserved} reserved\)",
        r"Memory pool usage: {allocated}",
        r"CUDA allocator usage: {allocated}",
        device="cuda",
    ),
    form("julia", "julia", "outofmemoryerror()", r"OutOfMemoryError\(\)"),
    form(
        "r",
        "r",
        (
            "cannotallocatevector",
            "cannotallocatememoryblock",
            "vectormemory",
            "memoryexhausted(limit",
            "reachedtotalallocation",
        ),
        r"cannot allocate (?:vector|memory block|buffer) of (?:size|length) {requested}|vector memory (?:limit "
        r"of {limit} reached|exhausted)|"
        r"cannot allocate (?:vector|memory block) of (?:size|length)|"
        r"memory exhausted \(limit reached|Reached total allocation of {l2:size}",
        r"cannot allocate (?:vector|memory block|buffer) of (?:size|length) {requested}",
        r"vector memory limit of {limit} reached",
        r"Reached total allocation of {limit}",
        device="cpu",
    ),
    form(
        "rust",
        "rust",
        "memoryallocationof",
        r"memory allocation of (?:{requested:count}|[^ \n]{1,24}) bytes failed",
        device="cpu",
    ),
    form(
        "java-native",
        "java",
        ("nativememoryallocation", "os::commit_memory"),
        r"Native memory allocation \((?:mmap|malloc)\) failed to (?:map|allocate) {requested:count} bytes|"
        r"os::commit_memory\(0x[0-9a-f]{1,16}, {r2:count}, [0-9]\) failed",
        r"failed to (?:map|allocate) {requested:count} bytes",
        r"os::commit_memory\(0x[0-9a-f]{1,16}, {requested:count},",
    ),
    form(
        "java",
        "java",
        "outofmemoryerror",
        r"java\.lang\.OutOfMemoryError|OutOfMemoryError: (?:Java heap space|GC overhead limit exceeded|Requested "
        r"array size|"
        r"Metaspace|Direct buffer memory|Compressed class space|PermGen)",
        unless="unable to create (?:new )?native thread",
    ),
    form(
        "java-direct",
        "java",
        "directmemory",
        r"failed to allocate {requested:count} byte\(s\) of direct memory \(used: {allocated:count}, "
        r"max: {limit:count}\)",
    ),
    form("spark", "spark", "unabletoacquire", r"Unable to acquire {requested:count} bytes of memory, got {free:count}"),
    form(
        "node",
        "node",
        ("javascriptheapoutofmemory", "reachedheaplimit"),
        r"JavaScript heap out of memory|Reached heap limit",
    ),
    form(
        "go",
        "go",
        ("runtime:outofmemory", "runtime:cannotallocate"),
        r"fatal error: (?:runtime: )?(?:out of memory|cannot allocate memory)|runtime: out of memory|runtime: "
        r"cannot allocate",
        r"cannot allocate {requested:count}-byte block \({allocated:count} in use\)",
    ),
    form(
        "openblas",
        "openblas",
        "openblas",
        r"OpenBLAS ?(?:error|warning)?:? ?(?:Memory allocation|malloc)[^\n]{0,40}?failed|"
        r"OpenBLAS[^\n]{0,40}allocat[^\n]{0,40}fail",
    ),
    form(
        "opencv",
        "opencv",
        "insufficientmemory",
        r"\(-4:Insufficient memory\) Failed to allocate {requested:count} bytes",
        device="cpu",
    ),
    form("opencv-gpu", "opencv", "gpuapicall", r"\(-217:Gpu API call\) out of memory", device="cuda"),
    form(
        "duckdb",
        "duckdb",
        ("outofmemoryerror:failed", "outofmemoryerror:could", "outofmemoryexception"),
        r"(?:failed to|could not) (?:allocate|pin) (?:data|block) of size {requested} ?\({allocated}/{limit} used\)",
        device="cpu",
    ),
    form(
        "matlab",
        "matlab",
        "arraysize",
        r"Requested {dims:word} \({requested}\) array exceeds maximum array size preference \({limit}\)",
        device="cpu",
    ),
    form("postgres", "postgres", "failedonrequestofsize", r"Failed on request of size {requested:count}", device="cpu"),
]

BARE: list[Format] = [
    form(
        "windows-1455",
        "windows",
        ("1455", "pagingfile"),
        r"\[WinError 1455\]|os error 1455|paging file is too small for this operation",
    ),
    form(
        "bad-alloc",
        "c++",
        ("std::bad_alloc", "bad_array_new_length", "badallocation"),
        r"std::bad_alloc|: bad allocation",
    ),
    form(
        "errno12",
        "linux",
        ("errno12", "cannotallocatememory", "oserror:[errno12", "enomem"),
        r"\[?Errno 12\]?:? ?(?:Cannot allocate memory|Not enough space)|fork(?:: retry)?: (?:Resource temporarily "
        r"unavailable: )?Cannot allocate memory|"
        r"(?:mmap|malloc|calloc|realloc|vfork|clone|sbrk|mlock|allocation|error)\(?\)?[^\n]{0,60}?: ?Cannot "
        r"allocate memory|"
        r"\bENOMEM\b|Cannot allocate memory",
        r"mmap(?:\(|ing )? ?{requested:count} bytes",
        unless=r"static TLS block|write\+execute",
    ),
    form(
        "python",
        "python",
        "memoryerror",
        r"^(?:[\w.]{1,80}: )?(?:builtins\.)?MemoryError ?(?:$|: ?$|\(\)$|: std::bad_alloc)",
        lines=True,
    ),
    form(
        "python-said",
        "python",
        "memoryerror",
        r"(?:^|[\s'\"`(])MemoryError: ?[^\s{]",
        r"(?:allocate|allocating) {requested:count} bytes",
        r"(?:allocate|allocating) {requested}",
        unless=r"static TLS block|write\+execute",
        lines=True,
    ),
]
"""Words that say no more than that it failed; asked last."""
