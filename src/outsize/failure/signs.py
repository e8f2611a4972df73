"""What a text shows around a message: patterns that a `Case` asks for, each with what it stands for."""

from __future__ import annotations

import re

EXPANDABLE = re.compile(
    r"(?<!try setting )(?<!try setting `)PYTORCH_(?:CUDA_|"
    r"HIP_|NPU_)?ALLOC_CONF\W{1,8}expandable_segments:True",
    re.IGNORECASE,
)
DENSE = re.compile(
    r"\.toarray\(|\.todense\(|_process_toarray|get_dummies|OneHotEncoder|one_hot|onehot|to_categorical\(|"
    r"sparse (?:matri|array|data|format|represent)|scipy\.sparse|\bcs[rc]_(?:matrix|array)|mostly zeros|稀疏",
    re.IGNORECASE,
)
WEIGHTS = re.compile(
    r"node:? ?(?:(?!gradients)[^\n]){0,120}?(?:/weights\b(?!/read)|/kernel\b(?!/read)|Initializer|"
    r"/Adam\b(?!/gradients)|/Momentum|"
    r"RestoreV2|embeddings?/)|Op:(?:StatelessRandom|StatelessTruncated|TruncatedNormal|RandomStandardNormal)\w*\]|"
    r"variables_initializer|initialize_all_variables|_initialize_variables|\bin add_weight\b",
    re.IGNORECASE,
)
SHARDS = re.compile(r"Loading checkpoint shards|Loading pipeline components|\bfrom_pretrained\(|Loading model weights")
FRAMES = re.compile(
    r"pandas[/\\]|\bpd\.(?:merge|concat|pivot\w*|read_\w+|HDFStore|melt|crosstab|DataFrame)\(|"
    r"\bdf\w{0,12}\.(?:merge|groupby|join|pivot\w*|apply|append|explode)\("
)
BUILD = re.compile(
    r"The command '/bin/sh -c|^#[0-9]{1,4} [0-9]+\.[0-9]+ |\bdocker build\b|executor failed running", re.MULTILINE
)
OTHER_TOOLS = re.compile(
    r"\bnpm ERR|\byarn\b|\bpnpm\b|\bwebpack\b|\bcargo\b|\brustc\b|\bg\+\+|\bcc1plus|\bninja\b|\bgradle\b|\bmvn\b"
)
WINDOWS = re.compile(
    r"WinError|\b[A-Z]:\\|\.\.\\|\w\.(?:dll|bat)\b|\bfatal error (?:LNK|C)1[0-9]{3}\b|: bad allocation\b|\bWindows 1[01]\b",
    re.IGNORECASE,
)
PYTHON = re.compile(
    r'File "|\bpython|\.py\b|MemoryError|>>>|\.ipynb|jupyter|\bpip\b|\bconda\b|\bimport \w|\bin <module>|\bpd\.|\bnp\.|torch|'
    r"Loading checkpoint|[0-9]it/s|s/it\b|\bIn \[[0-9]",
    re.IGNORECASE,
)
"""What shows that a program is one of Python."""
OFFLOADS = re.compile(r"offload_(?:optimizer|param)|zero-?_?3 offload|cpu_?offload|offload[^\n]{0,40}(?:cpu|optimizer)")
JOB_KILL = re.compile(
    r"slurmstepd: error:[^\n]{0,40}\bDetected [1-9][0-9]* oom[-_ ]kill event|Exceeded (?:job|step) memory limit",
    re.IGNORECASE,
)
"""A scheduler's word that it was the job's limit."""
JAX = re.compile(r"\bjax(?:lib)?\b|\bexternal/xla/", re.IGNORECASE)
"""What shows that an XLA is JAX's and not TensorFlow's."""
POOL_OF_JAVA = re.compile(r"OutOfMemoryError: (?:Metaspace|Compressed class space|PermGen|Direct buffer memory)")
"""A pool of Java that -Xmx does not limit."""
IN_A_POD = re.compile(r"kubepods|kubelet|\bkubectl\b|kubernetes", re.IGNORECASE)
"""A container of Kubernetes, whose limit is not Docker's to raise."""
ONE = re.compile(
    r"batch[-_ ]?size(?:_per_gpu)?[\"']?(?: is)?(?: set)?(?: to)?(?: even| as low as| only| just| "
    r"of)?\s*[=:]?\s*(?:1\b(?!\.)|one\b)|batch[-_ ]?size[^\n]{0,20}\[1\]|samples_per_gpu\W{1,3}1\b",
    re.IGNORECASE,
)
GROWS = re.compile(
    r"\b(?:memory|RAM)\b[^\n.]{0,40}\b(?:keeps?|continues?|constantly|slowly|steadily)\b[^\n.]{0,12}\b(?:grow|increas|climb|ris)|"
    r"after (?:an?|a few|some|several|many|about |around |~)? ?[0-9,k]* ?(?:of )?(?:training )?(?:steps?|iterations?|"
    r"epochs?|batch(?:es)?|hours?|"
    r"minutes|runs|images|files|rounds|samples)\b|memory (?:usage |use )?(?:\w+ )?(?:keeps? )?(?:grow|increas|leak|climb|ris)\w*|"
    r"\bleak(?:age|ing|s)?\b|epoch goes to [0-9]|gradually|bigger and bigger|more and more|for (?:around|about) "
    r"[0-9]+ (?:steps|iterations|epochs)|(?:the|on) (?:second|2nd|third|3rd|next) (?:epoch|run|"
    r"time|image|round|iteration|call)|"
    r"(?:in|inside) a (?:for )?loop\b|[0-9]+(?:st|nd|rd|th) (?:epoch|iteration|step)|"
    r"(?:memory|V?RAM|GPU|RSS|显存|内存)(?: (?:usage|use|consumption|footprint|occupation|has|have|been|is|was|are|keeps?|kept|"
    r"slowly|steadily|constantly|continuously|continues? to|always)){1,4} (?:grow|increas|climb|ris)(?:e[sn]?|ing|s|n)?\b",
    re.IGNORECASE,
)
RAM = re.compile(r"\bRAM\b|system memory|host memory|\bswap\b|\bkilled\b|pods?\b|container", re.IGNORECASE)
CARD = re.compile(r"\b(?:CUDA|GPUs?|VRAM|video memory|ROCm|GeForce|RTX ?\w*|GTX ?\w*|[AVH]100|graphics card)\b|显存")
MAC = re.compile(
    r"libc\+\+abi|Abort trap: 6|\bmac ?OS\b|MacBook|\bDarwin\b|\bOS ?X\b|\.dylib|/Users/\w|\bM[1-4] (?:Pro|Max|Ultra)\b|Killed: 9"
)
SPARED = re.compile(r"(?i)\bOOM_?Killed[\"']?\s{0,2}[:=]\s{0,2}[\"']?false\b")
"""A container that says it did not reach its limit."""
TORCH = re.compile(
    r"torch|RuntimeError: CUDA|\bCUDA out of memory|\bloss\w* ?\+= ?\w*loss\b|\byolov?[3-9]|\.backward\(", re.IGNORECASE
)
"""What shows that PyTorch computes, where the message does not say who does."""
MULTIPLIES = re.compile(
    r"\bexplode[d]?\b|json_normalize|flat_?table|cross[- ]?join|how=[\"']cross|cartesian|(?:\.|pd\.|\bin )merge\b|"
    r"_get_join_indexers|_left_join|inner_join|full_outer_join|\.join\(|itertools\.product|from_product|meshgrid|\bin melt\b|"
    r"\.melt\(|crosstab|\bpivot|unstack"
)
"""Functions that make many rows of a few."""
LITTLE = re.compile(
    r"(?i:(?:data ?frame|table|file|csv|data ?set|data)\b[^\n.]{0,40}\b(?:is|only|of|in|just|about)\b[^\n.]{0,20}"
    r"(?:\bK[bB]s?\b|[0-9] ?[KM]B\b|\bMBs?\b|\bsmall\b|\btiny\b)|"
    r"(?:\bsmall|\btiny|[0-9] ?[KM]B) (?:data ?frame|table|file|csv|data ?set))"
)
"""A user who says that what went in was little."""
ANY_LANGUAGE = ("linux", "c++", "unknown", "systemd")
"""Who speaks for a program without saying in what it is written."""
