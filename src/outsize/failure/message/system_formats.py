"""What schedulers, containers and the kernel print, how a killed program ends, and words that say no more than that."""

from __future__ import annotations

from outsize.failure.message.grammar import Format, Pattern, form

# Rows of tables: name, framework, anchor, further parts.
# fmt: off

_VM = (
    "total-vm:{total_vm_bytes:kb}kB",
    "anon-rss:{anon_rss_bytes:kb}kB",
    "file-rss:{file_rss_bytes:kb}kB",
    "shmem-rss:{shmem_rss_bytes:kb}kB",
)
_KILL = (
    r"Killed process (?:pid=)?{pid:int},? (?:UID [0-9]{1,10},? )?\({process:name}\)",
    r"Kill process (?:pid=)?{pid:int},? (?:UID [0-9]{1,10},? )?\({process:name}\)",
    r"Kill(?:ed)? process (?:pid=)?{pid:int}\b",
    r"Killed process \({process:name}\)",
    r"\btask={process:word}, ?pid={pid:int}",
    r"\btask={process:word}",
    r"memory: usage {usage_bytes:kb}kB, limit {limit:kb}kB",
    r"constraint={constraint:word}",
    r"(?<![^\s\]:)]){invoker:command} invoked oom-killer",
    *_VM,
)

KERNEL: list[Format] = [
    form("memcg", "linux", r"Memory cgroup out of memory|CONSTRAINT_MEMCG|killed as a result of limit of|"
         r"mem_cgroup_o(?:om_synchronize|ut_of_memory)", *_KILL,
         whole=True, extra={"scope": "cgroup"}),
    form("oom-killer", "linux",
         r"Out of memory(?: \([^)\n]{1,40}\))?: Kill(?:ed)? process|invoked oom-killer|oom-kill:constraint|\boom_kill_process\b|"
         r"Out of memory and no killable processes|"
         r"Killed process (?:pid=)?{pid:int},? (?:UID [0-9]{1,10},? )?\({process:name}\),? total-vm", *_KILL,
         each={"victims": r"Killed process {pid:int},? (?:UID [0-9]{1,10},? )?\({process:name}\),? total-vm:[0-9]{1,20}kB, "
               r"anon-rss:{anon_rss_bytes:kb}kB"}, whole=True, extra={"scope": "machine"}),
    form("reaper", "linux", r"oom_reaper: reaped process {pid:int} \({process:name}\)", extra={"scope": "machine"}),
    form("oomd", "systemd",
         r"Killed (?=[/.])[^ \n]{1,200}(?: \([^)\n]{1,40}\))? due to memory (?:pressure|used)|systemd-oomd killed|"
         r"due to memory pressure for", r"being {pressure_pct:float}% > {pressure_limit_pct:float}%",
         r"killed {processes_killed:int} process", r"memory used \({used_bytes:count}\) / total \({total:count}\)",
         whole=True),
    form("systemd", "systemd", r"(?:systemd|\.service|\.scope|\bunit\b)[^\n]{0,200}killed by the OOM killer|Failed "
                               r"with result 'oom-kill'|result 'oom-kill'"),
    form("earlyoom", "earlyoom", r"sending SIG(?:TERM|KILL) to process {pid:int} uid [0-9]{1,8} [\"']?{process:word}"),
]

