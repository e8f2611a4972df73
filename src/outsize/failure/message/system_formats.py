"""What serving engines, inference runtimes, schedulers, containers and the kernel print."""

from __future__ import annotations

from outsize.failure.message.grammar import Format, Pattern, form

ENGINES: list[Format] = [
    form("vllm-startup", "vllm", "onstartupisless",
         r"Free memory on device (?:cuda:{index} )?\({free_gib:float}/{total_gib:float} GiB\) on startup is less than",
         r"desired GPU memory utilization \({gpu_memory_utilization:float}, {requested}\)"),
    form(
        "vllm-kv", "vllm", "kvcacheisneeded", r"{requested} KV cache is needed, which is larger than the available KV cache memory",
        r"available KV cache memory \({free}\)", r"estimated maximum model length is {max_model_len:int}",
        r"max seq len \({max_seq_len:int}\)", extra={"requested_is": "KV cache needed for one request"}, whole=True,
    ),
    form("vllm-tokens", "vllm", "storedinkvcache",
         r"max seq len \({max_seq_len:int}\) is larger than the maximum number of tokens that can be stored in KV cache \({kv_tokens:int}\)"),
    form("vllm-blocks", "vllm", "memoryforthecacheblocks", "No available memory for the cache blocks"),
    form("sglang", "sglang", "mem-fraction-static", r"Not enough memory\.? ?Please try to increase --mem-fraction-static"),
    form("ollama", "ollama", "requiresmoresystemmemory",
         r"requires more system memory \({requested}\) than is available \({free}\)", device="cpu"),
    form(
        "ggml-cuda", "ggml", ("cudamallocfailed", "ggml_backend_cuda", "bufferofsize", "cudabuffer", "cuda0buffer"),
        r"allocating {said_bytes} on device {index}: cudaMalloc failed: out of memory|failed to allocate CUDA[0-9]{1,2} buffer of size|"
        r"cudaMalloc failed: out of memory|unable to allocate CUDA[0-9]{1,2} buffer",
        r"failed to allocate CUDA{index} buffer of size {requested:count}", r"allocating {requested} on device {index}",
        r"unable to allocate CUDA{index} buffer", r"device {index}: cudaMalloc", device="cuda", whole=True,
        unless="retry failed",
    ),
    form("ggml-rocm", "ggml", ("rocm0buffer", "rocm1buffer", "rocmbuffer", "rocm"),
         r"failed to allocate ROCm{index} buffer of size {requested:count}", device="hip"),
    form("ggml-sycl", "ggml", "sycl", r"failed to allocate SYCL{index} buffer of size {requested:count}", device="xpu"),
    form(
        "ggml-vulkan", "ggml", ("ggml_vulkan", "erroroutofdevicememory", "vulkan0buffer", "error_out_of_device_memory", "erroroutofhostmemory"),
        r"ggml_vulkan: ?(?:Device|Host) memory allocation of size|failed to allocate Vulkan[0-9]{1,2} buffer of size|ErrorOutOf(?:Device|Host)Memory|"
        r"VK_ERROR_OUT_OF_(?:DEVICE|HOST)_MEMORY",
        r"memory allocation of size {requested:count}", r"Vulkan[0-9]{1,2} buffer of size {requested:count}",
        r"Requested buffer size[^0-9\n]{0,20}{requested:count}", device="vulkan", whole=True,
    ),
    form(
        "metal", "metal", ("kiogpucommandbuffer", "ggml_metal", "ggml_backend_metal", "[metal]", "insufficientmemory(00000008"),
        r"kIOGPUCommandBufferCallbackErrorOutOfMemory|(?:ggml_metal|ggml_backend_metal)\w{0,60}: error: failed to allocate|"
        r"Insufficient Memory \(0000000[0-9]|failed to allocate Metal buffer",
        r"failed to allocate (?:'\w{1,24}' )?buffer,? (?:of )?size ?=? ?{requested}", device="metal", whole=True,
    ),
    form("ggml-pinned", "ggml", "pinnedmemory", r"failed to allocate {requested} of pinned memory", device="cpu",
         extra={"not_a_failure": True}),
    form("ggml-cpu", "ggml", ("ggml_aligned_malloc", "cpubuffer", "cpu_", "ggml_backend_cpu", "_hostbuffer"),
         r"ggml_aligned_malloc: insufficient memory|failed to allocate (?:CPU\w{0,20}|\w{1,12}_Host) buffer of size|"
         r"ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate",
         r"attempted to allocate {requested}", r"buffer of size {requested:count}", device="cpu"),
    form("ggml-other", "ggml", "bufferofsize", r"(?:ggml\w{0,60}|alloc_tensor_range|llama\w{0,40}): failed to allocate \w{1,24} buffer of size {requested:count}"),
    form(
        "tensorrt", "tensorrt", ("amountofgpumemory", "errorcode2:outofmemory", "outofmemory(", "cudaerrorinallocate", "cudaruntime(outofmemory"),
        r"Requested amount of GPU memory \({requested:count} bytes\) could not be allocated|Error Code 2: OutOfMemory|"
        r"OutOfMemory \((?:no further|Requested size was)|Cuda Error in allocate: 2|Cuda Runtime \(out of memory\)",
        r"Requested amount of GPU memory \({requested:count} bytes\)", r"Requested size was {requested:count} bytes",
        r"memory of size {requested:count}", device="cuda", whole=True,
    ),
    form("tensorrt-tactic", "tensorrt", "devicememoryisinsufficient",
         r"Device request: {requested} Available: {free}\.? ?Device memory is insufficient", device="cuda", extra={"not_a_failure": True}),
    form("tensorrt-skip", "tensorrt", "insufficientmemoryonrequestedsize",
         r"due to insufficient memory on requested size of {requested:count}", device="cuda", extra={"not_a_failure": True}),
    form(
        "onnxruntime", "onnxruntime", ("requestedbufferofsize", "smallerthanrequestedbytes"),
        r"Failed to allocate memory for requested buffer of size {requested:count}|"
        r"Available memory of {free:count} is smaller than requested bytes of {r2:count}",
        r"smaller than requested bytes of {requested:count}", r"requested buffer of size {requested:count}",
        r"Available memory of {free:count} is",
        Pattern(r"\bCUDA|CUDAExecutionProvider|cuda_", device="cuda"), r"GPU={index}\b", whole=True,
    ),
    form("onnxruntime-cuda", "onnxruntime", "cudafailure2",
         r"CUDA failure 2: ?out of memory", r"GPU={index}\b", device="cuda"),
    form(
        "paddle", "paddle", ("memoryerrorongpu", "memoryongpu", "memoryerroron"),
        r"Out of memory error on (?:GPU|XPU) {index}|Cannot allocate {r2:size} memory on GPU {i2:int}",
        r"Cannot allocate {requested} memory on GPU {index}", r"{allocated} memory has been allocated",
        r"available memory is only {free}", device="cuda", whole=True,
    ),
    form("paddle-cpu", "paddle", "failtoallocmemory", r"Fail to alloc memory of {requested:count} size", device="cpu"),
    form("mxnet", "mxnet", ("retryfailed:outofmemory", "mxnet"),
         r"cudaMalloc (?:retry )?failed: out of memory|mxnet[^\n]{0,200}?(?:out of memory|Memory allocation failed)", device="cuda"),
    form("nvdec", "nvdec", ("cuvid", "nvdec", "nvenc"), r"(?:cuvid\w{0,40}|nvdec|nvenc)[^\n]{0,200}?(?:CUDA_ERROR_OUT_OF_MEMORY|out of memory)",
         device="cuda"),
    form("mxnet-bare", "mxnet", "pooled_storage_manager", r"pooled_storage_manager[^\n]{0,80}out of memory", device="cuda"),
]  # fmt: skip

