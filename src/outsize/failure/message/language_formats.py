"""What languages, their tools and databases print: R, Rust, Java, Node, Go, C++, Python, compilers."""

from __future__ import annotations

from outsize.failure.message.grammar import Format, Pattern, form

# Rows of tables: name, framework, anchor, further parts.
# fmt: off

LANGUAGES: list[Format] = [
    form("julia", "julia", r"OutOfMemoryError\(\)"),
    form("r-narrow", "r", r"don't be silly!: your machine has a 4Gb address",
         r"cannot allocate (?:vector|memory block|buffer) of (?:size|length) {requested}", extra={"narrow": True}),
    form("r", "r", r"can ?not allocate (?:a |of )?(?:vector|memory block|buffer) of (?:size|length) {requested}|"
         r"vector memory (?:limit of {limit} reached|exhausted)|"
         r"can ?not allocate (?:a |of )?(?:vector|memory block) of (?:size|length)|"
         r"memory exhausted \(limit reached|Reached total allocation of",
         r"can ?not allocate (?:a |of )?(?:vector|memory block|buffer) of (?:size|length) {requested}",
         r"vector memory limit of {limit} reached", r"Reached total allocation of {limit}", whole=True),
    form("rust", "rust", r"memory allocation of (?:{requested:count}|\w{1,8}) bytes failed"),
    form("java-native", "java", r"Native memory allocation \((?:mmap|malloc)\) failed to (?:map|allocate)|"
         r"insufficient memory for the Java Runtime Environment|"
         r"os::commit_memory\(0x[0-9a-f]{1,16}, [0-9]{1,20}, [0-9]\) failed",
         r"failed to (?:map|allocate) {requested:count} bytes",
         r"os::commit_memory\(0x[0-9a-f]{1,16}, {requested:count},"),
    form("java-direct", "java",
         r"failed to allocate {requested:count} byte\(s\) of direct memory \(used: {allocated:count}, max: "
         r"{limit:count}\)"),
    form("spark", "spark", r"Unable to acquire {requested:count} bytes of memory, got {free:count}"),
    form("android", "android", r"Failed to allocate an? {requested:count} byte allocation with {free:count} free bytes",
         r"growth limit {limit:count}"),
    form("java-array", "java", r"Requested array size exceeds VM limit"),
    form("java-reserve", "java", r"Could not reserve enough space for [^\n]{0,20}object heap|Invalid maximum heap size"),
    form("java", "java",
         r"java\.lang\.OutOfMemoryError|running out of JVM (?:Metaspace|heap)|"
         r"OutOfMemoryError: (?:Java heap space|GC overhead limit exceeded|"
         r"Requested array size|" r"Metaspace|Direct buffer memory|Compressed class space|PermGen)",
         r"Failed to allocate (?:a )?{requested}", unless="unable to create (?:new )?native thread"),
    form("node", "node", r"JavaScript heap out of memory|"
         r"Allocation failed - process out of memory|Reached heap limit|(?<!::)Fatal process out of memory"),
    form("array-buffer", "javascript",
         r"Array buffer allocation failed|WebAssembly\.Memory\(\): could not allocate memory"),
    form("go", "go", r"fatal error: (?:runtime: )?(?:out of memory|cannot allocate memory)|runtime: out of memory|"
         r"runtime: cannot allocate", r"cannot allocate {requested:count}-byte block \({allocated:count} in use\)",
         r"VirtualAlloc of {requested:count} bytes failed", Pattern(r"asm_386\.s|not in usable range", narrow=True), whole=True),
    form("openblas", "openblas", r"OpenBLAS ?(?:error|warning)?:? ?(?:Memory allocation|malloc)[^\n]{0,40}?failed|"
         r"OpenBLAS[^\n]{0,40}allocat[^\n]{0,40}fail"),
    form("opencv", "opencv", r"\(-4(?::Insufficient memory)?\) Failed to allocate|"
         r"OpenCV Error: Insufficient memory \(Failed to allocate", r"Failed to allocate {requested:count} bytes", device="cpu"),
    form("opencv-gpu", "opencv", r"\(-217:Gpu API call\) out of memory", device="cuda"),
    form("duckdb", "duckdb",
         r"(?:failed to|could not) (?:allocate|pin) (?:data|block) of size {requested} ?\({allocated}/{limit} used\)"),
    form("duckdb-exception", "duckdb", r"duckdb[\w.]{0,40}OutOfMemoryException|"
         r"Out of Memory Error: ?(?:failed|could not) (?:to )?(?:allocate|offload|pin)", r"used\)?[^\n]{0,4}"
                                                                                         r"{allocated}/{limit} used"),
    form("elasticsearch", "elasticsearch", r"Circuit_?Breaking_?Exception[^\n]{0,40}Data too large",
         r"larger than the limit of \[{limit:count}/"),
    form("clickhouse", "clickhouse", r"Memory limit [^\n]{0,60}exceeded: would use {would_use_bytes}",
         r"attempt to allocate chunk of {requested:count} bytes", r"maximum: {limit}"),
    form("redis-limit", "redis", r"command not allowed when used memory >", extra={"limited": True}),
    form("git", "git", r"fatal: Out of memory, \w{1,20} failed(?: \(tried to allocate {requested:count} bytes\))?",
         device="cpu"),
    form("redis", "redis", r"zmalloc: Out of memory",
         r"trying to allocate {requested:count} bytes"),
    form("php", "php", r"Allowed memory size of (?:{limit:count} )?bytes exhausted",
         r"tried to allocate {requested:count} bytes"),
    form("ruby", "ruby", r"\bNoMemoryError\b"),
    form("dotnet", "dotnet", r"\bOutOfMemoryException\b|\bSystem Out of Memory Exception\b"),
    form("stata", "stata", r"op\. sys\. refuses to provide memory"),
    form("erlang", "erlang", r"\w{1,12}_alloc: Cannot (?:re)?allocate {requested:count} bytes of memory"),
    form("compiler", "compiler",
         r"Killed signal terminated program {process:word}|\b(?:ld|cc1\w{0,8}|lto\w{0,8}) terminated with signal 9\b",
         extra={"signal": "Killed"}),
    form("compiler-memory", "compiler", r"(?:final link failed|virtual memory):? ?(?:memory )?exhausted|"
         r"out of memory allocating {requested:count} bytes after a total of"),
    form("octave", "octave", r"out of memory or dimension too large for Octave's index type", device="cpu"),
    form("matlab-elided", "matlab", r"Requested {dims:word} \({requested}\) array exceeds maximum array size "
                                    r"preference\.", device="cpu"),
    form("matlab", "matlab",
         r"Requested {dims:word} \({requested}\) array exceeds maximum array size preference \({limit}\)",
         device="cpu"),
    form("matlab-help", "matlab", r"Out of memory\. ?Type [\"']?help memory", device="cpu"),
    form("matlab-gpu", "matlab", r"\bOut of memory on device\. ?To view more detail", device="cuda"),
    form("fortran", "fortran",
         r"\bError allocating {requested:count} bytes(?! of)|forrtl: severe \(41\): insufficient virtual memory"),
    form("perl", "perl", r"Out of memory in perl:"),
    form("mysql", "mysql", r"Out of memory; restart server and try again(?: \(needed {requested:count} bytes\))?|"
         r"Out of memory \(Needed [0-9]{1,20} bytes\)", r"\(Needed {requested:count} bytes\)"),
    form("datafusion", "datafusion",
         r"Resources exhausted: Failed to allocate additional (?:{requested:count} bytes|[0-9.]{1,12} [KMGT]i?B)",
         r"allocate additional {requested} for", r"with {allocated:count} bytes already"),
    form("trino", "trino", r"Query exceeded (?:per-node|distributed) (?:total |user )?memory limit of {limit}",
         r"Allocated: {allocated}"),
    form("bigquery", "bigquery", r"query could not be executed in the allotted memory"),
    form("mongodb", "mongodb", r"Sort exceeded memory limit of {limit:count} bytes"),
    form("postgres", "postgres", r"Failed on request of size {requested:count}"),
]