CLUSTER: list[Format] = [
    form("ray", "ray", r"exceeds the memory usage threshold of|due to the node running low on memory",
         r"name={process:task}, pid={pid:int}, memory used={task_used_bytes}", r"pid={pid:int}, memory used",
         r"(?:task|actor|worker) \([^)\n]{0,200}name={process:task}", r"was {node_used_bytes} ?/ ?{total} \(",
         r"was {node_used_bytes} ?/ ?{total}", r"threshold of {threshold_fraction:float}", whole=True),
    form("ray-low", "ray", r"System memory low at node",
         r"Used memory \({node_used_bytes}\) / total capacity \({total}\)",
         r"exceeds threshold {threshold_fraction:float}"),
    form("ray-old", "ray",
         r"More than {threshold_pct:int}% of the memory on node {node:word} is used \({used:float} / {total} ?\)"),
    form("ray-summary", "ray",
         r"(?:{workers_killed:int} )?Workers (?:\(tasks / actors\) |\.\.\. ?)?killed due to memory pressure \(OOM\)",
         r"IP: {node_ip:word}\)"),
    form("ray-store", "ray", r"object store because it is full", r"Object size is {requested:count} bytes"),
    form("ray-store-name", "ray", r"ObjectStoreFullError", r"Object size is {requested:count} bytes"),
    form("dask-nanny", "dask", r"exceeded {threshold_pct:int}% memory budget", r"\(pid={pid:int}\)",
         r"Worker memory limit: {limit}", whole=True),
    form("dask-died", "python", r"distributed[^\n]{0,40}KilledWorker|all those workers died while running it",
         extra={"signal": "Killed"}),
    form("dask-pause", "dask", r"Worker is at [0-9.]{1,6}% memory usage\. ?Pausing worker",
         r"Process memory: {process_bytes}", r"Worker memory limit: {limit}", extra={"not_a_failure": True}),
    form("yarn-virtual", "spark", r"{used_bytes} of {limit} virtual memory used",
         unless=r"beyond (?:the )?'?PHYSICAL'?|beyond physical"),
    form("yarn", "spark",
         r"(?:exceeding|beyond)(?: the)?(?: 'PHYSICAL'| 'VIRTUAL')? ?(?:physical |virtual )?memory limits?",
         r"{used_bytes} of {limit} physical memory used", r"{used_bytes} of {limit} virtual memory used",
         r"\[pid={pid:int}", whole=True),
    form("spark-executor", "spark",
         r"SIGKILL, possible container OOM|ExecutorLostFailure[^\n]{0,400}?(?:exit status|exit code)(?: is)?:? 137\b",
         extra={"signal": "Killed"}),
    form("spark-broadcast", "spark", r"Not enough memory to build and broadcast the table"),
    form("spark-result", "spark", r"\({requested}\) is bigger than spark\.driver\.maxResultSize ?\({limit}\)"),
    form("slurm-limit", "slurm",
         r"exceeded (?:virtual )?memory limit \({used_raw:int} > {limit_raw:int}\)|Exceeded (?:job|step) memory limit",
         r"[Jj]ob {job_id:int} exceeded"),
    form("slurm", "slurm",
         r"Detected (?:an? |[0-9]{1,9} )?oom[-_ ]kill event|oom[-_ ]kill event(?:\(s\))? (?:in |detected)|"
         r"cgroup out[- ]of[- ]memory handler|srun: error: [^\n]{1,80}: Out Of Memory",
         r"SBATCH --mem[= ]{limit}\b",
         r"(?:StepId=|in step ){step_id:word}", Pattern(r"\b{pid:int} Killed {1,40}(?:\S{1,120}/)?{process:word}"),
         whole=True),
    form("slurm-state", "slurm", r"(?:State:? ?|\b)(?-i:OUT_OF_ME(?:MORY\b|\+))",
         unless=r"CUDA_ERROR_OUT_OF_MEMORY|RESULT_ERROR_OUT_OF|VK_ERROR"),
    form("pbs", "pbs", r"job killed: (?:v?mem) {used_bytes} exceeded limit {limit}"),
    form("lsf", "lsf", "TERM_MEMLIMIT"),
    form("cloud", "cloud",
         r"Memory limit of {limit} exceeded with {used_bytes} used|Exceeded (?:hard|soft) memory limit of"),
    form("lambda", "lambda", r"Runtime exited with error: signal: killed", r"Memory Size: {limit}",
         r"Max Memory Used: {used_bytes}", whole=True),
    form("notebook", "notebook",
         r"session crashed after using all available RAM|notebook tried to allocate more memory than is available|"
         r"(?:session|notebook|runtime|kernel|colab)[^\n]{0,80}(?:crash|restart|died)[^\n]{0,60}(?-i:\bRAM\b)|"
         r"(?:session|notebook|runtime|kernel|colab)[^\n]{0,80}(?-i:\bRAM\b)[^\n]{0,60}(?:crash|restart|died)"),
    form("tcmalloc", "notebook", r"tcmalloc: large alloc {requested:count} bytes[^\n]{0,9000}?(?:restarted|killed|crash|died)|"
         r"(?:restarted|killed|crash|died)[^\n]{0,9000}?tcmalloc: large alloc {requested_too:count} bytes"),
    form("heroku", "heroku", r"Error R1[45] \(Memory quota"),
    form("kubernetes-evicted", "kubernetes", r"The node was low on resource: memory",
         r"Container {process:word} was using {used_bytes}", r"available: {free}"),
    form("kubernetes-system", "kubernetes", r"System OOM encountered, victim process: {process:word}, pid: {pid:int}"),
    form("ecs", "ecs", r"OutOfMemoryError: Container killed due to memory usage"),
    form("docker-event", "docker", r"\bcontainer oom [0-9a-f]{12,64}\b"),
    form("earlyoom", "linux", r"\bLow memory!? (?:mem )?avail|mem avail: ? ?[0-9]{1,8} of [0-9]{1,8} MiB[^\n]{0,120}<= ? ?min",
         extra={"scope": "machine"}),
    form("docker", "docker", r"OOMKilled\": ?true\b", r"ExitCode\": ?{exit_code:int}",
         r"\bMemory\": ?(?!0\b){limit:count}", *_KILL, whole=True),
    form("kubernetes", "kubernetes", r"OOMKilled\b(?![\"']?\s{0,2}[:=]\s{0,2}[\"']?(?:false|0)\b)",
         r"exit ?code[\"']?[:=]? ?{exit_code:int}", r"Restart ?Count[\"']?: ?{restart_count:int}",
         r"limits?[\"']?:\W{0,12}(?:cpu[\"']?: ?[\"']?[0-9.]{1,8}m?\W{0,6})?memory[\"']?: ?[\"']?{limit}", *_KILL,
         whole=True),
]