_VM = ("total-vm:{total_vm_bytes:kb}kB", "anon-rss:{anon_rss_bytes:kb}kB", "file-rss:{file_rss_bytes:kb}kB",
       "shmem-rss:{shmem_rss_bytes:kb}kB")  # fmt: skip
_KILL = (
    r"Kill(?:ed)? process {pid:int},? (?:UID [0-9]{1,10},? )?\({process:name}\)",
    r",task={process:word},pid={pid:int}",
    r"memory: usage {usage_bytes:kb}kB, limit {limit:kb}kB",
    r"constraint={constraint:word}",
    r"{invoker:word} invoked oom-killer",
    *_VM,
)

KERNEL: list[Format] = [
    form("memcg", "linux", ("memorycgroupoutofmemory", "constraint_memcg", "killedasaresultoflimit"),
         r"Memory cgroup out of memory|CONSTRAINT_MEMCG|killed as a result of limit of", *_KILL, whole=True,
         extra={"scope": "cgroup"}),
    form("oom-killer", "linux", ("outofmemory:kill", "oom-kill", "oom_kill", "killedprocess"),
         r"Out of memory(?: \([^)\n]{1,40}\))?: Kill(?:ed)? process|invoked oom-killer|oom-kill:constraint|"
         r"Killed process {pid:int},? (?:UID [0-9]{1,10},? )?\({process:name}\),? total-vm", *_KILL, whole=True,
         extra={"scope": "machine"}),
    form("reaper", "linux", "oom_reaper", r"oom_reaper: reaped process {pid:int} \({process:name}\)", extra={"scope": "machine"}),
    form(
        "oomd", "systemd", ("memorypressurefor", "systemd-oomd", "duetomemoryused"),
        r"Killed [^ \n]{1,200}(?: \([^)\n]{1,40}\))? due to memory (?:pressure|used)|systemd-oomd killed|due to memory pressure for",
        r"being {pressure_pct:float}% > {pressure_limit_pct:float}%", r"killed {processes_killed:int} process",
        r"memory used \({used_bytes:count}\) / total \({total:count}\)", whole=True,
    ),
    form("systemd", "systemd", ("oom-kill", "theoomkiller"),
         r"killed by the OOM killer|Failed with result 'oom-kill'|result 'oom-kill'"),
    form("earlyoom", "earlyoom", "sendingsig",
         r"sending SIG(?:TERM|KILL) to process {pid:int} uid [0-9]{1,8} [\"']?{process:word}"),
]  # fmt: skip

