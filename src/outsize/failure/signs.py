"""What a text shows around a message: patterns that a `Case` asks for, each with what it stands for."""

from __future__ import annotations

import re

EXPANDABLE = re.compile(
    r"(?<!try setting )(?<!try setting `)PYTORCH_(?:CUDA_|"
    r"HIP_|NPU_)?ALLOC_CONF\W{1,8}expandable_segments:True",
    re.IGNORECASE,
)
CANNOT_GROW = re.compile(r"\(GPU [0-9]+; [^)]{0,200}(?:cached|reserved in total by PyTorch)\)")
"""The message of a PyTorch before 2.1, whose segments cannot grow."""
SPLIT = re.compile(r"max_split_size_mb")
"""The setting that such a PyTorch names where it has it."""
SPLIT_IS_SET = re.compile(r"max_split_size_mb[\"']?\s?[:=]\s?[0-9]")
DENSE = re.compile(
    r"\.toarray\(|\.todense\(|_process_toarray|get_dummies|OneHotEncoder|one_hot|onehot|to_categorical\(|"
    r"sparse (?:matri|array|data|format|represent)|scipy\.sparse|\bcs[rc]_(?:matrix|array)|mostly zeros|稀疏",
    re.IGNORECASE,
)
LAST_LINE = re.compile(r"^[ \t>|-]*(\S[^\n]*[=(][^\n]*)\n\s*\n?(?:\w+\.)*_?(?:Array)?MemoryError\b", re.MULTILINE)
"""The line of code that a traceback ends with."""
READS = re.compile(
    r"load|read|open\(|fromfile|genfromtxt|np\.array\(|asarray|astype|zeros|empty|full\(|ones\(|stack|concat|append|File \"",
)
"""What makes, reads or puts together data."""
PACKAGE = re.compile(
    r"(?:site|dist)-packages[/\\](?!numpy|pandas|scipy|torch|jax|tensorflow|keras|dask|xarray|IPython|ipykernel)\w"
)
"""A frame inside a package: the array is not made by code of the user's own."""
RASTER = re.compile(
    r"ReadAsArray|\brasterio\b|\bQGIS\b|\bGeoTIFF\b|rioxarray|whole[-_ ]slide|openslide|\bgdal_?array|"
    r"raster(?:_?reader|_?layer|_?path)",
    re.IGNORECASE,
)
"""Readers of maps and of scans, of which a part can be read."""
TOKENS = re.compile(r"attention|transformer|\bbert|token|encoder[/_]layer|\bMatMul:0|points?\b", re.IGNORECASE)
"""Things of which a batch has thousands: a matrix of them is no weight."""
NODE = re.compile(r"\[\[(?:\{\{)?[Nn]ode\b|\[\[\{\{node|\[Op:|requested by op \w")
"""A tensor of TensorFlow that a layer makes."""
WEIGHTS = re.compile(
    r"node:? ?(?:(?!gradients)[^\n]){0,120}?(?:/weights\b(?!/read)|/kernel\b(?!/read)|Initializer|"
    r"/Adam\b(?!/gradients)|/Momentum|"
    r"RestoreV2|embeddings?/(?!_[0-9]))|Op:(?:StatelessRandom|StatelessTruncated|TruncatedNormal|RandomStandardNormal)\w*\]|"
    r"/random_uniform|/random_normal|/truncated_normal|glorot_|"
    r"variables_initializer|initialize_all_variables|_initialize_variables|\bin add_weight\b",
    re.IGNORECASE,
)
SHARDS = re.compile(r"[Cc]heckpoint shards|Loading pipeline components|\bfrom_pretrained\(|Loading model weights")
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
    r"DefaultCPUAllocator: ?not enough memory|"
    r"WinError|\b[A-Z]:(?:\\|/Users/)|\.\.\\|\w\.(?:dll|bat)\b|"
    r"\bfatal error (?:LNK|C)1[0-9]{3}\b|: bad allocation\b|\bWindows 1[01]\b",
    re.IGNORECASE,
)
ANDROID = re.compile(r"\bAndroid|/storage/emulated")
"""PyTorch's words for Windows are those for a phone."""
TPU = re.compile(r"\bTPUs?\b|tpu_|_HBM[0-9]|\bhbm\b|at the bottom of memory", re.IGNORECASE)
"""What only a TPU prints."""
NARROW = re.compile(
    r"\bPython ?[23]\.?[0-9]{1,2}-32\b|\b32[- ]?bits? (?:version of )?(?:python|anaconda|miniconda|interpreter)|"
    r"python[^\n.]{0,20}\(?32[- ]bit|Program Files \(x86\)[\\/]+(?:\w+[\\/]+)?(?:Python|Anaconda|Miniconda)|MSC v\.[0-9]+ 32 bit|"
    r"python-bits: 32\b|"
    r"\barmv[67]l\b|\barmhf\b",
    re.IGNORECASE,
)
"""A Python of 32 bits."""
ASKS = re.compile(
    r"\b(?-i:I|I'm|I've)\b|\bi(?:'m| (?:get|got|am|have|ha[ds]|run|ran|set|use|tried|try|was|can|can't|want|need|think|met|found|"
    r"know))\b|\b(?:my|our|me|we (?:have|are|ran|run|got|get|see|tried|try|found|noticed))\b|"
    r"\w\)? ?\?(?=\s|$)|\bplease\b|\bpls\b|"
    r"[我您请問问]|\b(?:mi|mis|estoy|tengo|minha|meu|estou|ich|mein\w{0,2}|mon|mes|je)\b|\b(?:у меня|мо[йяе])\b",
    re.IGNORECASE,
)
"""Somebody who asks, or who speaks of what is his."""
CODE = re.compile(r"\w\(.*\)\s*$|^\s*\w[\w.]* = \w|\bimport \w|>>>|```|\b(?:np|pd|plt|df)\.\w", re.MULTILINE)
"""A line of code."""
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
POOL_OF_JAVA = re.compile(
    r"out of JVM Metaspace|JVM Metaspace is exhausted|"
    r"OutOfMemoryError: (?:Metaspace|Compressed class space|PermGen|Direct buffer memory)"
)
"""A pool of Java that -Xmx does not limit."""
IN_A_POD = re.compile(r"kubepods|kubelet|\bkubectl\b|kubernetes", re.IGNORECASE)
"""A container of Kubernetes, whose limit is not Docker's to raise."""
ONE = re.compile(
    r"\bbatch\b[^\n.]{0,12}\b(?:only|just) one\b|"
    r"batch[-_ ]?size(?:_per_gpu)?[\"']?(?: is)?(?: set)?(?: to)?(?: even| as low as| only| just| "
    r"of)?\s*[=:]?\s*(?:1\b(?!\.[0-9])|one\b)|batch[-_ ]?size[^\n]{0,20}\[1\]|samples_per_gpu\W{1,3}1\b",
    re.IGNORECASE,
)
TRIED = re.compile(
    r"(?:besides|apart from|other than|except|without) (?:\w+ ){0,2}(?:chang|reduc|lower|decreas)\w+ (?:\w+ ){0,2}batch|"
    r"\b(?:even|already|tried|despite|though|although|still|have|"
    r"I)\b[^\n.]{0,60}(?<!have to )(?<!need to )(?<!want to )(?<!should )"
    r"(?<!how to )(?<!must )(?<!can )\b(?:reduc|lower|decreas|shr[iau]nk|minimi[sz])\w*"
    r"[^\n.]{0,24}\bbatch[^\n]{0,60}\b(?:but|still|same|persist|not help|no help|did ?n[o']t|does ?n[o']t|"
    r"no (?:use|luck|effect))|"
    r"\beven\b[^\n.]{0,40}\b(?:small(?:er|est)?|tiny|low(?:er|est)?|reduced|minimal) (?:\w+ ){0,2}batch|"
    r"(?:lower|reduc|decreas)ing[^\n.]{0,24}\bbatch[^\n.]{0,60}\b(?:persist|still|(?:did|does)(?:n't| not))|"
    r"\b(?:after|even (?:if|when|though)) (?:I |i |we |the )?(?:reduc|lower|decreas)\w*[^\n.]{0,16}batch|"
    r"\beven (?:with |if |when )?(?:the )?batch[-_ ]?size (?:is |was )?(?:reduced|lowered|decreased|small)|"
    r"\bbatch_?size\w*[^\n]{0,60}\bto (?:1|one)\b[^\n]{0,60}\b(?:but|still)\b|"
    r"batch[-_ ]?sizes?\b[^\n.]{0,60}\b(?:did|does|do)(?:n't|n’t| not) (?:help|work|change|matter|fix|solve)|"
    r"batch[-_ ]?sizes?\b[^\n.]{0,60}\b(?:no|without) (?:any )?(?:help|effect|difference|success)|"
    r"\bno matter (?:what|how|which)[^\n.]{0,24}batch|(?:any|whatever) batch[-_ ]?size|batch[-_ ]?size (?:does|did)(?:n't| not)",
    re.IGNORECASE,
)
"""A user who says that a smaller batch is no way out."""
GROWS = re.compile(
    r"\b(?:memory|RAM)\b[^\n.]{0,40}\b(?:keeps?|continues?|constantly|slowly|steadily)\b[^\n.]{0,12}\b(?:grow|increas|climb|ris)|"
    r"after (?:an?|a few|some|several|many|about |around |~)? ?[0-9,k]* ?(?:of )?(?:training )?(?:steps?|iterations?|"
    r"epochs?|batch(?:es)?|hours?|"
    r"minutes(?! (?:the|it|my|this) (?:process|kernel|program|script)? ?(?:dies|died))|runs|images|files|rounds|samples)\b|"
    r"memory (?:usage |use )?(?:(?!quick|rapid|sudden|immediate|fast)\w+ )?(?:keeps? )?(?:grow|increas|leak|climb|ris)\w*|"
    r"\bleak(?:age|ing|s)?\b(?! resources)|epoch goes to [0-9]|"
    r"iterations? (?:is |at |of |number |about |around |~)*[0-9.,]{1,7}k?\b|gradually|"
    r"bigger and bigger|more and more|for (?:around|about) [0-9]+ (?:steps|iterations|epochs)|(?:the|"
    r"on) (?:second|2nd|third|3rd|next) (?:epoch|run|"
    r"time|image|round|iteration|call)|"
    r"(?:in|inside) a (?:for )?loop\b|[0-9]+(?:st|nd|rd|th) (?:epoch|iteration|step)|"
    r"(?:memory|V?RAM|GPU|RSS|显存|内存)(?:[- ](?:usage|utili[sz]ation|use|consumption|footprint|occupation|has|have|been|is|was|"
    r"are|keeps?|kept|slowly|steadily|constantly|continuously|continues? to|always)){1,4} (?:grow|increas|"
    r"climb|ris)(?:e[sn]?|ing|s|n)?\b",
    re.IGNORECASE,
)
RISES = re.compile(
    r"\b(?:memory|RAM|RSS)\b(?: (?:usage|use|allocation|consumption|footprint))?"
    r"(?: (?:\w{1,12}ly|keeps?|is|was|just|always)){0,2} (?:grow|increas|climb|ris)(?:e[sn]?|ing|s)?\b",
    re.IGNORECASE,
)
"""Memory that is said to rise."""
_AMOUNT = r"(?P<number{way}>[0-9]{{1,5}}(?:\.[0-9]{{1,3}})?) ?(?P<unit{way}>[GT])i?B?\b"
FREE = re.compile(
    _AMOUNT.format(way="a")
    + r"(?: of)?(?: \w{1,9}){0,3}? (?:is |are |was |were |still )?(?:free|available|unused|left)\b|"
    r"(?<![KMGT]iB\n)\b(?:free|available|unused) (?:RAM|memory|mem)\b[^\n.0-9]{0,24}" + _AMOUNT.format(way="b") + r"|"
    r"\bMemAvailable[^\n0-9]{0,12}" + _AMOUNT.format(way="c"),
    re.IGNORECASE,
)
"""Somebody who says how much memory was free."""
ENOUGH = re.compile(
    r"\b(?:but|though|although|while|still)\b[^\n.]{0,40}\b(?:have|has|is|there)\b (?:still )?(?:enough |plenty of )?"
    r"(?:free|available|unused) (?:memory|RAM|VRAM)\b|"
    r"\b(?:I|i|we|it|machine|server|GPUs?|card|there)\b(?: (?:still|also|should|do|does|certainly|clearly))? "
    r"(?:have|has|had|is|was) (?:\w{1,10} )?(?:sufficient|enough|plenty of|ample|more than enough|"
    r"the (?:required|needed|necessary)) (?:\w{1,10} ){0,2}(?:memory|V?RAM)\b",
)
"""Somebody who says that there was memory enough."""
LARGE_INPUT = re.compile(
    r"\b(?:long|large|big|huge|whole|[48]k|high[- ]res\w*) (?:\w+ )?(?:video|image|picture|audio|recording|text|document|"
    r"scene|mesh)",
    re.IGNORECASE,
)
"""An input that its user calls large."""
PICTURES = re.compile(
    r"video|frames?\b|\bim(?:g|age)|picture|photo|\bcv2\b|\bPIL\b|\.(?:png|jpe?g|tiff?|mp4)\b", re.IGNORECASE
)
"""Words of pictures."""
MACHINE_RAM = re.compile(
    r"(?<![\w.])(?P<number>[0-9]{1,4}(?:\.[0-9]{1,2})?) ?(?P<unit>[GT])i?B?(?: of)?(?: (?:total|system|host|main|DDR[345]))?"
    r" ?(?:\bRAM\b|\b(?:system |host |main )?memory\b)(?! (?:GPU|card|is free|free|available|left))|"
    r"\b(?:RAM|system memory)(?: size)?\W{1,3}(?P<number2>[0-9]{1,4}) ?(?P<unit2>[GT])i?B?\b",
    re.IGNORECASE,
)
"""Somebody who says how much RAM the machine has."""
OF_A_CARD = re.compile(r"(?:GPU|VRAM|card|RTX|GTX|Tesla|nvidia|[AVHP]100|graphics)[^\n.,]{0,30}\Z", re.IGNORECASE)
"""What stands before memory that is a card's."""
WANTED = re.compile(r"\b(?:need|requir|necessary|recommend|at least|takes?\b)\w*[^\n.,]{0,24}\Z", re.IGNORECASE)
"""What stands before memory that a program wants, not the machine has."""
NO_CONTAINER = re.compile(
    r"(?:not|n't|without|never|no|n't use|not using)\W{1,3}(?:\w+\W{1,3}){0,2}(?:docker|a container|containers)\b|没有使用docker",
    re.IGNORECASE,
)
"""A user who says that no container is used."""
KEPT_AFTER = re.compile(
    r"(?:GPU|VRAM|video|cuda) memory\b[^\n.]{0,40}\b(?:remains?|still|stays?|keeps?)\b[^\n.]{0,16}"
    r"\b(?:occupied|held|allocated|used|full|taken)|"
    r"memory (?:was|is|are|were)(?: not|n't)(?: \w+)? (?:released|freed|cleared)|\bzombie process|"
    r"(?:no|without any) process(?:es)?\b[^\n.]{0,60}\b(?:memory|GPU)\b[^\n.]{0,30}\b(?:occupied|used|full)",
    re.IGNORECASE,
)
"""A card that is held after its program has ended."""
RAM_IS_FULL = re.compile(
    r"\b(?:RAM|(?:CPU|system|host|main) memory|内存)\b[^\n.]{0,40}\b(?:full|fully used|exhausted|100 ?%|used up|maxed out)|"
    r"内存[^\n。]{0,20}(?:占满|打满|耗尽|爆|用完|满了)|\bCPU Virtual Memory: +used = [0-9.]+ GB, percent = (?:[89][0-9]|100)",
    re.IGNORECASE,
)
"""A text that says itself that RAM was full."""
RAM = re.compile(r"\bRAM\b|system memory|host memory|\bswap\b|\bkilled\b|pods?\b|container", re.IGNORECASE)
CARD = re.compile(
    r"\b(?:(?i:CUDA|GPUs?|VRAM|video memory|ROCm|GeForce|RTX ?\w*|GTX ?\w*|graphics cards?|Tesla|Titan ?\w*|Quadro ?\w*|"
    r"gpu_?ids?|Radeon)|[AVHKTP][1-8]00?|K[48]0m?|T4)\b|显存"
)
NO_CARD = re.compile(
    r"(?:not|isn't|n't|never|without|instead of) (?:using |use |the |a ){0,2}(?:CUDA|GPUs?)\b|"
    r"\bcuda[\"']?\s?[:=]\s?(?:false|no|0)\b|"
    r"\bn1-standard|\b(?:using|on) (?:an? |the |my )?(?:[\w-]+ )?CPUs?\b(?![\s\S]*\b(?:GPU|VRAM|RTX|GTX))|"
    r"\bno (?:CUDA|GPU)\b|\bCPU[- ]only\b|\bmain memory\b",
    re.IGNORECASE,
)
"""A user who says that no card is used."""
WITHOUT_GPU = re.compile(
    r"\b(?:without|no|not using) (?:an? |any |the )?GPUs?\b|\bonly on (?:the )?(?:RAM|CPU)", re.IGNORECASE
)
"""A user who says that there is no GPU."""
MAC = re.compile(
    r"libc\+\+abi|Abort trap: 6|\bmac ?OS\b|MacBook|\bDarwin\b|\bOS ?X\b|\.dylib|(?<!\w:)(?<!/[a-z])/Users/\w"
    r"|\bM[1-4] (?:Pro|Max|Ultra)\b|Killed: 9"
)
SPARED = re.compile(r"(?i)\bOOM_?Killed[\"']?\s{0,2}[:=]\s{0,2}[\"']?false\b")
"""A container that says it did not reach its limit."""
TORCH = re.compile(
    r"torch|RuntimeError: CUDA|\bCUDA out of memory|\bloss\w* ?\+= ?\w*loss\b|\byolov?[3-9]|\.backward\(", re.IGNORECASE
)
"""What shows that PyTorch computes, where the message does not say who does."""
BESIDE_CORE = re.compile(r"memory space (?:vmem|smem|cmem)\b|[Ee]xceeded (?:scoped )?(?:vmem|smem|cmem)\b")
"""Memory of one core of a TPU, not its HBM."""
MAKES_TENSOR = re.compile(
    r"torch\.(?:\w*Tensor|tensor|as_tensor|from_numpy)\([^\n]*(?:\n[^\n]*){0,2}\n?[^\n]*(?:enforce fail|DefaultCPUAllocator)"
)
"""A line, just before the message, that makes one tensor of what was read."""
JOINS_RESULTS = re.compile(
    r"(?:torch\.(?:cat|concat|stack|vstack)|np\.(?:concatenate|vstack|stack|array))\(\s*\[?\w*"
    r"(?:all|outputs?|feats?|features|results?|preds?|predictions|embeds?|embeddings|logits|scores)\w*\b"
    r"(?!.{0,40}\bin forward\b)[^\n]*(?:\n[^\n]*){0,2}(?:enforce fail|DefaultCPUAllocator|MemoryError)"
)
"""A line, just before the message, that puts together what every batch gave."""
GRIDS = re.compile(r"\bmeshgrid\b|\bmgrid\b|np\.indices\(")
"""Functions that write out every point of a grid."""
DATA = re.compile(
    r"\bdata ?sets?\b|\.(?:npy|npz|pkl|pickle|csv|h5|hdf5)\b|\bpickl|"
    r"\b(?:read|load)(?:s|ed|ing)? (?:the |all |my |whole |this ){0,2}(?:data|files?)\b",
    re.IGNORECASE,
)
"""Words of data that are read, kept or written."""
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