EXITS: list[Format] = [
    form("deepspeed", "pytorch", r"sigkill_handler[^\n]{0,4000}?exits with return code = -9\b", extra={"signal": "Killed"}),
    form("elastic", "pytorch", r"exit ?code ?: ?-9\b|Signal 9 \(SIGKILL\) received by", r"\(pid: {pid:int}\)",
         r"received by PID {pid:int}", extra={"signal": "Killed"}),
    form("shell-killed", "linux",
         r"^(?:[^\n:]{0,120}: )?(?:line [0-9]{1,7}: )?{pid:int} Killed\b {0,40}(?:\(core dumped\) "
         r")?(?:[\"']?(?:\S{1,120}/)?{process:word})?", lines=True, extra={"signal": "Killed"}),
    form("killed", "linux",
         r"^[^\n]{0,400}it/s\](?:\[[0-9]\] {1,8}[0-9]{1,8} )?killed\b[^\n]{0,200}$|"
         r"^(?:\[[0-9]\][+-]? {0,4}[0-9]{1,8} killed\b[^\n]{0,200}|`{1,3}zsh: killed\b[^\n]{1,200}`{1,3})$|"
         r"^(?:\[[0-9]\][+-]? ?)?(?:zsh: killed|Killed)(?:: 9)?(?: {1,40}(?!by\b)[\w./-]{1,120}[^\n]{0,200})?$|"
         r"^(?:[\w./ -]{1,80}: )?Killed(?:: 9)?$|^[^\n]{1,300}[a-z0-9%.)\]](?-i:Killed)$|"
         r"(?:message|says?|error|with|prints?|just|get|got|is|only|then)[^\n\w]{0,3}(?:the |a )?[\"'`](?-i:Killed)[.!]?[\"'`]|"
         r"(?:message|result|error|output|response|returns?|reported)(?: of| saying)?[^\n\w]{0,3}[\"'`]killed[.!]?[\"'`]|"
         r"[\"'`](?-i:Killed)[.!]?[\"'`] (?:message|error)|(?:gets?|got|getting|being|still|always|just) (?-i:Killed)\b|"
         r"\b(?:process|script|program|job|training|python|command|it|build|server|worker|task|app|execution|"
         r"session|run|code) (?:\w{1,12} ){0,2}"
         r"(?:gets?|got|is|was|be|being|getting|been) (?:\w{3,14}ly |always |just )?killed(?= ?[.,!`\"')]| ?$| "
         r"(?:by (?:the )?(?:system|OS|kernel|operating system) )?(?:after|when|while|during|at|by itself|automatically|"
         r"without|halfway|because|due|in the middle)\b)", lines=True, extra={"signal": "Killed"}),
    form("mac-killed", "linux", r"low swap: killing|memor[a-z]{4,8}us: killing|killing_\w{1,40} pid [0-9]",
         r"killing largest compressed process (?:with pid )?{pid:int} \({process:name}\)", extra={"signal": "Killed"}),
    form("workers-gone", "python", r"background workers? (?:are|is) no longer alive|"
         r"process in the process pool was terminated abruptly|A worker process managed by the executor was "
         r"unexpectedly terminated",
         extra={"signal": "Killed"},
         unless=r"Exception in background worker|\b(?:Value|Type|Attribute|Key|Index|Import|ModuleNotFound|Name|"
                r"UnboundLocal|FileNotFound|"
         r"Assertion|EOF|Permission|Syntax)Error\b|No such file|Segmentation fault"),
    form("joblib", "python", r"exit codes of the workers are \{[^}\n]{0,80}SIGKILL\(-9\)", extra={"signal": "Killed"}),
    form("exit-9", "linux", r"(?:exit(?:ed)?(?: with)?[ _]?(?:code|status)|return ?code|\brc)\W{0,4}-9\b",
         extra={"signal": "Killed"}),
    form("sigkill", "linux",
         r"(?:died with|terminated (?:by|with)|killed by|received|by) (?:<Signals\.)?(?:signal )?(?:9 )?\(?SIGKILL|"
         r"\(signal: 9, SIGKILL|signal 9 \(SIGKILL\)|return code Negsignal\.SIGKILL|was sent SIGKILL!|code=killed, status=9/KILL",
         r"(?:process|pid)\W{1,3}{pid:int}", extra={"signal": "Killed"}),
    form("exit-137", "linux", r"returned a non-zero code: 137\b|"
         r"exit(?:ed)?[ _]?(?:with )?(?:non-zero )?(?:code|status|value)?[\"']?:? ?(?:with )?(?:code|status|of|is|"
         r"=)? ?[:=(]? ?137\b|\(137\)|code 137\b|exit code:[^\n0-9]{1,60}: 137\b|\brc ?= ?137\b|status 137\b|"
         r"return code:? ?137\b",
         extra={"exit_code": 137, "signal": "Killed"}),
    form("bus-error", "linux", r"(?:^|[:\s])Bus error(?: \(core dumped\))?", r"\b{pid:int} Bus error",
         extra={"signal": "Bus error"}, lines=True),
]
"""Ends that memory most often explains though each can have other causes; asked last."""