CLUSTER: list[Format] = [
    form(
        "ray", "ray", ("memoryusagethreshold", "runninglowonmemory"),
        r"exceeds the memory usage threshold of|due to the node running low on memory",
        r"name={process:task}, pid={pid:int}, memory used={task_used_bytes}", r"pid={pid:int}, memory used",
        r"(?:task|actor|worker) \([^)\n]{0,200}name={process:task}", r"was {node_used_bytes} ?/ ?{total} \(",
        r"was {node_used_bytes} ?/ ?{total}", r"threshold of {threshold_fraction:float}",
        whole=True,
    ),
    form("ray-low", "ray", "systemmemorylowatnode", r"System memory low at node",
         r"Used memory \({node_used_bytes}\) / total capacity \({total}\)", r"exceeds threshold {threshold_fraction:float}"),
    form("ray-old", "ray", "ofthememoryonnode",
         r"More than {threshold_pct:int}% of the memory on node {node:word} is used \({used:float} / {total} ?\)"),
    form("ray-summary", "ray", "duetomemorypressure(oom)",
         r"{workers_killed:int} Workers \(tasks / actors\) killed due to memory pressure \(OOM\)", r"IP: {node_ip:word}\)"),
    form("ray-store", "ray", "storebecauseitisfull", r"object store because it is full",
         r"Object size is {requested:count} bytes"),
    form("ray-store-name", "ray", "objectstorefullerror", r"ObjectStoreFullError", r"Object size is {requested:count} bytes"),
    form("dask-nanny", "dask", "memorybudget",
         r"exceeded {threshold_pct:int}% memory budget", r"\(pid={pid:int}\)", whole=True),
    form("dask-pause", "dask", ("pausingworker",), r"Worker is at [0-9.]{1,6}% memory usage\. ?Pausing worker",
         r"Process memory: {process_bytes}", r"Worker memory limit: {limit}", extra={"not_a_failure": True}),
    form(
        "yarn", "spark", ("memorylimits", "physicalmemory"),
        r"(?:exceeding|beyond)(?: the)?(?: 'PHYSICAL'| 'VIRTUAL')? ?(?:physical |virtual )?memory limits?",
        r"{used_bytes} of {limit} physical memory used", r"{used_bytes} of {limit} virtual memory used", r"\[pid={pid:int}",
        whole=True,
    ),
    form("spark-result", "spark", "maxresultsize", r"\({requested}\) is bigger than spark\.driver\.maxResultSize ?\({limit}\)"),
    form(
        "slurm-limit", "slurm", ("exceededmemorylimit", "jobmemorylimit", "stepmemorylimit"),
        r"exceeded memory limit \({used_raw:int} > {limit_raw:int}\)|Exceeded (?:job|step) memory limit",
        r"[Jj]ob {job_id:int} exceeded",
    ),
    form(
        "slurm", "slurm", ("oom-killevent", "oom_killevent", "oomkillevent", "out-of-memoryhandler", "outofmemoryhandler", "srun:error"),
        r"oom[-_ ]kill event|cgroup out[- ]of[- ]memory handler|srun: error: [^\n]{1,80}: Out Of Memory",
        r"(?:StepId=|in step ){step_id:word}", Pattern(r"\b{pid:int} Killed {1,40}(?:\S{1,120}/)?{process:word}"), whole=True,
    ),
    form("slurm-state", "slurm", ("out_of_memory", "out_of_me+"), r"(?:State:? ?|\b)OUT_OF_ME(?:MORY\b|\+)",
         unless=r"CUDA_ERROR_OUT_OF_MEMORY|RESULT_ERROR_OUT_OF|VK_ERROR"),
    form("pbs", "pbs", ("pbs:jobkilled", "jobkilled:mem"), r"job killed: (?:v?mem) {used_bytes} exceeded limit {limit}"),
    form("lsf", "lsf", "term_memlimit", "TERM_MEMLIMIT"),
    form("kubernetes-evicted", "kubernetes", "lowonresource:memory", r"The node was low on resource: memory",
         r"Container {process:word} was using {used_bytes}", r"available: {free}"),
    form("kubernetes-system", "kubernetes", "systemoomencountered", r"System OOM encountered, victim process: {process:word}, pid: {pid:int}"),
    form(
        "kubernetes", "kubernetes", "oomkilled", r"OOMKilled\b(?![\"']?\s{0,2}[:=]\s{0,2}[\"']?(?:false|0)\b)",
        r"exit ?code[\"']?[:=]? ?{exit_code:int}", r"Restart ?Count[\"']?: ?{restart_count:int}", r"limits?[\"']?:\W{0,12}(?:cpu[\"']?: ?[\"']?[0-9.]{1,8}m?\W{0,6})?memory[\"']?: ?[\"']?{limit}",
        whole=True,
    ),
]  # fmt: skip

