"""What is known of each framework, in one table: a row a framework, found by the name that `Failure.framework` has.

A row says how the framework is written, which device it means where a message names none, which of its limits can be
raised and where, how it splits and casts, and the advice that belongs to it alone. Rules of causes and remedies ask the
row, so that a new framework is one row here and its wordings in `message/`.
"""

from __future__ import annotations

from outsize.core.failure import CauseName
from outsize.failure.advice import (
    APPROXIMATE,
    FULL,
    HOST_CAUSES,
    LIMIT,
    NEED,
    OTHERS,
    ROUNDING,
    SERVING_CAUSES,
    Advice,
    Framework,
)
from outsize.failure.work import Work

LAUNCHERS = ("elastic", "deepspeed")
"""Wordings of launchers whose processes were killed: RAM ran out, whatever the device."""

# Rows of tables: what to do, the line, the causes it helps against, what it costs, what it does to results.
# fmt: off

_SHORT_CACHE = "-c 4096 --cache-type-k q8_0 --cache-type-v q8_0"
_SMALLER_CACHE = (
    Advice("a shorter context", "OLLAMA_CONTEXT_LENGTH=4096 ollama serve   # or /set parameter num_ctx 4096", SERVING_CAUSES,
           "shorter context", formats=("ollama-runner",)),
    Advice("keep some layers in RAM", "/set parameter num_gpu 20   # layers on the card; lower until it fits", SERVING_CAUSES,
           "slower", formats=("ollama-runner",)),
    Advice("smaller pieces of the prompt: the compute buffer grows with them", "-ub 128 -fa on", SERVING_CAUSES,
           "slower prompts", formats=("ggml-compute",)),
    Advice("a smaller KV cache", _SHORT_CACHE, SERVING_CAUSES, "shorter context, slightly other logits", APPROXIMATE,
           formats=("ggml-kv", "ggml-cpu", "ggml-pool")),
    Advice("keep some layers in RAM", "-ngl 20   # lower until it fits", SERVING_CAUSES, "slower"),
    Advice("a smaller KV cache", _SHORT_CACHE, SERVING_CAUSES, "shorter context, slightly other logits", APPROXIMATE),
)
_SMALLER_CHUNKS = Advice(
    "smaller chunks: a whole one is held to read a part of it",
    "h5repack -l NAME:CHUNK=64x1024 x.h5 y.h5   # h5dump -pH x.h5 shows what they are", HOST_CAUSES,
    "the file is written once more")
_LIBRARY_ROOM = Advice(
    "leave room outside PyTorch for library handles", "torch.cuda.set_per_process_memory_fraction(0.95)", (NEED,),
    "5 % of the card", formats=("library", "library-host", "nccl"))
_WHO_HOLDS = Advice(
    "see what holds the card; where it is this program, give it less at once",
    "nvidia-smi   # other processes, and what this one holds; then smaller inputs, fewer at once", (NEED, FULL))
_FEWER_BINS = Advice(
    "fewer bins: the data lies on the card as bins",
    "max_bin=63   # LightGBM; XGBoost: QuantileDMatrix(x, y, max_bin=64), larger data: ExtMemQuantileDMatrix",
    (NEED, FULL), "coarser splits", APPROXIMATE)
_ON_THE_CPU = Advice("train on the CPU, where the data fits", 'device="cpu"', (NEED, FULL), "slower", ROUNDING)
_FIRST_TENSORFLOW = r"\b201[5-8]-[01][0-9]-[0-3][0-9] |\btf\.Session\(|ConfigProto\("
_SMALLER_BATCH = Advice(
    "a smaller batch", "batch_size = 16   # half of yours",
    (NEED, FULL, CauseName.LARGER_THAN_DEVICE, CauseName.MEMORY_FRACTION), "more steps", ROUNDING)
_INTO_RAM = "let the card's memory overflow into RAM"

_HOST_PROGRAMS = ("imagemagick", "gromacs", "javascript", "fortran", "perl", "mysql")
_CUDA_LIBRARIES = ("thrust", "theano", "catboost", "faiss", "numba", "exllama", "nvdec", "cuda")