NAMES: list[Format] = [
    form("cuda-name", "cuda",
         r"(?<!case\s)CUDA_ERROR_OUT_OF_MEMORY|== ?cudaSuccess[^\n]{0,80}?out of memory|cudaErrorMemoryAllocation|(?:cudaMalloc|"
         r"cuMem\w{1,20}|cudaHostAlloc|cudaMallocHost)[^\n]{0,60}?(?:out of memory|failed)|"
         r"(?-i:\b(?:cu|cuda|cudnn|cublas|hip)[A-Z]\w{2,40}\b)[^\n]{0,240}?\b(?:code|reason|error|status|result|failed|"
         r"returned|what\(\))\b(?: with)? ?[:=(\"'][^\n]{0,40}?(?:out of memory|memory allocation)|"
         r"\bcuda_?error\b[^\n]{0,200}?[:=(\"'] ?(?:out of memory|memory allocation (?:failed|failure|error))",
         r"(?:allocate|alloc|size|requested)[ =:]{1,3}{requested:count} bytes",
         r"(?:allocate|allocating) {requested}", r"device ordinal {index}\b", r"(?:GPU|device) ?{index}\b", whole=True),
    form("opencl", "opencl", "CL_MEM_OBJECT_ALLOCATION_FAILURE"),
]
"""Names of errors of a driver, whoever prints them."""

_OUT_OF_MEMORY = "out of (?:host |system |device |gpu |video )?memory"