EXITS: list[Format] = [
    form("elastic", "pytorch", ("exitcode:-9", "(sigkill)"),
         r"exit ?code ?: ?-9\)? ?(?:\(pid: {p2:int}\) )?(?:local_rank: [0-9]{1,5} \(pid: {pid:int}\))?|Signal 9 \(SIGKILL\)(?: received by PID {p3:int})?",
         r"\(pid: {pid:int}\)", r"received by PID {pid:int}", extra={"signal": "Killed"}),
    form("shell-killed", "linux", "killed", r"^(?:[^\n:]{0,120}: )?(?:line [0-9]{1,7}: )?{pid:int} Killed\b {0,40}(?:\(core dumped\) )?(?:[\"']?(?:\S{1,120}/)?{process:word})?",
         lines=True, extra={"signal": "Killed"}),
    form("killed", "linux", "killed", r"^(?:\[[0-9]\][+-]? ?)?(?:zsh: killed|Killed)(?:: 9)?(?: {1,40}[\w./-]{1,120}[^\n]{0,200})?$|^(?:[\w./ -]{1,80}: )?Killed(?:: 9)?$",
         lines=True, extra={"signal": "Killed"}),
    form("sigkill", "linux", "sigkill", r"(?:died with|terminated (?:by|with)|killed by|received|by) (?:<Signals\.)?(?:signal )?(?:9 )?\(?SIGKILL",
         r"(?:process|pid)\W{1,3}{pid:int}", extra={"signal": "Killed"}),
    form("exit-137", "linux", "137", r"exit(?:ed)?[ _]?(?:with )?(?:non-zero )?(?:code|status|value)?[\"']?:? ?(?:with )?(?:code|status|of|is|=)? ?[:=(]? ?137\b|\(137\)|code 137\b|\brc ?= ?137\b|status 137\b",
         extra={"exit_code": 137, "signal": "Killed"}),
    form("bus-error", "linux", "buserror", r"(?:^|[:\s])Bus error(?: \(core dumped\))?", r"\b{pid:int} Bus error", extra={"signal": "Bus error"}, lines=True),
]  # fmt: skip
"""Ends that memory most often explains though each can have other causes; asked last."""

GENERIC: list[Format] = [
    form("cuda-name", "cuda", ("cuda_error_out_of_memory", "cudaerrormemoryallocation", "cudaerroroutofmemory", "cudamalloc", "cumemalloc",
                               "cudahostalloc", "cumemcreate"),
         r"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|(?:cudaMalloc|cuMem\w{1,20}|cudaHostAlloc|cudaMallocHost)[^\n]{0,60}?(?:out of memory|failed)",
         r"(?:allocate|alloc|size|requested)[ =:]{1,3}{requested:count} bytes", r"(?:allocate|allocating) {requested}",
         r"device ordinal {index}\b", r"(?:GPU|device) ?{index}\b", device="cuda", whole=True),
    form("opencl", "opencl", "cl_mem_object_allocation_failure", "CL_MEM_OBJECT_ALLOCATION_FAILURE"),
    form("said", "unknown", "outofmemory",
         r"(?:\berror\b|exception|fatal|failed|failure|abort\w{0,3}|panic\w{0,3})[^\n.]{0,60}?\bout of memory\b|"
         r"^(?:[\w./\[\]-]{1,40}: )?out of memory(?: ?[.!:]| ?$)",
         r"(?:allocate|allocating|requested) {requested:count} bytes", r"(?:allocate|allocating|requested) {requested}",
         lines=True, unless=r"(?:avoid|prevent|fix(?:es|ed)?|handle|without|may|might|could|can|if|until|no)\b[^\n.]{0,40}\bout of memory"),
    form("insufficient", "unknown", ("notenoughmemory", "insufficientmemory", "cannotallocate", "failedtoallocate"),
         r"(?:error|exception|fatal|failed)\b[^\n.]{0,60}?(?:not enough memory|insufficient memory)|"
         r"(?:cannot|could not|failed to|unable to) allocate (?:memory )?(?:of )?{requested:size}"),
]  # fmt: skip