FRAMEWORKS: dict[str, Framework] = {
    "pytorch": Framework(
        title="PyTorch",
        split="for part in x.split({length}, dim={axis}): ...",
        cast="x = x.to(torch.{dtype})",
        advice=(
            Advice("lift PyTorch's watermark", "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 python train.py",
                   (NEED, CauseName.OTHER_ALLOCATIONS), "macOS may swap, or stop the machine",
                   variable="PYTORCH_MPS_HIGH_WATERMARK_RATIO", done="0.0", place="mps"),
            _LIBRARY_ROOM,
            Advice("a smaller batch, shorter inputs", "batch_size = 1   # and shorter inputs", (CauseName.OTHER_ALLOCATIONS,),
                   "more steps", ROUNDING, place="mps"),
            Advice("raise the number of mappings", "sysctl -w vm.max_map_count=1048576", (CauseName.ADDRESS_SPACE,),
                   formats=("shm-map",)),
            Advice("hand over fewer, larger tensors", "DataLoader(..., collate_fn=stack_into_one)   # or num_workers=0",
                   (CauseName.ADDRESS_SPACE,), formats=("shm-map",)),
            Advice("do not pin", "pin_memory=False   # DeepSpeed: \"offload_optimizer\": {\"pin_memory\": false}", (LIMIT,),
                   "slower copies to the card", formats=("pinned",)),
            Advice("fewer workers, and arrays instead of lists of objects in the Dataset",
                   "DataLoader(..., num_workers=2)   # each worker touches, and so copies, a Python list of the parent",
                   HOST_CAUSES, "slower loading", process="DataLoader worker"),
            Advice("hold less in RAM: each rank loads the weights, and offloading keeps optimizer state there",
                   '"offload_optimizer": {"device": "nvme", "nvme_path": "/scratch"}   # or fewer ranks; torch.load(mmap=True)',
                   HOST_CAUSES, "slower steps", formats=LAUNCHERS),
        )),
    "nccl": Framework(title="NCCL", device="cuda", advice=(_LIBRARY_ROOM,)),
    "tensorflow": Framework(
        title="TensorFlow", accelerated=True,
        split="for start in range(0, {axis_length}, {length}):\n    part = x[{slices}]",
        cast="tf.cast(x, tf.{dtype})   # keras: mixed_precision.set_global_policy('mixed_float16')",
        advice=(
            Advice("let CUDA's own pool serve TensorFlow", "TF_GPU_ALLOCATOR=cuda_malloc_async python train.py",
                   (CauseName.FRAGMENTATION,), gives="unused", variable="TF_GPU_ALLOCATOR"),
            Advice("a smaller model, or an optimizer that keeps less beside each weight",
                   "tf.keras.optimizers.Adafactor()   # Adam keeps two more numbers for each weight", (NEED, FULL),
                   "other steps", APPROXIMATE, gives="weights_of_graph"),
            Advice("halve the batch: activations are half as large, weights and their state stay",
                   "model.fit(x, y, batch_size=16)   # half of yours", (NEED, FULL, CauseName.LARGER_THAN_DEVICE),
                   "noisier gradients, or the time of two passes", APPROXIMATE, gives="half_of_batch",
                   works=(Work.TRAINS, Work.UNKNOWN, Work.EVALUATES, Work.LOADS, Work.PAINTS)),
            Advice("fewer and smaller inputs at once, through one graph that is made once",
                   "model.predict(x, batch_size=1)   # smaller images, shorter texts; no new model or session for each input",
                   (NEED, FULL, OTHERS, CauseName.LARGER_THAN_DEVICE), "time, or less detail",
                   APPROXIMATE, works=(Work.INFERS, Work.SERVES)),
            Advice("smaller images, or shorter texts", "tf.image.resize(x, (512, 512))   # half of yours",
                   (NEED, FULL, CauseName.LARGER_THAN_DEVICE), "less detail", APPROXIMATE),
            Advice("let TensorFlow, this one and any other on the card, take memory as it needs it",
                   "TF_FORCE_GPU_ALLOW_GROWTH=true python train.py", (NEED, OTHERS, CauseName.PREALLOCATION),
                   variable="TF_FORCE_GPU_ALLOW_GROWTH", done="true", place="cuda", already=_FIRST_TENSORFLOW),
            Advice("let TensorFlow, this one and any other on the card, take memory as it needs it",
                   "config.gpu_options.allow_growth = True   # tf.Session(config=config); from 1.14 on also "
                   "TF_FORCE_GPU_ALLOW_GROWTH=true", (NEED, OTHERS, CauseName.PREALLOCATION), place="cuda",
                   only=_FIRST_TENSORFLOW, already=r"allow_growth\W{1,4}True"),
        )),
    "jax": Framework(
        title="JAX", accelerated=True,
        advice=(
            Advice("work through it in pieces", "jax.lax.map(f, xs, batch_size=64)   # instead of vmap, or of one large array",
                   (CauseName.LARGER_THAN_DEVICE, CauseName.LARGER_THAN_LIMIT), "time"),
            Advice("weights in 16 bits, over all devices, or a smaller model",
                   "dtype=jnp.bfloat16   # Keras: keras.distribution.ModelParallel; Flax: params sharded with "
                   "jax.device_put", (FULL, NEED),
                   "lower precision", APPROXIMATE, works=(Work.LOADS,)),
            Advice("less at once: a smaller batch, shorter inputs, or in pieces",
                   "batch_size=1   # many at once: jax.lax.map(f, xs, batch_size=64) instead of vmap", (FULL, NEED), "time",
                   ROUNDING, works=(Work.UNKNOWN, Work.INFERS, Work.EVALUATES)),
            Advice("let JAX have more than its 75 % of the card", "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python train.py",
                   (FULL, NEED), "leaves less to others", variable="XLA_PYTHON_CLIENT_MEM_FRACTION", place="cuda",
                   already=r"\bTPU\b|HBM"),
            Advice("recompute instead of keeping", "loss = jax.checkpoint(loss)   # and donate_argnums for the old state",
                   (FULL, NEED, CauseName.LARGER_THAN_LIMIT), "about a third more time", ROUNDING,
                   works=(Work.TRAINS, Work.UNKNOWN)),
            Advice("a smaller batch, accumulated over several steps",
                   "optax.MultiSteps(optimizer, every_k_schedule=2)   # and half the batch",
                   (FULL, NEED, CauseName.LARGER_THAN_LIMIT), "the time of two passes", ROUNDING,
                   works=(Work.TRAINS, Work.UNKNOWN)),
        )),
    "openvino": Framework(
        title="OpenVINO",
        advice=(Advice("one request at a time, or the CPU", 'core.compile_model(model, "CPU")   # PERFORMANCE_HINT: LATENCY',
                       (NEED, FULL), "slower"),)),
    "xgboost": Framework(device="cuda", advice=(_FEWER_BINS, _WHO_HOLDS, _ON_THE_CPU)),
    "lightgbm": Framework(device="cuda", advice=(_FEWER_BINS, _ON_THE_CPU)),
    "r": Framework(
        title="R", device="cpu", python=False, setting="R_MAX_VSIZE, or memory.limit() on Windows before R 4.2",
        optional=True,
        raising=("raise R's limit", "R_MAX_VSIZE={mib}Mb   # in ~/.Renviron; Windows before R 4.2: memory.limit(size = {mib})"),
        advice=(
            Advice("keep the matrix sparse, or on disk",
                   "Matrix::Matrix(x, sparse = TRUE)   # on disk: HDF5Array::writeHDF5Array(x), arrow::open_dataset()",
                   (NEED, CauseName.LARGER_THAN_MACHINE, CauseName.LARGER_THAN_LIMIT), "slower access"),
            Advice("use R of 64 bits", "R.version$arch   # x86_64 is 64 bits; i386 is not", (CauseName.ADDRESS_SPACE,)),
            Advice("let go what is no longer needed, and use fewer workers",
                   "rm(big); gc()   # plan(sequential); on Windows before R 4.2: memory.limit(size = 64000)",
                   (FULL, NEED, LIMIT)),
        )),
    "opencv": Framework(
        title="OpenCV",
        advice=(Advice("a smaller picture, or tiles of it", "cv2.imread(path, cv2.IMREAD_REDUCED_COLOR_4)",
                       HOST_CAUSES, "less detail, or several passes", APPROXIMATE, place="cpu"),)),
    "numpy": Framework(title="NumPy", device="cpu"),
    "pandas": Framework(
        title="pandas", host=True,
        advice=(Advice("read the file in pieces, only the columns you need, in narrow types",
                       "for part in pd.read_csv(path, usecols=[...], dtype={...}, chunksize=1_000_000): ...", HOST_CAUSES,
                       "one pass for each question"),)),
    "linux": Framework(
        advice=(Advice("fewer processes, and started before the data is loaded",
                       "num_workers=2, n_jobs=2, --maxWorkers=2   # and then: sysctl -w vm.overcommit_memory=1", (FULL,),
                       "less runs in parallel", formats=("fork",), only=r"File \"|\.py\b|os\.fork|node|jest|npm|"
                                                                        r"ENOMEM|n_jobs|workers"),
                Advice("see what the machine, or the container, has left and has promised, and who holds it",
                       "free -g; cat /proc/sys/vm/overcommit_memory; ulimit -u; ps -eo rss,comm --sort=-rss | head "
                       "  # then swap, or a larger limit",
                       (FULL,), formats=("fork",)),
                Advice("let the kernel promise more than it has: a map that is only read takes no RAM of its own",
                       "sysctl -w vm.overcommit_memory=1   # and: ulimit -v unlimited", (CauseName.ADDRESS_SPACE,),
                       "a program that asks for too much is killed later instead of refused", formats=("file-map",)),
                Advice("read the file instead of mapping it", "with open(path, 'rb') as file: file.read(2**30)   # part by part",
                       (CauseName.ADDRESS_SPACE,), "RAM for what is read", formats=("file-map",)))),
    "rust": Framework(
        device="cpu", python=False,
        advice=(Advice("give it less at once, or let it stream",
                       "/usr/bin/time -v COMMAND   # what it takes; Polars: pl.scan_csv(path).collect(engine='streaming')",
                       HOST_CAUSES),)),
    "arrow": Framework(device="cpu"),
    **dict.fromkeys(("hdf5", "netcdf"), Framework(device="cpu", advice=(_SMALLER_CHUNKS,))),
    **dict.fromkeys(_HOST_PROGRAMS, Framework(device="cpu", python=False)),
    **dict.fromkeys(("gdal", "petsc", "macos"), Framework(device="cpu")),
    **dict.fromkeys(("ruby", "dotnet", "stata", "erlang"), Framework(python=False)),
    "compiler": Framework(
        host=True, python=False,
        advice=(Advice("fewer files at once: each compiler takes its own memory",
                       "make -j2   # ninja -j2; MAX_JOBS=2 pip install ...", HOST_CAUSES, "a slower build"),)),
    "git": Framework(
        device="cpu", python=False,
        advice=(Advice("let git hold less at once",
                       "git -c pack.windowMemory=256m -c pack.threads=1 -c core.packedGitLimit=256m gc", HOST_CAUSES,
                       "slower"),)),
    "redis": Framework(
        title="Redis", device="cpu", python=False, setting="maxmemory", optional=True,
        raising=("raise Redis's limit", "CONFIG SET maxmemory {mib}mb   # or let it evict: maxmemory-policy allkeys-lru")),
    "blender": Framework(
        title="Blender", device="cuda", python=False,
        advice=(Advice("a smaller scene on the card", "Render > Simplify: texture limit 2048; Performance > Memory: tiles",
                       (NEED, FULL), "coarser textures", APPROXIMATE), _WHO_HOLDS)),
    **dict.fromkeys(_CUDA_LIBRARIES, Framework(device="cuda", advice=(_WHO_HOLDS,))),
    "cupy": Framework(
        title="CuPy", device="cuda", setting="set_limit of its pool, or CUPY_GPU_MEMORY_LIMIT", optional=True,
        raising=("raise the pool's limit", "cupy.get_default_memory_pool().set_limit(size={bytes})"),
        advice=(
            Advice("give back the blocks that the pool keeps without using them",
                   "cupy.get_default_memory_pool().free_all_blocks()   # before the large array", (LIMIT,)),
            Advice(_INTO_RAM, "cupy.cuda.set_allocator(cupy.cuda.MemoryPool(cupy.cuda.malloc_managed).malloc)",
                   (NEED, FULL), "slower once it overflows"),
            _WHO_HOLDS,
        )),
    "rmm": Framework(
        device="cuda",
        advice=(
            Advice(_INTO_RAM, "rmm.reinitialize(managed_memory=True)   # cudf: CUDF_SPILL=on", (NEED, FULL),
                   "slower once it overflows"),
            _WHO_HOLDS,
        )),
    "openblas": Framework(
        host=True,
        advice=(Advice("fewer threads: each has buffers of its own", "OPENBLAS_NUM_THREADS=1 python script.py", HOST_CAUSES,
                       "slower products of matrices", variable="OPENBLAS_NUM_THREADS", done="1"),)),
    "mxnet": Framework(device="cuda", advice=(_SMALLER_BATCH, _WHO_HOLDS)),
    "paddle": Framework(
        title="Paddle", accelerated=True,
        advice=(
            Advice("let Paddle have more of the card", "FLAGS_fraction_of_gpu_memory_to_use=0.95 python train.py",
                   (CauseName.MEMORY_FRACTION,), "leaves less to others", variable="FLAGS_fraction_of_gpu_memory_to_use"),
            Advice("smaller inputs, one at a time, in 16 bits", "half the height and width, batch_size=1   # "
                                                                "precision fp16; config.enable_memory_optim()",
                   (NEED, FULL), "less detail", APPROXIMATE, works=(Work.INFERS, Work.EVALUATES)),
            _SMALLER_BATCH, _WHO_HOLDS)),
    "android": Framework(
        title="an Android app", host=True, python=False, setting="the heap that the system gives an app",
        raising=("find what the app keeps, in a heap dump", "Android Studio > Profiler > heap dump: pictures, "
                                                            "listeners   # then android:largeHeap=\"true\"")),
    "vulkan": Framework(
        device="vulkan", python=False,
        advice=(Advice("less on the card: lower textures and resolution, and close what else is on it",
                       "texture quality and render scale one step down   # nvidia-smi, radeontop: who holds the card",
                       (NEED, FULL), "coarser pictures", APPROXIMATE),)),
    "go": Framework(
        host=True, python=False,
        advice=(Advice("use the build of 64 bits", "file $(which PROGRAM); uname -m   # x86-64 or aarch64, not 386 or armv7",
                       (CauseName.ADDRESS_SPACE,)),)),
    "mlx": Framework(device="metal"),
    "metal": Framework(device="metal", advice=_SMALLER_CACHE),
    "ggml": Framework(accelerated=True, title="llama.cpp", advice=_SMALLER_CACHE),
    "ollama": Framework(
        title="Ollama", device="cpu", python=False,
        advice=(Advice("a smaller model, or the same in fewer bits", "ollama run llama3.2:1b   # or a tag with q4_K_M",
                       SERVING_CAUSES, "other answers", APPROXIMATE),
                Advice("a shorter context", "OLLAMA_CONTEXT_LENGTH=2048 ollama serve", SERVING_CAUSES, "shorter context"),
                Advice("close what else holds RAM, or add swap", "free -g; ollama ps   # ollama stop MODEL", SERVING_CAUSES))),
    "miner": Framework(
        title="the miner", device="cuda", python=False,
        advice=(Advice("a card larger than the table it makes; on Windows a page file as large as all cards together",
                       "Advanced system settings > Performance > Advanced > Virtual memory", (NEED, FULL), "disk"), _WHO_HOLDS)),
    "vllm": Framework(accelerated=True, title="vLLM"),
    "sglang": Framework(
        accelerated=True,
        advice=(Advice("give the weights and the KV cache more of the card", "--mem-fraction-static 0.9", SERVING_CAUSES,
                       "less is left for activations"),)),
    "ctranslate2": Framework(
        title="CTranslate2", device="cuda",
        advice=(Advice("a smaller model, or its weights in 8 bits",
                       'WhisperModel("small", device="cuda", compute_type="int8")   # --compute_type int8, --batch_size 1',
                       SERVING_CAUSES, "slightly other text", APPROXIMATE), _WHO_HOLDS)),
    "tensorrt": Framework(
        device="cuda",
        advice=(Advice("less workspace", "trtexec --memPoolSize=workspace:1024", SERVING_CAUSES, "perhaps slower tactics",
                       ROUNDING),)),
    "onnxruntime": Framework(
        accelerated=True,
        advice=(Advice("let the arena grow only as asked",
                       '("CUDAExecutionProvider", {"arena_extend_strategy": "kSameAsRequested"})', SERVING_CAUSES),)),
    "c++": Framework(host=True),
    "notebook": Framework(
        host=True,
        advice=(Advice("hold less at once: a part of the data, narrower types, batches instead of whole arrays",
                       "pd.read_csv(path, usecols=[...], nrows=100_000)   # arrays: outsize.open(path); pictures: "
                       "batches from disk",
                       HOST_CAUSES,
                       "one pass for each question"),
                Advice("take a runtime with more RAM", "Runtime > Change runtime type > High-RAM", HOST_CAUSES,
                       "a paid plan, as a rule"))),
    "torch7": Framework(
        title="Torch", device="cuda", python=False,
        advice=(_SMALLER_BATCH, Advice("let cuDNN try no algorithms that need workspace", "cudnn.benchmark = false", (NEED, FULL),
                                       "slower"), _WHO_HOLDS)),
    "darknet": Framework(
        title="Darknet", device="cuda", python=False,
        advice=(Advice("fewer and smaller images on the card at once",
                       "subdivisions=64 width=416 height=416   # in the .cfg; for testing batch=1 subdivisions=1", (NEED, FULL),
                       "time, or less detail", APPROXIMATE), _WHO_HOLDS)),
    "caffe": Framework(
        title="Caffe", device="cuda",
        advice=(Advice("a smaller batch, smaller images, one net at a time",
                       "batch_size: 4   # of the data layer in the .prototxt; deploy: a smaller input shape, "
                       "TEST.SCALES", (NEED, FULL),
                       "time, or less detail", ROUNDING), _WHO_HOLDS)),
    "python": Framework(
        host=True,
        advice=(Advice("fewer jobs at once: each has its own copy of the data",
                       "n_jobs=2   # or joblib.Parallel(..., max_nbytes='1M'), which shares large arrays", HOST_CAUSES,
                       "less runs in parallel", formats=("joblib",)),
                Advice("give each worker more, and smaller chunks",
                       'LocalCluster(n_workers=2, memory_limit="8GiB"); x.rechunk("64MiB")', HOST_CAUSES,
                       "less runs in parallel", formats=("dask-died",)))),
    "windows": Framework(
        host=True,
        advice=(Advice("fewer processes: each takes its share when it loads the libraries", "DataLoader(..., num_workers=0)",
                       (LIMIT,), "loading no longer overlaps the work"),)),
    "julia": Framework(
        host=True, python=False,
        advice=(Advice("give back what Julia no longer uses, and work on smaller arrays",
                       "x = nothing; GC.gc(true); CUDA.reclaim()", (NEED, FULL, CauseName.LARGER_THAN_DEVICE), place="cuda"),)),
    "postgres": Framework(
        device="cpu", host=True, python=False,
        advice=(Advice("less memory for each sort and hash, and fewer of them at once",
                       "SET work_mem = '64MB'; SET max_parallel_workers_per_gather = 0;", HOST_CAUSES, "slower queries"),)),
    "java": Framework(
        host=True, python=False,
        raising=("raise the heap", "java -Xmx8g ...   # Spark: --driver-memory 8g; Gradle: org.gradle.jvmargs=-Xmx4g"),
        advice=(Advice("split the input: no heap holds such an array", "split -l 1000000 input part_   # or a "
                                                                       "record, or a sequence, at a time",
                       (NEED,), "several runs", formats=("java-array",)),
                Advice("a smaller heap, or Java of 64 bits", "java -Xmx1g ...   # java -version must say 64-Bit for more",
                       (CauseName.ADDRESS_SPACE,), formats=("java-reserve",)))),
    "node": Framework(host=True, python=False, raising=("raise the heap", "NODE_OPTIONS=--max-old-space-size=8192")),
    "duckdb": Framework(
        device="cpu", setting="memory_limit",
        raising=("let DuckDB spill, with fewer threads",
                 "SET threads = 2; SET temp_directory = '/scratch';   # where RAM has it: SET memory_limit = '{mib}MiB'"),
        advice=(Advice("let DuckDB spill, with fewer threads",
                       "SET threads = 2; SET temp_directory = '/scratch'; SET preserve_insertion_order = false;", HOST_CAUSES,
                       "slower"),)),
    "clickhouse": Framework(
        host=True, python=False, setting="max_memory_usage",
        raising=("raise the query's limit", "SET max_memory_usage = {bytes}")),
    "elasticsearch": Framework(
        host=True, python=False, setting="indices.breaker.total.limit",
        raising=("raise the heap, of which the limit is a share", "ES_JAVA_OPTS='-Xms8g -Xmx8g'")),
    "php": Framework(
        host=True, python=False, setting="memory_limit", raising=("raise PHP's limit", "memory_limit = {mib}M   # php.ini")),
    "mongodb": Framework(
        host=True, python=False, setting="100 MB a stage without allowDiskUse",
        raising=("let the stage spill", "db.c.aggregate([...], {{allowDiskUse: true}})")),
    "trino": Framework(
        host=True, python=False, setting="query.max-memory",
        raising=("raise the query's limit",
                 "query.max-memory-per-node   # config.properties; or let it spill: spill-enabled=true")),
    "datafusion": Framework(
        device="cpu", setting="the session's memory pool",
        raising=("let it spill", "RuntimeEnvBuilder().with_disk_manager_os().with_fair_spill_pool(bytes)")),
    "bigquery": Framework(
        host=True, python=False, setting="the memory of a query's slots",
        raising=("less at once", "drop ORDER BY and wide GROUP BY over everything, or cut the query in parts")),
    "matlab": Framework(
        title="MATLAB", host=True, python=False,
        raising=("allow larger arrays, where they were meant", "Settings > MATLAB > Workspace > Maximum array size"),
        advice=(Advice("smaller arrays: narrower types, sparse, or a part at a time",
                       "single(x), sparse(x), clear x   # from a file: matfile(path), tall arrays, datastore", HOST_CAUSES,
                       "fewer digits, or time", APPROXIMATE),)),
    "octave": Framework(
        title="Octave", device="cpu", python=False,
        advice=(Advice("smaller arrays: narrower types, sparse, or a part at a time; see whether that size was meant",
                       "size(x), single(x), sparse(x), clear x   # and an Octave of 64 bits", HOST_CAUSES,
                       "fewer digits, or time", APPROXIMATE),)),
    "kubernetes": Framework(
        killer="pod (resources.limits.memory)",
        raising=("raise the pod's limit", "resources: {{limits: {{memory: {mib}Mi}}}}")),
    "slurm": Framework(
        killer="Slurm job (--mem)",
        raising=("ask Slurm for more", "sbatch --mem={mib}M job.sh   # sacct -j JOBID --format=MaxRSS says what it took")),
    "pbs": Framework(killer="PBS job", raising=("ask PBS for more", "qsub -l mem={mib}mb")),
    "lsf": Framework(killer="LSF job", raising=("ask LSF for more", "bsub -M {mib}")),
    "dask": Framework(
        killer="Dask worker (memory_limit)",
        raising=("give each worker more", 'LocalCluster(n_workers=2, memory_limit="{mib}MiB")'),
        advice=(Advice("smaller chunks, fewer at once", 'x.rechunk("64MiB"); LocalCluster(threads_per_worker=1)', HOST_CAUSES,
                       "more tasks"),)),
    "spark": Framework(
        killer="executor's container (executor memory + overhead)",
        raising=("give executors more beside the heap", "--conf spark.executor.memoryOverhead={more}m   # beside what it has"),
        advice=(Advice("do not count address space",
                       "yarn.nodemanager.vmem-check-enabled=false   # yarn-site.xml; or a larger vmem-pmem-ratio",
                       (CauseName.ADDRESS_SPACE,)),)),
    "ray": Framework(
        advice=(Advice("fewer tasks at once", "@ray.remote(num_cpus=4, memory=8 * 2**30)", HOST_CAUSES,
                       "less runs in parallel"),)),
    "ecs": Framework(
        killer="task (memory in its definition)",
        raising=("raise the task's memory", '"memory": {mib}   # in the task definition, then register and deploy it')),
    "docker": Framework(
        killer="container (docker run --memory)",
        raising=("raise the container's limit", "docker run --memory={mib}m ...")),
    "lambda": Framework(
        host=True, killer="Lambda function (memory size)",
        raising=("raise the function's memory", "aws lambda update-function-configuration --memory-size {mib} ...")),
    "cloud": Framework(
        killer="cloud service", raising=("raise the service's memory", "gcloud run deploy --memory={mib}Mi ...")),
    "heroku": Framework(killer="dyno", raising=("take a larger dyno", "heroku ps:resize web=performance-l")),
}
# fmt: on
"""Name -> row. A framework without a row has nothing of its own."""

CONTAINER = ("raise the container's limit", "docker run --memory={mib}m ...   # systemd: MemoryMax={mib}M")
"""How a limit is raised that no framework set."""

ALLOCATOR_SETTINGS = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_NPU_ALLOC_CONF",
)
"""Environment variables that configure PyTorch's allocator."""
VARIABLES = (
    *ALLOCATOR_SETTINGS,
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    *(advice.variable for row in FRAMEWORKS.values() for advice in row.advice if advice.variable),
)
"""Environment variables that advice depends on."""

_NOTHING = Framework()


def framework(name: str) -> Framework:
    """What is known of a framework."""
    return FRAMEWORKS.get(name, _NOTHING)