WORDS: list[Format] = [
    form("said", "unknown", rf"(?:\berror\b|exception|fatal|failed|failure|abort\w{{0,3}}|panic\w{{0,3}}|"
         rf"Error:)[^\n.]{{0,60}}?\b{_OUT_OF_MEMORY}\b|"
         rf"(?<![a-z,]\n)^(?:[\w ./\[\]-]{{1,60}}: |System is )?{_OUT_OF_MEMORY}(?: ?[.!:]| ?$)",
         r"(?:allocate|allocating|requested) {requested:count} bytes",
         r"(?:allocate|allocating|requested) {requested}", lines=True,
         unless=r"(?:avoid|prevent|fix(?:es|ed)?|handle|without|may|might|could|can|if|until|no)\b[^\n.]{0,40}\bout of memory|"
         r"native thread"),
    form("all-used", "unknown", r"(?:consum|us|eat)(?:ed|es|ing|s)? (?:up )?all (?:of )?(?:the |my )?(?:available |"
                                r"system )?(?:RAM\b|memory\b)|"
         r"(?:ran|runs?|running) out of (?:system |host )?RAM\b|no RAM available|RAM (?:size |limit |usage )?exceeded"),
    form("told", "unknown",
         r"\b(?:I|we|it|this|keeps?|get(?:s|ting)?|got|gives?|gave|throws?|shows?|reports?|caus(?:es?|ed|ing)|with|crash\w{0,3}|hits?|face[sd]?|"
         r"facing|met|occurs?|encounter\w{0,3}|into|always|still|"
         r"报(?:错)?)\b[^\n.]{0,30}?(?:(?<!zero\s)(?-i:\bOOM\b)(?! ?-?kill)|\bout[- ]?of[- ]?memory[\"'”]?"
         r"(?: ?(?:error|exception|issue|problem|crash)\b|错误))|"
         r"^#? ?(?:\[[^\]\n]{1,20}\]:? ?)?(?:(?:GPU|CUDA|VRAM) )?(?:Out of memory (?:errors?|exceptions?|problems?|"
         r"issues?|on|in|when|while|during|at)|"
         r"(?-i:OOM) (?:errors?|exceptions?|problems?|issues?|on|in|when|while|during|at))\b[^\n]{0,100}$|"
         r"runs? out \((?-i:OOM)\)|"
         r"\b(?:it|always|says?|tells?|keeps?|just|then|and|GPU|card|system|machine|server|process|program|has|"
         r"have|had|I|we) (?:\w{1,12} ){0,3}"
         r"(?:run|ran|runs|running) out of (?:\w{1,8} )?(?:memory|VRAM)\b|, running out of memory\b|\bout of "
         r"(?:GPU )?VRAM\b|后报 ?out of memory|(?:出现|遇到|触发|导致)[^\n]{0,6}(?-i:OOM)|\boom error\b|(?:leads? "
         r"to|suffer\w{0,3} from|every) (?:an? )?(?-i:OOM)[- ]kills?\b|报错 ?memory out|"
         r"\b(?:got|get|gets|due to|because of) (?:an? )?(?:out of memory|insufficient memory|not enough (?:GPU "
         r")?memory|lack of memory)\b|"
         r"can ?not allocate [0-9.]{1,8} ?[GT]i?B? (?:of )?memory|"
         r"\b(?:finally|eventually|immediately|suddenly) (?:run|ran|runs|running) out of (?:\w{1,8} )?(?:memory|VRAM)\b",
         lines=True,
         unless=r"\b(?:avoid|prevent|fix(?:es|ed)?|handle|without|may|might|could|would|will|if|until(?! finally| eventually)|"
                r"no longer|enhance|improve)\b[^\n.]{0,40}"
         r"(?:\bout[- ]of[- ](?:\w{1,8} )?(?:memory|VRAM)\b|(?-i:\bOOM\b))|native thread"),
    form("told", "unknown",  # a title that names it, and under it a traceback or the words of one whom it befell
         r"\A(?:(?!avoid|prevent|fix|handl|without|support|feature|how to|guide|tips|reduc|detect|\bno \b)[^\n]){0,120}?"
         r"(?:(?-i:\bOOM\b)(?!-?kill)|\bout[- ]of[- ](?:GPU |CUDA |video )?(?:memory|VRAM)\b)[^\n]{0,120}\n[\s\S]{0,6000}?"
         r"(?:Traceback \(most recent call|\bI (?:am|was|have|had|tried|try|got|get|run|ran|use|used)\b|"
         r"\bI'(?:m|ve)\b|\bmy (?:GPUs?|card|machine|computer|laptop|server|RAM|model|training|script|code)\b)", lines=True),
    form("contiguous", "unknown",
         r"\b(?:fail(?:s|ed)?|unable|could not|cannot|can't|couldn't) (?:to )?(?:find|get|allocate|obtain) (?:an? |any )?"
         r"(?:(?:large|big) enough |sufficient(?:ly large)? )?contiguous (?:block|chunk|region|piece|area|memory)\b[^\n.]{0,60}"
         r"(?:memory|bytes|VRAM|enough)\b", r"(?:block|chunk) of {requested}",
         unless=r"\b(?:may|might|can|could|would|if|when)\b (?:\w{1,20} ){0,3}fail to (?:find|get|allocate) (?:an? )?contiguous"),
    form("said-otherwise", "unknown",
         r"(?:显存|内存|記憶體|顯存)(?:不足|溢出|不够|不夠)|爆显存|爆内存|"
         r"メモリ(?:不足|が不足|が足り)|메모리 ?(?:가 )?부족|memoria insuficiente|"
         r"mémoire insuffisante|nicht genügend (?:Arbeits)?speicher|недостаточно памяти|memória insuficiente",
         r"(?:尝试分配|allocate) {requested}"),
    form("insufficient", "unknown",
         r"(?:error|exception|fatal|failed)\b[^\n.]{0,60}?(?:not enough memory|insufficient memory)|"
         r"(?:cannot|could not|failed to|unable to) allocate (?:memory )?(?:of )?{requested:size}"),
]
"""Words that anybody may use; asked when nothing else was found."""