BARE: list[Format] = [
    form("windows-1455", "windows",
         r"\[WinError 1455\]|os error 1455|paging file is too small|Not enough memory resources are available"),
    form("bad-alloc", "c++", r"std::bad_alloc|: bad allocation"),
    form("file-map", "linux", r"unable to mmap {requested:count} bytes from file[^\n]{1,300}?Cannot allocate memory",
         device="cpu"),
    form("fork", "linux", r"(?:os\.fork\(|fork_exec\(?|\bfork(?:: retry)?:|fork/exec|spawn)[^\n]{0,80}?\n?[^\n]{0,60}?"
         r"(?:Cannot allocate memory|ENOMEM|Errno 12\b)", device="cpu", lines=True),
    form("errno12", "linux", r"\[?Errno 12\]?:? ?(?:Cannot allocate memory|Not enough space)|"
         r"fork(?:: retry)?: (?:Resource temporarily unavailable: )?Cannot allocate memory|"
         r"(?:mmap|malloc|calloc|realloc|vfork|clone|sbrk|mlock|allocation|"
         r"error)\(?\)?[^\n]{0,60}?: ?Cannot allocate memory|" r"\bENOMEM\b|Cannot allocate memory",
         r"mmap(?:\(|ing )? ?{requested:count} bytes", unless=r"static TLS block|write\+execute", whole=True),
    form("macos", "macos",
         r"\b(?:mach_vm_map|mmap)\(size=(?:{requested:count}\b)?[^)\n]{0,60}\) failed \(error code=(?:3|12)\)|"
         r"malloc: [^\n]{0,40}can't allocate region"),
    form("coreutils", "linux", r"\b(?:sort|[ef]?grep|sed|diff|tar|m4|ld): memory exhausted\b", device="cpu"),
    form("python", "python", r"^(?:[\w.]{1,80}: )?(?:builtins\.)?MemoryError ?(?:$|: ?$|\(\)$|: std::bad_alloc)|"
         r"[\w)\]] (?-i:MemoryError) ?$", lines=True),
    form("python-told", "python",
         r"(?:get|got|getting|face|facing|gives?|gave|with|hit|have|having|throws?|threw|causes?|caused|into) "
         r"(?:me )?(?:a |an |the )?"
         r"[`'\"]?(?-i:MemoryError)\b|[,\[] ?[`'\"](?-i:MemoryError)[`'\"]"),
    form("ipython", "python", r"^MemoryError {2,80}Traceback \(most recent call last\)", lines=True),
    form("python-said", "python", r"(?:^|[\s'\"`(])MemoryError: ?[^\s{]",
         r"(?:allocate|allocating) {requested:count} bytes", r"(?:allocate|allocating) {requested}",
         unless=r"static TLS block|write\+execute", lines=True),
]
"""Words that say no more than that it failed; asked last."""
